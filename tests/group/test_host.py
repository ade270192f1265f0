"""What the contract of groups does not cover: waiting, losses, memory, and orders that differ."""

import concurrent.futures
import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from group.hosts import finish, open_hosts, open_member, together
from shoal.core import (
    Deadline,
    DeadlineExceeded,
    PeerLost,
    Placement,
    ShoalError,
    TensorError,
    UsageError,
)
from shoal.group import GroupSettings, MemoryFull, open_host_group
from shoal.group.functions import exchange_machines, share
from shoal.group.host import memory as shared_memory
from shoal.topology import Weights


def test_work_goes_on_only_when_asked_and_nobody_need_wait_alone():
    with open_hosts(3) as groups:
        tensors = together(groups, lambda group: group.empty(1000).fill_(group.rank))
        handles = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
        assert all(torch.all(tensor == 1) for tensor in finish(handles))


def test_stores_that_need_ordering_go_through_pipes(monkeypatch):
    """The way of processors that reorder stores."""
    monkeypatch.setattr(shared_memory, "IS_ORDERED", False)
    with open_hosts(2) as groups:

        def train(group):
            live, spare = group.empty(100).fill_(group.rank), group.empty(100)
            for _ in range(30):
                group.exchange(live, Weights(0.5, {1 - group.rank: 0.5}), out=spare).wait()
                live, spare = spare, live
            window = group.window("x", 100, sources=())
            window.publish(live, 1)
            group.barrier().wait()
            snapshot = window.fetch(1 - group.rank).wait()
            return float(live.mean()), snapshot.version

        assert together(groups, train) == [(0.5, 1), (0.5, 1)]


def test_waiting_has_a_deadline_and_names_the_one_who_is_missing():
    with open_hosts(2) as (first, _):
        with pytest.raises(DeadlineExceeded, match=r"barrier: waiting for rank 1 .*last beat"):
            first.barrier().wait(Deadline.after(0.02))
        assert first.stats.waited_s[1] > 0.01


def test_the_groups_timeout_counts_without_a_deadline():
    with open_hosts(2, timeout_s=0.5) as (first, _), pytest.raises(DeadlineExceeded, match="--peer-timeout"):
        first.barrier().wait()


def test_a_long_wait_says_for_whom(monkeypatch, caplog):
    monkeypatch.setattr("shoal.group.base.LINE_EVERY_S", 0.01)
    with open_hosts(2) as (first, _), caplog.at_level(logging.WARNING):
        with pytest.raises(DeadlineExceeded):
            first.barrier().wait(Deadline.after(0.1))
        assert "rank 0: barrier: waiting for rank 1" in caplog.text


def test_different_orders_are_refused_on_all_sides():
    with open_hosts(2) as (first, second):
        errors = finish([first.all_reduce(torch.zeros(3)), second.broadcast(torch.zeros(3))])
        assert all(isinstance(error, UsageError) for error in errors)
        assert "rank 0 called all_reduce of 3 elements" in str(errors[0])
        assert "rank 0 called all_reduce" in str(errors[1])
        # and the group is not broken by it
        assert finish([first.barrier(), second.barrier()]) == [None, None]


def test_sources_who_do_not_send_are_named():
    with open_hosts(2) as (first, second):
        errors = finish(
            [
                first.exchange(torch.zeros(3), Weights(0.5, {1: 0.5}, {1: 1.0})),
                second.exchange(torch.zeros(3), Weights(1.0, {}, {})),
            ]
        )
        assert "rank 0 wants to receive from rank 1, which does not send to it" in str(errors[0])
        assert torch.equal(errors[1], torch.zeros(3))


def test_memory_that_is_not_to_be_had_is_an_error_for_all(monkeypatch):
    with open_hosts(2) as groups:

        def full(descriptor, offset, size):
            raise OSError(28, "no space")

        monkeypatch.setattr(os, "posix_fallocate", full)

        def take(group):
            with pytest.raises(MemoryFull, match=r"No room for .* of shared memory"):
                group.empty(1000)

        together(groups, take)
        monkeypatch.undo()
        together(groups, lambda group: group.empty(1000))


def test_memory_is_given_back():
    with open_hosts(2) as groups:
        together(groups, lambda group: group.free(group.empty(10_000_000)))
        assert os.fstat(groups[0]._arena.files[0]).st_blocks * 512 < 40_000_000


def test_published_memory_must_be_the_groups():
    with open_hosts(2) as (first, _), pytest.raises(UsageError, match=r"group.empty\(\)"):
        first.window("x", 3, sources=()).publish(torch.zeros(3), 1)


