"""That a lock has one holder, among workers and threads, and is never kept by one that is closed."""

import tempfile
import threading

import pytest

from shoal.group.host import window
from shoal.group.host.window import FileLocks


@pytest.fixture(params=[True, False], ids=["by description", "by process"])
def pair(request, monkeypatch):
    """Two workers' locks in one file; a system without descriptions of its own locks by process."""
    if not request.param:
        monkeypatch.setattr(window.sys, "platform", "another")
    with tempfile.TemporaryFile() as file:
        two = FileLocks(file.fileno()), FileLocks(file.fileno())
        yield two
        for each in two:
            each.close()


def test_a_lock_has_one_holder(pair):
    first, second = pair
    at = 1 << 61
    assert first.try_take(at)
    assert not second.try_take(at)
    assert not first.try_take(at), "not twice, either"
    assert second.try_take(at + 1)
    first.release(at)
    assert second.try_take(at)


def test_threads_of_one_worker_keep_each_other_out(pair):
    first, _ = pair
    taken = []
    assert first.try_take(5)
    thread = threading.Thread(target=lambda: taken.append((first.try_take(5), first.is_held_here(5))))
    thread.start()
    thread.join()
    assert taken == [(False, False)]
    assert first.is_held_here(5)


def test_closing_gives_back(pair):
    first, second = pair
    assert first.try_take(7)
    first.close()
    assert second.try_take(7)
    assert not first.try_take(8)


def test_who_holds_a_range_is_known():
    with tempfile.TemporaryFile() as file:
        first, second = FileLocks(file.fileno()), FileLocks(file.fileno())
        assert second.first_taken(100, 10) is None
        assert first.try_take(104, 2)
        assert second.first_taken(100, 10) == 4
        assert not second.try_take(100, 10)
        assert second.try_take(100, 4)
        first.close()
        second.close()
