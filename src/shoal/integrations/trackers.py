"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, or a class of one's own as `module:Class` or
`file.py:Class`.

Every worker of a run writes what it logs (`strategy.log(loss=loss)`) and what its session counts, step by
step, and a tracker shows all workers as one run: the values of worker 3 have the tag `loss/3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from shoal.core.errors import UsageError, did_you_mean
from shoal.core.run_options import load_named

KNOWN = {
    "tensorboard": "TensorBoardTracker",
    "wandb": "WandbTracker",
    "mlflow": "MlflowTracker",
}
DEFAULT_FOLDER = "shoal-tracked"


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
    """Writes each worker as a member of one group of Weights & Biases; offline with WANDB_MODE=offline."""

    def __init__(self, run: str, rank: int, folder: Path) -> None:
        wandb = _library("wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        self._run = wandb.init(project="shoal", group=run, name=f"{run}-{rank}", dir=str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values of one step."""
        self._run.log({f"{name}/{self._rank}": value for name, value in values.items()}, step=step)

    def flush(self) -> None:
        """Does nothing: wandb writes by itself."""

    def close(self) -> None:
        """Ends this worker's part of the run."""
        self._run.finish()


class MlflowTracker:
    """Writes each worker as a run of the experiment that has the run's name."""

    def __init__(self, run: str, rank: int, folder: Path) -> None:
        mlflow = _library("mlflow", "mlflow")
        mlflow.set_tracking_uri(folder.absolute().as_uri())
        mlflow.set_experiment(run)
        self._mlflow, self._rank = mlflow, rank
        mlflow.start_run(run_name=f"worker {rank}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the values of one step."""
        self._mlflow.log_metrics({f"{name}/{self._rank}": value for name, value in values.items()}, step=step)

    def flush(self) -> None:
        """Does nothing: mlflow writes by itself."""

    def close(self) -> None:
        """Ends this worker's run."""
        self._mlflow.end_run()


def _library(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"--track {package} needs the package {package}, which is not installed here.",
            next_step=f"pip install {package}.",
        ) from error
