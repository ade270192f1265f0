"""What the samples of `shoal bench scaling` say: BlueFog's lines, and how near each strategy is to linear."""

from __future__ import annotations

import math
import statistics
from typing import Any

from shoal.bench.contenders import NONE, Spread, iteration_text, tokens_of
from shoal.bench.scaling import AS_TOKENS, EFFICIENCY, FRACTION, PROCESSORS, SPEED, WORKER_SPEED
from shoal.core import ShoalError
from shoal.report import Report, Row
from shoal.report.schema import with_failed
from shoal.report.statistics import MIN_TIMED_STARTS, lead_of, start_medians
from shoal.report.tables import Column, Table
from shoal.report.units import counted, digits
from shoal.report.views import Items, contest_line, title_line

_SHORT_S = 0.05
_METRICS_OF_TOKENS = {text: image for image, text in AS_TOKENS.items()}
"""Under which metric of images the speeds of a model of text are found here."""


class ScalingFigures:
    """The rows of a report by strategy, batch size and number of workers."""

    def __init__(self, report: Report) -> None:
        self._rows: dict[tuple[str, str, int, int, int | None], Row] = {}
        self.errors: dict[tuple[str, int, int], str] = {}
        self.processors: dict[int, tuple[float, str]] = {}
        """How many cores or GPUs a worker has, and which, by the number of workers."""
        self.num_tokens = tokens_of(report.config)
        """Of an example; None where speeds are of images."""
        self.what, self.unit = ("img", "images/s") if self.num_tokens is None else ("tok", "tokens/s")
        for row in report.rows:
            if row.metric in PROCESSORS.values():
                kind = "core" if row.metric == PROCESSORS["cpu"] else "GPU"
                self.processors[int(row.key["num_workers"])] = row.samples[0], kind
            elif "strategy" in row.key:
                self._add(row)

    def _add(self, row: Row) -> None:
        key = str(row.key["strategy"]), int(row.key["batch_size"]), int(row.key["num_workers"])
        if row.error is not None:
            self.errors[key] = row.error
        else:
            rank = int(row.key["rank"]) if "rank" in row.key else None
            self._rows[(_METRICS_OF_TOKENS.get(row.metric, row.metric), *key, rank)] = row

    def samples(
        self, metric: str, strategy: str, batch_size: int, num_workers: int, rank: int | None = None
    ) -> list[float] | None:
        """Return all samples of one figure; None where it was not measured."""
        row = self._rows.get((metric, strategy, batch_size, num_workers, rank))
        return None if row is None else row.samples

    def mean(self, metric: str, strategy: str, batch_size: int, num_workers: int) -> float | None:
        """Averages the samples of one figure; None where it was not measured."""
        samples = self.samples(metric, strategy, batch_size, num_workers)
        return None if samples is None else statistics.fmean(samples)

    def start_medians(self, strategy: str, batch_size: int, num_workers: int) -> list[float]:
        """The speeds of all workers together, one for each start; of a point that was measured."""
        return start_medians(self._rows[SPEED, strategy, batch_size, num_workers, None])

    @property
    def points(self) -> list[tuple[str, int, int]]:
        """Strategy, batch size and number of workers, as measured or failed; by number within a strategy."""
        measured = [key[1:4] for key in self._rows if key[0] == SPEED]
        points = dict.fromkeys((*measured, *self.errors))
        names = list(dict.fromkeys(point[0] for point in points))
        return sorted(points, key=lambda point: (names.index(point[0]), point[2]))


def summarize_scaling(report: Report) -> dict[str, Any]:
    """The RESULT line: means by batch size, strategy and number of workers."""
    figures = ScalingFigures(report)
    result: dict[str, Any] = {
        "headline": headline(report),
        "conditions": [f"{_what(report.config)}; {counted(len(report.seeds), 'run')}."],
        "device": report.config.get("device", "cpu"),
        "image_size": report.config.get("image_size"),
    }
    for metric, places in ((SPEED, 1), (EFFICIENCY, 4), (FRACTION, 4)):
        found: dict[str, dict[str, dict[str, float]]] = {}
        for strategy, batch_size, num_workers in figures.points:
            mean = figures.mean(metric, strategy, batch_size, num_workers)
            if mean is not None:
                by_strategy = found.setdefault(str(batch_size), {})
                by_strategy.setdefault(strategy, {})[str(num_workers)] = round(mean, places)
        is_text = figures.num_tokens is not None
        result[AS_TOKENS.get(metric, metric) if is_text else metric] = found
    if report.config.get("should_predict"):
        result["forecast"] = predicted_result(report)
    return with_failed(report, result)


