"""What workers do with windows, mutexes and changing memory in `test_group.py`.

Each function runs in every worker of a group, as those of `group_checks`. Numbers are small integers, so that
sums are exact in whatever order they are made.
"""

import os
import signal
import time

import pytest
import torch

from shoal.core import Deadline, DeadlineExceeded, LimitExceeded, TensorError, UsageError
from shoal.group.functions import Mutex

COUNT = 5003


def writes(group, _):
    """Put, overwrite, weights, notes, refusals, and a name that is used again; each writes to the next."""
    rank, size = group.rank, group.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        window = group.window("w", COUNT, dtype, sources=[before])
        assert (window.name, window.num_elements, window.dtype) == ("w", COUNT, dtype)
        assert list(window.filled()) == []
        with window.slot(before) as slot:
            assert (slot.source, slot.num_writes, slot.mass, slot.note) == (before, 0, 0.0, b"")
        group.barrier().wait()
        own = torch.arange(COUNT).remainder(100).add(rank).to(dtype)
        assert window.put(after, torch.zeros_like(own), mass=9.0, note=b"first").wait() is None
        weight = 0.5 if dtype.is_floating_point else 1.0
        window.put(after, own.view(1, -1), weight=weight, mass=0.25, note=b"second").wait()
        group.barrier().wait()
        assert list(window.filled()) == list(window.wait()) == [before]
        with window.slot(before) as slot:
            assert (slot.num_writes, slot.mass, slot.note) == (2, 0.25, b"second")
            wanted = torch.arange(COUNT).remainder(100).add(before).to(dtype)
            assert torch.equal(slot.tensor, wanted * weight if weight != 1 else wanted)
            slot.clear()
            assert slot.num_writes == 0
        assert list(window.filled()) == []
        group.barrier().wait()
        window.add(after, own, mass=1.0).wait()
        window.add(after, own, weight=weight, mass=0.5, note=b"third").wait()
        group.barrier().wait()
        with window.slot(before) as slot:
            assert (slot.num_writes, slot.mass, slot.note) == (2, 1.5, b"third")
            assert torch.equal(slot.tensor, wanted + wanted * weight if weight != 1 else wanted * 2)
        group.barrier().wait()
        _refusals(window, rank, own, after)
        window.close()
        with pytest.raises(UsageError, match="closed"):
            window.filled()


def _refusals(window, rank, own, after):
    with pytest.raises(TensorError, match="do not fit"):
        window.put(after, own[1:])
    with pytest.raises(TensorError, match="do not fit"):
        window.add(after, own.to(torch.float16))
    with pytest.raises(LimitExceeded, match="note"):
        window.put(after, own, note=b"x" * 5000)
    with pytest.raises(UsageError, match="no rank"):
        window.put(99, own)
    if after != rank:
        with pytest.raises(UsageError, match="no slot"), window.slot(rank):
            pass


def masses(group, arguments):
    """Everybody pushes half of what it has to one after the other, and all collect: nothing is lost."""
    rank, size = group.rank, group.size
    others = [other for other in range(size) if other != rank] or [0]
    window = group.window("mass", COUNT, torch.float64, sources=others)
    own, mass = torch.full((COUNT,), float(1 << 30), dtype=torch.float64), float(1 << 30)
    seen = 0
    choice = torch.Generator("cpu").manual_seed(rank)
    for turn in range(arguments["num_turns"]):
        to = others[turn % len(others)]
        part, weight = (own / 2).floor(), mass // 2  # whole numbers: all sums are exact
        own, mass = own - part, mass - weight
        window.add(to, part, mass=weight).wait()
        for source in window.filled():
            got, counted, weight = _collect(window, source)
            own, mass, seen = own + got, mass + weight, seen + counted
        torch.ones(int(torch.randint(1, 60, (1,), generator=choice, device="cpu")), 60).sum()
    group.barrier().wait()
    for source in window.filled():
        got, counted, weight = _collect(window, source)
        own, mass, seen = own + got, mass + weight, seen + counted
    assert torch.all(own == own[0])
    assert float(own[0]) == mass
    total = group.all_reduce(torch.tensor([mass, float(seen)], dtype=torch.float64), "sum").wait()
    assert total.tolist() == [size * float(1 << 30), size * arguments["num_turns"]]
    window.close()


