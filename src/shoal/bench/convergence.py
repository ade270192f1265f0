"""`shoal bench convergence`: how well MNIST is learned from gradients that the network has delayed.

The experiment of Learning@home: many trainers share one mixture of experts, or one large network, and each
update comes from parameters that others have changed meanwhile. The model and its virtual time are
`simulate.mixture`'s; here its seeds are spread over processes, and told as rows and curves.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from shoal.bench.contenders import DeviceChoice, device_of
from shoal.bench.frame import (
    BenchmarkPlan,
    ContestRunFlags,
    Noted,
    RowKey,
    RunFlags,
    Tell,
    announce,
    curve,
    measured,
    same_fields,
)
from shoal.bench.workers import one_line, run_tasks
from shoal.core import BenchmarkError, UsageError
from shoal.core.placement import num_cores
from shoal.core.run_options import flag
from shoal.doctor.machine import memory
from shoal.report import Curve, Report, Row
from shoal.report.curves import BEHIND, STALENESS, evenly
from shoal.report.schema import rows_of, with_failed
from shoal.report.tables import Column, Table
from shoal.report.units import counted, digits, scale_for
from shoal.report.views import Items, histogram_items, title_line
from shoal.simulate.mixture.settings import MixtureResult, MixtureRunSettings

ACCURACY, ACCURACY_5, FINAL_LOSS = "val_accuracy", "val_accuracy_last_5", "final_val_loss"
MEAN_STALENESS, EXPERT_STALENESS, VIRTUAL = "mean_staleness", "mean_expert_staleness", "virtual_s"
TOUCHED, LOST = "touched_experts", "lost_gradients"
VAL_LOSS, TRAIN_LOSS = "val_loss", "train_loss"
NUM_LAST = {ACCURACY: 3, ACCURACY_5: 5}
"""Evaluations at the end whose median is the figure; one alone swings too much."""
TRAINERS, EXPERTS = "trainers", "experts"
_COUNTED = re.compile(r"^(?:(\d+)/\d+ )?.*: (\d+) of \d+$")


NUM_SEEDS = 3
_LAYER_DIMS = {"dmoe": 512, "large-ffn": 1024}
_SHORT_STEPS = 1024
_MIXTURE_ONLY = (
    "num_experts",
    "num_active",
    "failure_rate",
    "backward_failure_rate",
    "update_every_inputs",
    "update_every_steps",
)


class ConvergenceConfig(MixtureRunSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained, and with how many seeds: `seed` and those after it."""

    num_seeds: int = NUM_SEEDS
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

    def of_seed(self, seed: int) -> MixtureRunSettings:
        """The settings of one run."""
        fields = {name: getattr(self, name) for name in MixtureRunSettings.__struct_fields__}
        return MixtureRunSettings(**{**fields, "seed": seed})


_USUAL = MixtureRunSettings()


class ConvergenceFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The flags of `shoal bench convergence`."""

    model: Annotated[
        Literal["dmoe", "large-ffn"], flag("A mixture of experts in each layer, or one large network.")
    ] = _USUAL.model
    num_experts: Annotated[int, flag("In each layer.", ge=1)] = _USUAL.num_experts
    num_layers: Annotated[int, flag("Mixtures, or blocks of the large network.", ge=1)] = _USUAL.num_layers
    num_active: Annotated[int, flag("Experts that a sample goes through in a layer.", ge=1)] = (
        _USUAL.num_active
    )
    layer_dim: Annotated[
        int | None, flag("Of what goes from layer to layer.", ge=1, shown="512; large-ffn 1024")
    ] = None
    batch_size: Annotated[int, flag("Of each trainer.", ge=1)] = _USUAL.batch_size
    num_trainers: Annotated[int, flag("That share the model.", ge=1)] = _USUAL.num_trainers
    delay_ms: Annotated[
        float, flag("Mean delay of an update, exponential (Weibull of shape 1) once a step.", ge=0)
    ] = _USUAL.delay_ms
    compute_ms: Annotated[
        float | None,
        flag(
            "Virtual time from a trainer's update to its next gradient; of a step under the lock of "
            "--faithful.",
            ge=0,
            shown="14200; large-ffn 1900; --faithful 240 and 45",
        ),
    ] = None
    window_ms: Annotated[
        float | None,
        flag(
            "Trainers whose computing ends within it read the same parameters; 0: none do.",
            ge=0,
            shown="so long that about twelve do, three without a delay",
        ),
    ] = None
    failure_rate: Annotated[
        float, flag("Chance that an expert does not answer for a sample.", ge=0, le=1)
    ] = _USUAL.failure_rate
    backward_failure_rate: Annotated[
        float, flag("Chance that its gradient does not reach it.", ge=0, le=1)
    ] = _USUAL.backward_failure_rate
    steps: Annotated[int | None, flag("Updates of all trainers together.", ge=1, shown=f"{_USUAL.steps}")] = (
        None
    )
    eval_every: Annotated[
        int | None, flag("Updates from one evaluation to the next.", ge=1, shown=f"{_USUAL.eval_every}")
    ] = None
    learning_rate: Annotated[float, flag("Of Adam with AMSGrad.", "--lr", "--learning-rate", ge=0)] = (
        _USUAL.learning_rate
    )
    update_every_inputs: Annotated[
        int | None, flag("Inputs after which an expert updates.", ge=1, shown="--batch-size")
    ] = None
    update_every_steps: Annotated[
        int, flag("Training steps after which an expert updates with fewer inputs.", ge=1)
    ] = _USUAL.update_every_steps
    faithful: Annotated[
        bool,
        flag(
            "As the original: gate not trained, experts' gradients not delayed, failures in evaluation too, "
            "one lock."
        ),
    ] = False
    seeds: Annotated[int | None, flag("Independent runs.", ge=1, shown=f"{NUM_SEEDS}")] = None
    device: Annotated[DeviceChoice, flag("Where workers compute; auto: on a GPU, if there is one.")] = "auto"
    data_dir: Annotated[Path | None, flag("Has the files of MNIST.", metavar="DIR", shown=False)] = None
    force: Annotated[bool, flag("Try it even if memory seems too small.")] = False


class ConvergenceRunFlags(ContestRunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark, with the first seed of the original."""

    seed: Annotated[int, flag("Of the first run; each further one adds 1.")] = _USUAL.seed


def convergence_command(
    flags: ConvergenceFlags, run: ConvergenceRunFlags, typed: Mapping[str, str]
) -> BenchmarkPlan:
    """How well MNIST is learned when every update comes late: Learning@home's experiment in virtual time.

    Trainers share one model. Each computes a gradient, waits for the network, and updates what others have
    changed meanwhile. Nobody sleeps: the delays pass in virtual time, and two runs with one seed are equal.
    """
    from shoal.data import mnist

    config = convergence_config(flags, run, typed)
    available_bytes = free_bytes(config.device)
    announce(f"Memory: {memory_text(config, config.num_seeds, available_bytes)}")
    if not flags.force:
        check_memory(config, available_bytes)
    # found or fetched once, before every process looks for it
    for is_training in (True, False):
        mnist(train=is_training, folder=flags.data_dir)
    return BenchmarkPlan(config, run, summarize_convergence, convergence_items)