def test_after_leaving_nothing_goes():
    with open_hosts(2) as (first, second):
        first.leave()
        first.leave()
        with pytest.raises(UsageError, match="has left the group"):
            first.barrier()
        tensor = torch.full((3,), 5.0)
        assert torch.equal(second.all_reduce(tensor).wait(), torch.full((3,), 5.0))
        with pytest.raises(UsageError, match="has left the group"):
            second.broadcast(tensor, 0).wait()
        assert list(second.members) == [1]
        assert not second.lost


def test_operations_on_the_same_memory_follow_each_other():
    with open_hosts(2) as groups:
        own = together(groups, lambda group: group.empty(5).fill_(group.rank + 1))
        for tensors in (own, [torch.full((5,), group.rank + 1.0) for group in groups]):
            handles = []
            for group, tensor in zip(groups, tensors, strict=True):
                handles += [group.all_reduce(tensor, "sum"), group.all_reduce(tensor, "sum")]
            assert all(torch.equal(result, torch.full((5,), 6.0)) for result in finish(handles))


def test_an_error_leaves_staging_in_step():
    """One gave group memory, the other did not."""
    with open_hosts(2) as groups:
        own = together(groups, lambda group: group.empty(5))
        errors = finish([groups[0].all_reduce(own[0]), groups[1].all_reduce(torch.zeros(5))])
        assert "group memory" in str(errors[0])
        assert "other memory" in str(errors[0])
        for number in range(5):
            tensors = [torch.full((3,), float(number + group.rank)) for group in groups]
            reduced = finish([g.all_reduce(t, "sum") for g, t in zip(groups, tensors, strict=True)])
            assert [tensor[0].item() for tensor in reduced] == [2 * number + 1] * 2


def test_nothing_to_reduce_counts_too():
    with open_hosts(2) as groups:
        finish([group.all_reduce(torch.zeros(0)) for group in groups])
        assert finish([group.barrier() for group in groups]) == [None, None]


def test_an_exchange_into_the_same_memory_is_refused():
    with open_hosts(2) as groups:
        tensor = together(groups, lambda group: group.empty(5))[0]
        with pytest.raises(UsageError, match="does not overlap"):
            groups[0].exchange(tensor, Weights(0.5, {1: 0.5}), out=tensor)


def test_parameters_in_the_groups_memory():
    with open_hosts(2) as groups:
        own = together(groups, lambda group: torch.nn.Parameter(group.empty(3).fill_(group.rank)))
        finish([group.broadcast(tensor, 1) for group, tensor in zip(groups, own, strict=True)])
        assert own[0].tolist() == [1, 1, 1]


def test_memory_is_taken_by_the_next_when_the_first_has_gone():
    with open_hosts(3) as groups, concurrent.futures.ThreadPoolExecutor(2) as threads:
        taking = [threads.submit(group.empty, 100) for group in groups[1:]]
        groups[0].leave()
        tensors = [future.result(20) for future in taking]
        handles = [group.all_reduce(t.fill_(1), "sum") for group, t in zip(groups[1:], tensors, strict=True)]
        assert all(torch.all(tensor == 2) for tensor in finish(handles))


def test_who_fails_does_not_leave_in_order():
    with open_hosts(2) as (first, second):
        with pytest.raises(KeyError), second:
            raise KeyError
        with pytest.raises(PeerLost, match="rank 1 is lost: it failed"):
            first.all_reduce(torch.ones(3)).wait(Deadline.after(10))
        second.close()


def test_an_operation_that_was_broken_off_is_not_done_again(monkeypatch):
    with open_hosts(2) as (first, second):
        handle = first.all_reduce(torch.ones(3))

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr("shoal.group.host.collectives.reduce_into", interrupt)
        with pytest.raises(KeyboardInterrupt):
            second.all_reduce(torch.ones(3))
        monkeypatch.undo()
        with pytest.raises(UsageError, match=r"out of step .* KeyboardInterrupt"):
            second.barrier()
        assert torch.equal(handle.wait(Deadline.after(10)), torch.full((3,), 1.0)), "what it gave was there"
        second.close()
        with pytest.raises(PeerLost, match="rank 1 is lost: it failed"):
            first.barrier().wait(Deadline.after(10))


def test_a_share_that_never_comes_is_a_loss(monkeypatch):
    monkeypatch.setattr("shoal.group.host.group._LEAVING_S", 0.05)
    with open_hosts(3) as groups:
        tensors = together(groups, lambda group: group.empty(100))
        handle = groups[1].all_reduce(tensors[1])
        groups[0].all_reduce(tensors[0])
        groups[0].leave()
        groups[2].all_reduce(tensors[2])
        with pytest.raises(PeerLost, match="rank 0 is lost: it left in the middle"):
            handle.wait(Deadline.after(10))


