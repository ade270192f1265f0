"""Tensors that pass through memory of the host between machines, as those of a GPU do.

There is no GPU here: tensors of float64 are treated as if they lay elsewhere, and copies take their time.
"""

import types

import pytest
import torch

from group.clusters import open_cluster
from group.hosts import together
from shoal.core import Deadline, PeerLost
from shoal.group.base import Done, Handle
from shoal.group.cluster.collectives import HostStaging
from shoal.group.cluster.group import QueuedOperation
from shoal.group.cluster.machine_exchange import MachineReduction
from shoal.group.cluster.torch_world import TorchOperations
from shoal.group.functions import exchange_machines
from shoal.topology import Weights

MACHINES = [[0, 1], [2], [3]]
SIZE = 4
PIECE_BYTES = 1000
"""So that a tensor of 1,003 elements has nine pieces, the last of another size."""
COUNT = 1003


def is_foreign(tensor):
    return tensor.dtype is torch.float64


class LateCopies(HostStaging):
    """Makes a copy only when it has been asked for several times, after those before it, as on a stream."""

    def __init__(self):
        super().__init__(is_foreign, PIECE_BYTES)
        self.num_begun = 0
        self.under_way = []

    def copy(self, out, source):
        late = LateCopy(self.under_way, lambda: out.copy_(source))
        self.under_way.append(late)
        self.num_begun += 1
        return late


class LateCopy(Handle):
    def __init__(self, under_way, make):
        self._under_way = under_way
        self._make = make
        self._num_looks = 0

    def is_done(self):
        self._num_looks += 1
        while self in self._under_way and self._num_looks > 3:
            self._under_way.pop(0)._make()
        return self not in self._under_way

    def wait(self, deadline=None):
        assert self.is_done()


def own(group, count=COUNT):
    return torch.arange(count, dtype=torch.float64) + 1000 * group.rank


def everybody(count=COUNT):
    return torch.stack([torch.arange(count, dtype=torch.float64) + 1000 * rank for rank in range(SIZE)])


@pytest.fixture
def groups():
    with open_cluster(MACHINES, staging=HostStaging(is_foreign, PIECE_BYTES)) as groups:
        yield groups


@pytest.mark.parametrize("count", [0, 1, 125, 250, COUNT, 40_000])
def test_reductions_of_any_number_of_pieces(groups, count):
    for op in ("sum", "mean", "min", "max"):
        wanted = getattr(everybody(count), {"min": "amin", "max": "amax"}.get(op, op))(0)
        got = together(groups, lambda group, op=op: group.all_reduce(own(group, count), op).wait())
        assert all(torch.allclose(each, wanted) for each in got)
        assert all(torch.equal(each, got[0]) for each in got)


@pytest.mark.parametrize("root", [0, 1, 3])
def test_broadcasts(groups, root):
    for got in together(groups, lambda group: group.broadcast(own(group), root).wait()):
        assert torch.equal(got, everybody()[root])


def test_gatherings(groups):
    def gather(group):
        return group.all_gather(own(group)[: 3 * (group.rank + 1)].view(-1, 3)).wait()

    for parts in together(groups, gather):
        for rank, part in enumerate(parts):
            assert torch.equal(part, everybody()[rank, : 3 * (rank + 1)].view(-1, 3))


@pytest.mark.parametrize("has_destinations", [True, False])
def test_exchanges(groups, has_destinations):
    def mix(group):
        others = [rank for rank in range(SIZE) if rank != group.rank]
        return group.exchange(
            own(group), Weights.uniform(others, others if has_destinations else None)
        ).wait()

    for got in together(groups, mix):
        assert torch.allclose(got, everybody().mean(0))


def test_an_exchange_into_other_memory_leaves_its_own(groups):
    def mix(group):
        mine, out = group.empty(COUNT, torch.float64), group.empty(COUNT, torch.float64)
        mine.copy_(own(group))
        peer = SIZE - 1 - group.rank
        group.exchange(mine, Weights(0.25, {peer: 0.75}, {peer: 1.0}), out=out).wait()
        group.settle(mine)
        return mine.clone(), out.clone()

    for rank, (mine, out) in enumerate(together(groups, mix)):
        assert torch.equal(mine, everybody()[rank])
        assert torch.allclose(out, 0.25 * mine + 0.75 * everybody()[SIZE - 1 - rank])


def test_exchanges_of_machines(groups):
    def mix(group):
        others = [machine for machine in range(3) if machine != group.machine]
        return exchange_machines(group, own(group), Weights(0.5, dict.fromkeys(others, 0.25))).wait()

    means = [everybody()[ranks].mean(0) for ranks in MACHINES]
    for rank, got in enumerate(together(groups, mix)):
        machine = next(index for index, ranks in enumerate(MACHINES) if rank in ranks)
        assert torch.allclose(got, 0.25 * sum(means) + 0.25 * means[machine])


def test_the_next_piece_is_copied_while_one_is_worked_on():
    staging, begun = LateCopies(), []

    def double(number, piece):
        begun.append(staging.num_begun)
        yield Done(None)
        piece.mul_(2)

    tensor = torch.arange(COUNT, dtype=torch.float64)
    operation = QueuedOperation(1, staging.in_pieces(tensor, double), [])
    while not operation.is_done():
        operation.advance()
    assert begun == [2, 4, 6, 8, 10, 12, 14, 16, 17], "of the last piece no other one follows"
    while staging.under_way:
        staging.under_way[-1].is_done()
    assert torch.equal(tensor, 2 * torch.arange(COUNT, dtype=torch.float64))


class KilledError(Exception):
    """In place of a signal."""


def test_a_peer_that_is_lost_between_two_pieces_is_named(monkeypatch):
    whole = MachineReduction.start

    def broken(reduction):
        # a signal would come anywhere
        if reduction._between._mesh.rank == 2 and reduction._name == "3":
            raise KilledError
        whole(reduction)

    def reduce(group):
        try:
            return group.all_reduce(own(group)).wait(Deadline.after(20))
        except KilledError as error:
            group.close(error)
            return None
        except PeerLost as error:
            return error.peer

    monkeypatch.setattr(MachineReduction, "start", broken)
    with open_cluster(MACHINES, staging=HostStaging(is_foreign, PIECE_BYTES)) as groups:
        assert together(groups, reduce) == [2, 2, None, 2]


@pytest.mark.parametrize(
    ("gpus", "is_nccl"),
    [
        ([b"a 0", b"a 1", b"b 0"], True),
        ([b"a 0", b"a 0", b"b 0"], False),  # two workers share one
        ([b"a 0", b"a 1", b"-"], False),  # somebody has none, or no NCCL
        ([b"a 0", b"a 1"], False),  # somebody has left
    ],
)
def test_nccl_is_taken_where_each_worker_has_a_gpu_of_its_own(gpus, is_nccl):
    through_torch = TorchOperations(types.SimpleNamespace(rank=0, size=3), None, None)
    assert through_torch.is_wanted is None
    through_torch.choose(gpus)
    assert through_torch.is_wanted is is_nccl
    assert not through_torch.takes(torch.ones(3)), "it is not in a GPU's memory"
