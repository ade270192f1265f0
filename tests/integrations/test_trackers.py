"""What workers log reaches the tracker that --track names, every step of it, and nothing of it ends a run."""

import os
import subprocess
import sys

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


def train(num_steps, kind=shoal.LocalSGD):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = shoal.init()
    strategy = kind(group)
    losses = []
    with strategy.attach(model, optimizer):
        for _ in range(num_steps):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).square().sum()
            loss.backward()
            optimizer.step()
            strategy.log(loss=loss, rate=0.1)
            losses.append(loss.item())
        strategy.consensus_distance()
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


class FakeWandb:
    """What the tracker calls of wandb, and what it was told."""

    def __init__(self):
        self.inits, self.logged, self.defined = [], [], []

    def Settings(self, **settings):  # noqa: N802  # wandb's own name
        return settings

    def init(self, **where):
        self.inits.append(where)
        return self

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        pass


@pytest.mark.parametrize("asked", [None, "my-run"])
def test_wandb_has_one_run_for_all_workers(monkeypatch, tmp_path, asked):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if asked is not None:
        monkeypatch.setenv("WANDB_RUN_ID", asked)
    for rank in range(2):
        tracker = make_tracker(f"wandb={tmp_path}", "job", rank)
        tracker.log(7, {"loss": 0.5})
        tracker.close()
    first, second = fake.inits
    assert first["id"] == second["id"] == (asked or "job")
    assert [init["settings"]["mode"] for init in fake.inits] == ["shared", "shared"]
    assert [init["settings"]["x_primary"] for init in fake.inits] == [True, False]
    assert fake.logged == [{"step": 7, "loss/0": 0.5}, {"step": 7, "loss/1": 0.5}]
    assert set(fake.defined) == {("*", "step")}


def test_names_of_no_tracker_are_refused():
    with pytest.raises(UsageError, match=r"There is no tracker 'tensorbord'. Did you mean 'tensorboard'"):
        check_name("tensorbord")
    check_name("tensorboard")
    check_name("my.module:Tracker")


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="pip install wandb"):
        make_tracker("wandb", "run", 0)


@pytest.mark.parametrize("is_on_board", [True, False])
def test_what_the_session_counts_is_tracked_too(monkeypatch, tmp_path, is_on_board):
    monkeypatch.setenv("SHOAL_TRACK", f"{__name__}:Recorder={tmp_path}")
    monkeypatch.setenv("SHOAL_TOP", str(int(is_on_board)))
    train(5, shoal.PairAverage)
    logged = {}
    for step, values in sys.modules[__name__].Recorder.made.logged:
        assert step <= 5
        logged.update(values)
    counted = ("sent_bytes", "received_bytes", "lost_peers", "mean_staleness", "max_staleness")
    assert [logged[f"shoal_{name}"] for name in counted] == [0] * len(counted)
    assert logged["consensus_distance"] == 0


PROGRAM = """
import torch, shoal
from torch import nn

torch.manual_seed(0)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
group = shoal.init()
strategy = shoal.from_args(group)
with strategy.attach(model, optimizer):
    for step in range(40):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        optimizer.step()
        strategy.log(loss=loss)
        if step % 10 == 9:
            strategy.consensus_distance()
"""


def run(folder, tracker, num_workers, **environ):
    """Trains in processes of its own; the folder that the tracker has written."""
    program = folder / "train.py"
    program.write_text(PROGRAM)
    words = (
        "run",
        "-np",
        num_workers,
        "--strategy",
        "pair",
        "--track",
        f"{tracker}={folder / 'log'}",
        program,
    )
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *map(str, words)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "not tracked" not in done.stdout + done.stderr
    return folder / "log"


COUNTED = ("lost_peers", "mean_staleness", "max_staleness", "sent_bytes", "received_bytes")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tensorboard_reads_all_steps_of_four_workers_as_one_run(tmp_path):
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'shoal[track]'"
    )
    (only,) = run(tmp_path, "tensorboard", 4).iterdir()  # one run for all workers
    found = accumulators.EventAccumulator(str(only))
    found.Reload()
    for rank in range(4):
        assert [event.step for event in found.Scalars(f"loss/{rank}")] == list(range(1, 41))
        assert [event.step for event in found.Scalars(f"consensus_distance/{rank}")] == [10, 20, 30, 40]
        for name in COUNTED:
            assert found.Scalars(f"shoal_{name}/{rank}")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mlflow_has_all_steps_of_three_workers_in_one_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="pip install 'shoal[track]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    client = mlflow.MlflowClient(run(tmp_path, "mlflow", 3).as_uri())
    (experiment,) = (each for each in client.search_experiments() if each.name == "shoal")
    (only,) = client.search_runs([experiment.experiment_id])
    assert only.info.status == "FINISHED"
    for rank in range(3):
        history = client.get_metric_history(only.info.run_id, f"loss/{rank}")
        assert sorted(metric.step for metric in history) == list(range(1, 41))
        assert all(f"shoal_{name}/{rank}" in only.data.metrics for name in COUNTED)


@pytest.mark.slow
def test_wandb_takes_the_settings_of_a_shared_run():
    wandb = pytest.importorskip("wandb", reason="pip install 'shoal[track]'")
    settings = wandb.Settings(mode="shared", x_primary=False, x_label="worker-1", x_update_finish_state=False)
    assert (settings.mode, settings.x_primary) == ("shared", False)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_wandb_keeps_all_steps_of_two_workers_as_one_group(tmp_path):
    pytest.importorskip("wandb", reason="pip install 'shoal[track]'")
    folder = run(tmp_path, "wandb", 2, WANDB_MODE="offline", WANDB_SILENT="true")
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    written = [path.read_bytes() for path in files]
    assert all(any(f"loss/{rank}".encode() in each for each in written) for rank in range(2))
