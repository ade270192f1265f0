"""Checkpoints of whole runs: what continues from one is what had not stopped."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoal.core import CheckpointError, UsageError
from shoal.core.run_options import VARIABLE, RunOptions
from shoal.data import shard
from shoal.group.solo import SoloGroup
from shoal.strategies import make_strategy
from shoal.strategies.all_reduce import GradientAllReduce

NUM_EXAMPLES = 48
DATA = TensorDataset(
    torch.randn(NUM_EXAMPLES, 6, generator=torch.Generator().manual_seed(0)), torch.arange(NUM_EXAMPLES)
)
ADAM = {"lr": 0.01}


class Net(nn.Module):
    """Dropout, BatchNorm, a shared weight, a buffer that is not saved, and something beside tensors."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(6)
        self.num_seen = 0
        self.register_buffer("last", torch.zeros(6), persistent=False)

    def forward(self, x):
        if self.training:
            self.num_seen += len(x)
            self.last.copy_(x[0])
        return self.norm(self.two(nn.functional.dropout(self.one(x), 0.3, self.training)))

    def get_extra_state(self):
        return {"num_seen": self.num_seen}

    def set_extra_state(self, state):
        self.num_seen = state["num_seen"]


class Run:
    """A loop that can be left at any step, and what it has seen."""

    def __init__(self, group, strategy="all-reduce", seed=0, **options):
        torch.manual_seed(seed + group.rank)
        self.group = group
        self.model = Net(seed + group.rank)
        self.optimizer = torch.optim.Adam(self.model.parameters(), **ADAM)
        self.strategy = make_strategy(group, strategy, **options)
        self.loader = shard(DataLoader(DATA, batch_size=2, shuffle=True), group)
        self.seen = []

    def attach(self, **settings):
        return self.strategy.attach(self.model, self.optimizer, stays=True, **settings)

    def train(self, until, at_step=None):
        """`at_step` is called after each step, where a user would save."""
        while True:
            for x, y in self.loader:
                self.seen.append([self.loader.epoch - 1, *y.tolist()])
                self.optimizer.zero_grad()
                self.model(x).square().mean().backward()
                self.step()
                if at_step is not None:
                    at_step(self.strategy.steps)
                if self.strategy.steps == until:
                    return

    def step(self):
        if self.strategy.name != "pair":
            self.optimizer.step()
            return
        for turn in range(self.group.size):  # so that it is known which model is pulled
            if turn == self.group.rank:
                self.optimizer.step()
            self.group.barrier().wait()

    def bits(self):
        tensors = [*self.model.parameters(), *self.model.buffers()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += state.values()
        drawn = [torch.rand(1), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        return [tensor.detach().double().flatten().tolist() for tensor in (*tensors, *drawn)]


def goes_on_exactly(group, arguments):
    """Resume, from the middle of an epoch, in a program that was started otherwise; compare all bits."""
    folder, strategy, options = arguments["folder"], arguments["strategy"], arguments["options"]
    whole = Run(group, strategy, **options)

    def save(step):
        if step == 5:
            whole.strategy.save(folder, loaders=[whole.loader])

    with whole.attach():
        whole.train(17, save)
        expected, rounds = whole.bits(), whole.strategy.rounds  # without the last one, at the end
    resumed = Run(group, strategy, seed=77, **options)
    resumed.strategy.load(folder, loaders=[resumed.loader])
    with resumed.attach():
        assert resumed.strategy.steps == 5
        resumed.train(17)
        assert resumed.seen == whole.seen[5:]
        assert resumed.bits() == expected
        assert resumed.model.num_seen == 34
        assert resumed.strategy.rounds == rounds
        # once more, without leaving
        resumed.strategy.load(folder, loaders=[resumed.loader])
        assert resumed.strategy.steps == 5
        resumed.train(17)
        assert resumed.bits() == expected


@pytest.mark.parametrize(
    ("size", "strategy", "options"),
    [
        (2, "all-reduce", {}),
        (2, "neighbor", {"order": "adapt-while-combine"}),
        (2, "sma", {}),
        (2, "pair", {}),
        pytest.param(3, "neighbor", {}, marks=pytest.mark.slow),
        pytest.param(2, "all-reduce", {"local_steps": 3}, marks=pytest.mark.slow),
        pytest.param(2, "ddp", {}, marks=pytest.mark.slow),
        (1, "all-reduce", {}),
    ],
)
def test_a_resumed_run_is_the_same_bit_for_bit(workers, tmp_path, size, strategy, options):
    arguments = {"folder": str(tmp_path), "strategy": strategy, "options": options}
    workers.run(goes_on_exactly, size, arguments, kind="host" if size > 1 else "solo")


def saves_at(group, arguments):
    """Train and save after a step; what was seen until then, and the mean of all models."""
    run = Run(group, arguments["strategy"], seed=arguments.get("seed", 0))
    means = {}

    def save(step):
        if step == arguments["at"]:
            run.strategy.save(arguments["folder"])
            for name, tensor in run.model.state_dict().items():
                if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                    means[name] = torch.stack(group.all_gather(tensor.clone()).wait()).mean(0).tolist()

    with run.attach():
        run.train(arguments["at"], save)
    return {"seen": run.seen, "means": means}


def goes_on(group, arguments):
    """Resume, and train to the end of the epoch."""
    run = Run(group, arguments["strategy"], seed=50)
    run.strategy.load(arguments["folder"])
    with run.attach():
        start = [tensor.detach().flatten().tolist() for tensor in run.model.parameters()]
        state = run.optimizer.state_dict()["state"]
        steps = run.strategy.steps
        epoch = run.loader.epoch
        for _, y in run.loader:
            run.seen.append([run.loader.epoch - 1, *y.tolist()])
        return {"seen": run.seen, "start": start, "steps": steps, "epoch": epoch, "has_state": bool(state)}


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 2), (2, 1)])
def test_another_number_of_workers_sees_the_rest_of_the_epoch_once(workers, tmp_path, before, after):
    arguments = {"folder": str(tmp_path), "strategy": "neighbor", "at": 5}
    first = workers.run(saves_at, before, arguments, kind="host" if before > 1 else "solo")
    second = workers.run(goes_on, after, arguments, kind="host" if after > 1 else "solo")
    seen = [example for part in (*first, *second) for _, *batch in part["seen"] for example in batch]
    assert {epoch for part in (*first, *second) for epoch, *_ in part["seen"]} == {0}
    assert sorted(seen) == list(range(NUM_EXAMPLES))
    for part in second:
        assert part["start"] == second[0]["start"]
        assert (part["steps"], part["epoch"], part["has_state"]) == (5, 0, True)
    saved = load_file(tmp_path / "step-00000005" / "model.safetensors")
    for name, mean in first[0]["means"].items():
        assert torch.allclose(saved[name], torch.tensor(mean), rtol=1e-5, atol=1e-6)
    model = Net(9)
    model.load_state_dict(saved, strict=False)
    assert [parameter.flatten().tolist() for parameter in model.parameters()] == second[0]["start"]