def _collect(window, source):
    with window.slot(source) as slot:
        result = slot.tensor.clone(), slot.num_writes, slot.mass
        slot.clear()
    assert result[1] > 0
    return result


def letters(group, arguments):
    """Each sends numbered tensors to all others, who take them one by one: in order, and none is missed."""
    rank, size, count = group.rank, group.size, arguments["num_letters"]
    others = [other for other in range(size) if other != rank] or [0]
    window = group.window("letters", 64, torch.int64, sources=others)
    handles = {
        (to, number): window.send(to, torch.full((64,), number), note=str(number).encode())
        for number in range(count)
        for to in others
    }
    got = {source: [] for source in others}
    while any(len(numbers) < count for numbers in got.values()):
        for source in window.wait(Deadline.after(20)):
            with window.slot(source) as slot:
                assert slot.num_writes == 1
                assert slot.tensor.tolist() == [int(slot.note)] * 64
                got[source].append(int(slot.note))
                slot.clear()
    assert all(numbers == list(range(count)) for numbers in got.values())
    for handle in handles.values():
        handle.wait(Deadline.after(20))
        assert handle.is_done()
    window.close()


def pending(group, _):
    """A write waits for a slot that is held, and only that; a full slot keeps a second letter back."""
    rank, size = group.rank, group.size
    after, before = (rank + 1) % size, (rank - 1) % size
    window = group.window("pending", 8, sources=[before])
    with window.slot(before) as slot:
        group.barrier().wait()
        handle = window.put(after, torch.ones(8))
        assert not handle.is_done()
        group.all_reduce(torch.ones(3)).wait()  # other operations go on meanwhile
        assert slot.num_writes == 0
        with pytest.raises(DeadlineExceeded):
            handle.wait(Deadline.after(0.005))
        group.barrier().wait()
    handle.wait(Deadline.after(20))
    group.barrier().wait()
    letter = window.send(after, torch.full((8,), 2.0))
    assert not letter.is_done()
    group.barrier().wait()
    with window.slot(before) as slot:
        assert slot.tensor.tolist() == [1.0] * 8
        slot.clear()
    letter.wait(Deadline.after(20))
    group.barrier().wait()
    with window.slot(before) as slot:
        assert slot.tensor.tolist() == [2.0] * 8
    with pytest.raises(UsageError, match="itself"), window.slot(before), window.slot(before):
        pass
    assert list(window.wait(Deadline.after(0))) == [before]
    window.close()


def exclusion(group, arguments):
    """A count that is read, and written a moment later: under a mutex nobody's turn is missed."""
    size = group.size
    window = group.window("count", 1, torch.int64, sources=range(size))
    mutex, another = Mutex(group, "count"), Mutex(group, "another")
    counted = 0
    for _ in range(arguments["num_turns"]):
        with mutex:
            # everybody keeps a copy of the count, and tells all the next one
            counted = max([counted, *(_peek(window, source) for source in window.filled())]) + 1
            for other in range(size):
                window.put(other, torch.tensor([counted])).wait()
    group.barrier().wait()
    assert max(_peek(window, source) for source in window.filled()) == size * arguments["num_turns"]
    with mutex, another:
        pass
    with pytest.raises(UsageError, match="itself"), mutex, mutex:
        pass
    with mutex:
        pass
    group.barrier().wait()
    mutex.close()
    with Mutex(group, "count"):
        pass
    window.close()


def _peek(window, source):
    with window.slot(source) as slot:
        return int(slot.tensor)


