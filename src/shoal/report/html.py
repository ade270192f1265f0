"""One self-contained HTML page of reports or of a comparison; it opens from disk and never asks the network.

The page's policy forbids any request. Plots are drawn by the copy of plotly.js in `assets`.
Every value from a report is escaped. What a reader asks first comes first: headlines, a glance, courses,
scaling, waits, staleness, every figure, and how it was run.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import UsageError
from shoal.core.untrusted import visible, visible_line
from shoal.report.curves import is_histogram
from shoal.report.diff import LABELS, Diff, RowDiff, RowVerdict, busy
from shoal.report.plots import (
    CONTENDERS,
    MIN_SAMPLES,
    NUM_COLOURS,
    Colours,
    PageFigures,
    ReportGroup,
    Shown,
    bars_data,
    beside_one_another,
    curve_plots,
    curves_title,
    forest_data,
    gathered,
    group_reports,
    has_samples,
    histogram_plots,
    is_wait,
    overview_data,
    percentile_plot,
    percentile_view,
    scaling_groups,
    scaling_plots,
    spread_data,
    titled,
    wait_plots,
)
from shoal.report.schema import Identity, Report, Row, Scalar, flatten, is_number, label_of, text
from shoal.report.statistics import (
    MIN_SEEDS,
    MIN_TIMED_STARTS,
    PERCENTILES,
    lead_of,
    percentile,
    start_medians,
    summarize,
)
from shoal.report.storage import write_atomically
from shoal.report.units import Scale, counted, percent, scale_for
from shoal.report.views import headline, interval_text, shared_key, verdict_text
from shoal.report.words import BenchmarkWords, benchmark_words, metric_words, sentence_case

# --- the page ---

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
SCRIPTS = ("drawing.js", "rows.js", "lines.js", "page.js")
HOW_TO_READ = (
    "Percentiles interpolate linearly and are numeric: p95 of a rate is its high end. Those that a row has "
    "too few samples for are left out (p95 needs twenty). Spread is the standard deviation of all samples. "
    "The noise floor is how far equal measurements lie apart: nine of ten pairs of process starts have "
    "medians nearer to each other than that (with one start, two halves of its samples)."
)
HOW_TO_JUDGE = (
    "Negative is worse. A row is judged on the medians of its process starts: Welch's test on their "
    "logarithms, or the paired one where the starts took turns (--against), with Holm's correction, so that "
    "the chance to call any equal pair different is 1% over all rows together. The interval excludes zero "
    "exactly when the row is called different. Other percentiles are not tested."
)


def write_reports(reports: Sequence[Report], path: Path | str, sources: Sequence[str]) -> Path:
    """Write a page of one report, or of several; `sources` are their file names.

    Reports of one benchmark stand side by side, those of several benchmarks one chapter after another.
    """
    if not reports:
        raise UsageError("no reports to show", next_step="shoal report FILE -o out.html")
    shown = [
        Shown(report, label, number, source)
        for number, (report, label, source) in enumerate(zip(reports, _labels(reports), sources, strict=True))
    ]
    chapters: dict[str, list[Shown]] = {}
    for item in shown:
        chapters.setdefault(item.report.benchmark, []).append(item)
    figures = PageFigures()
    parts = [
        PagePart(
            benchmark_words(name) if len(chapters) > 1 else None,
            [*chapter(_named(items), figures), how_it_ran(_named(items))],
        )
        for name, items in chapters.items()
    ]
    if len(parts) > 1:
        parts.append(PagePart(None, [environments(shown)]))
    else:
        parts[0].sections.append(environments(shown))
    about = facts(shown[0])
    if len(shown) > 1:
        about = folded("Reports on this page", reports_table(shown), is_open=len(chapters) == 1)
    words = [benchmark_words(name) for name in chapters]
    title = words[0].title if len(words) == 1 else f"{len(words)} measurements: {', '.join(chapters)}"
    explained = f'<p class="about">{escape(words[0].about)}</p>' if len(words) == 1 and words[0].about else ""
    head = [explained, headlines(shown), about, contents(parts), notices(shown)]
    return _write(path, title, head, [body(parts), _how(HOW_TO_READ)], figures)


def write_diff(diff: Diff, path: Path | str, sources: Sequence[str]) -> Path:
    """Write a page of a comparison; `sources` are the file names of baseline and test."""
    shown = [
        Shown(diff.baseline, "baseline", 0, sources[0]),
        Shown(diff.test, "test", 1, sources[1]),
    ]
    figures = PageFigures()
    forest = figures.place("forest", rows=forest_data(diff))
    changes = Section("Change of the median", forest + verdicts_table(diff) + _how(HOW_TO_JUDGE))
    sections = [changes, *chapter(shown, figures, is_diff=True), how_it_ran(shown), environments(shown)]
    parts = [PagePart(None, sections)]
    head = [
        f'<p class="counts">{verdict_counts(diff)}</p>',
        reports_table(shown),
        contents(parts),
        notices(shown, diff.warnings),
    ]
    title = f"{diff.baseline.benchmark}: baseline and test"
    return _write(path, title, head, [body(parts), _how(HOW_TO_READ)], figures)


def _labels(reports: Sequence[Report]) -> list[str]:
    """A letter for each of several; the benchmark's name where that tells them apart."""
    if len(reports) == 1:
        return [""]
    names = [report.benchmark for report in reports]
    letters = [chr(ord("A") + number) if number < 26 else f"R{number + 1}" for number in range(len(names))]
    if names.count(names[0]) == len(names):
        return letters
    return [
        name if names.count(name) == 1 else f"{name} {letter}"
        for name, letter in zip(names, letters, strict=True)
    ]