class Pair:
    """A loop over two loaders of different lengths: the second one begins again whenever it is through."""

    def __init__(self, group):
        self.group = group
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.strategy = make_strategy(group, "all-reduce")
        self.long = self.divide(24)
        self.seen = [[], []]

    def divide(self, num_examples):
        return shard(DataLoader(TensorDataset(torch.arange(num_examples)), shuffle=True), self.group)

    def train(self, short, num_steps):
        """Until the end of the long loader's epoch, at most so many steps."""
        others = iter(())
        for number, (example,) in enumerate(self.long, 1):
            try:
                (other,) = next(others)
            except StopIteration:
                others = iter(short)
                (other,) = next(others)
            self.seen[0].append([self.long.epoch - 1, int(example)])
            self.seen[1].append([short.epoch - 1, int(other)])
            self.optimizer.zero_grad()
            self.model(example.float().view(1, 1)).sum().backward()
            self.optimizer.step()
            if number == num_steps:
                self.strategy.save(self.folder)
                return


def saves_two(group, arguments):
    run = Pair(group)
    run.folder = arguments["folder"]
    short = run.divide(12)
    with run.strategy.attach(run.model, run.optimizer, stays=True):
        run.train(short, 9)
    return run.seen


def resumes_two(group, arguments):
    run = Pair(group)
    if arguments["when"] == "before":
        short = run.divide(12)
    run.strategy.load(arguments["folder"], loaders=[run.long] if arguments["is_given"] else None)
    with run.strategy.attach(run.model, run.optimizer, stays=True):
        if arguments["when"] == "after":
            short = run.divide(12)
        run.train(short, None)
    return run.seen


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("is_given", [False, True])
def test_two_loaders_go_on_where_they_were(workers, tmp_path, when, is_given):
    arguments = {"folder": str(tmp_path), "when": when, "is_given": is_given}
    before = workers.run(saves_two, 2, arguments)
    after = workers.run(resumes_two, 2, arguments)
    for number, num_examples, epoch in ((0, 24, 0), (1, 12, 1)):
        seen = [example for part in before + after for example in part[number]]
        assert sorted(seen_in(seen, epoch)) == list(range(num_examples))
        assert after[0][number][0][0] == epoch


def seen_in(seen, epoch):
    return [example for each, example in seen if each == epoch]


def resumes_rate(group, folder):
    """Of an optimizer that keeps no state but its settings."""
    rates = []
    for should_start_equal in (True, False):
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        strategy = GradientAllReduce(group)
        strategy.load(folder)
        with strategy.attach(model, optimizer, stays=True, should_start_equal=should_start_equal):
            rates.append([optimizer.param_groups[0]["lr"], model.weight.tolist()])
    return rates


