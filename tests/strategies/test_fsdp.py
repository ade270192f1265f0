"""Models that FSDP2 shards among the workers of a machine, trained by two machines of two."""

import contextlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shoal
from shoal.core import PeerLost, Placement, UsageError
from shoal.group import GroupSettings, open_host_group
from shoal.group.cluster.torch_world import destroy_world

TESTS = Path(__file__).parents[1]
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
    """The mesh of this worker's machine, in a world of all workers, or in one of this machine's alone."""
    folder, is_small = arguments["folder"], arguments.get("is_small", False)
    store = f"file://{folder}/store{group.machine if is_small else ''}"
    rank, size = (group.rank % 2, 2) if is_small else (group.rank, group.size)
    dist.init_process_group("gloo", store, rank=rank, world_size=size)
    try:
        if is_small:
            yield init_device_mesh("cpu", (2,))
        else:
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


def step(model, optimizer, x, y, *, is_skipped=False):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    if not is_skipped:
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
            is_skipped = (machine, number) == (1, 6)
            step(model, optimizer, x[part], y[part], is_skipped=is_skipped)
            if number < 4:
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


def compare(workers, tmp_path, *, is_small=False, **group):
    names = [*RUNS]
    arguments = {"folder": str(tmp_path), "runs": names, "is_small": is_small}
    expected = workers.run(unsharded, 2, arguments)
    told = workers.run(sharded, 4, arguments, timeout_s=50, **group)
    for name in names:
        one = {"rtol": 0.03, "atol": 0.02} if "int8" in name else {"rtol": 1e-9, "atol": 1e-12}
        for rank, theirs in enumerate(told):
            for key in ("parameters", "distances"):
                got, known = _flat(theirs[name][key]), _flat(expected[rank // 2][name][key])
                assert torch.allclose(got, known, **one), (name, key, got, known)
        means = [torch.tensor(theirs[name]["mean"]) for theirs in told]
        assert torch.equal(means[0], means[2])
        torch.testing.assert_close((means[0] + means[1]) / 2, torch.tensor(expected[0][name]["mean"]))


def _flat(values):
    return torch.tensor(
        [number for each in values for number in (each if isinstance(each, list) else [each])]
    )


def test_two_machines_of_two_train_as_two_workers_do(workers, tmp_path):
    compare(workers, tmp_path, kind="torch")


@pytest.mark.slow
def test_a_machine_that_counts_as_two_does_so_too(workers, tmp_path):
    compare(workers, tmp_path, is_small=True, settings={"workers_per_machine": 2})


def refusal(group, model, optimizer, name="diloco", **options):
    with pytest.raises(UsageError) as refused:
        shoal.from_args(group, strategy=name, **options).attach(model, optimizer, stays=True)
    return str(refused.value)


def refusals(group, arguments):
    told = {}
    with mesh_inside(group, arguments) as mesh:
        model, optimizer = make(0, mesh)
        for name in ("all-reduce", "neighbor", "pair"):
            told[name] = refusal(group, model, optimizer, name)
        told["monitor"] = refusal(group, model, optimizer, monitor=True)
        told["skip"] = refusal(group, model, optimizer, on_nonfinite="skip")

        strategy = shoal.from_args(group, strategy="diloco")
        with strategy.attach(model, optimizer, stays=True), pytest.raises(UsageError) as refused:
            strategy.save(arguments["folder"])
        told["save"] = str(refused.value)
        assert strategy.group is group
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHOAL_RUN", json.dumps({"checkpoint": arguments["folder"]}))
            told["--checkpoint"] = refusal(group, model, optimizer)

        step(model, optimizer, *batch(0, 0))
        told["state"] = refusal(group, model, optimizer)
        with strategy.attach(model, optimizer, stays=True, should_start_equal=False):
            step(model, optimizer, *batch(0, 0))

        model, optimizer = make(0, None)
        fully_shard(model[1], mesh=mesh)
        told["a part"] = refusal(group, model, torch.optim.SGD(model.parameters()))
        told["one machine"] = refusal(group, *make(0, mesh if group.machine == 0 else None))
        alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("worker", "shard"))["shard"]
        told["another mesh"] = refusal(group, *make(0, alone))
    return told


def test_what_cannot_be_trained_is_refused_on_all_workers(workers, tmp_path):
    settings = {"workers_per_machine": 2}
    for told in workers.run(refusals, 4, {"folder": str(tmp_path)}, settings=settings, timeout_s=50):
        for name in ("all-reduce", "neighbor", "pair"):
            assert f"{name} does not train models that are sharded by FSDP2; diloco and" in told[name]
        assert "monitor does not work" in told["monitor"]
        assert "on_nonfinite=stop works" in told["skip"]
        assert "torch.distributed.checkpoint" in told["save"]
        assert "torch.distributed.checkpoint" in told["--checkpoint"]
        assert "a DTensor does not travel" in told["state"]
        assert "should_start_equal=False" in told["state"]
        assert "3.weight is not sharded" in told["a part"]
        assert "1.weight (float64, shape [5, 3], trainable) where rank 0 has" in told["one machine"]
        assert "the meshes of fully_shard (1 workers) are not the machines" in told["another mesh"]


def spoiled(group, arguments):
    """Rank 3 alone has a batch that is not finite, which reaches both shards of its machine."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("shoal.strategies").addHandler(handler)
    try:
        with mesh_inside(group, arguments) as mesh:
            model, optimizer = make(0, mesh)
            with shoal.from_args(group, strategy="local-sgd", local_steps=2).attach(model, optimizer):
                for number in range(4):
                    x, y = batch(group.rank, number)
                    step(model, optimizer, x * (math.nan if (group.rank, number) == (3, 2) else 1), y)
    finally:
        logging.getLogger("shoal.strategies").removeHandler(handler)
    return lines


def test_values_that_are_not_finite_are_told_of_by_their_machine(workers, tmp_path):
    told = workers.run(spoiled, 4, {"folder": str(tmp_path)}, settings={"workers_per_machine": 2})
    for rank, lines in enumerate(told):
        sent = f"rank {rank} sent a value that is not finite in step 2"
        assert any(sent in line for line in lines) == (rank > 1)


def train_until_lost(group, mesh, fail):
    """Rank 3 fails before its fifth step; how far the others come."""
    model, optimizer = make(group.machine, mesh)
    strategy = shoal.from_args(group, strategy="diloco", local_steps=2)
    error = None
    try:
        with strategy.attach(model, optimizer):
            for number in range(NUM_STEPS):
                if number == 4:
                    fail(group)
                step(model, optimizer, *batch(group.rank, number))
    except (PeerLost, ConnectionAbortedError) as raised:
        error = [getattr(raised, "peer", None), str(raised)]
        group.close(raised)
    return {"error": error, "steps": strategy.steps}


def check_loss(told, reason):
    for seen in told[:2]:
        assert seen == {"error": None, "steps": NUM_STEPS}
    (peer, text), steps = told[2]["error"], told[2]["steps"]
    assert (peer, steps) == (3, 4)
    assert "rank 3 is lost, which held a part of this machine's model" in text
    assert reason in text


def fail_alive(group):
    """The process of the worker that fails goes on: torch would wait for it, and Shoal must not let it."""
    if group.rank == 3:
        raise ConnectionAbortedError
    while group.rank == 2 and 3 not in group.lost:
        time.sleep(0.01)


def failing(group, arguments):
    with mesh_inside(group, arguments) as mesh:
        return train_until_lost(group, mesh, fail_alive)


@pytest.mark.parametrize("kind", ["torch", pytest.param("host", marks=pytest.mark.slow)])
def test_a_machine_ends_with_its_lost_worker_and_the_other_goes_on(workers, tmp_path, kind):
    settings = {"workers_per_machine": 2}
    told = workers.run(failing, 4, {"folder": str(tmp_path)}, kind=kind, settings=settings, timeout_s=50)
    check_loss(told, "failed")


def die(group):
    if group.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def main(rank, folder):
    torch.set_num_threads(1)
    placement, settings = Placement(rank, 4, rank, 4, "test"), GroupSettings(folder, workers_per_machine=2)
    with open_host_group(placement, settings) as group, mesh_inside(group, {"folder": folder}) as mesh:
        print(json.dumps(train_until_lost(group, mesh, die)), flush=True)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_killed_worker_is_named(tmp_path):
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}{os.pathsep}{TESTS}"}
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    assert [process.returncode for process in processes] == [0, 0, 0, -signal.SIGKILL]
    check_loss([json.loads(output) for output in outputs[:3]], f"its process {processes[3].pid} ended")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
