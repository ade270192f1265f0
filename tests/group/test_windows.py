"""What the contract of groups does not cover of windows: other processors, torn writes, who is stopped."""

import contextlib
import itertools
import os
import subprocess
import sys

import pytest
import torch

from group.hosts import open_hosts, open_member, together
from shoal.core import Deadline, DeadlineExceeded, PeerLost, UsageError
from shoal.group import GroupSettings, SoloGroup
from shoal.group.functions import Mutex
from shoal.group.host import memory as shared_memory
from shoal.group.host import window


def test_processors_that_reorder_stores(monkeypatch):
    monkeypatch.setattr(shared_memory, "IS_ORDERED", False)
    with open_hosts(2) as groups:

        def work(group):
            other = 1 - group.rank
            window = group.window("w", 100)
            memory = group.empty(100).fill_(group.rank)
            window.publish(memory, 0)
            group.barrier().wait()
            into = torch.empty(100)
            for number in range(1, 20):
                handle = window.send(other, torch.full((100,), float(number)))
                assert window.wait(Deadline.after(20)) == [other]
                with window.slot(other) as slot:
                    assert torch.all(slot.tensor == number)
                    slot.clear()
                handle.wait(Deadline.after(20))
                with window.changing(number):
                    memory.add_(1)
                assert window.read(other, into, version=number).wait(Deadline.after(20)) >= number
            window.close()

        together(groups, work)


def test_workers_that_make_different_windows_are_told():
    with open_hosts(2) as groups:

        def make(group):
            with pytest.raises(UsageError, match=r"rank 1 makes window 'w' of 11 elements .* rank 0 makes"):
                group.window("w", 10 + group.rank)
            group.window("w", 10).close()

        together(groups, make)


def test_memory_is_taken_for_the_sources_alone_and_given_back():
    with open_hosts(3) as groups:
        file = groups[0]._arena.files[0]
        before = os.fstat(file).st_blocks
        count = 1_000_000
        sources = [[0], [0], [1]]
        windows = together(groups, lambda group: group.window("w", count, sources=sources[group.rank]))
        taken_bytes = (os.fstat(file).st_blocks - before) * 512
        assert 3 * 4 * count <= taken_bytes < 3.1 * 4 * count
        with pytest.raises(UsageError, match="rank 0 has no slot for rank 1"):
            windows[1].put(0, torch.zeros(count))
        together(windows, lambda window: window.close())
        assert (os.fstat(file).st_blocks - before) * 512 < 4 * count


def test_a_window_that_is_closed_drops_what_was_not_written():
    with open_hosts(2) as groups:
        windows = together(groups, lambda group: group.window("w", 4))
        windows[0].send(1, torch.ones(4)).wait()
        late = windows[0].send(1, torch.ones(4))
        together(windows, lambda window: window.close())
        with pytest.raises(UsageError, match="closed before it was written"):
            late.wait()


def test_leaving_waits_for_writes():
    with open_hosts(2) as groups:
        windows = together(groups, lambda group: group.window("w", 4))
        with contextlib.ExitStack() as held:
            held.enter_context(windows[1].slot(0))
            windows[0].put(1, torch.ones(4))
            together([held.close, groups[0].leave], lambda act: act())
        assert list(windows[1].filled()) == [0]


def test_a_failed_change_can_be_read_only_after_another():
    with open_hosts(2) as groups:
        memory, _ = together(groups, lambda group: group.empty(4))
        first, second = (group.window("x", 4, sources=()) for group in groups)
        first.publish(memory, 0)
        with pytest.raises(ZeroDivisionError), first.changing(1):
            memory[:2] = 1 / 0
        into = torch.empty(4)
        handle = second.read(0, into)
        with pytest.raises(DeadlineExceeded, match="read 'x' of rank 0"):
            handle.wait(Deadline.after(0.01))
        with first.changing(1):
            memory.fill_(5)
        assert handle.wait() == 1
        assert into.tolist() == [5] * 4
        with pytest.raises(UsageError, match="version 1 and cannot become 0"), first.changing(0):
            pass


def test_snapshots_of_what_changes_are_not_intact():
    with open_hosts(2) as groups:
        memory, _ = together(groups, lambda group: group.empty(4))
        first, second = (group.window("x", 4, sources=()) for group in groups)
        first.publish(memory, 0)
        snapshot = second.fetch(0).wait()
        assert snapshot.is_intact()
        with first.changing(1):
            assert not snapshot.is_intact()
            assert not second.fetch(0).wait().is_intact()
        assert not snapshot.is_intact()
        assert second.fetch(0).wait().is_intact()


def test_what_is_closed_or_reclaimed_while_it_is_copied_is_not_read(monkeypatch):
    """Its publisher may write it from then on."""
    really = window.copy_out
    with open_hosts(2) as groups:
        memory, other = together(groups, lambda group: [group.empty(4) for _ in range(2)])[0]
        first, second = (group.window("x", 4, sources=()) for group in groups)
        first.publish(memory, 1)

        def interrupted_by(act):
            def copy_out(*arguments):
                monkeypatch.setattr(window, "copy_out", really)
                act()
                memory.fill_(9)
                return really(*arguments)

            monkeypatch.setattr(window, "copy_out", copy_out)
            into = torch.zeros(4)
            return second.read(0, into).wait(), into.tolist()

        def replace():
            first.publish(other, 2)
            first.reclaim(1)

        assert interrupted_by(replace) == (2, [0.0] * 4)
        assert interrupted_by(first.close)[0] is None


