"""Runs with parameter servers whose members are threads of this process, and the training that they do."""

import concurrent.futures
import contextlib
import itertools
import os
import threading

import torch
from torch import nn

from group.fake_device import FakeDevice
from group.hosts import open_hosts
from shoal.core import Placement
from shoal.group import GroupSettings, open_host_group
from shoal.group.opening import WithServers
from shoal.group.solo import SoloGroup
from shoal.strategies import session
from shoal.strategies.parameter_server import ParameterServer

_making = threading.Lock()
_numbers = itertools.count()
PLACEMENTS = {
    "on the cpu": (),
    "on gpus": ("worker", "server"),
    "workers on gpus": ("worker",),
    "servers on gpus": ("server",),
}
"""Whose models pretend to be on a GPU: their tensors are the CPU's, and the GPU is made of a thread."""
_pretending = []


@contextlib.contextmanager
def placed(placement, monkeypatch):
    """Let models pretend to be on GPUs in all runs inside of the block."""

    def device_of(parameters, *_, **__):
        return torch.device("meta" if any(hasattr(each, "pretends") for each in parameters) else "cpu")

    monkeypatch.setattr(session, "device_of", device_of)
    _pretending[:] = PLACEMENTS[placement]
    try:
        yield
    finally:
        _pretending.clear()


def pretend(group, model):
    """The model, on the GPU that its member pretends to have, if it does."""
    for parameter in model.parameters() if group.role in _pretending else ():
        parameter.pretends = True
    return model


@contextlib.contextmanager
def _open_everybody(size):
    settings = GroupSettings(key=f"servers {os.getpid()} {next(_numbers)}")

    def open_member(rank):
        return open_host_group(
            Placement(rank, size, rank, size, "test"), settings, lambda _: FakeDevice(seed=rank)
        )

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(size) as threads:
        for group in (groups := list(threads.map(open_member, range(size)))):
            stack.callback(group.close)
        yield groups


@contextlib.contextmanager
def open_run(num_workers, num_servers=1):
    """The groups of all, the servers' first."""
    with _open_everybody(num_servers + num_workers) as everybody, open_hosts(num_workers) as workers:
        inner = [SoloGroup() for _ in range(num_servers)] + list(workers)
        yield [WithServers(own, whole, num_servers) for own, whole in zip(inner, everybody, strict=True)]


def run(work, num_workers, num_servers=1, make=None, **options):
    """What `work(strategy, model, optimizer, rank)` gives on each worker, and what each server counts."""
    make = make or model_and_optimizer
    with open_run(num_workers, num_servers) as groups:

        def act(group):
            strategy = ParameterServer(group, **options)
            if group.role == "server":
                model, optimizer = make()
                while strategy.serve(pretend(group, model), optimizer):
                    model, optimizer = make()
                group.leave()
                return strategy.stats
            model, optimizer = make(group.rank)
            result = work(strategy, pretend(group, model), optimizer, group.rank)
            group.leave()
            return result

        with concurrent.futures.ThreadPoolExecutor(len(groups)) as threads:
            results = [future.result(60) for future in [threads.submit(act, group) for group in groups]]
    return results[num_servers:], results[:num_servers]


def model_and_optimizer(seed=0, kind=torch.optim.SGD, **settings):
    with _making:
        torch.manual_seed(seed)  # other values on each: the first worker's are taken
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, kind(
        model.parameters(), **(settings or {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01})
    )


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)


def loss_of(model, rank, step):
    x, y = batch(rank, step)
    return (model(x) - y).square().mean()


def train(model, optimizer, rank, steps, besides=lambda step: None):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        besides(step)


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