def changes(group, arguments):
    """Rank 0 changes what it has published again and again; no copy is ever of two versions."""
    rank, count = group.rank, arguments["num_elements"]
    memory = group.empty(count, torch.int64)
    into = torch.empty(count, dtype=torch.int64)
    window = group.window("changing", count, torch.int64, sources=())
    assert window.read(0, into).wait() is None
    group.barrier().wait()
    if rank == 0:
        with pytest.raises(UsageError, match="publish"), window.changing(1):
            pass
        window.publish(memory, 0)
        for version in range(1, arguments["num_versions"] + 1):
            with window.changing(version):
                for part in memory.chunk(7):
                    part.fill_(version)
    versions = [window.read(0, into, version=1).wait(Deadline.after(20))]
    while versions[-1] < arguments["num_versions"]:
        wanted = versions[-1] + 1 if len(versions) % 2 else 0
        versions.append(window.read(0, into, version=wanted).wait(Deadline.after(20)))
        assert versions[-1] >= max(wanted, versions[-2])
        assert torch.all(into == versions[-1])
    with pytest.raises(TensorError, match="fit"):
        window.read(0, into[1:]).wait()
    later = window.read(0, into, version=arguments["num_versions"] + 1)
    assert not later.is_done()
    group.barrier().wait()
    if rank == 0:
        with window.changing(arguments["num_versions"] + 1):
            assert not later.is_done()
            memory.fill_(-1)
    assert later.wait(Deadline.after(20)) == arguments["num_versions"] + 1
    assert torch.all(into == -1)
    group.barrier().wait()
    group.free(memory)


def departures(group, _):
    """The last one leaves: what it wrote can be read, what is written to it is nowhere."""
    rank, size = group.rank, group.size
    gone = size - 1
    window = group.window("leaving", 16)
    memory = group.empty(16)
    window.publish(memory, 3)
    mutex = Mutex(group, "leaving")
    group.barrier().wait()
    if rank == gone:
        for other in range(gone):
            window.put(other, torch.full((16,), 7.0)).wait()
        mutex.__enter__()  # it leaves with the mutex in its hands
        group.barrier().wait()
        group.leave()
        return
    group.barrier().wait()
    with window.slot(gone) as slot:
        assert slot.tensor.tolist() == [7.0] * 16
        slot.clear()
    into = torch.zeros(16)
    waiting = window.read(gone, into, version=4)
    assert waiting.wait(Deadline.after(20)) is None
    assert window.read(gone, into).wait() is None
    assert window.fetch(gone).wait() is None
    assert window.put(gone, torch.ones(16)).wait() is None
    assert window.send(gone, torch.ones(16)).wait() is None
    assert window.send(gone, torch.ones(16)).wait() is None
    with mutex:
        pass
    if size == 2:
        assert list(window.wait(Deadline.after(20))) == []


def killed_holder(group, _):
    """The last one is killed while it holds a mutex, a slot, and what it changes: nobody waits for long."""
    rank, dead = group.rank, group.size - 1
    window = group.window("w", 8)
    memory = group.empty(8)
    window.publish(memory, 0)
    mutex = Mutex(group, "m")
    group.barrier().wait()
    if rank == dead:
        window.put(0, torch.ones(8), mass=0.5).wait()
        with mutex, window.slot(0), window.changing(1):
            group.barrier().wait()
            os.kill(os.getpid(), signal.SIGKILL)
    group.barrier().wait()
    began_s = time.monotonic()
    with mutex:
        pass
    if rank == 0:
        assert window.put(dead, torch.ones(8)).wait(Deadline.after(9)) is None
        with window.slot(dead) as slot:
            assert (slot.num_writes, slot.mass) == (1, 0.5)
    assert window.read(dead, torch.zeros(8)).wait(Deadline.after(9)) is None
    assert window.read(dead, torch.zeros(8), version=9).wait(Deadline.after(9)) is None
    assert dead in group.lost
    assert time.monotonic() - began_s < 9