def _named(items: list[Shown]) -> list[Shown]:
    """A report alone in its chapter needs no name there."""
    return items if len(items) > 1 else [replace(items[0], label="", number=0)]


def _how(words: str, content: str = "") -> str:
    """Words for a reader, after the content that they are of."""
    return f'{content}<p class="how">{escape(words)}</p>'


@dataclass(frozen=True)
class PagePart:
    """Sections, under what their benchmark measures where a page has several."""

    words: BenchmarkWords | None
    sections: list[Section]


def _filled(parts: Sequence[PagePart]) -> Iterator[tuple[int, PagePart, list[tuple[str, Section]]]]:
    """The parts with their sections that say something, each with its place on the page."""
    for number, part in enumerate(parts):
        found = [(f"p{number}-{index}", section) for index, section in enumerate(part.sections)]
        yield number, part, [(place, section) for place, section in found if section.content]


def contents(parts: Sequence[PagePart]) -> str:
    """Say where everything is on the page; '' for a short one."""
    lines = []
    count = 0
    for number, part, found in _filled(parts):
        links = [f'<a href="#{place}">{escape(section.name)}</a>' for place, section in found]
        count += len(links)
        if part.words:
            links.insert(0, f'<a href="#p{number}"><b>{escape(part.words.title)}</b></a>')
        if links:
            lines.append(f"<li>{' '.join(links)}</li>")
    return f'<nav aria-label="Contents"><ul>{"".join(lines)}</ul></nav>' if count > 3 else ""


def body(parts: Sequence[PagePart]) -> str:
    """Write all sections, in order."""
    written = []
    for number, part, found in _filled(parts):
        level = 3 if part.words else 2
        if part.words:
            written.append(f'<h2 class="chapter" id="p{number}">{escape(part.words.title)}</h2>')
            written.append(f'<p class="about">{escape(part.words.about)}</p>' if part.words.about else "")
        for place, section in found:
            about = f" <small>{escape(section.about)}</small>" if section.about else ""
            key = f' title="{escape(section.key, quote=True)}"' if section.key else ""
            written.append(
                f'<section id="{place}"><h{level}{key}>{escape(section.name)}{about}</h{level}>'
                f"{section.content}</section>"
            )
    return "\n".join(written)