def test_a_wish_to_change_does_not_make_the_newest_look_old(monkeypatch):
    """Both versions are of the same memory, so that the older one would be the wrong one."""
    with open_hosts(2) as groups:
        memory, _ = together(groups, lambda group: group.empty(4))
        first, second = (group.window("x", 4, sources=()) for group in groups)
        first.publish(memory, 0)
        with first.changing(1):
            memory.fill_(1)
        # the moment between two looks of a reader cannot be hit from outside
        table, page, states = groups[0]._windows.publications, groups[1]._control, itertools.cycle((1, 0))
        really = page.publication

        def publication(rank, index):
            table.set_change(first._published, next(states))
            return really(rank, index)

        monkeypatch.setattr(page, "publication", publication)
        assert second.fetch(0).wait().version == 1


def test_a_window_that_is_closed_drops_its_reads():
    with open_hosts(2) as groups:
        window = groups[0].window("x", 4, sources=())
        handle = window.read(1, torch.empty(4), version=1)
        assert not handle.is_done()
        window.close()
        with pytest.raises(UsageError, match="closed before it was written or read"):
            handle.wait()
        assert groups[0]._windows.pending.is_busy is False  # nothing is tried for ever


def test_alone_there_is_nobody_to_wait_for():
    with SoloGroup() as group:
        assert group.window("w", 4).filled() == []
        window = group.window("w", 4, sources=[0])
        window.send(0, torch.ones(4)).wait()
        second = window.send(0, torch.full((4,), 2.0))
        with pytest.raises(DeadlineExceeded, match="nobody else"):
            second.wait()
        with window.slot(0) as slot:
            slot.clear()
            assert not second.is_done()
        assert second.is_done()
        window.publish(torch.ones(4), 0)
        with pytest.raises(DeadlineExceeded, match="nobody else"):
            window.read(0, torch.zeros(4), version=1).wait()


CHILD = """
import os, signal, sys, torch
sys.path[:0] = {path!r}
from group.hosts import open_member
from shoal.group import GroupSettings
from shoal.group.functions import Mutex
from shoal.group.host import window
group = open_member(1, 2, GroupSettings(key={key!r}, patience=0.06))
put, added = group.window("put", 1000), group.window("added", 1000)
memory = group.empty(1000)
put.publish(memory, 1)
mutex = Mutex(group, "held")
put.put(0, torch.ones(1000)).wait()
added.add(0, torch.ones(1000)).wait()

def in_the_middle_of_adding(slot, write):
    window.write_first = in_the_middle_of_putting
    put.put(0, torch.ones(1000))

def in_the_middle_of_putting(slot, write):
    slot[:500] = 7
    with mutex:
        group.barrier().wait()
        os.kill(os.getpid(), signal.{signal})

window.write_more = in_the_middle_of_adding
added.add(0, torch.ones(1000))
"""


@pytest.fixture
def hit(tmp_path, request):
    """This process is rank 0; rank 1 gets a signal in the middle of two writes, with a mutex in its hands."""
    key = f"{tmp_path} {os.getpid()}"
    code = CHILD.format(path=[path for path in sys.path if path], key=key, signal=request.param)
    child = subprocess.Popen([sys.executable, "-c", code])
    group = open_member(0, 2, GroupSettings(key=key, patience=0.06))
    try:
        windows = group.window("put", 1000), group.window("added", 1000)
        group.empty(1000)
        mutex = Mutex(group, "held")
        group.barrier().wait(Deadline.after(20))
        yield group, *windows, mutex
    finally:
        child.kill()
        child.wait()
        group.close()


@pytest.mark.parametrize("hit", ["SIGKILL"], indirect=True)
def test_writes_that_a_killed_source_has_not_finished_do_not_count(hit):
    group, put, added, mutex = hit
    with mutex:
        pass
    with put.slot(1) as slot:
        assert slot.num_writes == 0
    with pytest.raises(PeerLost, match="rank 1") as caught, added.slot(1):
        pass
    assert caught.value.peer == 1
    while not group.lost:
        group.progress()
    assert list(put.filled()) == list(added.filled()) == list(put.wait()) == []
    assert put.read(1, torch.empty(1000)).wait() is None


@pytest.mark.parametrize("hit", ["SIGSTOP"], indirect=True)
def test_a_stopped_source_is_named_once_it_is_lost_and_holds_no_mutex(hit):
    group, put, added, mutex = hit
    with mutex:
        assert "silent" in group.lost[1].reason
    for held in (put.slot(1), added.slot(1)):
        with pytest.raises(PeerLost, match=r"rank 1 is lost: silent") as caught, held:
            pass
        assert caught.value.peer == 1
    assert put.put(1, torch.ones(1000)).wait() is None
    assert list(put.wait()) == []
