"""A worker of one machine that goes while its GPU lags behind: nothing that it did not give is used."""

import concurrent.futures
import contextlib
import itertools
import os
import threading

import pytest
import torch

from group.fake_device import FakeDevice
from group.hosts import together
from shoal.core import Deadline, PeerLost, Placement, UsageError
from shoal.group import GroupSettings, open_host_group
from shoal.group.functions import announce
from shoal.group.host import engine
from shoal.topology import Weights

GPU = torch.device("meta")
_numbers = itertools.count()


@contextlib.contextmanager
def gpu_workers(size):
    """Groups of workers that are threads of this process, and their GPUs, by rank."""
    key = f"gpu losses {os.getpid()} {next(_numbers)}"
    devices = [FakeDevice(seed=rank, longest_s=0) for rank in range(size)]

    def open_member(rank):
        placement = Placement(rank, size, rank, size, "test")
        return open_host_group(placement, GroupSettings(key=key), lambda _: devices[rank])

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(size) as threads:
        for device in devices:
            stack.callback(device.gate.set)
        groups = list(threads.map(open_member, range(size)))
        for group in reversed(groups):
            stack.callback(group.close, ConnectionAbortedError())
        yield groups, devices


def filled(groups):
    """Memory of each worker on its GPU, with its rank in it."""
    memory = together(groups, lambda group: group.empty(8, device=GPU))
    for rank, tensor in enumerate(memory):
        tensor.fill_(rank)
    return memory


def test_a_gather_may_be_the_first_operation_on_a_gpu():
    with gpu_workers(2) as (groups, _):
        memory = filled(groups)
        gathered = together(groups, lambda group: group.all_gather(memory[group.rank]).wait())
        for tensors in gathered:
            assert [tensor.tolist() for tensor in tensors] == [[0.0] * 8, [1.0] * 8]


def test_who_fails_before_its_gpu_has_given_its_part_is_left_out_of_an_exchange():
    with gpu_workers(3) as (groups, devices):
        live, spare = filled(groups), filled(groups)
        devices[2].gate.clear()
        everybody = [Weights.uniform([other for other in range(3) if other != rank]) for rank in range(3)]
        handles = [
            group.exchange(live[rank], everybody[rank], out=spare[rank]) for rank, group in enumerate(groups)
        ]
        assert all(handle.is_done() for handle in handles)  # issued by all
        assert [spare[rank].tolist() for rank in range(2)] == [[0.0] * 8, [1.0] * 8]
        groups[2].close(ConnectionAbortedError())
        for rank in range(2):
            handles[rank].wait(Deadline.after(20))
            mean = (2 * rank + (1 - rank)) / 3  # the weight of who is gone goes to oneself
            assert spare[rank].tolist() == pytest.approx([mean] * 8)


def test_an_all_reduce_that_lacks_a_part_is_void_for_all_others():
    with gpu_workers(3) as (groups, devices):
        memory = filled(groups)
        devices[2].gate.clear()
        handles = together(groups, lambda group: group.all_reduce(memory[group.rank]))
        together(groups, lambda group: group.progress())
        assert all(handle.is_done() for handle in handles)  # issued by all
        groups[2].close(ConnectionAbortedError())
        for rank in range(2):
            with pytest.raises(PeerLost) as raised:
                groups[rank].all_reduce(memory[rank]).wait(Deadline.after(20))
            assert raised.value.peer == 2
        devices[0].synchronize()  # no stream waits for it any more
        devices[1].synchronize()


def test_who_leaves_does_so_when_its_gpu_has_done_its_part():
    with gpu_workers(2) as (groups, devices):
        memory = filled(groups)
        devices[1].gate.clear()
        handles = together(groups, lambda group: group.all_reduce(memory[group.rank], "sum"))
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            leaving = threads.submit(groups[1].leave)
            assert list(groups[0].members) == [0, 1]
            devices[1].gate.set()
            leaving.result(20)
        handles[0].wait(Deadline.after(20))
        assert memory[0].tolist() == [1.0] * 8
        assert list(groups[0].members) == [0]
        assert not groups[0].lost