def _write(
    path: Path | str, title: str, head: Sequence[str], content: Sequence[str], figures: PageFigures
) -> Path:
    data = {"plots": figures.plots, "sets": figures.sets}
    encoded = visible(msgspec.json.encode(data).decode()).replace("<", "\\u003c")
    title = visible_line(title)
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} · Shoal</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<header>
<div class="bar"><span class="brand">Shoal</span><button id="theme" type="button">theme</button></div>
<h1>{escape(title)}</h1>
{visible(_joined(head))}
</header>
<main>
<noscript><p class="notices">The plots need JavaScript; the tables do not.</p></noscript>
{visible(_joined(content))}
</main>
<script type="application/json" id="shoal-data">{encoded}</script>
<script>{_plotly()}</script>
<script>
"use strict";
{{
{_joined([_asset(name) for name in SCRIPTS])}
}}
</script>
</body>
</html>
"""
    return write_atomically(path, page.encode())


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part for part in parts if part)


def _asset(name: str) -> str:
    return resources.files("shoal.report").joinpath("assets", name).read_text(encoding="utf-8")


def _plotly() -> str:
    """The program that draws: plotly.js's basic bundle, which has lines, points and bars."""
    return _asset("plotly-basic.min.js").replace("</script", "<\\/script")


# --- one benchmark on a page ---

MAX_OPEN_ROWS = 16
"""A metric of more rows is folded."""
SCALING_HOW = (
    "Ideal is the fastest with the fewest workers, multiplied. Bars are the range of process starts."
)
STALENESS_HOW = "How many updates were made between the moment a gradient was computed at and its own update."
WAITS_HOW = "A row of the map waited for a column, on average over the samples; more colour, longer wait."


@dataclass(frozen=True)
class Section:
    """A named part of a page; `about` stands beside the name, `key` is what the report calls it."""

    name: str
    content: str
    about: str = ""
    key: str = ""


def chapter(shown: Sequence[Shown], figures: PageFigures, *, is_diff: bool = False) -> list[Section]:
    """Make all sections of the reports of one benchmark."""
    colours: Colours = {}
    glance = "" if is_diff else glance_tables(shown)
    over, lines_are = curves_title(shown)
    found = [
        Section("At a glance", glance),
        Section(over, curve_plots(shown, figures, colours), lines_are),
    ]
    for name, plots, how in (
        ("Scaling", scaling_plots(shown, figures, colours), SCALING_HOW),
        ("Who waited for whom", wait_plots(shown, figures), WAITS_HOW),
        ("Staleness", histogram_plots(shown, figures, colours), STALENESS_HOW),
    ):
        found += [Section(name, _how(how, plots))] * bool(plots)
    drawn = dict.fromkeys(scaling_groups(shown), True)
    folds = []
    for group in gathered(group_reports([item.report for item in shown])):
        if all(map(is_histogram, group.present)):
            continue
        is_shown = (group.metric, group.unit, group.direction) in drawn or all(map(is_wait, group.present))
        is_shown = is_shown or (group.is_of_facts and bool(glance or is_diff))
        section = _metric(group, shown, figures)
        if is_shown or len(group.rows) > MAX_OPEN_ROWS:
            about = (section.name, section.about, counted(len(group.rows), "row"))
            title = " · ".join(part for part in about if part)
            folds.append(folded(title, section.content))
        else:
            found.append(section)
    found.append(Section("More figures", "".join(folds)))
    return [section for section in found if section.content]


def how_it_ran(shown: Sequence[Shown]) -> Section:
    """Command lines, configuration and results, folded unless they differ."""
    configs = [
        item.report.config | ({"seeds": item.report.seeds} if item.report.seeds else {}) for item in shown
    ]
    results = [
        {name: value for name, value in item.report.result.items() if name != "headline"} for item in shown
    ]
    content = commands(shown)
    if config := settings_table("config", configs, shown):
        content += folded("Configuration", config, is_open=any(each != configs[0] for each in configs))
    if result := settings_table("result", results, shown):
        content += folded("Result", result)
    return Section("How it ran", content)


def environments(shown: Sequence[Shown]) -> Section:
    """Shows on which machines everything ran."""
    content = settings_table("environment", [item.report.environment for item in shown], shown)
    return Section("Environment", folded("Machine and versions", content) if content else "")


def folded(name: str, content: str, *, is_open: bool = False) -> str:
    """Content under a line that opens and closes it."""
    return f"<details{' open' if is_open else ''}><summary>{escape(name)}</summary>{content}</details>"