def headline(report: Report) -> list[str]:
    """For each batch size, how fast the most workers are, and under which strategy where starts tell."""
    figures = ScalingFigures(report)
    lines = []
    for batch_size in dict.fromkeys(point[1] for point in figures.points):
        measured = [
            (num_workers, speed, strategy)
            for strategy, batch, num_workers in figures.points
            if batch == batch_size
            and strategy != NONE
            and (speed := figures.mean(SPEED, strategy, batch, num_workers)) is not None
        ]
        if not measured:
            continue
        num_workers, speed, strategy = max(measured)
        rivals = {
            name: figures.start_medians(name, batch_size, most)
            for most, _, name in measured
            if most == num_workers
        }
        if len(rivals) > 1:
            what = f"With {counted(num_workers, 'worker')} at batch {batch_size}"
            lead = lead_of(rivals, "higher", MIN_TIMED_STARTS)
            lines.append(contest_line(what, lead, lambda mean: f"{digits(mean)} {figures.unit}"))
            continue
        efficiency = figures.mean(EFFICIENCY, strategy, batch_size, num_workers) or 0.0
        fraction = figures.mean(FRACTION, strategy, batch_size, num_workers) or 0.0
        lines.append(
            f"With {counted(num_workers, 'worker')} at batch {batch_size}: {strategy}, {digits(speed)} "
            f"{figures.unit}, {efficiency:.0%} of linear, {fraction:.0%} of the same workers sharing nothing."
        )
    return lines


def scaling_items(report: Report) -> Items:
    """A table for each batch size, and BlueFog's lines: all for a single point, the last ones for several."""
    config, figures = report.config, ScalingFigures(report)
    items: Items = [title_line(report), _what(config)]
    if config.get("device") == "cpu":
        items.append("On the CPU: what the lines below count as a GPU is a worker of one thread.")
    items.append("")
    asked = [point for point in figures.points if point[0] != NONE]
    measured = [point for point in asked if figures.samples(SPEED, *point) is not None]
    if len(asked) == len(measured) == 1:
        items += [*_document_lines(figures, asked[0], config), ""]
    for batch_size in dict.fromkeys(point[1] for point in figures.points):
        items.append(_table(figures, batch_size))
    items += _notes(figures, config)
    for point in measured if len(asked) > 1 else ():
        items += [_point_text(point), *_figure_lines(figures, point), ""]
    items += [(line, "red") for line in _failures(report)]
    if config.get("should_predict"):
        items += predicted_items(report)
    return items


def _what(config: dict[str, Any]) -> str:
    side, num_tokens = config.get("image_size"), tokens_of(config)
    inputs = f", images of {side}x{side}" if side else ""
    if num_tokens is not None:
        inputs = f", sequences of {num_tokens} tokens"
    kind = "classes" if num_tokens is None else "in the vocabulary"
    parts = [f"{config.get('model')}{inputs}, {config.get('num_classes')} {kind}"]
    parts.append(f"on {config.get('device')}")
    if config.get("workers_per_machine"):
        parts.append(f"machines of {config['workers_per_machine']}")
    if config.get("profile"):
        parts.append(f"links between {config.get('between')} as '{config['profile']}'")
    return "; ".join(parts)


def _document_lines(
    figures: ScalingFigures, point: tuple[str, int, int], config: dict[str, Any]
) -> list[str]:
    """All that the document prints of its one point."""
    _, batch_size, num_workers = point
    speeds = figures.samples(WORKER_SPEED, *point, 0) or []
    return [
        f"Model: {config.get('model')}",
        f"Batch size: {batch_size}",
        f"Number of GPUs: {num_workers}",
        "Running warmup...",
        "Running benchmark...",
        *(iteration_text(number, speed, figures.what) for number, speed in enumerate(speeds)),
        *_figure_lines(figures, point),
    ]


