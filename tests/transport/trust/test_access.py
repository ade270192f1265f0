import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.core import PeerId, UsageError
from shoal.transport.trust.membership import Access

A, B, C = (PeerId(bytes([n]) * 20) for n in (1, 2, 3))


def write(path, *ids):
    path.write_text("\n".join(map(str, ids)) + "\n")


def age(path):
    """As if it had been written long ago, so that its times can be trusted."""
    os.utime(path, (1_600_000_000, 1_600_000_000))


def test_without_lists_everybody_may():
    access = Access()
    assert access.is_allowed(A)
    assert not access.refresh()


def test_a_deny_list(tmp_path):
    path = tmp_path / "deny"
    path.write_text(f"# who cheated\n\n{A}  # in March\n  {str(B).upper()}\r\n")
    access = Access(deny_file=path)
    assert [access.is_allowed(peer) for peer in (A, B, C)] == [False, False, True]


def test_an_allow_list_and_a_deny_list(tmp_path):
    write(tmp_path / "allow", A, B)
    write(tmp_path / "deny", B)
    access = Access(allow_file=tmp_path / "allow", deny_file=tmp_path / "deny")
    assert [access.is_allowed(peer) for peer in (A, B, C)] == [True, False, False]


def test_an_empty_allow_list_allows_nobody(tmp_path):
    path = tmp_path / "allow"
    path.touch()
    assert not Access(allow_file=path).is_allowed(A)


def test_what_the_program_says_counts_beside_the_files(tmp_path):
    write(tmp_path / "allow", A)
    write(tmp_path / "deny", C)
    access = Access(allow_file=tmp_path / "allow", deny_file=tmp_path / "deny")
    access.allow(B)
    access.allow(C)
    assert [access.is_allowed(peer) for peer in (A, B, C)] == [True, True, False]
    access.deny(A)
    access.deny(B)
    assert [access.is_allowed(peer) for peer in (A, B, C)] == [False, False, False]
    access.allow(A)
    assert access.is_allowed(A)


def test_a_changed_file_is_read_again(tmp_path):
    path = tmp_path / "deny"
    write(path, A)
    age(path)
    access = Access(deny_file=path)
    assert not access.refresh()
    write(path, B)  # of the same size
    assert access.refresh()
    assert access.is_allowed(A)
    write(path, C)  # once more, maybe within one tick of the file's clock
    assert access.refresh()
    assert [access.is_allowed(peer) for peer in (A, B, C)] == [True, True, False]
    assert not access.refresh()


def test_a_file_that_does_not_change_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "deny"
    write(path, A)
    age(path)
    access = Access(deny_file=path)
    monkeypatch.setattr(type(path), "read_bytes", lambda _: pytest.fail("it was read"))
    assert not access.refresh()


def test_a_file_that_breaks_keeps_the_list_and_is_told_once(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = tmp_path / "deny"
    write(path, A)
    access = Access(deny_file=path)
    path.write_text("no peer id\n")
    for _ in range(3):
        assert not access.refresh()
    path.unlink()
    assert not access.refresh()
    assert not access.is_allowed(A)
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"Line 1 of {path} is no peer id" in line
    write(path, B)
    assert access.refresh()
    assert access.is_allowed(A)
    assert "can be read again" in caplog.text


def test_a_file_that_is_broken_at_the_start(tmp_path):
    path = tmp_path / "deny"
    with pytest.raises(UsageError, match=r"(?s)cannot be read.*one peer id a line"):
        Access(deny_file=path)
    path.write_text(f"{A}\nabc\n")
    with pytest.raises(UsageError, match=f"(?s)Line 2 of {path} is no peer id.*shoal keys show"):
        Access(deny_file=path)


def test_changes_of_several_threads_are_all_kept():
    access = Access()
    ids = [PeerId(number.to_bytes(20)) for number in range(4000)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda start: [access.deny(peer_id) for peer_id in ids[start::4]], range(4)))
    finally:
        sys.setswitchinterval(before)
    assert not any(access.is_allowed(peer_id) for peer_id in ids)