def _metric(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> Section:
    name = "Single figures" if group.is_mixed else sentence_case(metric_words(group.metric))
    table = statistics_table(group, shown)
    content = table + _distribution(group, shown, figures) + _closer(group, shown, figures)
    about = [
        group.unit,
        f"{group.direction} is better" if group.direction else "",
        label_of(shared_key(group.present)),
    ]
    key = "" if group.is_mixed else group.metric
    return Section(name, content, " · ".join(part for part in about if part), key)


def _distribution(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> str:
    """All rows on one axis; the percentiles of each beside it where they are times of a single report."""
    if group.is_mixed or not group.has_samples:
        return ""
    overview = figures.place("overview", **overview_data(group), **_names(shown))
    if len(shown) > 1:
        return overview
    rows = [(group.label(index), row) for index, row in enumerate(group.present)]
    return beside_one_another(overview, percentile_plot(rows, figures, range(len(rows))))


def _closer(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> str:
    """One row at a time: its percentiles in every report beside each other, and its samples by start."""
    lines = [(index, line) for index, line in enumerate(group.rows) if has_samples(line)]
    if not lines or group.is_of_facts:
        return ""
    number = figures.open_set((item.label, item.number) for item in shown)
    picker = figures.picker(number, "Row", [group.label(index) for index, _ in lines])
    picker += "".join(swatch(item.number, item.label) for item in shown if item.label)
    names = _names(shown)
    parts = []
    if len(shown) > 1:
        bars = figures.place("bars", set=number, rows=[bars_data(line) for _, line in lines], **names)
        parts.append(titled("percentiles", bars))
        rows = [row for _, line in lines for row in line if row is not None]
        if all(row.unit == "s" and (not row.starts or len(row.samples) >= MIN_SAMPLES) for row in rows):
            views = [percentile_view(line) for _, line in lines]
            together = {"y": views[0]["y"], "views": [view["views"][0] for view in views]}
            parts.append(titled("share of samples", figures.place("lines", set=number, **together)))
    spread = figures.place("spread", set=number, rows=[spread_data(line) for _, line in lines], **names)
    content = (
        f'<div class="controls">{picker}</div>'
        + beside_one_another(*parts)
        + titled("samples by process start", spread)
    )
    return folded("One row closer", content, is_open=len(shown) > 1)


def _names(shown: Sequence[Shown]) -> dict[str, list[object]]:
    return {"labels": [item.label for item in shown], "colours": [item.number for item in shown]}


# --- tables of figures ---

TONES = {
    RowVerdict.BETTER: "good",
    RowVerdict.FIXED: "good",
    RowVerdict.WORSE: "bad",
    RowVerdict.FAILED: "bad",
    RowVerdict.FAILED_BOTH: "bad",
    RowVerdict.TOO_FEW: "unsure",
    RowVerdict.NO_DIFFERENCE: "quiet",
}


def signed(value: float | None) -> str:
    """A percentage with a real minus sign."""
    return percent(value).replace("-", "−")


def pill(label: str, tone: str) -> str:
    """A small coloured word."""
    return f'<span class="pill {tone}">{escape(label)}</span>'


def swatch(number: int, label: str) -> str:
    """A report's colour and name."""
    return f'<span class="swatch s{number % NUM_COLOURS}">{escape(label)}</span>'


def html_table(head: Iterable[str], body: Iterable[str], kind: str = "") -> str:
    """A table that scrolls by itself where it is wider than the page."""
    rows = "\n".join(body)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{"".join(head)}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _key_columns(rows: Sequence[Row]) -> list[str]:
    """Names of the key entries that tell the rows apart, in the order of the benchmark."""
    shared = shared_key(rows)
    return list(dict.fromkeys(name for row in rows for name in row.key if name not in shared))


def key_cells(row: Row, names: Sequence[str], span: int = 1) -> str:
    """The entries of a row's key under `key_heads`."""
    rows = f' rowspan="{span}"' if span > 1 else ""
    cells = []
    for name in names:
        value: Scalar | None = row.key.get(name)
        kind, shown = ("key number", f"{value:,}") if is_number(value) else ("key", text(value))
        shown = "–" if value is None else shown
        cells.append(f'<th scope="row"{rows} class="{kind}">{escape(shown)}</th>')
    return "".join(cells)


def key_heads(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Headings of those entries, numbers to the right."""
    heads = []
    for name in names:
        are_numbers = all(is_number(row.key.get(name)) for row in rows)
        heads.append(f'<th class="key{" number" if are_numbers else ""}">{escape(name)}</th>')
    return heads


def statistics_table(group: ReportGroup, shown: Sequence[Shown]) -> str:
    """Every row of a group with its figures, one line for each report that has it."""
    names = _key_columns(group.present)
    has_metrics = group.is_mixed
    figures = ("starts", "samples", *(f"p{q}" for q in PERCENTILES), "mean", "spread", "noise floor")
    head = [
        *key_heads(group.present, names),
        *(["<th>metric</th>"] if has_metrics else []),
        *(["<th>report</th>"] if len(shown) > 1 else []),
        *(f'<th class="number">{name}</th>' for name in figures),
    ]
    body = []
    # of which nothing happened: a count or a sum of zero in all reports
    zeros = [
        line
        for line in group.rows
        if has_metrics and all(row is None or (row.starts and not any(row.samples)) for row in line)
    ]
    for line in group.rows:
        if line in zeros:
            continue
        present = [(number, row) for number, row in enumerate(line) if row is not None]
        for position, (number, row) in enumerate(present):
            key = key_cells(row, names, len(present)) if position == 0 else ""
            if has_metrics and position == 0:
                arrow = "↑" if row.direction == "higher" else "↓"
                key += f'<td rowspan="{len(present)}">{_metric_name(row.metric)} {arrow}</td>'
            item = shown[number]
            report = f"<td>{swatch(item.number, item.label)}</td>" if len(shown) > 1 else ""
            kind = ' class="first"' if position == 0 else ""
            body.append(f"<tr{kind}>{key}{report}{_figure_cells(row, len(figures))}</tr>")
    told = ", ".join(
        dict.fromkeys(_metric_name(row.metric) for line in zeros for row in line if row is not None)
    )
    return html_table(head, body, "statistics") + (f'<p class="how">Zero: {told}.</p>' if told else "")


def _figure_cells(row: Row, count: int) -> str:
    summary = summarize(row)
    if summary is None:
        return f'<td colspan="{count}" class="error">{pill("failed", "bad")} {escape(row.error or "")}</td>'
    scale = scale_for(row.unit, summary.p50)
    noise = "–" if summary.noise_percent is None else "±" + percent(summary.noise_percent, signed=False)
    spread = scale.format(summary.spread) if summary.num_samples > 1 else "–"
    cells = [
        f"{summary.num_starts:,}",
        f"{summary.num_samples:,}",
        *("–" if value is None else scale.format(value) for value in summary.known_percentiles),
        scale.format(summary.mean),
        spread,
        noise,
    ]
    return "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)


def _metric_name(key: str) -> str:
    """What a figure is called, with its key in the tooltip."""
    return f'<span title="{escape(key, quote=True)}">{escape(metric_words(key))}</span>'


def verdicts_table(diff: Diff) -> str:
    """Every pair of rows: percentiles of both sides, the change of the median and the verdict."""
    rows = [row.baseline for row in diff.rows]
    names = _key_columns(rows)
    has_metrics = len({row.metric: True for row in rows}) > 1 or not names
    head = [
        *key_heads(rows, names),
        *(["<th>metric</th>"] if has_metrics else []),
        *(f'<th class="number">p{q}</th>' for q in PERCENTILES),
        '<th class="number">median change</th>',
        '<th class="number">starts</th>',
        "<th>verdict</th>",
    ]
    body = []
    for row in diff.rows:
        metric = f"<td>{_metric_name(row.baseline.metric)}</td>" if has_metrics else ""
        body.append(f'<tr class="first">{key_cells(row.baseline, names)}{metric}{_verdict_cells(row)}</tr>')
    for side, only in (("baseline", diff.only_baseline), ("test", diff.only_test)):
        for lone in only:
            error = f": failed, {escape(lone.error)}" if lone.error is not None else ""
            body.append(
                f'<tr class="first"><td colspan="{len(head)}">{pill(f"only in {side}", "unsure")} '
                f"{escape(lone.label)} {escape(lone.metric)}{error}</td></tr>"
            )
    return html_table(head, body, "verdicts")


def _verdict_cells(row: RowDiff) -> str:
    verdict = pill(LABELS[row.verdict], TONES[row.verdict])
    starts = f'<td class="number">{len(row.baseline.starts)}, {len(row.test.starts)}</td>'
    if not row.changes:
        error = escape(row.test.error or row.baseline.error or "")
        return f'<td colspan="{len(PERCENTILES) + 1}" class="error">{error}</td>{starts}<td>{verdict}</td>'
    scale = scale_for(row.baseline.unit, row.changes[0].baseline)
    cells = "".join(
        f'<td class="number"><span class="pair">{scale.number(change.baseline)} → '
        f"{escape(scale.format(change.test))}</span><br>{signed(change.percent)}</td>"
        for change in row.changes
    )
    interval = interval_text(row).replace("-", "−") if row.judgement.low_percent is not None else "not judged"
    change = f'<td class="number"><b>{signed(row.judgement.change_percent)}</b><br>'
    detail = ""
    if row.verdict is RowVerdict.TOO_FEW:
        detail = f'<br><span class="pair">{escape(verdict_text(row).partition(", ")[2])}</span>'
    return f'{cells}{change}<span class="pair">{interval}</span></td>{starts}<td>{verdict}{detail}</td>'


def verdict_counts(diff: Diff) -> str:
    """One pill for each verdict that occurs."""
    counts = [
        pill(f"{diff.count(verdict)} {LABELS[verdict]}", TONES[verdict])
        for verdict in RowVerdict
        if diff.count(verdict)
    ]
    lone = len(diff.only_baseline) + len(diff.only_test)
    return " ".join([*counts, *([pill(f"{lone} in one report only", "unsure")] if lone else [])])


# --- at a glance ---

MAX_LINES = 40
DETAILS = ("rank", "waited_for", "behind", "start")
"""Entries of keys that belong to a closer look."""
CEILING = "none"
"""The strategy without any sharing, which nobody can beat and nobody has to."""

Line = tuple[int, tuple[tuple[str, bool, Scalar], ...]]
"""The number of the report, and the key."""
_VIRTUAL = ("compare", "convergence")
"""Benchmarks whose seconds are computed: a busy machine does not change them."""


def glance_tables(shown: Sequence[Shown]) -> str:
    """A table for each kind of key with several metrics and lines; '' where there is none."""
    kinds: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for index, item in enumerate(shown):
        for row in item.report.rows:
            if not any(name in row.key for name in DETAILS):
                kinds.setdefault(tuple(sorted(row.key)), []).append((index, row))
    tables = [_glance_table(found, shown) for found in kinds.values()]
    return "".join(table for table in tables if table)


def _glance_table(rows: list[tuple[int, Row]], shown: Sequence[Shown]) -> str:
    metrics = {
        (row.metric, row.unit, row.direction): True
        for _, row in rows
        if row.error is not None or any(row.samples)
    }
    lines: dict[Line, dict[tuple[str, str, str], Row]] = {}
    for index, row in rows:
        cells = lines.setdefault((index, row.identity[1]), {})
        cells[row.metric, row.unit, row.direction] = row
    if len(metrics) < 2 or not 1 < len(lines) <= MAX_LINES:
        return ""
    firsts = [next(iter(cells.values())) for cells in lines.values()]
    names = _differing(firsts)
    best = best_cells(rows, [item.report.benchmark for item in shown])
    scales = {}
    for metric in metrics:
        medians = [
            abs(percentile(row.samples, 50))
            for _, row in rows
            if row.starts and (row.metric, row.unit, row.direction) == metric
        ]
        scales[metric] = scale_for(metric[1], percentile(medians, 50) if medians else 1.0)
    heads = [
        *key_heads(firsts, names),
        *(["<th>report</th>"] if len(shown) > 1 else []),
        *(_head(metric, scales[metric]) for metric in metrics),
    ]
    body = []
    for (index, _), cells in lines.items():
        first = next(iter(cells.values()))
        item = shown[index]
        report = f"<td>{swatch(item.number, item.label)}</td>" if len(shown) > 1 else ""
        figures = "".join(
            _cell(cell, scales[metric], cell is not None and (index, cell.identity) in best)
            for metric, cell in ((metric, cells.get(metric)) for metric in metrics)
        )
        body.append(f'<tr class="first">{key_cells(first, names)}{report}{figures}</tr>')
    told = (
        "<b class=best>Best</b>: ahead of all that differ in nothing else by more than chance."
        if best
        else "Nothing is marked as best: these starts do not tell one from the others."
    )
    return html_table(heads, body, "glance") + f'<p class="how">Medians. {told}</p>'


def _differing(rows: Sequence[Row]) -> list[str]:
    """Entries that differ."""
    names = {name: True for row in rows for name in row.key}
    return [name for name in names if any(row.key.get(name) != rows[0].key.get(name) for row in rows)]


def best_cells(rows: Sequence[tuple[int, Row]], benchmarks: Sequence[str]) -> set[tuple[int, Identity]]:
    """Those that win their contest by more than chance, against those that differ in the contender alone.

    `benchmarks` has the kind of each report. Timings need more starts than what a seed decides.
    """
    contests: dict[object, dict[str, tuple[int, Row]]] = {}
    for index, row in rows:
        contender = _contender(row, rows)
        is_ceiling = any(row.key.get(name) == CEILING for name in CONTENDERS)
        if contender is not None and row.starts and not is_ceiling:
            setting = tuple(entry for entry in row.identity[1] if entry[0] not in contender)
            rivals = contests.setdefault((index, row.metric, setting), {})
            rivals[str(len(rivals))] = (index, row)
    best = set()
    for rivals in contests.values():
        index, row = rivals["0"]
        is_timed = (row.unit == "s" or row.unit.endswith("/s")) and benchmarks[index] not in _VIRTUAL
        lead = lead_of(
            {name: start_medians(rival) for name, (_, rival) in rivals.items()},
            row.direction,
            MIN_TIMED_STARTS if is_timed else MIN_SEEDS,
        )
        if lead.is_told_apart:
            index, row = rivals[lead.names[0]]
            best.add((index, row.identity))
    return best


def _contender(row: Row, rows: Sequence[tuple[int, Row]]) -> tuple[str, ...] | None:
    """The entries of its key by which it competes: known names, or the one that differs, if it is text."""
    known = tuple(name for name in CONTENDERS if name in row.key)
    if known:
        return known
    names = _differing([other for _, other in rows])
    if len(names) == 1 and all(isinstance(other.key.get(names[0]), str) for _, other in rows):
        return tuple(names)
    return None


def _head(metric: tuple[str, str, str], scale: Scale) -> str:
    name, _, direction = metric
    arrow = "↑" if direction == "higher" else "↓"
    unit = f"{scale.unit} " if scale.unit else ""
    return f'<th class="number">{_metric_name(name)}<br><small>{escape(unit)}{arrow}</small></th>'


def _cell(row: Row | None, scale: Scale, is_best: bool) -> str:
    if row is None:
        return '<td class="number quiet-text">–</td>'
    if not row.starts:
        return f'<td class="number error" title="{escape(row.error or "", quote=True)}">failed</td>'
    shown = escape(scale.number(percentile(row.samples, 50)))
    return f'<td class="number">{f"<b class=best>{shown}</b>" if is_best else shown}</td>'


# --- what is said around the figures ---


def headlines(shown: Sequence[Shown]) -> str:
    """What each benchmark found, in the sentences that it wrote; '' where none did."""
    items = []
    for item in shown:
        prefix = f'<span class="of">{escape(item.label)}</span> ' if item.label else ""
        items += [f"<li>{prefix}{escape(sentence)}</li>" for sentence in headline(item.report)]
    return f'<ul class="headline">{"".join(items)}</ul>' if items else ""


def facts(item: Shown) -> str:
    """What a single report is, as one line."""
    report = item.report
    code = f"code {report.code}" if report.code.version else ""
    parts = (item.source, report.created, code, _machine(report.environment))
    return f'<p class="facts">{" · ".join(escape(part) for part in parts if part and part != "–")}</p>'


def notices(shown: Sequence[Shown], warnings: Sequence[str] | None = None) -> str:
    """What a reader must know before the figures: warnings, and rows that failed."""
    items = list(warnings or [])
    for item in shown:
        prefix = f"{item.label}: " if item.label else ""
        if warnings is None:
            items += [prefix + reason for reason in busy(item.report)]
        items += [f"{prefix}{row.label} {row.metric} failed: {row.error}" for row in item.report.failed]
    if not items:
        return ""
    if len(items) == 1:
        return f'<p class="notices">{escape(items[0])}</p>'
    rest = "".join(f"<li>{escape(item)}</li>" for item in items)
    num_failed = sum(len(item.report.failed) for item in shown)
    failed = f", {num_failed} of them of figures that failed" if num_failed else ""
    return (
        f'<details class="notices"><summary>{len(items)} warnings{failed}</summary><ul>{rest}</ul></details>'
    )


def reports_table(shown: Sequence[Shown]) -> str:
    """Which reports the page shows."""
    names = ["report"] * (len(shown) > 1) + ["file", "benchmark", "created", "code", "machine"]
    head = [f"<th>{name}</th>" for name in names]
    body = []
    for item in shown:
        report = item.report
        name = f"<td>{swatch(item.number, item.label)}</td>" if len(shown) > 1 else ""
        code = str(report.code) if report.code.version else "–"
        cells = (item.source, report.benchmark, report.created or "–", code, _machine(report.environment))
        body.append(f"<tr>{name}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return html_table(head, body, "reports")


def _machine(environment: dict[str, Any]) -> str:
    parts = {
        name: text(environment[name]) for name in ("machine", "cores", "device") if environment.get(name)
    }
    if "cores" in parts:
        parts["cores"] += " cores"
    return ", ".join(parts.values()) or "–"


def settings_table(name: str, values: Sequence[dict[str, Any]], shown: Sequence[Shown]) -> str:
    """Configurations or environments side by side; what is equal is said once, what differs is marked."""
    sides = [flatten(value) for value in values]
    names = sorted({entry: True for side in sides for entry in side})
    if not names:
        return ""
    heads = [f"<th>{name}</th>"]
    heads += [
        f"<th>{swatch(item.number, item.label)}</th>" if len(shown) > 1 else "<th></th>" for item in shown
    ]
    body = []
    for entry in names:
        written = [text(side[entry]) if entry in side else "–" for side in sides]
        kind = ""
        if any(value != written[0] for value in written):
            kind = ' class="differs"'
            pairs = zip(sides, written, strict=True)
            cells = "".join(f"<td>{_value(side.get(entry), value)}</td>" for side, value in pairs)
        else:
            span = f' colspan="{len(sides)}"' if len(sides) > 1 else ""
            cells = f"<td{span}>{_value(sides[0].get(entry), written[0])}</td>"
        body.append(f'<tr{kind}><th scope="row">{escape(entry)}</th>{cells}</tr>')
    return html_table(heads, body, "settings")


def _value(value: Any, shown: str) -> str:
    """A list of dictionaries as a table of its own, anything else as it is written."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return escape(shown)
    names = list({name: True for item in value for name in item})
    heads = [f"<th>{escape(str(name))}</th>" for name in names]
    lines = ("".join(f"<td>{escape(text(item.get(name)))}</td>" for name in names) for item in value)
    return html_table(heads, [f"<tr>{line}</tr>" for line in lines])


def commands(shown: Sequence[Shown]) -> str:
    """The command line of each report."""
    blocks = []
    for item in shown:
        if item.report.command:
            name = swatch(item.number, item.label) if item.label else ""
            blocks.append(f"{name}<pre>{escape(shlex.join(item.report.command))}</pre>")
    return "".join(blocks)
