"""Models that FSDP2 shards among the workers of a machine, trained by two machines of two."""

import contextlib
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shoal
from shoal.core import PeerLost, UsageError
from shoal.group import share
from shoal.group.cluster.collectives import destroy_world

NUM_STEPS = 10
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
}
RUNS = {
    "diloco": ("diloco", {"local_steps": 3}, "adam"),
    "diloco in fragments": ("diloco", {"local_steps": 4, "fragments": 2, "overlap_steps": 1}, "sgd"),
    "diloco in int8": ("diloco", {"local_steps": 3, "codec": "int8"}, "sgd"),
    "local-sgd": ("local-sgd", {"local_steps": 3}, "sgd"),
    "local-sgd with momentum": ("local-sgd", {"local_steps": 3, "average_momentum": True}, "adam"),
    "local-sgd in int8": ("local-sgd", {"local_steps": 3, "codec": "int8"}, "adam"),
}


@contextlib.contextmanager
def mesh_inside(group, arguments):
    """The mesh of this worker's machine, in a world of all workers."""
    folder = share(group, arguments["folder"])[0]
    dist.init_process_group("gloo", f"file://{folder}/store", rank=group.rank, world_size=group.size)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("machine", "shard"))["shard"]
    finally:
        destroy_world()


class Average(nn.Module):
    """Keeps a mean of what it sees: a buffer that is linear in the data."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.num_seen += 1
        return x


def make(machine, mesh, optimizer="sgd"):
    """Five rows make shards of three and two, and one row one of one and one of nothing."""
    torch.manual_seed(machine)
    model = nn.Sequential(Average(3), nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[optimizer](model.parameters())


def batch(machine, step):
    x = torch.rand(8, 3, generator=torch.Generator().manual_seed(100 * machine + step), dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def train(group, mesh, strategy, options, optimizer, machine):
    """A machine's batch is divided among its workers; what the model and its buffer are in the end."""
    model, optimizer = make(machine, mesh, optimizer)
    part = slice(None) if mesh is None else slice(4 * mesh.get_local_rank(), 4 * mesh.get_local_rank() + 4)
    strategy = shoal.from_args(group, strategy=strategy, **options)
    distances = []
    with strategy.attach(model, optimizer, stays=True):
        for number in range(NUM_STEPS):
            x, y = batch(machine, number)
            step(model, optimizer, x[part], y[part])
            distances.append(strategy.consensus_distance())
    values = [whole(each).flatten().tolist() for each in model.parameters()]
    return {"parameters": values, "mean": model[0].mean.tolist(), "distances": distances}


def whole(parameter):
    return parameter.detach() if not hasattr(parameter, "full_tensor") else parameter.detach().full_tensor()


def sharded(group, arguments):
    """All in one world: bringing up gloo takes longer than what is looked at."""
    with mesh_inside(group, arguments) as mesh:
        return {name: train(group, mesh, *RUNS[name], group.machine) for name in arguments["runs"]}


def unsharded(group, arguments):
    return {name: train(group, None, *RUNS[name], group.rank) for name in arguments["runs"]}


def compare(workers, tmp_path, names, **group):
    arguments = {"folder": str(tmp_path), "runs": names}
    expected = workers.run(unsharded, 2, arguments)
    told = workers.run(sharded, 4, arguments, timeout_s=50, **group)
    for name in names:
        one = {"rtol": 0.03, "atol": 0.02} if "int8" in name else {"rtol": 1e-9, "atol": 1e-12}
        for rank, theirs in enumerate(told):
            for key in ("parameters", "distances"):
                got, known = _flat(theirs[name][key]), _flat(expected[rank // 2][name][key])
                torch.testing.assert_close(got, known, **one, msg=lambda text: f"{name}, {key}: {text}")
        means = [torch.tensor(theirs[name]["mean"]) for theirs in told]
        assert torch.equal(means[0], means[2])
        torch.testing.assert_close((means[0] + means[1]) / 2, torch.tensor(expected[0][name]["mean"]))


def _flat(values):
    return torch.tensor(
        [number for each in values for number in (each if isinstance(each, list) else [each])]
    )


def test_two_machines_of_two_train_as_two_workers_do(workers, tmp_path):
    compare(workers, tmp_path, ["diloco", "local-sgd"], kind="torch")