def test_nothing_is_written_anywhere_after_the_end(tmp_path):
    with open_hosts(2) as (first, second):
        live = torch.zeros(3)
        handle = first.all_reduce(live)
        window = first.window("x", 3, sources=())
        first.close(ConnectionAbortedError())
        files = [(tmp_path / str(number)).open("wb") for number in range(20)]
        window.reclaim(1)
        first.progress()
        first.leave()
        first.close()
        with pytest.raises(ShoalError):
            handle.wait(Deadline.after(0.1))
        for file in files:
            file.close()
        assert all(not path.stat().st_size for path in tmp_path.iterdir())
        second.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_child_is_no_member():
    with open_hosts(2) as groups:
        child = os.fork()
        if child == 0:
            code = 0
            try:
                groups[0].barrier()
            except UsageError:
                code = 7
            groups[0].close()
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert finish([group.barrier() for group in groups]) == [None, None]


def test_what_cannot_be_published_is_refused_and_hides_nothing():
    with open_hosts(2) as groups:
        tensors = together(groups, lambda group: group.empty(8))
        with pytest.raises(UsageError, match="cannot be exchanged"):
            groups[0].window("complex", 4, torch.complex64, sources=())
        windows = [group.window("plain", 8, sources=()) for group in groups]
        with pytest.raises(TensorError, match="do not fit"):
            windows[0].publish(tensors[0][1:], 1)
        with pytest.raises(UsageError, match="negative"):
            windows[0].publish(tensors[0], -1)
        assert windows[1].fetch(0).wait() is None
        windows[0].publish(tensors[0], 1)
        assert windows[1].fetch(0).wait().version == 1


def test_windows_that_publish_come_and_go_by_the_hundred():
    """Nothing that was seen of an earlier one is taken for a later one's."""
    with open_hosts(2) as groups:
        memory, _ = together(groups, lambda group: group.empty(1))
        kept = groups[0].window("kept", 1, sources=())
        kept.publish(memory, 1)
        readers = [groups[1].window(name, 1, sources=()) for name in ("kept", "again", "other")]
        old = None
        for turn in range(2 * shared_memory.PUBLICATIONS):
            window = groups[0].window("again" if turn % 2 else "other", 1, sources=())
            window.publish(memory, turn % 3)
            seen = [reader.fetch(0).wait() for reader in readers]
            assert [one and one.version for one in seen] == [1, *[turn % 3, None][:: 1 if turn % 2 else -1]]
            new = seen[1 if turn % 2 else 2]
            assert new.is_intact()
            assert old is None or not old.is_intact()
            old = new
            window.close()
            assert not old.is_intact()
        open_windows = [groups[0].window(f"w {n}", 1, sources=()) for n in range(shared_memory.PUBLICATIONS)]
        for window in open_windows[:-1]:
            window.publish(memory, 0)
        with pytest.raises(UsageError, match="at most 512 windows"):
            open_windows[-1].publish(memory, 0)
        with pytest.raises(UsageError, match="Another window 'kept'"):
            groups[0].window("kept", 1, sources=()).publish(memory, 0)


def test_watching_needs_no_small_descriptors():
    """select() takes none above 1023."""
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with open_hosts(2, patience=0.1) as (first, second):
            with pytest.raises(DeadlineExceeded):
                first.barrier().wait(Deadline.after(0.8))
            second.barrier()
            assert not first.lost
    finally:
        for descriptor in held:
            os.close(descriptor)


def test_an_opening_that_fails_leaves_nothing(monkeypatch):
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            open_member(0, 2, GroupSettings(key="alone", timeout_s=0.01))
        with pytest.raises(DeadlineExceeded):
            open_member(1, 2, GroupSettings(key="alone", timeout_s=0.01))
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


def test_several_machines_are_refused():
    with pytest.raises(UsageError, match="several machines"):
        open_host_group(Placement(0, 4, 0, 2, "test"), GroupSettings(key="x"))


def test_one_machine_is_split():
    with open_hosts(4, workers_per_machine=2) as groups:
        assert [group.machine for group in groups] == [0, 0, 1, 1]
        assert groups[0].num_machines == 2
        assert list(groups[0].machines) == [0, 0, 1, 1]
        tensors = [torch.full((2,), float(group.rank)) for group in groups]
        exchanges = [
            exchange_machines(group, tensor, Weights(0.5, {1 - group.machine: 0.5}))
            for group, tensor in zip(groups, tensors, strict=True)
        ]
        assert [tensor[0].item() for tensor in finish(exchanges)] == [1.5] * 4


