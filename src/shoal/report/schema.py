"""What a report holds: the versioned document of one benchmark run, and the checks that every one passes.

Samples are raw and grouped by independent process start; statistics are computed when a report is read
(`statistics`), so that a better estimate works on old reports too. Files are `storage`'s.
"""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any, Literal

import msgspec

from shoal.core.errors import ReportError
from shoal.core.untrusted import visible_line

SCHEMA = "shoal-report"
VERSION = 1

Scalar = str | int | float | bool
Direction = Literal["higher", "lower"]
Identity = tuple[str, tuple[tuple[str, bool, Scalar], ...]]


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """One figure of one scenario: its samples by process start, or the error that prevented them.

    `key` and `metric` together identify it. Raises ReportError when made of samples that are not finite, of
    an empty start, of both an error and samples, or of neither.
    """

    key: dict[str, Scalar]
    """What was measured, for example {"scenario": "echo", "size_bytes": 100}."""
    metric: str
    """What the samples are: "calls_per_s", "sec_per_iter", "latency"."""
    unit: str
    """The unit of every sample: "s", "1/s", "GB/s", "B", "%"."""
    direction: Direction
    """Whether higher or lower samples are better."""
    starts: list[list[float]] = msgspec.field(default_factory=list)
    """Raw samples in the order of measurement, one list for each independent process start."""
    error: str | None = None
    """What prevented the samples, where there are none."""

    def __post_init__(self) -> None:
        if self.direction not in {"higher", "lower"}:
            raise ReportError(
                f"{self.name}: direction is {self.direction!r}",
                next_step="say 'higher' or 'lower' (is better)",
            )
        for name, value in self.key.items():
            if not isinstance(value, Scalar) or not _is_plain(value):
                raise ReportError(
                    f"{self.name}: {name!r} in its key is {value!r}",
                    cause="a key holds text, finite numbers of at most 64 bits and booleans",
                    next_step="put anything larger into the report's config",
                )
        starts = [self._checked(number, start) for number, start in enumerate(self.starts, 1)]
        msgspec.structs.force_setattr(self, "starts", starts)
        if self.error is None and not starts:
            raise ReportError(
                f"{self.name} has neither samples nor an error",
                next_step="record a failed scenario with error='what happened'",
            )
        if self.error is not None and starts:
            raise ReportError(
                f"{self.name} has both samples and an error",
                next_step="leave the samples of a failed scenario out",
            )

    def _checked(self, number: int, start: list[float]) -> list[float]:
        try:
            samples = [float(sample) for sample in start]
        except (TypeError, ValueError, OverflowError) as error:
            raise ReportError(
                f"{self.name}: start {number} holds something that is no number: {error}"
            ) from error
        if not samples:
            raise ReportError(
                f"{self.name}: start {number} holds no samples", next_step="leave that start out"
            )
        for index, sample in enumerate(samples, 1):
            if not math.isfinite(sample):
                raise ReportError(
                    f"{self.name}: sample {index} of start {number} is {sample}",
                    cause="a rate over zero seconds, or a measurement that diverged",
                    next_step="record the scenario as failed, with error='what happened'",
                )
        return samples

    @property
    def label(self) -> str:
        """The key as one line, in the order in which the benchmark wrote it."""
        return label_of(self.key)

    @property
    def name(self) -> str:
        """Key and metric as one line, for messages."""
        metric = visible_line(self.metric)
        return f"row '{self.label} {metric}'" if self.key else f"row '{metric}'"

    @property
    def identity(self) -> Identity:
        """Equal for two rows of the same figure; 1 and 1.0 are one value, 1 and true are two."""
        key = sorted((name, isinstance(value, bool), value) for name, value in self.key.items())
        return self.metric, tuple(key)

    @property
    def samples(self) -> list[float]:
        """The samples of all starts, pooled."""
        return [sample for start in self.starts for sample in start]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """How one figure went along something: shown, and not compared. Raises ReportError when points miss."""

    key: dict[str, Scalar]
    metric: str
    unit: str
    direction: Direction
    starts: list[dict[str, list[float]]]
    """For each independent start `value`, and the axes along which it was taken, as `step`, `s` (seconds) and
    `bytes`: lists of one length, in the order of measurement."""

    def __post_init__(self) -> None:
        for points in self.starts:
            if "value" not in points or len({len(values): True for values in points.values()}) != 1:
                raise ReportError(
                    f"the curve '{self.label} {self.metric}' lacks values or has axes of other lengths",
                    next_step="give `value` and each axis the same number of points",
                )
            if not all(math.isfinite(number) for values in points.values() for number in values):
                raise ReportError(f"the curve '{self.label} {self.metric}' holds a number that is not finite")

    @property
    def label(self) -> str:
        """The key as one line."""
        return label_of(self.key)


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The version of the code that ran."""

    version: str = ""
    revision: str | None = None
    """The git commit, where there was one."""
    is_dirty: bool = False
    """Whether the working tree held changes that the commit does not."""

    def __str__(self) -> str:
        revision = f" ({self.revision[:12]}{', changed' if self.is_dirty else ''})" if self.revision else ""
        return (self.version or "unknown") + revision


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark run: what ran, where, and every raw sample. Raises ReportError on duplicate rows."""

    schema: str = SCHEMA
    version: int = VERSION
    benchmark: str
    created: str
    """When the run began, in ISO 8601 and UTC."""
    command: list[str] = msgspec.field(default_factory=list)
    config: dict[str, Any] = msgspec.field(default_factory=dict)
    """The resolved configuration, defaults included."""
    seeds: list[int] = msgspec.field(default_factory=list)
    code: Code = msgspec.field(default_factory=Code)
    environment: dict[str, Any] = msgspec.field(default_factory=dict)
    """`machine`, `cores`, `device`, `versions`, `topology`; `before` and `after`, each with `load_average`
    (of the last minute, or all three) and `cpu_steal_percent`."""
    rows: list[Row] = msgspec.field(default_factory=list)
    curves: list[Curve] = msgspec.field(default_factory=list)
    result: dict[str, Any] = msgspec.field(default_factory=dict)
    """What the benchmark printed on its RESULT line."""
    turns: str = ""
    """Equal in two reports whose starts took turns, each right beside the other's of the same number."""

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ReportError(f"the schema is {self.schema!r}, not {SCHEMA!r}")
        seen: dict[Identity, Row] = {}
        for row in self.rows:
            if row.identity in seen:
                raise ReportError(
                    f"{row.name} occurs twice",
                    cause="two scenarios with the same key and metric",
                    next_step="add what distinguishes them to their keys",
                )
            seen[row.identity] = row

    def to_pandas(self) -> Any:
        """A DataFrame with a line for each sample: the entries of its key, metric, unit, start and value.

        A row that failed has one line, without a value, and with its error. ReportError where pandas is
        missing.
        """
        pandas = library("pandas", "pip install pandas")
        lines: list[dict[str, Any]] = []
        for row in self.rows:
            about = {**row.key, "metric": row.metric, "unit": row.unit, "direction": row.direction}
            for number, samples in enumerate(row.starts):
                lines += [{**about, "start": number, "value": value} for value in samples]
            if row.error is not None:
                lines.append({**about, "error": row.error})
        return pandas.DataFrame(lines)

    def figure(self, metric: str | None = None, over: str | None = None) -> Any:
        """A figure of plotly of one metric; see `shoal.report.html.figures.figure`."""
        from shoal.report.html.figures import figure

        return figure(self, metric, over)

    @property
    def failed(self) -> list[Row]:
        """The rows that hold an error instead of samples."""
        return [row for row in self.rows if row.error is not None]


