"""Buffers between members, and the distance of parameters."""

import math

import torch
from torch import nn

from shoal.strategies.all_reduce import GradientAllReduce
from shoal.strategies.averaging import average_buffers, consensus_distance, copy_buffers


class Buffers(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.register_buffer("mean", torch.full((3,), float(rank)))
        self.register_buffer("count", torch.tensor(2**40 + rank))
        self.register_buffer("flag", torch.tensor([rank == 0]))
        self.register_buffer("phase", torch.tensor([complex(rank, -rank)]))


def share(group, arguments):
    others = group.size - 1
    model = Buffers(group.rank)
    average_buffers(group, model)
    torch.testing.assert_close(model.mean, torch.full((3,), others / 2))
    torch.testing.assert_close(model.phase, torch.tensor([complex(others / 2, -others / 2)]))
    assert (model.count.item(), model.flag.item()) == (2**40 + group.rank, group.rank == 0)
    model = Buffers(group.rank)
    copy_buffers(group, model)
    assert all(map(torch.equal, model.buffers(), Buffers(0).buffers()))

    parameters = [torch.full((2, 3), float(group.rank)), torch.full((4,), float(group.rank)).double()]
    assert math.isclose(consensus_distance(group, parameters), math.sqrt(10 * 2 / 3), rel_tol=1e-6)
    assert parameters[0][0, 0] == group.rank


def batch_norm(group, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(group.rank)
    with GradientAllReduce(group, **options).attach(model, optimizer, stays=True):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 3, generator=generator)).square().mean().backward()
            optimizer.step()
    return model[1].running_mean.tolist()


def test_average_copy_and_distance(workers):
    workers.run(share, 3)


def test_batch_norm(workers):
    own = workers.run(batch_norm, 2)
    assert own[0] != own[1]
    averaged = workers.run(batch_norm, 2, {"global_average_every": 2})
    torch.testing.assert_close(torch.tensor(averaged[0]), torch.tensor(averaged[1]))
    first, second = workers.run(batch_norm, 2, {"should_broadcast_buffers": True})
    assert first == second == own[0]