CHILD = """
import sys, torch
sys.path[:0] = {path!r}
from group.hosts import open_member
from shoal.group import GroupSettings
from shoal.topology import Weights
group = open_member(1, 2, GroupSettings(key={key!r}, patience=0.06))
live, spare = group.empty(10), group.empty(10)
print("ready", flush=True)
while True:
    try:
        group.exchange(live.fill_(3), Weights(0.5, {{0: 0.5}}), out=spare).wait()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
        break
    live, spare = spare, live
"""


@pytest.fixture
def pair(tmp_path):
    """This process is rank 0; rank 1 exchanges for ever in another one."""
    key = f"{tmp_path} {os.getpid()}"
    code = CHILD.format(path=[path for path in sys.path if path], key=key)
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    group = open_member(0, 2, GroupSettings(key=key, patience=0.06))
    live, spare = group.empty(10).fill_(1), group.empty(10)
    try:
        yield group, child, live, spare
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        group.close()


def exchange_until_lost(group, live, spare):
    """Rounds go on; the values of the last two."""
    while True:
        group.exchange(live.fill_(1), Weights(0.5, {1: 0.5}), out=spare).wait(Deadline.after(20))
        if group.lost:
            break
        assert torch.all(spare == 2)
        live, spare = spare, live
    return group.exchange(live.fill_(1), Weights(0.5, {1: 0.5}), out=spare).wait()


def test_an_exchange_outlives_a_killed_peer_and_a_reduction_names_it(pair):
    group, child, live, spare = pair
    child.kill()
    began_s = time.monotonic()
    assert torch.all(exchange_until_lost(group, live, spare) == 1), "its weight goes to oneself"
    assert time.monotonic() - began_s < 5
    assert group.lost[1].reason == f"its process {child.pid} ended"
    assert list(group.members) == [0]
    for operation in (group.all_reduce(live), group.all_reduce(torch.zeros(3)), group.barrier()):
        with pytest.raises(PeerLost, match="rank 1 is lost: its process") as caught:
            operation.wait()
        assert caught.value.peer == 1
    assert group.window("x", 10, sources=()).fetch(1).wait() is None
    group.should_survive = True
    assert torch.equal(group.all_reduce(torch.ones(3)).wait(), torch.ones(3))
    assert share(group, "here") == ["here"]


def test_a_stopped_peer_is_lost_when_patience_ends_and_learns_of_it(pair):
    group, child, live, spare = pair
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGSTOP)
    exchange_until_lost(group, live, spare)
    assert "silent for" in group.lost[1].reason
    assert "SIGSTOP" in group.lost[1].reason
    child.send_signal(signal.SIGCONT)
    assert child.stdout.readline().startswith("PeerLost rank 1, this worker, was silent")


def test_what_is_broadcast_is_not_written_over_before_all_have_read_it():
    with open_hosts(3) as groups:
        tensors = together(groups, lambda group: group.empty(100_000))
        tensors[0].fill_(1.0)
        handle = groups[0].broadcast(tensors[0])
        finish([groups[1].broadcast(tensors[1])])
        assert not handle.is_done()
        finish([groups[2].broadcast(tensors[2]), handle])
        assert tensors[2].unique().tolist() == [1.0]


def test_one_that_fails_because_of_a_loss_is_not_blamed_for_it():
    with open_hosts(3) as groups:
        handles = [group.barrier() for group in groups[1:]]
        groups[0].close(ConnectionAbortedError())
        with pytest.raises(PeerLost) as raised:
            handles[1].wait(Deadline.after(20))
        assert raised.value.peer == 0
        groups[2].close(raised.value)
        with pytest.raises(PeerLost, match="rank 0 is lost: it failed"):
            groups[1].barrier().wait(Deadline.after(20))


def test_the_others_blame_whom_the_error_names():
    """Also one that this group has not noticed itself."""
    with open_hosts(3) as groups:
        groups[2].close(PeerLost("rank 0 is lost.", peer=0))
        groups[2].close()
        groups[0].barrier()
        with pytest.raises(PeerLost, match="rank 0 is lost"):
            groups[1].barrier().wait(Deadline.after(20))


def test_a_loss_that_was_noticed_is_blamed_whatever_the_error():
    with open_hosts(3) as groups:
        handles = [group.barrier() for group in groups[1:]]
        groups[0].close(ConnectionAbortedError())
        with pytest.raises(PeerLost):
            handles[1].wait(Deadline.after(20))
        groups[2].close(ValueError())
        with pytest.raises(PeerLost, match="rank 0 is lost: it failed"):
            groups[1].barrier().wait(Deadline.after(20))
