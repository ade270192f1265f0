"""The data of the plots, reduced to what a browser draws quickly; `assets/page.js` draws them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.report.diff import Diff
from shoal.report.schema import Report, Row
from shoal.report.statistics import PERCENTILES, percentile, percentiles, start_medians
from shoal.report.units import scale_for
from shoal.report.views import shared_key, short_label, verdict_text

MAX_POINTS = 4000
"""Of one distribution plot; more are thinned evenly in time, which keeps drift within a start visible."""
LOG_RATIO = 20
"""Medians further apart than this are drawn on a logarithmic axis."""


class ReportGroup:
    """Rows of one metric and unit over several reports; a line of `rows` has one row, or None, for each."""

    def __init__(self, key: tuple[str, str, str, str]) -> None:
        self.benchmark, self.metric, self.unit, self.direction = key
        self.rows: list[list[Row | None]] = []

    @property
    def present(self) -> list[Row]:
        """The first row of each line, which names it."""
        return [next(row for row in line if row is not None) for line in self.rows]

    @property
    def is_mixed(self) -> bool:
        """Whether the rows are of several metrics, which share a table and no axis."""
        return len({(row.metric, row.unit): True for row in self.present}) > 1

    @property
    def has_samples(self) -> bool:
        """Whether any row was measured more than once."""
        return any(row is not None and len(row.samples) > 1 for line in self.rows for row in line)

    @property
    def is_of_facts(self) -> bool:
        """Whether every start gave a single figure, which has no distribution."""
        return all(
            len(start) == 1 for line in self.rows for row in line if row is not None for start in row.starts
        )

    def label(self, index: int) -> str:
        """What tells a line from the others."""
        row = self.present[index]
        if self.is_mixed:
            return " · ".join(part for part in (row.metric, row.label) if part)
        return short_label(row, shared_key(self.present))


def gathered(groups: Sequence[ReportGroup]) -> list[ReportGroup]:
    """Groups of a single line in one table, after the others: a metric of one figure needs no chapter."""
    lone = [group for group in groups if len(group.rows) == 1]
    if len(lone) < 2:
        return list(groups)
    mixed = ReportGroup(("", "", "", ""))
    mixed.rows = [group.rows[0] for group in lone]
    return [*(group for group in groups if len(group.rows) > 1), mixed]


def group_reports(reports: Sequence[Report]) -> list[ReportGroup]:
    """All rows of all reports, lined up by identity, in the order in which they first occur."""
    groups: dict[tuple[str, str, str, str], ReportGroup] = {}
    lines: dict[object, list[Row | None]] = {}
    for number, report in enumerate(reports):
        for row in report.rows:
            key = (report.benchmark, row.metric, row.unit, row.direction)
            line = lines.get((key, row.identity))
            if line is None:
                line = lines[key, row.identity] = [None] * len(reports)
                groups.setdefault(key, ReportGroup(key)).rows.append(line)
            line[number] = row
    return list(groups.values())


def overview_data(group: ReportGroup) -> dict[str, Any]:
    """One line for each row, of all reports."""
    medians = [
        percentile(row.samples, 50) for line in group.rows for row in line if row is not None and row.starts
    ]
    positive = [median for median in medians if median > 0]
    is_log = len(positive) == len(medians) > 0 and max(medians) > LOG_RATIO * min(medians)
    scale = scale_for(group.unit, percentile(medians, 50) if medians else 1.0)
    rows = [
        {
            "label": group.label(index),
            "series": [
                _series(row, scale.factor) if row is not None and row.starts else None for row in line
            ],
            "failed": [row.error if row is not None else None for row in line],
        }
        for index, line in enumerate(group.rows)
    ]
    return {"unit": scale.unit, "isLog": is_log, "rows": rows}


def _series(row: Row, factor: float) -> dict[str, Any]:
    values = [value / factor for value in percentiles(row.samples, (5, 25, 50, 75, 95))]
    return {"quantiles": values, "starts": len(row.starts), "samples": len(row.samples)}


def bars_data(line: Sequence[Row | None]) -> dict[str, Any]:
    """Percentiles of one row in every report, to stand beside each other."""
    present = [row for row in line if row is not None and row.starts]
    scale = scale_for(present[0].unit, percentile(present[0].samples, 50)) if present else scale_for("", 1.0)
    reports = [
        [value / scale.factor for value in percentiles(row.samples)]
        if row is not None and row.starts
        else None
        for row in line
    ]
    return {"unit": scale.unit, "names": [f"p{q}" for q in PERCENTILES], "reports": reports}


def spread_data(line: Sequence[Row | None]) -> dict[str, Any]:
    """All samples of one row by process start, in every report."""
    rows = [row if row is not None and row.starts else None for row in line]
    present = [row for row in rows if row is not None]
    if not present:
        return {"unit": "", "reports": [None for _ in rows]}
    scale = scale_for(present[0].unit, percentile(present[0].samples, 50))
    share = max(8, MAX_POINTS // sum(len(row.starts) for row in present))
    reports = [
        None
        if row is None
        else {
            "median": percentile(row.samples, 50) / scale.factor,
            "medians": [median / scale.factor for median in start_medians(row)],
            "starts": [[sample / scale.factor for sample in thin(start, share)] for start in row.starts],
        }
        for row in rows
    ]
    return {"unit": scale.unit, "reports": reports}


def thin(samples: Sequence[float], limit: int) -> list[float]:
    """At most `limit` samples, evenly spaced in time, the smallest and largest among them."""
    if len(samples) <= limit:
        return list(samples)
    keep = {round(index * (len(samples) - 1) / (limit - 3)): True for index in range(limit - 2)}
    keep[min(range(len(samples)), key=lambda index: samples[index])] = True
    keep[max(range(len(samples)), key=lambda index: samples[index])] = True
    return [samples[index] for index in sorted(keep)]


def forest_data(diff: Diff) -> list[dict[str, Any]]:
    """The change of every row with its interval."""
    shared = shared_key(row.baseline for row in diff.rows)
    has_metrics = len({row.baseline.metric: True for row in diff.rows}) > 1
    points = []
    for row in diff.rows:
        label = short_label(row.baseline, shared)
        if has_metrics and label != row.baseline.metric:
            label += f" · {row.baseline.metric}"
        judgement = row.judgement
        points.append(
            {
                "label": label,
                "change": judgement.change_percent,
                "low": judgement.low_percent,
                "high": judgement.high_percent,
                "verdict": row.verdict.value,
                "text": verdict_text(row),
            }
        )
    return points
