"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, or a class of one's own as `module:Class` or
`file.py:Class`.

Every worker of a run writes what it logs (`strategy.log(loss=loss)`) and what its session counts, step by
step, and a tracker shows all workers as one run: the values of worker 3 have the tag `loss/3`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import UsageError, did_you_mean
from shoal.core.run_options import load_named

KNOWN = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
}
DEFAULT_FOLDER = "shoal-tracked"
_MLFLOW_TAG = "shoal.run"
_MLFLOW_BATCH = 1000
"""Metrics in one request, at most: MLflow's own limit."""


class Tracker(Protocol):
    """Takes the values of one worker; made with the run's name, the worker's rank and a folder."""

    def __init__(self, run: str, rank: int, folder: Path) -> None:
        """Begins to write. Raises when the library is not there or the folder cannot be written."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values of one step; steps come in order."""

    def flush(self) -> None:
        """Writes what is kept; called about once a second."""

    def close(self) -> None:
        """Writes the rest, and ends."""


def make_tracker(asked: str, run: str, rank: int) -> Tracker:
    """The tracker that `--track` names: `NAME` or `module:Class`, with `=FOLDER` behind it or not."""
    name, _, folder = asked.partition("=")
    check_name(name)
    kind = load_named(name, "tracker") if ":" in name else globals()[KNOWN[name]]
    made: Tracker = kind(run, rank, Path(folder or DEFAULT_FOLDER))
    return made


def check_name(name: str) -> None:
    """UsageError for the name of no tracker; whether its library is there only workers can tell."""
    if ":" not in name and name not in KNOWN:
        raise UsageError(
            f"There is no tracker {name!r}.{did_you_mean(name, KNOWN)}",
            next_step=f"one of {', '.join(KNOWN)}, or a class of your own as package.module:Class or "
            "file.py:Class.",
        )


class TensorBoardTracker:
    """Writes an event file for each worker into one folder, which TensorBoard shows as one run."""

    def __init__(self, run: str, rank: int, folder: Path) -> None:
        writers = _library("torch.utils.tensorboard", "tensorboard")
        self._rank = rank
        self._writer = writers.SummaryWriter(str(folder / run), filename_suffix=f".{rank}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values of one step."""
        for name, value in values.items():
            self._writer.add_scalar(f"{name}/{self._rank}", value, step)

    def flush(self) -> None:
        """Writes what is kept."""
        self._writer.flush()

    def close(self) -> None:
        """Writes the rest, and closes the file."""
        self._writer.close()


class WandbTracker:
    """Writes all workers into one run of Weights & Biases, whose server brings them together.

    The run's id is the run's name, or WANDB_RUN_ID. Without a server (WANDB_MODE=offline) each worker has a
    run of its own, all of them in one group.
    """

    def __init__(self, run: str, rank: int, folder: Path) -> None:
        wandb = _library("wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        where: dict[str, Any] = {"project": "shoal", "dir": str(folder)}
        if os.environ.get("WANDB_MODE", "online") == "online":
            where["settings"] = wandb.Settings(
                mode="shared", x_primary=rank == 0, x_label=f"worker-{rank}", x_update_finish_state=rank == 0
            )
            self._run = wandb.init(id=os.environ.get("WANDB_RUN_ID", run), name=run, **where)
        else:
            self._run = wandb.init(group=run, name=f"{run}-{rank}", **where)
        self._run.define_metric("*", step_metric="step")  # a shared run has no steps of its own

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values of one step."""
        self._run.log({"step": step, **{f"{name}/{self._rank}": value for name, value in values.items()}})

    def flush(self) -> None:
        """Does nothing: wandb writes by itself."""

    def close(self) -> None:
        """Ends this worker's part of the run; the run ends with rank 0's."""
        self._run.finish()


class MlflowTracker:
    """Writes all workers into one run of the experiment `shoal`, on the server of MLFLOW_TRACKING_URI.

    Without a server, into the folder. Rank 0 makes the run, and the others find it by its name: what they log
    before is kept. A worker that never finds it has a run of its own in the end.
    """

    def __init__(self, run: str, rank: int, folder: Path) -> None:
        self._mlflow = _library("mlflow", "mlflow")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if not server:
            # so it is chosen for itself: MLflow would rather have a database there
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = self._mlflow.MlflowClient(server or folder.absolute().as_uri())
        self._name, self._rank = run, rank
        self._kept: list[Any] = []
        self._run_id: str | None = self._found()
        if self._run_id is None and rank == 0:
            self._run_id = self._made(run)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values of one step."""
        now_ms = int(SYSTEM_CLOCK.wall_s() * 1000)
        metric = self._mlflow.entities.Metric
        self._kept += [metric(f"{name}/{self._rank}", value, now_ms, step) for name, value in values.items()]

    def flush(self) -> None:
        """Writes what is kept, once there is a run."""
        self._run_id = self._run_id or self._found()
        while self._run_id is not None and self._kept:
            self._client.log_batch(self._run_id, metrics=self._kept[:_MLFLOW_BATCH])
            del self._kept[:_MLFLOW_BATCH]

    def close(self) -> None:
        """Writes the rest; rank 0 ends the run."""
        self.flush()
        if self._kept:
            self._run_id = self._made(f"{self._name} worker {self._rank}")
            self.flush()
        if self._rank == 0 and self._run_id is not None:
            self._client.set_terminated(self._run_id)

    def _experiment(self) -> str | None:
        found = self._client.get_experiment_by_name("shoal")
        return None if found is None else str(found.experiment_id)

    def _found(self) -> str | None:
        experiment = self._experiment()
        if experiment is None:
            return None
        name = f"tags.`{_MLFLOW_TAG}` = '{self._name}'"
        runs = self._client.search_runs([experiment], name, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _made(self, name: str) -> str:
        experiment = self._experiment() or self._client.create_experiment("shoal")
        return str(self._client.create_run(experiment, run_name=name, tags={_MLFLOW_TAG: name}).info.run_id)


def _library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"--track {package} needs the package {package}, which is not installed here.",
            next_step=f"pip install {package}, or pip install 'shoal[track]' for all of them.",
        ) from error