def _figure_lines(figures: ScalingFigures, point: tuple[str, int, int]) -> list[str]:
    """What the document ends with: each worker's speed, and that of all."""
    num_workers = point[2]
    speeds = [figures.samples(WORKER_SPEED, *point, rank) or [math.nan] for rank in range(num_workers)]
    lines = [
        f"[{rank}] {figures.what.capitalize()}/sec per GPU: {Spread.of(own)}"
        for rank, own in enumerate(speeds)
    ]
    totals = Spread.of(figures.samples(SPEED, *point) or [math.nan])
    return [*lines, f"Total {figures.what}/sec on {num_workers} GPU(s): {totals}"]


def _point_text(point: tuple[str, int, int]) -> str:
    strategy, batch_size, num_workers = point
    return f"{strategy}, {counted(num_workers, 'worker')}, batch {batch_size}:"


def _table(figures: ScalingFigures, batch_size: int) -> Table:
    own_speed = figures.mean(SPEED, NONE, batch_size, 1)
    heads = ("workers", figures.unit, "+-", "per worker", "linear", "of linear", "of ceiling")
    table = Table(
        f"batch {batch_size} of each worker: {figures.unit}, mean +- 1.96 sigma",
        (Column("strategy", "left"), *map(Column, heads)),
    )
    for strategy, batch, num_workers in figures.points:
        if batch != batch_size:
            continue
        linear = "-" if own_speed is None else digits(num_workers * own_speed)
        samples = figures.samples(SPEED, strategy, batch, num_workers)
        if samples is None:
            table.rows.append((strategy, str(num_workers), "failed", "-", "-", linear, "-", "-"))
            continue
        total = Spread.of(samples)
        ratios = [figures.mean(metric, strategy, batch, num_workers) for metric in (EFFICIENCY, FRACTION)]
        cells = (digits(total.mean), digits(total.error), digits(total.mean / num_workers), linear)
        shares = ("-" if ratio is None else f"{ratio:.1%}" for ratio in ratios)
        table.rows.append((strategy, str(num_workers), *cells, *shares))
    return table


def _notes(figures: ScalingFigures, config: dict[str, Any]) -> list[str]:
    notes = [
        "linear: as many times the speed of one worker alone.",
        "of ceiling: of the speed of as many workers that share nothing ('none'), right before or after.",
    ]
    for num_workers, (share, kind) in figures.processors.items():
        if share < 1:
            sharing = f"{num_workers} workers share {counted(round(share * num_workers), kind)}"
            notes.append(f"{sharing}: linear is out of reach here, and the ceiling is what there is.")
    num_batches = int(config.get("num_batches_per_iter", 1))
    for batch_size in dict.fromkeys(point[1] for point in figures.points):
        own_speed = figures.mean(SPEED, NONE, batch_size, 1) or math.inf
        iteration_s = num_batches * batch_size * (figures.num_tokens or 1) / own_speed
        if 0 < iteration_s < _SHORT_S:
            notes.append(
                f"At batch {batch_size} an iteration takes one worker {iteration_s * 1e3:.1f} ms, which is "
                "short: workers do not begin at the same instant. Give more --num-batches-per-iter."
            )
    if config.get("trace_folder"):
        notes.append(f"What torch's profiler saw of rank 0 is in {config['trace_folder']}.")
    return [*notes, ""]


def _failures(report: Report) -> list[str]:
    """One line for each error, with all points that it ended."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in report.failed:
        strategy = str(row.key.get("strategy", "start"))
        place = ""
        if "num_workers" in row.key:
            place = f"{counted(int(row.key['num_workers']), 'worker')} at batch {row.key['batch_size']}"
        first_line = (row.error or "").partition("\n")[0]
        where.setdefault((strategy, first_line), []).append(place)
    lines = [
        f"{strategy} failed{' with ' if any(places) else ''}{', '.join(dict.fromkeys(places))}: {error}"
        for (strategy, error), places in where.items()
    ]
    return [*lines, ""] if lines else []


def predicted_result(report: Report) -> dict[str, Any]:
    """Say for the RESULT line what is expected of more workers, or why nothing is."""
    from shoal.bench.forecast.predict import forecast_of, forecast_result

    try:
        return forecast_result(forecast_of(report))
    except ShoalError as error:
        return {"error": error.what}


def predicted_items(report: Report) -> Items:
    """Show on the terminal what is expected of more workers, or why nothing is."""
    from shoal.bench.forecast.predict import forecast_items, forecast_of

    try:
        return forecast_items(forecast_of(report))
    except ShoalError as error:
        return [(f"No prediction: {error}", "yellow"), ""]