def library(name: str, install: str) -> Any:
    """An optional library; ReportError that says how to install it where it is missing."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ReportError(f"This needs {package}, which is not installed", next_step=install) from error


def rows_of(report: Report, metric: str) -> list[Row]:
    """The rows of one metric that hold samples."""
    return [row for row in report.rows if row.metric == metric and row.starts]


Start = dict[str, list[float]]
"""Samples of one process start, by metric."""


def by_start(report: Report, metric: str) -> list[Start]:
    """The samples of each process start by metric, of one figure each that every start has.

    There are as many starts as have `metric`; rows that tell reasons apart are left out.
    """
    rows = {row.metric: row.starts for row in report.rows if row.starts and "reason" not in row.key}
    count = len(rows.get(metric, ()))
    return [
        {name: starts[number] for name, starts in rows.items() if len(starts) == count}
        for number in range(count)
    ]


def by_reason(report: Report, metric: str) -> dict[str, int]:
    """The counts of a metric whose rows differ by their `reason`."""
    return {str(row.key["reason"]): int(sum(row.samples)) for row in rows_of(report, metric)}


def is_in_virtual_time(report: Report) -> bool:
    """Whether its seconds were computed, so that a busy machine does not change them."""
    config = report.config
    if report.benchmark == "compare":
        return not config.get("is_real")
    if report.benchmark == "dht":
        return config.get("profile") is not None
    return report.benchmark == "convergence" or bool(config.get("is_virtual"))


def with_failed(report: Report, result: dict[str, Any]) -> dict[str, Any]:
    """A RESULT with the number of rows that failed, where any did."""
    return {**result, "failed": len(report.failed)} if report.failed else result


def is_number(value: object) -> bool:
    """Whether a value of a key is a number; true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_plain(value: Scalar) -> bool:
    """Whether tables and plots can show it: sums and axes are made of floats."""
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) < 1 << 64


def label_of(key: dict[str, Scalar]) -> str:
    """A key as one line, in its own order."""
    return " ".join(f"{visible_line(name)}={text(value)}" for name, value in key.items())


def text(value: object) -> str:
    """A configuration value as a person writes it: true, null, 1, cpu; containers as JSON.

    It is one line: whatever cannot be seen is written out, as `visible_line` does it.
    """
    if isinstance(value, str):
        return visible_line(value)
    if isinstance(value, dict | list | tuple | bool) or value is None:
        return visible_line(msgspec.json.encode(value, enc_hook=str).decode())
    return str(value)


def flatten(document: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one level of dotted names, sorted, so that two compare line by line."""
    flat: dict[str, Any] = {}
    for name in sorted(document, key=str):
        value = document[name]
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
