"""What workers log reaches the tracker that --track names, every step of it, and nothing of it ends a run."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import UsageError
from shoal.integrations.trackers import check_name, make_tracker


class Recorder:
    """A tracker of one's own."""

    made = None

    def __init__(self, run, rank, folder):
        self.run, self.rank, self.folder = run, rank, folder
        self.logged, self.is_closed = [], False
        Recorder.made = self

    def log(self, step, values):
        self.logged.append((step, dict(values)))

    def flush(self):
        pass

    def close(self):
        self.is_closed = True


def train(num_steps):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = shoal.init()
    strategy = shoal.LocalSGD(group, local_steps=2)
    losses = []
    with strategy.attach(model, optimizer):
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            optimizer.step()
            strategy.log(loss=loss, rate=0.1)
            losses.append(loss.item())
    group.close()
    return losses


def test_every_step_that_is_logged_reaches_the_tracker(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_TRACK", f"{__name__}:Recorder={tmp_path}")
    losses = train(5)
    made = sys.modules[__name__].Recorder.made
    assert (made.rank, made.folder, made.is_closed) == (0, tmp_path, True)
    logged = [(step, values["loss"]) for step, values in made.logged if "loss" in values]
    assert logged == [(step, pytest.approx(loss)) for step, loss in enumerate(losses, 1)]
    assert all(values["rate"] == 0.1 for _, values in made.logged if "loss" in values)


def test_a_tracker_that_cannot_be_made_is_told_and_the_training_goes_on(monkeypatch, caplog):
    monkeypatch.setenv("SHOAL_TRACK", "no_such_module:Tracker")
    assert len(train(2)) == 2
    assert "this run is not tracked: There is no module 'no_such_module'" in caplog.text


def test_names_of_no_tracker_are_refused():
    with pytest.raises(UsageError, match=r"There is no tracker 'tensorbord'. Did you mean 'tensorboard'"):
        check_name("tensorbord")
    check_name("tensorboard")
    check_name("my.module:Tracker")


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="pip install wandb"):
        make_tracker("wandb", "run", 0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensorboard_reads_all_steps_of_four_workers_as_one_run(tmp_path):
    import subprocess

    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, shoal\n"
        "from torch import nn\n"
        "model = nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "group = shoal.init()\n"
        "strategy = shoal.from_args(group)\n"
        "with strategy.attach(model, optimizer):\n"
        "    for step in range(40):\n"
        "        optimizer.zero_grad()\n"
        "        loss = model(torch.ones(1, 2)).square().sum()\n"
        "        loss.backward()\n"
        "        optimizer.step()\n"
        "        strategy.log(loss=loss)\n"
    )
    words = ("run", "-np", "4", "--strategy", "local-sgd", "--track", f"tensorboard={tmp_path / 'log'}")
    subprocess.run([sys.executable, "-m", "shoal", *words, str(program)], check=True, timeout=200)
    (run,) = Path(tmp_path / "log").iterdir()  # one run for all workers
    found = accumulators.EventAccumulator(str(run))
    found.Reload()
    for rank in range(4):
        assert [event.step for event in found.Scalars(f"loss/{rank}")] == list(range(1, 41))
