import errno
import logging
import os

import pytest
import torch

from shoal.core import UsageError
from shoal.group.host.memory import Arena, MemoryFull, open_files


@pytest.fixture
def arena(tmp_path):
    arena = Arena(open_files(tmp_path), 0, 2)
    yield arena
    arena.close()


def test_files_have_no_names(tmp_path):
    files = open_files(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(files) == 2, "the temporary folder is the second choice"
    for descriptor in files:
        os.close(descriptor)


def test_regions_are_apart_and_aligned(arena):
    segment = arena.map(arena.grow(8192))
    mine, theirs = (segment.region(rank, 64, 100, torch.float32) for rank in range(2))
    mine.fill_(1)
    assert theirs.sum() == 0
    assert mine.data_ptr() % 64 == 0
    again = arena.map(segment.place)
    assert again.region(0, 64, 100, torch.float32).sum() == 100
    assert arena.at(segment.code + 64) == (segment, 64)


def test_a_tensor_is_found_by_its_memory(arena):
    segment = arena.map(arena.grow(4096))
    assert arena.find(segment.region(1, 0, 10, torch.float32)[5:]) is segment
    assert arena.find(torch.zeros(10)) is None
    arena.forget(segment)
    assert arena.find(segment.flat) is None
    with pytest.raises(UsageError, match="given back"):
        arena.at(segment.code)


def test_given_back_pages_are_empty(arena):
    segment = arena.map(arena.grow(4096))
    segment.flat.fill_(7)
    segment.discard()
    if hasattr(__import__("mmap"), "MADV_REMOVE"):
        assert segment.flat.sum() in (0, 7 * 8192)  # not every file system can


def test_a_full_folder_falls_back_with_a_warning(arena, monkeypatch, caplog):
    """As /dev/shm of a container with 64 MB."""
    first = arena.grow(4096)
    really, full = os.posix_fallocate, arena.files[0]

    def allocate(descriptor, offset, size):
        if descriptor == full:
            raise OSError(errno.ENOSPC, "no space")
        really(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with caplog.at_level(logging.WARNING):
        place = arena.grow(4096)
    assert (first.file, place.file) == (0, 1)
    assert "has no room for" in caplog.text
    assert "--shm-size" in caplog.text
    arena.map(place).flat.fill_(1)


def test_all_folders_full_is_an_error_that_says_what_to_do(arena, monkeypatch):
    def allocate(descriptor, offset, size):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(MemoryFull, match="TMPDIR"):
        arena.grow(4096)


def test_no_folder_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "gone"))
    with pytest.raises(UsageError, match="No file for shared memory can be created"):
        open_files(tmp_path / "nowhere")
