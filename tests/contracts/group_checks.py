"""What workers do in `test_group.py`.

Each function runs in every worker of a group, and compares what it gets with what it can reckon alone, since
a rank's data follow from its number.
"""

import hashlib
import itertools

import pytest
import torch

from shoal.core import Deadline, ShoalError, TensorError, UsageError
from shoal.group.functions import exchange_machines, next_number, pair_gossip, share
from shoal.topology import Weights

OPS = ("sum", "mean", "min", "max")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
ODD_SIZES = (1, 7, 10_007)
MORE_THAN_STAGED = 1_100_003
"""Float32 elements that pass through staging memory in several pieces."""


def data_of(rank, count, dtype=torch.float32):
    """What a rank brings, on the device that is tested."""
    if count == MORE_THAN_STAGED:
        return (torch.arange(count, dtype=torch.int32) * (2 * rank + 1) % 1009).to(dtype)
    choice = torch.Generator("cpu").manual_seed(1000 + rank)
    if dtype.is_floating_point:
        drawn = torch.randn(count, generator=choice, dtype=torch.float64, device="cpu")
    else:
        drawn = torch.randint(-1000, 1000, (count,), generator=choice, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def in_memory(group, tensor, *, is_own):
    """The same values in memory of the group, or as they are."""
    if not is_own:
        return tensor.clone()
    own = group.empty(tensor.numel(), tensor.dtype)
    return own.copy_(tensor)


def bits_of(tensors):
    """Equal only for equal bits."""
    hasher = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hasher.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return hasher.hexdigest()


def close(got, wanted):
    tolerance = 2e-2 if got.dtype == torch.bfloat16 else 1e-5
    wanted = wanted.to(got.dtype)
    if not torch.equal(got, wanted):  # most often they are, and that is quickly seen
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# --- reductions ---


def reduced(ranks, count, dtype, op):
    stack = torch.stack([data_of(rank, count, dtype) for rank in ranks])
    if op in ("min", "max"):
        return stack.amin(0) if op == "min" else stack.amax(0)
    total = stack.sum(0, dtype=torch.float64)
    return total if op == "sum" else total / len(stack)


def reductions(group, arguments):
    ranks, results = range(group.size), []
    sizes, owners = itertools.cycle(ODD_SIZES), itertools.cycle((True, False))
    for dtype, op in itertools.product(DTYPES[: arguments["num_dtypes"]], OPS):
        if op == "mean" and not dtype.is_floating_point:
            with pytest.raises(UsageError, match="mean"):
                group.all_reduce(torch.ones(3, dtype=dtype), op)
            continue
        count = next(sizes)
        tensor = in_memory(group, data_of(group.rank, count, dtype), is_own=next(owners))
        assert group.all_reduce(tensor, op).wait() is tensor
        close(tensor, reduced(ranks, count, dtype, op))
        results.append(tensor)
    for is_own in (False, True):
        tensor = in_memory(group, data_of(group.rank, MORE_THAN_STAGED), is_own=is_own)
        close(group.all_reduce(tensor, "sum").wait(), reduced(ranks, MORE_THAN_STAGED, torch.float32, "sum"))
        results.append(tensor.clone())
        if is_own:
            group.free(tensor)
    tall = data_of(group.rank, 33 * 65).view(33, 65)
    wide = tall.clone().T  # with gaps between neighbours
    close(group.all_reduce(wide).wait().T.reshape(-1), reduced(ranks, 33 * 65, torch.float32, "mean"))
    with pytest.raises(UsageError, match="median"):
        group.all_reduce(tall, "median")
    mine = torch.tensor([group.rank == 0, True, False])
    for op, refusal in (("sum", "Cannot sum bool tensors: convert to an integer type"), ("mean", "mean")):
        with pytest.raises(UsageError, match=refusal):
            group.all_reduce(mine.clone(), op)
    for op, combined in (("max", [True, True, False]), ("min", [group.size == 1, True, False])):
        assert group.all_reduce(mine.clone(), op).wait().tolist() == combined
    assert group.all_reduce(torch.empty(0)).wait().numel() == 0
    return bits_of([*results, wide])


# --- copies ---


def copies(group, _):
    for root, is_own, count in itertools.product(range(group.size), (False, True), (5, 20_011)):
        tensor = in_memory(group, data_of(group.rank, count), is_own=is_own)
        assert torch.equal(group.broadcast(tensor, root).wait(), data_of(root, count))
    with pytest.raises(UsageError, match=str(group.size)):
        group.broadcast(torch.ones(1), group.size)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        own = data_of(group.rank, 3 * group.rank, dtype).view(group.rank, 3)  # rank 0 has nothing to give
        parts = group.all_gather(own).wait()
        assert [list(part.shape) for part in parts] == [[rank, 3] for rank in range(group.size)]
        for rank, part in enumerate(parts):
            assert torch.equal(part, data_of(rank, 3 * rank, dtype).view(rank, 3))
    value = {"rank": group.rank, "list": [1.5, None, "ü" * group.rank]}
    assert share(group, value) == [
        {"rank": rank, "list": [1.5, None, "ü" * rank]} for rank in range(group.size)
    ]
    group.notes["numbers"] = group.rank  # the last one has given the most
    assert [next_number(group, "numbers") for _ in range(2)] == [group.size - 1, group.size]
    assert group.barrier().wait() is None
    memory = group.empty(3, torch.int64)
    assert memory.tolist() == [0, 0, 0]
    assert memory.data_ptr() % 64 == 0
    group.free(memory)


# --- exchanges ---


def ring(rank, size, _):
    neighbours = sorted({(rank - 1) % size, (rank + 1) % size} - {rank})
    return Weights.uniform(neighbours)


def full(rank, size, _):
    return Weights.uniform([other for other in range(size) if other != rank])


def directed(rank, size, _):
    """Each takes two thirds from the one before, which knows it."""
    before, after = (rank - 1) % size, (rank + 1) % size
    return Weights(1 / 3, {before: 2 / 3}, {after: 1.0}) if size > 1 else Weights(1.0)


def one_peer(rank, size, turn):
    """Another peer each time; the factor stands on the sender's side."""
    if size == 1:
        return Weights(1.0)
    distance = 1 + turn % (size - 1)
    return Weights(0.25, {(rank - distance) % size: 1.0}, {(rank + distance) % size: 0.75})


GRAPHS = {"ring": ring, "full": full, "directed": directed, "one-peer": one_peer}


def matrix_of(graph, size, turn):
    """Row i is what worker i gives to each x_j."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    every = [graph(rank, size, turn) for rank in range(size)]
    for rank, weights in enumerate(every):
        matrix[rank, rank] = weights.own
        for source, weight in weights.sources.items():
            sends = every[source].destinations
            matrix[rank, source] = weight * (1.0 if sends is None else sends[rank])
    return matrix


def exchanges(group, _):
    rank, size, count = group.rank, group.size, 1003
    start = torch.stack([data_of(other, count) for other in range(size)]).double()
    for graph, is_own in itertools.product(GRAPHS.values(), (False, True)):
        values = start.clone()
        tensor = in_memory(group, data_of(rank, count), is_own=is_own)
        for turn in range(size + 1):
            values = matrix_of(graph, size, turn) @ values
            assert group.exchange(tensor, graph(rank, size, turn)).wait() is tensor
        close(tensor, values[rank])
        close(group.all_reduce(tensor).wait(), start.mean(0))  # a doubly stochastic average keeps the mean
    large = data_of(rank, MORE_THAN_STAGED)
    group.exchange(large, ring(rank, size, 0)).wait()
    shares = matrix_of(ring, size, 0)[rank].float()
    close(large, shares @ torch.stack([data_of(other, MORE_THAN_STAGED) for other in range(size)]))
    differences(group)
    tensor = data_of(rank, count)
    peer = (rank + 1) % size
    if size > 1:
        close(pair_gossip(group, tensor, peer, 0.25).wait(), 0.75 * start[rank] + 0.25 * start[peer])
    for nobody in (size, rank, -1):
        with pytest.raises(UsageError, match="cannot exchange"):
            group.exchange(tensor, Weights(0.5, {nobody: 0.5}))


def differences(group):
    """What mixing would change; nothing at all where all are equal."""
    start = torch.stack([data_of(rank, 1003) for rank in range(group.size)])
    weights = ring(group.rank, group.size, 0).differences()
    tensor = start[group.rank].clone()
    group.exchange(tensor, weights).wait()
    close(tensor, ((matrix_of(ring, group.size, 0) @ start.double()) - start.double())[group.rank])
    assert not group.exchange(start[0].clone(), weights).wait().any()


def twins(group, arguments):
    """Two buffers that take turns, as a strategy's parameters do, while the workers are busy unevenly."""
    rank, size, count = group.rank, group.size, 40_009
    graph = GRAPHS[arguments["graph"]]
    live, spare = group.empty(count), group.empty(count)
    live.copy_(data_of(rank, count))
    values = torch.stack([data_of(other, count) for other in range(size)]).double()
    choice = torch.Generator("cpu").manual_seed(rank)
    for turn in range(20):
        handle = group.exchange(live, graph(rank, size, turn), out=spare)
        _be_busy(choice)
        assert handle.wait() is spare
        live, spare = spare, live
        live += rank + 1  # a step of one's own, while others still read the other one
        values = matrix_of(graph, size, turn) @ values
        values += torch.arange(1, size + 1).unsqueeze(1)
    close(live / 20, values[rank] / 20)
    group.settle(spare)
    spare.fill_(torch.nan)
    group.settle(live)
    group.barrier().wait()
    group.free(live)
    group.free(spare)


def _be_busy(choice):
    size = int(torch.randint(1, 120, (1,), generator=choice, device="cpu"))
    torch.ones(size, size) @ torch.ones(size, size)


def machines(group, _):
    """Two workers a machine, the last one may be alone; machines in a ring of one direction."""
    differences(group)
    rank, count = group.rank, 501
    assert list(group.machines) == [r // 2 for r in range(group.size)]
    assert group.machine == rank // 2
    assert group.num_machines == -(-group.size // 2)
    tensor = data_of(rank, count)
    means = [
        torch.stack([data_of(r, count) for r in range(group.size) if r // 2 == machine]).double().mean(0)
        for machine in range(group.num_machines)
    ]
    before = (group.machine - 1) % group.num_machines
    weights = Weights(0.25, {before: 0.75}) if group.num_machines > 1 else Weights(1.0)
    wanted = weights.own * means[group.machine] + (1 - weights.own) * means[before]
    close(exchange_machines(group, tensor, weights).wait(), wanted)
    own, out = (in_memory(group, data_of(rank, count), is_own=True) for _ in range(2))
    assert exchange_machines(group, own, weights, out=out).wait() is out
    close(out, wanted)
    group.settle(own)


# --- one-sided ---


def one_sided(group, _):
    rank, size = group.rank, group.size
    peer = (rank + 1) % size
    buffers = [group.empty(64) for _ in range(2)]
    window, another = (group.window(name, 64, sources=()) for name in ("model", "another"))
    assert (window.name, window.num_elements, window.dtype) == ("model", 64, torch.float32)
    assert window.fetch(peer).wait() is None
    group.barrier().wait()
    for version in range(6):
        buffer = buffers[version % 2].fill_(100 * rank + version)
        window.publish(buffer, version)
        if version == 0:
            group.barrier().wait()
        for other in range(size):
            snapshot = window.fetch(other).wait()
            assert snapshot.rank == other
            values = snapshot.tensor.clone()
            if snapshot.is_intact():
                assert values.tolist() == [100 * other + snapshot.version] * 64
        window.reclaim(version - 1)
    own = window.fetch(rank).wait()
    assert own.version == 5
    assert own.is_intact()
    group.barrier().wait()
    old = window.fetch(peer).wait()
    assert old.version == 5
    assert old.is_intact()
    group.barrier().wait()
    window.publish(buffers[0], 6)
    window.reclaim(5)
    group.barrier().wait()
    buffers[1].fill_(-1)
    group.barrier().wait()
    # memory of the peer's own is void, a copy stays what it was
    assert old.is_intact() == (old.tensor.tolist() == [100 * peer + 5] * 64)
    assert window.fetch(peer).wait().version == 6
    assert another.fetch(peer).wait() is None
    for unfit in (buffers[0][1:], buffers[0].view(torch.int32)):
        with pytest.raises(TensorError, match="do not fit"):
            another.publish(unfit, 0)
    group.barrier().wait()
    names_are_used_again(group, window, buffers[0], peer)


def names_are_used_again(group, window, buffer, peer):
    """What a window has published goes with it, and another one begins again from the first version."""
    window.close()
    window.close()
    group.barrier().wait()
    again = group.window("model", 64, sources=())
    assert again.fetch(peer).wait() is None
    group.barrier().wait()
    again.publish(buffer.fill_(7 + group.rank), 1)
    group.barrier().wait()
    snapshot = again.fetch(peer).wait()
    assert (snapshot.version, snapshot.tensor.tolist()) == (1, [7 + peer] * 64)
    assert snapshot.is_intact()
    group.barrier().wait()


def unasked(group, _):
    """A window without slots is one member's own affair: the others need not have made it."""
    rank, size = group.rank, group.size
    memory = group.empty(4).fill_(5)
    if rank == 0:
        window = group.window("late", 4, sources=())
        window.publish(memory, 1)
        assert list(window.filled()) == list(window.wait()) == []
    group.barrier().wait()
    if rank == size - 1:
        window = group.window("late", 4, sources=())
        into = torch.zeros(4)
        assert window.read(0, into, version=1).wait(Deadline.after(20)) == 1
        assert into.tolist() == [5] * 4
        with pytest.raises(UsageError, match="no slot"):
            window.put(0, into)
    group.barrier().wait()


# --- handles ---


def in_flight(group, _):
    """Many at once, waited for in another order by each worker, with deadlines and looks in between."""
    rank, size = group.rank, group.size
    foreign = [data_of(rank, 100 + index) for index in range(6)]
    sent = data_of(rank, 30)
    own = [in_memory(group, data_of(rank, 300), is_own=True) for _ in range(2)]
    mixed = own[1].clone()
    handles = {
        **{index: group.all_reduce(tensor, "sum") for index, tensor in enumerate(foreign)},
        "own": group.all_reduce(own[0], "mean"),
        "broadcast": group.broadcast(sent, size - 1),
        "barrier": group.barrier(),
        "exchange": group.exchange(mixed, full(rank, size, 0)),
    }
    order = list(handles)
    order = order[rank:] + order[:rank]
    if rank % 2:
        order.reverse()
    for name in order:
        handles[name].is_done()
        group.progress()
        handles[name].wait(Deadline.after(20))
        assert handles[name].is_done()
        handles[name].wait()
    for index, tensor in enumerate(foreign):
        close(tensor, reduced(range(size), 100 + index, torch.float32, "sum"))
    assert torch.equal(sent, data_of(size - 1, 30))
    for tensor in (own[0], mixed):
        close(tensor, reduced(range(size), 300, torch.float32, "mean"))


def mismatch(group, _):
    """Rank 1 does something else than rank 0; what each is told."""
    tensor = torch.ones(10)
    handle = group.all_reduce(tensor) if group.rank == 0 else group.broadcast(tensor)
    with pytest.raises(ShoalError) as raised:
        handle.wait(Deadline.after(20))
    return str(raised.value)


def leaving(group, _):
    """The last rank leaves, then the first; the others go on without them."""
    rank, size = group.rank, group.size
    tensor = data_of(rank, 50)
    group.all_reduce(tensor).wait()
    window = group.window("model", 4, sources=())
    memory = group.empty(4)
    window.publish(memory, 1)
    group.barrier().wait()
    left = []
    for gone in (size - 1, 0):
        left.append(gone)
        if rank == gone:
            group.leave()
            group.leave()
            with pytest.raises(UsageError, match="left"):
                group.all_reduce(tensor)
            return len(left)
        rest = [other for other in range(size) if other not in left]
        tensor = data_of(rank, 50)
        close(group.all_reduce(tensor, "mean").wait(), reduced(rest, 50, torch.float32, "mean"))
        assert list(group.members) == rest
        own = in_memory(group, data_of(rank, 70), is_own=True)
        close(group.all_reduce(own, "sum").wait(), reduced(rest, 70, torch.float32, "sum"))
        assert share(group, rank) == rest
        mixed = data_of(rank, 50)
        close(
            group.exchange(mixed, full(rank, size, 0)).wait(),
            data_of(rank, 50) * (size - len(rest) + 1) / size
            + sum(data_of(other, 50) for other in rest if other != rank) / size,
        )
        assert window.fetch(gone).wait() is None
        assert window.fetch(rank).wait().version == 1
        assert not group.lost
    return len(left)


# --- bytes ---


def metered(group, _):
    """Counted bytes, by operation."""
    rank, size = group.rank, group.size
    following = (rank + 1) % size
    tensor = torch.zeros(1001)
    group.all_reduce(tensor).wait()
    group.broadcast(tensor, 1).wait()
    group.all_gather(torch.zeros(rank + 1)).wait()
    group.exchange(tensor, full(rank, size, 0)).wait()
    group.exchange(tensor, directed(rank, size, 0)).wait()
    pair_gossip(group, tensor, following).wait()
    exchange_machines(group, tensor, Weights(1.0)).wait()
    published = group.window("x", 11, sources=())
    published.publish(group.empty(11), 0)
    group.barrier().wait()
    published.fetch(following).wait()
    share(group, 1)
    window = group.window("w", 1001)
    for write in (window.put, window.add):
        write(following, tensor).wait()
    window.wait()
    preceding = (rank - 1) % size
    group.barrier().wait()
    with window.slot(preceding) as slot:
        slot.clear()
    group.barrier().wait()
    window.send(following, tensor).wait()
    with published.changing(1):
        pass
    published.read(following, torch.zeros(11)).wait()
    assert window.read(following, torch.zeros(1001)).wait() is None
    group.barrier().wait()
    totals = group.totals()
    assert all(traffic.blocked_s <= traffic.lasted_s for traffic in totals.values())
    return {row["op"]: [row["num_calls"], row["sent_bytes"], row["received_bytes"]] for row in group.rows()}