def test_there_is_always_a_publication_to_fetch():
    with gpu_workers(2) as (groups, _):
        buffers = [filled(groups), filled(groups)]
        windows = [group.window("model", 8, sources=(), device=GPU) for group in groups]
        for version in range(6):
            memory = buffers[version % 2][1].fill_(version)
            windows[1].publish(memory, version)
            windows[1].reclaim(version - 1)
            snapshot = windows[0].fetch(1).wait()
            assert snapshot.version == version
            values = snapshot.tensor.clone()
            assert snapshot.is_intact()
            assert values.tolist() == [float(version)] * 8


def test_more_snapshots_than_claims_are_told_apart():
    with gpu_workers(2) as (groups, _):
        memory = filled(groups)
        windows = [group.window("model", 8, sources=(), device=GPU) for group in groups]
        windows[1].publish(memory[1], 0)
        snapshots = [windows[0].fetch(1).wait() for _ in range(5)]
        assert all(snapshot.is_intact() for snapshot in snapshots)
        with windows[1].changing(1):
            memory[1].fill_(7)
        assert not any(snapshot.is_intact() for snapshot in snapshots)


def test_who_announces_an_all_reduce_is_not_waited_for_on_the_processor():
    with gpu_workers(3) as (groups, devices):
        memory = filled(groups)
        for group in groups[1:]:
            announce(group, 1)
        handle = groups[0].all_reduce(memory[0], "sum")
        assert handle.is_done()  # ordered before what its GPU does next
        together(groups[1:], lambda group: group.all_reduce(memory[group.rank], "sum").wait())
        for device in devices:
            device.synchronize()
        assert [tensor.tolist() for tensor in memory] == [[3.0] * 8] * 3


def test_who_announces_an_all_reduce_and_fails_leaves_a_void_result():
    with gpu_workers(2) as (groups, devices):
        memory = filled(groups)
        announce(groups[1], 1)
        assert groups[0].all_reduce(memory[0]).is_done()
        groups[1].close(ConnectionAbortedError())
        with pytest.raises(PeerLost) as raised:
            groups[0].all_reduce(memory[0]).wait(Deadline.after(20))
        assert raised.value.peer == 1
        devices[0].synchronize()


def test_who_announces_an_all_reduce_and_issues_another_is_told_so():
    with gpu_workers(2) as (groups, _):
        memory = filled(groups)
        announce(groups[1], 1)
        assert groups[0].all_reduce(memory[0], "sum").is_done()
        with pytest.raises(UsageError, match="called all_reduce of 8 elements"):
            groups[1].all_reduce(memory[1], "max").wait(Deadline.after(20))
        with pytest.raises(UsageError, match="called all_reduce of 8 elements"):
            groups[0].progress()


def test_who_announces_an_all_reduce_and_leaves_has_not_left_in_order():
    with gpu_workers(2) as (groups, devices):
        memory = filled(groups)
        announce(groups[1], 1)
        assert groups[0].all_reduce(memory[0]).is_done()
        groups[1].close()
        with pytest.raises(PeerLost) as raised:
            groups[0].all_reduce(memory[0]).wait(Deadline.after(20))
        assert raised.value.peer == 1
        devices[0].synchronize()


def test_windows_that_nobody_has_closed_leave_no_host_memory_pinned():
    with gpu_workers(2) as (groups, devices):
        together(groups, lambda group: group.window("w", 8, torch.float32, sources=[0, 1], device=GPU))
        assert all(
            len(device.registered) == 2 for device in devices
        )  # the control page, and the window's words
    assert not any(device.registered for device in devices)


def test_host_memory_that_a_gpu_may_still_write_stays_mapped_until_it_is_done():
    with gpu_workers(2) as (groups, devices):
        memory = filled(groups)
        devices[1].gate.clear()
        together(groups, lambda group: group.exchange(memory[group.rank], Weights.uniform([1 - group.rank])))
        groups[1].close(ConnectionAbortedError())
        held = devices[1].registered
        assert len(held) == 1  # so its addresses are not used anew
        devices[1].gate.set()
        devices[1].synchronize()
        with gpu_workers(1) as (others, _):
            filled(others)
            assert not devices[1].registered


