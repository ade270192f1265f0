"""Shared memory of the workers of one machine: ranges of a nameless file, mapped by all of them.

`posix_fallocate` takes the pages when they are asked for, so a full /dev/shm is an error here and not a
SIGBUS later; the temporary folder is the second choice.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from shoal.core import UsageError
from shoal.core.fork import close_in_children, keep_in_children
from shoal.tensors.memory import tensor_over

log = logging.getLogger(__name__)
_MEMORY_FOLDER = Path("/dev/shm")
_MAX_REGIONS = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class MemoryFull(UsageError):
    """No folder has room for that much shared memory."""


def open_files(folder: Path | None) -> list[int]:
    """Makes nameless files for shared memory, best first; UsageError when no folder takes one."""
    temporary = Path(tempfile.gettempdir())
    folders = [folder] if folder else [_MEMORY_FOLDER] if _MEMORY_FOLDER.is_dir() else []
    files = []
    for place in [*folders, *([] if temporary in folders else [temporary])]:
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="shoal-", dir=place)
            Path(path).unlink()
            files.append(descriptor)
    if not files:
        raise UsageError(
            f"No file for shared memory can be made in {' or '.join(map(str, [*folders, temporary]))}.",
            next_step="make one of them writable, or set TMPDIR.",
        )
    return files


class MemoryRange(msgspec.Struct, frozen=True, array_like=True):
    """Where a segment lies in the files."""

    file: int
    """Index among the arena's files."""
    offset_bytes: int
    size_bytes: int


class Segment:
    """One range of shared memory, mapped: a region of `stride_bytes` for each rank."""

    def __init__(self, place: MemoryRange, memory: mmap.mmap, stride_bytes: int) -> None:
        self.place = place
        self.stride_bytes = stride_bytes
        self.flat = tensor_over(memoryview(memory))
        self.start = self.flat.data_ptr()
        self.end = self.start + place.size_bytes
        self.code = place.file << 56 | place.offset_bytes
        """A number for its beginning that is the same on all workers."""
        self._regions: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        self._memory = memory

    def region(self, rank: int, offset_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Views a part of a rank's region as a flat tensor, the same one every time: keep it to yourself."""
        key = (rank, offset_bytes, num_elements, dtype)
        found = self._regions.get(key)
        if found is None:
            if len(self._regions) >= _MAX_REGIONS:
                self._regions.clear()
            found = self._regions[key] = self.new_region(*key)
        return found

    def new_region(self, rank: int, offset_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Makes a flat tensor of a part of a rank's region, to give away."""
        start = rank * self.stride_bytes + offset_bytes
        return self.flat[start : start + num_elements * dtype.itemsize].view(dtype)

    def discard(self) -> None:
        """Gives the pages back to the system, while the mapping may live on."""
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE)


class Arena:
    """The files, and the segments that are mapped of them; only the coordinator makes them grow."""

    def __init__(self, files: Sequence[int], num_ranks: int) -> None:
        self._files = list(files)
        self._num_ranks = num_ranks
        self._segments: list[Segment] = []
        for descriptor in self._files:
            close_in_children(descriptor)

    @property
    def lock_file(self) -> int:
        """The descriptor of the file whose ranges of bytes serve as locks."""
        return self._files[0]

    def grow(self, region_bytes: int) -> MemoryRange:
        """Takes pages for a region of each rank; MemoryFull when no file has room."""
        size = region_bytes * self._num_ranks
        full: list[str] = []
        for index, descriptor in enumerate(self._files):
            offset = os.fstat(descriptor).st_size
            try:
                _allocate(descriptor, offset, size)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, offset)
                full.append(_describe_full(descriptor))
                continue
            if full:
                log.warning(
                    "shared memory: %s has no room for %.1f MB more; a file in %s is used instead, which may "
                    "be slower. Try: free it, or more of it (docker run --shm-size, mount -o remount,size=)",
                    " and ".join(full),
                    size / 1e6,
                    tempfile.gettempdir(),
                )
            return MemoryRange(index, offset, size)
        raise MemoryFull(
            f"Shared memory for {size / 1e6:.1f} MB is not to be had: {' and '.join(full)} full.",
            next_step="free some space there, or point TMPDIR to a folder with more.",
        )

    def map(self, place: MemoryRange) -> Segment:
        """Maps a segment; its pages are looked up at once, not one by one in the first round."""
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if sys.platform == "linux" else 0)
        memory = mmap.mmap(self._files[place.file], place.size_bytes, flags, offset=place.offset_bytes)
        segment = Segment(place, memory, place.size_bytes // self._num_ranks)
        self._segments.append(segment)
        return segment

    def find(self, tensor: torch.Tensor) -> Segment | None:
        """Finds the segment that holds a tensor's memory; None for memory that is not the group's."""
        pointer = tensor.data_ptr()
        for segment in self._segments:
            if segment.start <= pointer < segment.end:
                return segment
        return None

    def find_own(self, tensor: torch.Tensor, rank: int) -> tuple[Segment, int] | None:
        """Finds where in a rank's own region a tensor lies; None for other memory and tensors with gaps."""
        segment = self.find(tensor)
        if segment is None or not tensor.is_contiguous():
            return None
        offset = tensor.data_ptr() - segment.start - rank * segment.stride_bytes
        is_inside = offset >= 0 and offset + tensor.numel() * tensor.element_size() <= segment.stride_bytes
        return (segment, offset) if is_inside else None

    def at(self, code: int) -> tuple[Segment, int]:
        """Finds the segment, and the offset in its regions, that a number names."""
        for segment in self._segments:
            if 0 <= code - segment.code < segment.stride_bytes:
                return segment, code - segment.code
        raise UsageError("A peer names memory that this worker has given back.")

    def forget(self, segment: Segment) -> None:
        """Forgets a segment; it is unmapped when its last tensor is gone."""
        self._segments.remove(segment)

    def close(self) -> None:
        """Closes the files; what is mapped stays for as long as there are tensors in it."""
        self._segments.clear()
        for descriptor in self._files:
            keep_in_children(descriptor)
            os.close(descriptor)
        self._files.clear()


def _allocate(descriptor: int, offset: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, offset, size)
    else:
        os.ftruncate(descriptor, offset + size)


def _describe_full(descriptor: int) -> str:
    target = f"file {descriptor}"
    with contextlib.suppress(OSError):
        target = str(Path(f"/proc/self/fd/{descriptor}").readlink().parent)
    with contextlib.suppress(OSError):
        return f"{target} ({shutil.disk_usage(target).free / 1e6:.1f} MB free)"
    return target
