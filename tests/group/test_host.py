"""What the contract of groups does not cover: waiting, losses, memory, and orders that differ."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from group.hosts import finish, open_hosts, open_member, together
from shoal.core import Deadline, DeadlineExceeded, PeerLost, Placement, UsageError
from shoal.group import GroupSettings, MemoryFull, control, open_host_group
from shoal.topology import Weights


def test_work_goes_on_only_when_asked_and_nobody_need_wait_alone():
    with open_hosts(3) as groups:
        tensors = together(groups, lambda group: group.empty(1000).fill_(group.rank))
        handles = [group.all_reduce(tensor) for group, tensor in zip(groups, tensors, strict=True)]
        assert all(torch.all(tensor == 1) for tensor in finish(handles))


def test_stores_that_need_ordering_go_through_bells(monkeypatch):
    """The way of processors that reorder stores."""
    monkeypatch.setattr(control, "IS_ORDERED", False)
    with open_hosts(2) as groups:

        def train(group):
            live, spare = group.empty(100).fill_(group.rank), group.empty(100)
            for _ in range(30):
                group.exchange(live, Weights(0.5, {1 - group.rank: 0.5}), out=spare).wait()
                live, spare = spare, live
            group.publish("x", live, 1)
            group.barrier().wait()
            snapshot = group.fetch("x", 1 - group.rank).wait()
            return float(live.mean()), snapshot.version

        assert together(groups, train) == [(0.5, 1), (0.5, 1)]


def test_waiting_has_a_deadline_and_names_the_one_who_is_missing():
    with open_hosts(2) as (first, _):
        with pytest.raises(DeadlineExceeded, match=r"barrier: waiting for rank 1 .*last beat"):
            first.barrier().wait(Deadline.after(0.02))
        assert first.waited_s[1] > 0.01


def test_the_groups_timeout_counts_without_a_deadline():
    with open_hosts(2, timeout_s=0.5) as (first, _), pytest.raises(DeadlineExceeded, match="--peer-timeout"):
        first.barrier().wait()


def test_a_long_wait_says_for_whom(monkeypatch, caplog):
    monkeypatch.setattr("shoal.group.engine._LINE_EVERY_S", 0.01)
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
            with pytest.raises(MemoryFull, match="not to be had"):
                group.empty(1000)

        together(groups, take)
        monkeypatch.undo()
        together(groups, lambda group: group.empty(1000))


def test_memory_is_given_back():
    with open_hosts(2) as groups:

        def use(group):
            group.free(group.empty(10_000_000))
            return os.fstat(group._arena._files[0]).st_blocks * 512

        assert max(together(groups, use)) < 40_000_000


def test_published_memory_must_be_the_groups():
    with open_hosts(2) as (first, _), pytest.raises(UsageError, match=r"group.empty\(\)"):
        first.publish("x", torch.zeros(3), 1)


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


def test_several_machines_are_refused():
    with pytest.raises(UsageError, match="several machines"):
        open_host_group(Placement(0, 4, 0, 2, "test"), GroupSettings(key="x"))


def test_one_machine_is_split():
    with open_hosts(4, workers_per_machine=2) as groups:
        assert [group.machine for group in groups] == [0, 0, 1, 1]
        assert groups[0].num_machines == 2
        tensors = [torch.full((2,), float(group.rank)) for group in groups]
        exchanges = [
            group.exchange_machines(tensor, Weights(0.5, {1 - group.machine: 0.5}))
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
    assert group.fetch("x", 1).wait() is None
    group.should_survive = True
    assert torch.equal(group.all_reduce(torch.ones(3)).wait(), torch.ones(3))
    assert group.share("here") == ["here"]


def test_a_stopped_peer_is_lost_when_patience_ends_and_learns_of_it(pair):
    group, child, live, spare = pair
    child.send_signal(signal.SIGSTOP)
    exchange_until_lost(group, live, spare)
    assert "silent for" in group.lost[1].reason
    assert "SIGSTOP" in group.lost[1].reason
    child.send_signal(signal.SIGCONT)
    assert child.stdout.readline() == "ready\n"
    assert child.stdout.readline().startswith("PeerLost rank 1, this worker, was silent")
