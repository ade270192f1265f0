"""`shoal bench convergence`: how well MNIST is learned from gradients that the network has delayed.

The experiment of Learning@home: many trainers share one mixture of experts, or one large network, and each
update comes from parameters that others have changed meanwhile. The model and its virtual time are
`simulate.mixture`'s; here its seeds are spread over processes, and told as rows and curves. What memory that
takes is `convergence_memory`'s, and what the figures say `convergence_summary`'s.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from shoal.bench.convergence_memory import num_at_once
from shoal.bench.frame import Direction, Measured, MeasuredCurve, Metrics, Noted, RowKey, Tell, measured
from shoal.bench.workers import one_line, run_tasks
from shoal.core import BenchmarkError, UsageError
from shoal.report.histograms import BEHIND, METRIC
from shoal.simulate.mixture_settings import MixtureSettings

ACCURACY, ACCURACY_5, FINAL_LOSS = "val_accuracy", "val_accuracy_last_5", "final_val_loss"
MEAN_STALENESS, EXPERT_STALENESS, VIRTUAL = "mean_staleness", "mean_expert_staleness", "virtual_s"
TOUCHED, LOST = "touched_experts", "lost_gradients"
VAL_LOSS, TRAIN_LOSS = "val_loss", "train_loss"
STALENESS = METRIC
NUM_LAST = {ACCURACY: 3, ACCURACY_5: 5}
"""Evaluations at the end whose median is the figure; one alone swings too much."""
METRICS: Metrics = {
    ACCURACY: ("", "higher"),
    ACCURACY_5: ("", "higher"),
    FINAL_LOSS: ("", "lower"),
    MEAN_STALENESS: ("", "lower"),
    EXPERT_STALENESS: ("", "lower"),
    VIRTUAL: ("s", "lower"),
    TOUCHED: ("", "higher"),
    LOST: ("", "lower"),
    STALENESS: ("", "lower"),
}
_measured = partial(measured, METRICS)
CURVES: dict[str, Direction] = {ACCURACY: "higher", VAL_LOSS: "lower", TRAIN_LOSS: "lower"}
TRAINERS, EXPERTS = "trainers", "experts"
_COUNTED = re.compile(r"^(?:(\d+)/\d+ )?.*: (\d+) of \d+$")


class ConvergenceConfig(MixtureSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, and with how many seeds: `seed` and those after it."""

    num_seeds: int = 3
    data_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_seeds < 1:
            raise UsageError(f"--seeds {self.num_seeds} trains nothing.", next_step="give 1 or more.")
        if max(self.failure_rate, self.backward_failure_rate) >= 1:
            raise UsageError("Experts that always fail learn nothing.", next_step="give a rate below 1.")
        if self.learning_rate <= 0:
            raise UsageError(f"--lr {self.learning_rate:g} trains nothing.", next_step="give more than 0.")

    @property
    def seeds(self) -> range:
        """Each a run of its own."""
        return range(self.seed, self.seed + self.num_seeds)

    @property
    def setup(self) -> str:
        """What tells this experiment from others on one page."""
        is_mixture = self.model == "dmoe"
        size = f"{self.num_experts}×{self.num_layers}" if is_mixture else f"{self.num_layers} blocks"
        parts = [f"{self.model} {size} dim {self.layer_dim}", f"{self.num_trainers} trainers"]
        parts.append(f"{self.delay_ms:g} ms")
        if self.compute_ms not in (None, self.usual_compute_ms):
            parts.append(f"computing {self.compute_ms:g} ms")
        parts += [f"{100 * self.failure_rate:g}% failures"] * (self.failure_rate > 0)
        parts += [f"{100 * self.backward_failure_rate:g}% lost"] * (self.backward_failure_rate > 0)
        parts += ["faithful"] * self.is_faithful
        return ", ".join(parts)

    def of_seed(self, seed: int) -> MixtureSettings:
        """The settings of one run."""
        fields = {name: getattr(self, name) for name in MixtureSettings.__struct_fields__}
        return MixtureSettings(**{**fields, "seed": seed})


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """How one seed went, without tensors; lists of evaluations, and of windows of training, go together."""

    num_updates: list[int]
    virtual_s: list[float]
    losses: list[float]
    accuracies: list[float]
    train_updates: list[int]
    train_s: list[float]
    train_losses: list[float]
    staleness: dict[int, int]
    """How many updates were so far behind."""
    expert_staleness: dict[int, int]
    """How many samples' gradients were so many of their expert's own updates behind."""
    figures: dict[str, float]
    """Of the whole run, by metric."""
    wall_s: float

    @property
    def diverged_after(self) -> int | None:
        """The first evaluation or window of training that is no number; None where all are."""
        pairs = [*zip(self.num_updates, self.losses, strict=True)]
        pairs += zip(self.train_updates, self.train_losses, strict=True)
        return min((at for at, loss in pairs if not math.isfinite(loss)), default=None)