def exchanged(groups, live, spare, weights=None):
    """Issues an exchange of all with all on each of some groups; their handles."""
    size = groups[0].size
    return [
        group.exchange(
            live[group.rank],
            weights or Weights.uniform([other for other in range(size) if other != group.rank]),
            out=spare[group.rank],
        )
        for group in groups
    ]


def look_and_wait(group, handle):
    group.progress()
    handle.wait(Deadline.after(20))


def test_who_is_one_exchange_behind_is_waited_for_by_the_gpu_alone():
    with gpu_workers(3) as (groups, devices):
        live, spare = filled(groups), filled(groups)
        (handle,) = exchanged(groups[:1], live, spare)
        assert handle.is_done()  # ordered before what its GPU does next
        assert spare[0].tolist() == [0.0] * 8
        (second,) = exchanged(groups[:1], spare, live)
        assert not second.is_done()  # two ahead is too far
        for _ in range(2):
            exchanged(groups[1:], live, spare)
            live, spare = spare, live
        assert second.is_done()
        for device in devices:
            device.synchronize()
        assert [memory.tolist() for memory in live] == [pytest.approx([1.0] * 8)] * 3


@pytest.mark.parametrize("way", ["fails", "leaves"])
def test_who_goes_before_an_exchange_that_others_have_issued_weighs_nothing_in_it(way):
    with gpu_workers(3) as (groups, devices):
        live, spare = filled(groups), filled(groups)
        handles = exchanged(groups[:2], live, spare)
        assert all(handle.is_done() for handle in handles)
        if way == "fails":
            groups[2].close(ConnectionAbortedError())
        else:
            groups[2].leave()
        for rank in range(2):
            devices[rank].synchronize()  # no stream waits for it any more
            mean = (2 * rank + (1 - rank)) / 3  # the weight of who is gone goes to oneself
            assert spare[rank].tolist() == pytest.approx([mean] * 8)
        for handle in exchanged(groups[:2], spare, live):
            handle.wait(Deadline.after(20))


def test_who_is_ahead_hears_of_another_operation_a_call_later():
    with gpu_workers(2) as (groups, _):
        live, spare = filled(groups), filled(groups)
        (handle,) = exchanged(groups[:1], live, spare)
        assert handle.is_done()
        groups[1].all_reduce(live[1])
        with pytest.raises(UsageError, match="all_reduce"):
            exchanged(groups[:1], spare, live)[0].wait(Deadline.after(20))


@pytest.mark.parametrize("is_ahead", [True, False])
def test_factors_of_one_side_alone_are_refused_whoever_comes_first(is_ahead):
    with gpu_workers(2) as (groups, _):
        live, spare = filled(groups), filled(groups)

        def send():
            with contextlib.suppress(UsageError):
                groups[1].exchange(live[1], Weights(0.5, {0: 0.5}, {0: 0.25}), out=spare[1])

        if not is_ahead:
            send()
        handles = exchanged(groups[:1], live, spare)
        if is_ahead:
            assert handles[0].is_done()
            send()
        with pytest.raises(UsageError, match=r"factor 0\.25"):
            look_and_wait(groups[0], handles[0])


def test_a_gpu_that_waits_long_for_one_that_is_behind_has_it_named(monkeypatch):
    monkeypatch.setattr(engine, "LINE_EVERY_S", 0.2)
    with gpu_workers(2) as (groups, devices):
        live, spare = filled(groups), filled(groups)
        exchanged(groups[:1], live, spare)
        heard = threading.Event()
        monkeypatch.setattr(engine.log, "warning", lambda *_: heard.set() or said.append(_))
        said = []
        assert heard.wait(20)
        assert "waiting for rank 1" in said[0][0] % said[0][1:]
        exchanged(groups[1:], live, spare)
        devices[0].synchronize()
