"""One benchmark on a page: its reports at a glance, courses, scaling, waits, staleness, and every figure.

Each part is a `Section` with a name, so that `html` can list them; what a reader asks first comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.report import context, sections
from shoal.report.charts import ReportGroup, bars_data, gathered, group_reports, overview_data, spread_data
from shoal.report.figures import Figures, Shown, beside_one_another, titled
from shoal.report.glance import glance_tables
from shoal.report.histograms import histogram_plots, is_histogram
from shoal.report.lines import (
    MIN_SAMPLES,
    Colours,
    curve_plots,
    curves_title,
    percentile_plot,
    percentile_view,
    scaling_groups,
    scaling_plots,
)
from shoal.report.schema import Row, label_of
from shoal.report.views import shared_key
from shoal.report.waits import is_wait, wait_plots

MAX_OPEN_ROWS = 16
"""A metric of more rows is folded."""
SCALING_HOW = (
    "Ideal is the fastest with the fewest workers, multiplied. Bars are the range of process starts."
)
STALENESS_HOW = "How many updates were made between the moment a gradient was computed at and its own update."
WAITS_HOW = "A row of the map waited for a column, on average over the samples; more colour, longer wait."


@dataclass(frozen=True)
class Section:
    """A named part of a page; `about` stands beside the name."""

    name: str
    content: str
    about: str = ""


def chapter(shown: Sequence[Shown], figures: Figures, *, is_diff: bool = False) -> list[Section]:
    """All sections of the reports of one benchmark."""
    colours: Colours = {}
    glance = "" if is_diff else glance_tables(shown)
    over, lines_are = curves_title(shown)
    found = [
        Section("At a glance", glance),
        Section(over, curve_plots(shown, figures, colours), lines_are),
        Section("Scaling", _noted(scaling_plots(shown, figures, colours), SCALING_HOW)),
        Section("Who waited for whom", _noted(wait_plots(shown, figures), WAITS_HOW)),
        Section("Staleness", _noted(histogram_plots(shown, figures, colours), STALENESS_HOW)),
    ]
    drawn = dict.fromkeys(scaling_groups(shown), True)
    folds = []
    for group in gathered(group_reports([item.report for item in shown])):
        if all(map(is_histogram, group.present)):
            continue
        is_shown = (group.metric, group.unit, group.direction) in drawn or all(map(is_wait, group.present))
        is_shown = is_shown or (group.is_of_facts and bool(glance or is_diff))
        section = _metric(group, shown, figures)
        if is_shown or len(group.rows) > MAX_OPEN_ROWS:
            folds.append(_fold(section, len(group.rows)))
        else:
            found.append(section)
    found.append(Section("More figures", "".join(folds)))
    return [section for section in found if section.content]


def _fold(section: Section, num_rows: int) -> str:
    parts = (section.name, section.about, f"{num_rows} row{'s' if num_rows > 1 else ''}")
    return folded(" · ".join(part for part in parts if part), section.content)


def how_it_ran(shown: Sequence[Shown]) -> Section:
    """Command lines, configuration and results, folded unless they differ."""
    configs = [
        item.report.config | ({"seeds": item.report.seeds} if item.report.seeds else {}) for item in shown
    ]
    results = [
        {name: value for name, value in item.report.result.items() if name != "headline"} for item in shown
    ]
    tables = (
        ("Configuration", context.settings_table("config", configs, shown), _differ(configs)),
        ("Result", context.settings_table("result", results, shown), False),
    )
    folds = [folded(name, content, is_open=is_open) for name, content, is_open in tables if content]
    return Section("How it ran", context.commands(shown) + "".join(folds))


def environments(shown: Sequence[Shown]) -> Section:
    """Where everything ran."""
    places = [item.report.environment for item in shown]
    content = context.settings_table("environment", places, shown)
    return Section("Environment", folded("Machine and versions", content) if content else "")


def folded(name: str, content: str, *, is_open: bool = False) -> str:
    """Content under a line that opens and closes it."""
    return f"<details{' open' if is_open else ''}><summary>{escape(name)}</summary>{content}</details>"


def _differ(values: Sequence[object]) -> bool:
    return any(value != values[0] for value in values)


def _noted(content: str, note: str) -> str:
    return f'{content}<p class="how">{escape(note)}</p>' if content else ""


def _metric(group: ReportGroup, shown: Sequence[Shown], figures: Figures) -> Section:
    name = "Figures" if group.is_mixed else group.metric
    table = sections.statistics_table(group, shown)
    content = table + _distribution(group, shown, figures) + _closer(group, shown, figures)
    about = [
        group.unit,
        f"{group.direction} is better" if group.direction else "",
        label_of(shared_key(group.present)),
    ]
    return Section(name, content, " · ".join(part for part in about if part))


def _distribution(group: ReportGroup, shown: Sequence[Shown], figures: Figures) -> str:
    """All rows on one axis; the percentiles of each beside it where they are times of a single report."""
    if group.is_mixed or not group.has_samples:
        return ""
    overview = figures.place("overview", **overview_data(group), **_names(shown))
    if len(shown) > 1:
        return overview
    rows = [(group.label(index), row) for index, row in enumerate(group.present)]
    return beside_one_another(overview, percentile_plot(rows, figures, range(len(rows))))


def _closer(group: ReportGroup, shown: Sequence[Shown], figures: Figures) -> str:
    """One row at a time: its percentiles in every report beside each other, and its samples by start."""
    lines = [(index, line) for index, line in enumerate(group.rows) if _has_samples(line)]
    if not lines or group.is_of_facts:
        return ""
    number = figures.open_set((item.label, item.number) for item in shown)
    picker = figures.picker(number, "Row", [group.label(index) for index, _ in lines])
    picker += "".join(sections.swatch(item.number, item.label) for item in shown if item.label)
    names = _names(shown)
    parts = []
    if len(shown) > 1:
        bars = figures.place("bars", set=number, rows=[bars_data(line) for _, line in lines], **names)
        parts.append(titled("percentiles", bars))
        views = [percentile_view(line) for _, line in lines if _is_timed(line)]
        if len(views) == len(lines):
            together = {"y": views[0]["y"], "views": [view["views"][0] for view in views]}
            parts.append(titled("share of samples", figures.place("lines", set=number, **together)))
    spread = figures.place("spread", set=number, rows=[spread_data(line) for _, line in lines], **names)
    content = (
        f'<div class="controls">{picker}</div>'
        + beside_one_another(*parts)
        + titled("samples by process start", spread)
    )
    return folded("One row closer", content, is_open=len(shown) > 1)


def _has_samples(line: Sequence[Row | None]) -> bool:
    return any(row is not None and len(row.samples) > 1 for row in line)


def _is_timed(line: Sequence[Row | None]) -> bool:
    return all(
        row is None or (row.unit == "s" and (not row.starts or len(row.samples) >= MIN_SAMPLES))
        for row in line
    )


def _names(shown: Sequence[Shown]) -> dict[str, list[object]]:
    return {"labels": [item.label for item in shown], "colours": [item.number for item in shown]}