def test_a_rate_that_was_changed_goes_on_with_more_workers(workers, tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = GradientAllReduce(SoloGroup())
    with strategy.attach(model, optimizer):
        optimizer.param_groups[0]["lr"] = 0.25
        strategy.save(tmp_path)
    for rates in workers.run(resumes_rate, 2, str(tmp_path)):
        assert rates == [[0.25, model.weight.tolist()]] * 2


def alone(seed=0, **options):
    return Run(SoloGroup(), seed=seed, **options)


def saved(folder, *steps, num_kept=2):
    run = alone()
    with run.attach():
        run.train(max(steps), lambda step: step in steps and run.strategy.save(folder, num_kept=num_kept))
    return run


def resumed_step(folder):
    run = alone(3)
    run.strategy.load(folder)
    with run.attach():
        return run.strategy.steps


def test_the_newest_are_kept(tmp_path):
    saved(tmp_path, 1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    saved(tmp_path, 1)
    assert resumed_step(tmp_path) == 1
    saved(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.json", "manifest.json", "strategy.safetensors"]
)
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_what_is_not_whole_is_left_out(tmp_path, caplog, name, damage):
    saved(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    is_blank = damage == "changed" and name == "manifest.json"
    assert resumed_step(tmp_path) == 1 or is_blank
    assert "step-00000002 is left out" in caplog.text or is_blank


def test_without_a_checkpoint_there_is_nothing_to_load(tmp_path):
    run = alone()
    run.strategy.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        run.attach()


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved(tmp_path, 1)
    model = nn.Linear(2, 2)
    strategy = GradientAllReduce(SoloGroup())
    strategy.load(tmp_path)
    with pytest.raises(UsageError, match="does not fit"):
        strategy.attach(model, torch.optim.SGD(model.parameters()))


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    run = alone()

    def fail(*_):
        raise OSError(28, "no space left")

    with run.attach():
        run.train(1)
        monkeypatch.setattr("shoal.tensors.checkpoint.save_file", fail)
        with pytest.raises(CheckpointError, match="no space left"):
            run.strategy.save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_json_beside_the_tensors_can_be_read_by_anybody(tmp_path):
    saved(tmp_path, 2)
    folder = tmp_path / "step-00000002"
    optimizer = json.loads((folder / "optimizer.json").read_text())
    assert optimizer["param_groups"][0]["lr"] == 0.01
    assert "state.0.exp_avg" in load_file(folder / "optimizer.safetensors")
    assert json.loads((folder / "strategy.json").read_text())["strategy"]["steps"] == 2
    assert (folder / "workers" / "rank-0.json").exists()


def test_a_run_that_keeps_checkpoints_resumes_by_itself(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(
        VARIABLE, RunOptions(checkpoint=str(tmp_path), checkpoint_every=3).to_environment()[VARIABLE]
    )
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    whole = alone()
    with whole.attach():
        assert "resumed" not in caplog.text
        whole.train(7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000006", "step-00000007"]
    again = alone(5)
    with again.attach():
        assert "resumed step 7 from" in caplog.text
        again.train(8)
        other = alone()  # in a group of its own, as another program
        with other.attach():
            assert other.strategy.steps == 7
    second = Run(again.group)
    with second.attach():
        assert second.strategy.steps == 0
        second.train(1)
    assert (tmp_path / "strategy-2" / "step-00000001").is_dir()


def ends_unevenly(group, arguments):
    """Each worker does another number of steps, and the last to end writes the checkpoint of all."""
    import os

    options = RunOptions(checkpoint=arguments["folder"])
    os.environ.pop("TORCHELASTIC_RUN_ID", None)
    os.environ.update(options.to_environment())
    try:
        run = Run(group, arguments["strategy"])
        with run.strategy.attach(run.model, run.optimizer):
            run.train(4 + group.rank if arguments["is_uneven"] else 4)
    finally:
        del os.environ[VARIABLE]
    return [tensor.detach().flatten().tolist() for tensor in run.model.parameters()]


@pytest.mark.parametrize(("strategy", "is_uneven"), [("all-reduce", True), ("neighbor", False)])
def test_the_end_is_saved_without_waiting(workers, tmp_path, strategy, is_uneven):
    arguments = {"folder": str(tmp_path), "strategy": strategy, "is_uneven": is_uneven}
    models = workers.run(ends_unevenly, 2, arguments)
    (path,) = tmp_path.iterdir()
    assert path.name == ("step-00000005" if is_uneven else "step-00000004")
    model = Net(9)
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    for number, parameter in enumerate(model.parameters()):
        own = torch.tensor([one[number] for one in models])
        expected = own.mean(0) if strategy == "neighbor" else own[1]
        assert torch.allclose(parameter.flatten(), expected, rtol=1e-5, atol=1e-6)
    assert len(workers.run(goes_on, 2, arguments)) == 2