def convergence_config(flags: ConvergenceFlags, run: RunFlags, typed: Mapping[str, str]) -> ConvergenceConfig:
    """Make of the flags what is trained; UsageError for those `typed` that mean nothing to the model."""
    unfit = [typed[name] for name in _MIXTURE_ONLY if name in typed] if flags.model == "large-ffn" else []
    if unfit:
        raise UsageError(
            f"{unfit[0]} is of mixtures of experts, and large-ffn has none.",
            next_step="leave it out, or say --model dmoe.",
        )
    steps = flags.steps or (_SHORT_STEPS if run.short else _USUAL.steps)
    resolved = {
        "layer_dim": flags.layer_dim or _LAYER_DIMS[flags.model],
        "steps": steps,
        "eval_every": flags.eval_every or min(_USUAL.eval_every, max(1, steps // 4)),
        "device": device_of(flags.device),
    }
    return ConvergenceConfig(
        **{**same_fields(flags, MixtureRunSettings), **resolved},
        is_faithful=flags.faithful,
        seed=run.seed,
        num_seeds=flags.seeds or (1 if run.short else NUM_SEEDS),
        data_dir=None if flags.data_dir is None else str(flags.data_dir.absolute()),
    ).resolved()


class SeedRun(msgspec.Struct, frozen=True):
    """How one seed went, and how long it took this machine."""

    result: MixtureResult
    wall_s: float


class ConvergenceScenario:
    """All seeds of the experiment, as many at once as there are cores and memory for."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), ConvergenceConfig)
        self._key: RowKey = {"contender": self._config.setup}

    def run(self, tell: Tell) -> Iterator[Row | Curve | Noted]:
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
        runs: dict[int, SeedRun] = {}
        for seed, answer in zip(config.seeds, told, strict=True):
            error = one_line(answer) if isinstance(answer, BenchmarkError) else answer.get("error")
            if error is not None:
                yield measured(ACCURACY, {**self._key, "seed": seed}, error=error)
                continue
            runs[seed] = run = msgspec.convert(answer, SeedRun, str_keys=True)
            yield from self._rows(run.result)
            yield from self._curves(run.result)
        yield from self._histograms([run.result for run in runs.values()])
        seconds = {str(seed): round(run.wall_s, 2) for seed, run in runs.items()}
        wall_s = round(time.perf_counter() - began_s, 2)
        yield Noted(facts={"wall_s": wall_s, "wall_s_by_seed": seconds, "num_processes": num_processes})

    def _rows(self, result: MixtureResult) -> Iterator[Row]:
        for metric, num_last in NUM_LAST.items():
            last = [each.accuracy for each in result.evaluations[-num_last:]]
            yield measured(metric, self._key, [statistics.median(last)])
        figures = {
            FINAL_LOSS: result.evaluations[-1].loss,
            MEAN_STALENESS: result.mean_staleness,
            VIRTUAL: result.virtual_s,
        }
        if self._config.has_gate:
            figures |= {EXPERT_STALENESS: result.mean_expert_staleness, TOUCHED: result.num_touched_experts}
        if self._config.backward_failure_rate > 0:
            figures[LOST] = result.num_lost
        for metric, figure in figures.items():
            yield measured(metric, self._key, [figure])

    def _curves(self, result: MixtureResult) -> Iterator[Curve]:
        for metric, taken, field in (
            (ACCURACY, result.evaluations, "accuracy"),
            (VAL_LOSS, result.evaluations, "loss"),
            (TRAIN_LOSS, result.train_loss, "loss"),
        ):
            points = {
                "value": [float(getattr(each, field)) for each in taken],
                "step": [float(each.num_updates) for each in taken],
                "s": [each.virtual_s for each in taken],
            }
            yield curve(metric, self._key, points)

    def _histograms(self, results: Sequence[MixtureResult]) -> Iterator[Row]:
        """Each seed's count at every place that any seed has, so that seeds stay in order."""
        counted = {TRAINERS: [result.staleness for result in results]}
        if self._config.has_gate:
            counted[EXPERTS] = [result.expert_staleness for result in results]
        for whose, counts in counted.items():
            for behind in sorted({behind: True for each in counts for behind in each}):
                for each in counts:
                    key = {**self._key, "of": whose, BEHIND: behind}
                    yield measured(STALENESS, key, [float(each.get(behind, 0))])


def together(tell: Tell, steps: int, num_seeds: int) -> Tell:
    """One count of the updates of all seeds, from what each of them tells."""
    done: dict[str, int] = {}
    seeds = counted(num_seeds, "seed")

    def count(text: str) -> None:
        counted = _COUNTED.match(text)
        if counted is None:
            tell(text)
            return
        done[counted[1] or ""] = int(counted[2])
        tell(f"{seeds}, updates: {sum(done.values())} of {steps * num_seeds}")

    return count


def run_seed(task: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Train with one seed, in a process of the pool: its `SeedRun`, or the `error` where it diverged."""
    from shoal.data import mnist
    from shoal.simulate.mixture.experiment import run_mixture

    settings = msgspec.convert(task["settings"], MixtureRunSettings)
    began_s = time.perf_counter()
    images_and_labels = (mnist(train=is_training, folder=task["data_dir"]) for is_training in (True, False))
    (train_x, train_y), (test_x, test_y) = images_and_labels
    result = run_mixture(
        settings, (train_x, train_y, test_x, test_y), lambda done, total: tell(f"updates: {done} of {total}")
    )
    at = result.diverged_after
    if at is not None:
        return {"error": f"diverged: the loss was no number after {at} updates."}
    run = SeedRun(result, time.perf_counter() - began_s)
    told: dict[str, Any] = msgspec.to_builtins(run, str_keys=True)
    return told


# --- memory ---


def free_bytes(device: str) -> int | None:
    """What is left on the device; None where nobody tells. A GPU is asked by a process of its own."""
    if device == "cpu":
        return memory().available_bytes
    task = {"device": device}
    (answer,) = run_tasks(
        "shoal.bench.convergence:ask_device", [task], num_processes=1, tell=lambda text: None
    )
    if isinstance(answer, BenchmarkError):
        raise answer
    return int(answer)


def ask_device(task: Mapping[str, Any], tell: Tell) -> int:
    """What is free on a GPU, asked in a process whose end gives back what asking takes."""
    import torch

    free, _ = torch.cuda.mem_get_info(torch.device(task["device"]))
    return free


def num_at_once(settings: MixtureRunSettings, num_seeds: int) -> int:
    """Seeds that train side by side: on CPUs as many as cores and memory allow, on a GPU one.

    Up to twice as many as cores go at once: three on two cores take turns, and no core waits for the last.
    """
    if settings.device != "cpu":
        return 1
    available_bytes = memory().available_bytes
    fitting = num_seeds if available_bytes is None else available_bytes // settings.memory_bytes()
    cores = num_cores()
    return max(1, min(num_seeds if num_seeds <= 2 * cores else cores, fitting))


def memory_text(settings: MixtureRunSettings, num_seeds: int, available_bytes: int | None) -> str:
    """What it takes and what there is, in one line."""
    weights, needed = settings.parameter_bytes(), settings.memory_bytes()
    at_once = num_at_once(settings, num_seeds)
    where = "memory" if settings.device == "cpu" else "memory of the GPU"
    text = f"about {_size(needed)} of {where} for a seed ({_size(weights)} of them weights)"
    text += f", {at_once} seeds at once" if at_once > 1 else ""
    if available_bytes is None:
        return f"{text}; how much is free is not known."
    fits = "that fits" if needed * at_once <= available_bytes else "that does NOT fit"
    return f"{text}; {_size(available_bytes)} are free: {fits}."


def check_memory(settings: MixtureRunSettings, available_bytes: int | None) -> None:
    """UsageError where not even one seed fits."""
    if available_bytes is None or settings.fits(available_bytes):
        return
    kind = "" if settings.device == "cpu" else " of the GPU"
    sizes = "--layer-dim" if settings.model == "large-ffn" else "--num-experts or --layer-dim"
    raise UsageError(
        f"This needs about {_size(settings.memory_bytes())} of memory{kind}, and "
        f"{_size(available_bytes)} are free.",
        cause="weights, the three moments of AMSGrad for each, and the gradients that are under way.",
        next_step=f"a smaller {sizes}, another --device, or --force to try nevertheless.",
    )


def _size(size_bytes: int) -> str:
    return scale_for("B", size_bytes).format(size_bytes)


# --- what it prints ---

MAX_LINES = 24
"""Of the table of evaluations; more are thinned evenly."""
_MEANS = {FINAL_LOSS: 4, MEAN_STALENESS: 3, EXPERT_STALENESS: 3, VIRTUAL: 3, TOUCHED: 1, LOST: 1}
"""Digits after the point of what the RESULT line has as means over seeds."""


def summarize_convergence(report: Report) -> dict[str, Any]:
    """The RESULT line: medians of the last evaluations of all seeds, and means over seeds."""
    result: dict[str, Any] = {"headline": headline(report), "conditions": _conditions(report)}
    for metric, num_last in NUM_LAST.items():
        last = last_accuracies(report, num_last)
        if last:
            result[metric] = round(statistics.median(last), 4)
            result[f"{metric}_std"] = round(_deviation(_samples(report, metric)), 4)
    for metric, places in _MEANS.items():
        samples = _samples(report, metric)
        if samples:
            result[metric] = round(statistics.fmean(samples), places)
    result["num_seeds"] = len(_samples(report, ACCURACY))
    return with_failed(report, result)


def last_accuracies(report: Report, num_last: int) -> list[float]:
    """Collect the accuracies of the last evaluations of every seed."""
    found = _curve(report, ACCURACY)
    starts = [] if found is None else found.starts
    return [value for points in starts for value in points["value"][-num_last:]]


def headline(report: Report) -> list[str]:
    """How well was learned, from how stale gradients, and in what time."""
    last = last_accuracies(report, NUM_LAST[ACCURACY])
    if not last:
        return ["No seed came to its end."]
    config, medians = report.config, _samples(report, ACCURACY)
    num_last = min(NUM_LAST[ACCURACY], len(last) // len(medians))
    seeds = f" of {len(medians)} seeds" if len(medians) > 1 else ""
    apart = f" ± {100 * _deviation(medians):.1f}" if len(medians) > 1 else ""
    of = "the last evaluation" if num_last == 1 else f"the median of the last {num_last} evaluations"
    stale, virtual = (statistics.fmean(_samples(report, metric)) for metric in (MEAN_STALENESS, VIRTUAL))
    learned = f"{100 * statistics.median(last):.1f}{apart} % of the test images"
    sentences = [
        f"{_setup(report)}: {learned} after {config.get('steps'):,} updates, {of}{seeds}.",
        f"An update was {digits(stale)} behind on average; they took {digits(virtual)} s of virtual time.",
    ]
    if report.failed:
        sentences.append(f"{len(report.failed)} of {config.get('num_seeds')} seeds did not come to an end.")
    return sentences


def convergence_items(report: Report) -> Items:
    """What was trained, each evaluation as mean and deviation over seeds, the staleness, the headline."""
    items: Items = [title_line(report), ""]
    items += [*_conditions(report), ""]
    items += [(f"Seed {row.key.get('seed', '')} failed: {row.error}", "red") for row in report.failed]
    items += [""] * bool(report.failed)
    table = _evaluations(report)
    if table is not None:
        items.append(table)
    items += histogram_items(row for row in report.rows if row.metric == STALENESS)
    items += headline(report)
    medians = [f"{100 * median:.1f}" for median in _samples(report, ACCURACY)]
    return [*items, *[f"Each seed's own: {', '.join(medians)} %."] * (len(medians) > 1), ""]


def _conditions(report: Report) -> list[str]:
    config = report.config
    num_seeds = config.get("num_seeds", 1)
    first, last = config.get("seed", 0), config.get("seed", 0) + num_seeds - 1
    seeds = f"seeds {first} to {last}" if last > first else f"seed {first}"
    return [
        f"{_setup(report)}, batch {config.get('batch_size')} each.",
        f"{config.get('steps'):,} updates of Adam with AMSGrad, {seeds}.",
        *_how(msgspec.convert(config, ConvergenceConfig)),
    ]


def _how(config: ConvergenceConfig) -> list[str]:
    is_mixture, step_ms = config.has_gate, 1000 * config.compute_s
    if config.is_faithful:
        changed = "gate not trained, experts' gradients not delayed, " * is_mixture
        return [f"As the original: {changed}one lock for all trainers, held {step_ms:,g} ms for an update."]
    trainers = f"Trainers compute side by side, {step_ms:,g} ms for an update"
    window_ms = 1000 * config.window_s
    together = f"; those that end within {window_ms:,g} ms do so together" if window_ms else ""
    return [f"{trainers}{together}.", *["The gate is trained, experts' gradients are delayed."] * is_mixture]


def _setup(report: Report) -> str:
    keys = (row.key for row in report.rows)
    return next((str(key["contender"]) for key in keys if "contender" in key), "convergence")


def _evaluations(report: Report) -> Table | None:
    """A line for each evaluation; training loss is that of the last window before it."""
    accuracy, loss, training = (_curve(report, metric) for metric in (ACCURACY, VAL_LOSS, TRAIN_LOSS))
    if accuracy is None or loss is None:
        return None
    several = len(accuracy.starts) > 1
    title = f"MNIST, 10,000 test images{', mean ± deviation over seeds' if several else ''}"
    heads = ("updates", "virtual s", "accuracy %", "loss", "train loss")
    table = Table(title, tuple(map(Column, heads)))
    count = min(len(points["value"]) for points in accuracy.starts)
    for index in evenly(count, MAX_LINES):
        at = accuracy.starts[0]["step"][index]
        trained = [] if training is None else [_before(points, at) for points in training.starts]
        table.rows.append(
            (
                f"{at:,.0f}",
                digits(statistics.fmean(points["s"][index] for points in accuracy.starts), 4),
                _spread([100 * points["value"][index] for points in accuracy.starts], 2),
                _spread([points["value"][index] for points in loss.starts], 3),
                _spread([value for value in trained if value is not None], 3),
            )
        )
    return table


def _before(points: dict[str, list[float]], at: float) -> float | None:
    """The last value that was taken up to there."""
    values = [value for step, value in zip(points["step"], points["value"], strict=True) if step <= at]
    return values[-1] if values else None


def _curve(report: Report, metric: str) -> Curve | None:
    return next((curve for curve in report.curves if curve.metric == metric), None)


def _samples(report: Report, metric: str) -> list[float]:
    return [sample for row in rows_of(report, metric) for sample in row.samples]


def _spread(values: Sequence[float], places: int) -> str:
    if not values:
        return "-"
    deviation = f" ± {_deviation(values):.{places}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{places}f}{deviation}"


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
