"""A server without network, device or threads, and small experts, for tests in virtual time."""

import asyncio

import torch
from torch import nn

from shoal.experts.expert import Expert


class FakeServer:
    """Has experts; what is to run on the device runs at once."""

    def __init__(self, *experts):
        self.experts = {expert.uid: expert for expert in experts}
        self.is_leaving = False

    async def on_device(self, work):
        await asyncio.sleep(0)
        return work()

    async def add(self, expert):
        self.experts[expert.uid] = expert


class FakeThread:
    """Stands for a loop thread where everything happens on one loop."""

    async def run_blocking(self, work):
        return work()


def small_expert(uid="ffn.1.2", *, seed=0, num_updates=0, num_features=4):
    """One that Adam trains, after so many updates."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(num_features, num_features), nn.BatchNorm1d(num_features))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    expert = Expert(uid, module, ((torch.zeros(3, num_features),), {}), optimizer=optimizer)
    train(expert, num_updates)
    return expert


def train(expert, num_updates, seed=7):
    """A few backward requests."""
    generator = torch.Generator().manual_seed(seed)
    shape = (3, *expert.schema.inputs[0].shape)
    for _ in range(num_updates):
        expert.backward([torch.randn(shape, generator=generator)], [torch.randn(shape, generator=generator)])


def values(expert):
    """All floating parameters and buffers, copied into one tensor."""
    return torch.cat([tensor.reshape(-1) for tensor in expert.parameters_and_buffers().values()])
