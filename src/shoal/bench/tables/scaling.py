"""What the samples of `shoal bench scaling` say: BlueFog's lines, and how near each strategy is to linear."""

from __future__ import annotations

import math
import statistics
from typing import Any

from shoal.bench.contenders import NONE, Spread, iteration_text, tokens_of
from shoal.bench.scaling import AS_TOKENS, EFFICIENCY, FRACTION, PROCESSORS, SPEED, WORKER_SPEED, ScalingPoint
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
    """The rows of a report by point: strategy, batch size and number of workers."""

    def __init__(self, report: Report) -> None:
        self._rows: dict[tuple[str, ScalingPoint, int | None], Row] = {}
        self.errors: dict[ScalingPoint, str] = {}
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
        place = (str(row.key["strategy"]), int(row.key["batch_size"]), int(row.key["num_workers"]))
        point = ScalingPoint(*place)
        if row.error is not None:
            self.errors[point] = row.error
        else:
            rank = int(row.key["rank"]) if "rank" in row.key else None
            self._rows[_METRICS_OF_TOKENS.get(row.metric, row.metric), point, rank] = row

    def samples(self, metric: str, point: ScalingPoint, rank: int | None = None) -> list[float] | None:
        """Return all samples of one figure; None where it was not measured."""
        row = self._rows.get((metric, point, rank))
        return None if row is None else row.samples

    def mean(self, metric: str, point: ScalingPoint) -> float | None:
        """Averages the samples of one figure; None where it was not measured."""
        samples = self.samples(metric, point)
        return None if samples is None else statistics.fmean(samples)

    def start_medians(self, point: ScalingPoint) -> list[float]:
        """The speeds of all workers together, one for each start; of a point that was measured."""
        return start_medians(self._rows[SPEED, point, None])

    @property
    def points(self) -> list[ScalingPoint]:
        """Those that were measured or failed; by number of workers within a strategy."""
        measured = [point for metric, point, _ in self._rows if metric == SPEED]
        points = dict.fromkeys((*measured, *self.errors))
        names = list(dict.fromkeys(point.strategy for point in points))
        return sorted(points, key=lambda point: (names.index(point.strategy), point.num_workers))

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes of all points."""
        return list(dict.fromkeys(point.batch_size for point in self.points))


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
        for point in figures.points:
            if (mean := figures.mean(metric, point)) is not None:
                by_strategy = found.setdefault(str(point.batch_size), {})
                by_strategy.setdefault(point.strategy, {})[str(point.num_workers)] = round(mean, places)
        is_text = figures.num_tokens is not None
        result[AS_TOKENS.get(metric, metric) if is_text else metric] = found
    if report.config.get("should_predict"):
        result["forecast"] = predicted_result(report)
    return with_failed(report, result)


def headline(report: Report) -> list[str]:
    """For each batch size, how fast the most workers are, and under which strategy where starts tell."""
    figures = ScalingFigures(report)
    lines = []
    for batch_size in figures.batch_sizes:
        measured = [
            point
            for point in figures.points
            if point.batch_size == batch_size
            and point.strategy != NONE
            and figures.samples(SPEED, point) is not None
        ]
        if not measured:
            continue
        most = max(point.num_workers for point in measured)
        rivals = {
            point.strategy: figures.start_medians(point) for point in measured if point.num_workers == most
        }
        what = f"With {counted(most, 'worker')} at batch {batch_size}"
        if len(rivals) > 1:
            lead = lead_of(rivals, "higher", MIN_TIMED_STARTS)
            lines.append(contest_line(what, lead, lambda mean: f"{digits(mean)} {figures.unit}"))
            continue
        point = next(point for point in measured if point.num_workers == most)
        speed, linear, fraction = (figures.mean(name, point) or 0.0 for name in (SPEED, EFFICIENCY, FRACTION))
        lines.append(
            f"{what}: {point.strategy}, {digits(speed)} {figures.unit}, {linear:.0%} of linear, "
            f"{fraction:.0%} of the same workers sharing nothing."
        )
    return lines


def scaling_items(report: Report) -> Items:
    """A table for each batch size, and BlueFog's lines: all for a single point, the last ones for several."""
    config, figures = report.config, ScalingFigures(report)
    items: Items = [title_line(report), _what(config)]
    if config.get("device") == "cpu":
        items.append("On the CPU: what the lines below count as a GPU is a worker of one thread.")
    items.append("")
    asked = [point for point in figures.points if point.strategy != NONE]
    measured = [point for point in asked if figures.samples(SPEED, point) is not None]
    if len(asked) == len(measured) == 1:
        items += [*_document_lines(figures, asked[0], config), ""]
    items += [_table(figures, batch_size) for batch_size in figures.batch_sizes]
    items += _notes(figures, config)
    for point in measured if len(asked) > 1 else ():
        items += [f"{point}:", *_figure_lines(figures, point), ""]
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


def _document_lines(figures: ScalingFigures, point: ScalingPoint, config: dict[str, Any]) -> list[str]:
    """All that the document prints of its one point."""
    speeds = figures.samples(WORKER_SPEED, point, 0) or []
    return [
        f"Model: {config.get('model')}",
        f"Batch size: {point.batch_size}",
        f"Number of GPUs: {point.num_workers}",
        "Running warmup...",
        "Running benchmark...",
        *(iteration_text(number, speed, figures.what) for number, speed in enumerate(speeds)),
        *_figure_lines(figures, point),
    ]


def _figure_lines(figures: ScalingFigures, point: ScalingPoint) -> list[str]:
    """What the document ends with: each worker's speed, and that of all."""
    ranks = range(point.num_workers)
    speeds = [figures.samples(WORKER_SPEED, point, rank) or [math.nan] for rank in ranks]
    lines = [
        f"[{rank}] {figures.what.capitalize()}/sec per GPU: {Spread.of(own)}"
        for rank, own in enumerate(speeds)
    ]
    totals = Spread.of(figures.samples(SPEED, point) or [math.nan])
    return [*lines, f"Total {figures.what}/sec on {point.num_workers} GPU(s): {totals}"]


def _table(figures: ScalingFigures, batch_size: int) -> Table:
    own_speed = figures.mean(SPEED, ScalingPoint(NONE, batch_size, 1))
    heads = ("workers", figures.unit, "+-", "per worker", "linear", "of linear", "of ceiling")
    table = Table(
        f"batch {batch_size} of each worker: {figures.unit}, mean +- 1.96 sigma",
        (Column("strategy", "left"), *map(Column, heads)),
    )
    for point in figures.points:
        if point.batch_size != batch_size:
            continue
        place = point.strategy, str(point.num_workers)
        linear = "-" if own_speed is None else digits(point.num_workers * own_speed)
        samples = figures.samples(SPEED, point)
        if samples is None:
            table.rows.append((*place, "failed", "-", "-", linear, "-", "-"))
            continue
        total = Spread.of(samples)
        ratios = [figures.mean(metric, point) for metric in (EFFICIENCY, FRACTION)]
        cells = (digits(total.mean), digits(total.error), digits(total.mean / point.num_workers), linear)
        shares = ("-" if ratio is None else f"{ratio:.1%}" for ratio in ratios)
        table.rows.append((*place, *cells, *shares))
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
    for batch_size in figures.batch_sizes:
        own_speed = figures.mean(SPEED, ScalingPoint(NONE, batch_size, 1)) or math.inf
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