class ConvergenceScenario:
    """All seeds of the experiment, as many at once as there are cores and memory for."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), ConvergenceConfig)
        self._key: RowKey = {"contender": self._config.setup}

    def run(self, tell: Tell) -> Iterator[Measured | MeasuredCurve | Noted]:
        """Train with every seed; one that fails or diverges is a row with its error."""
        config, began_s = self._config, time.perf_counter()
        tasks = [
            {"settings": msgspec.to_builtins(config.of_seed(seed)), "data_dir": config.data_dir}
            for seed in config.seeds
        ]
        num_processes = num_at_once(config, config.num_seeds)
        told = run_tasks(
            "shoal.bench.convergence:run_seed",
            tasks,
            num_processes=num_processes,
            tell=together(tell, config.steps, config.num_seeds),
        )
        courses: dict[int, Course] = {}
        for seed, answer in zip(config.seeds, told, strict=True):
            error = one_line(answer) if isinstance(answer, BenchmarkError) else answer.get("error")
            if error is not None:
                yield _measured(ACCURACY, {**self._key, "seed": seed}, error=error)
                continue
            courses[seed] = course = msgspec.convert(answer, Course, str_keys=True)
            yield from self._rows(course)
            yield from self._curves(course)
        yield from self._histograms(list(courses.values()))
        seconds = {str(seed): round(course.wall_s, 2) for seed, course in courses.items()}
        wall_s = round(time.perf_counter() - began_s, 2)
        yield Noted(facts={"wall_s": wall_s, "wall_s_by_seed": seconds, "num_processes": num_processes})

    def _rows(self, course: Course) -> Iterator[Measured]:
        medians = {
            metric: statistics.median(course.accuracies[-num_last:]) for metric, num_last in NUM_LAST.items()
        }
        for metric, figure in {**medians, FINAL_LOSS: course.losses[-1], **course.figures}.items():
            yield _measured(metric, self._key, [figure])

    def _curves(self, course: Course) -> Iterator[MeasuredCurve]:
        evaluated = (course.num_updates, course.virtual_s)
        for metric, values, (updates, seconds) in (
            (ACCURACY, course.accuracies, evaluated),
            (VAL_LOSS, course.losses, evaluated),
            (TRAIN_LOSS, course.train_losses, (course.train_updates, course.train_s)),
        ):
            points = {"value": values, "step": [float(at) for at in updates], "s": seconds}
            yield MeasuredCurve(
                key=self._key, metric=metric, unit="", direction=CURVES[metric], points=points
            )

    def _histograms(self, courses: Sequence[Course]) -> Iterator[Measured]:
        """Each seed's count at every place that any seed has, so that seeds stay in order."""
        for whose, counts in (
            (TRAINERS, [course.staleness for course in courses]),
            (EXPERTS, [course.expert_staleness for course in courses]),
        ):
            for behind in sorted({behind: True for each in counts for behind in each}):
                for each in counts:
                    key = {**self._key, "of": whose, BEHIND: behind}
                    yield _measured(STALENESS, key, [float(each.get(behind, 0))])


def together(tell: Tell, steps: int, num_seeds: int) -> Tell:
    """One count of the updates of all seeds, from what each of them tells."""
    done: dict[str, int] = {}
    seeds = f"{num_seeds} seed{'s' if num_seeds > 1 else ''}"

    def count(text: str) -> None:
        counted = _COUNTED.match(text)
        if counted is None:
            tell(text)
            return
        done[counted[1] or ""] = int(counted[2])
        tell(f"{seeds}, updates: {sum(done.values())} of {steps * num_seeds}")

    return count


def run_seed(task: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Train with one seed, in a process of the pool: its `Course`, or the `error` where it diverged."""
    from shoal.data import mnist
    from shoal.simulate.mixture import run_mixture

    settings = msgspec.convert(task["settings"], MixtureSettings)
    began_s = time.perf_counter()
    images_and_labels = (mnist(train=is_training, folder=task["data_dir"]) for is_training in (True, False))
    (train_x, train_y), (test_x, test_y) = images_and_labels
    result = run_mixture(
        settings,
        (train_x, train_y, test_x, test_y),
        lambda done, total: tell(f"updates: {done} of {total}"),
    )
    figures = {MEAN_STALENESS: result.mean_staleness, VIRTUAL: result.virtual_s}
    if settings.has_gate:
        figures[EXPERT_STALENESS] = result.mean_expert_staleness
        figures[TOUCHED] = result.num_touched_experts
    if settings.backward_failure_rate > 0:
        figures[LOST] = result.num_lost
    course = Course(
        num_updates=[each.num_updates for each in result.evaluations],
        virtual_s=[each.virtual_s for each in result.evaluations],
        losses=[each.loss for each in result.evaluations],
        accuracies=[each.accuracy for each in result.evaluations],
        train_updates=[each.num_updates for each in result.train_loss],
        train_s=[each.virtual_s for each in result.train_loss],
        train_losses=[each.loss for each in result.train_loss],
        staleness=result.staleness,
        expert_staleness=result.expert_staleness if settings.has_gate else {},
        figures=figures,
        wall_s=time.perf_counter() - began_s,
    )
    at = course.diverged_after
    if at is not None:
        return {"error": f"diverged: the loss was no number after {at} updates."}
    return msgspec.structs.asdict(course)
