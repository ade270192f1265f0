"""One self-contained HTML page of reports or of a comparison; it opens from disk and never asks the network.

The page's policy forbids any request. Plots are drawn by the copy of plotly.js in `assets`. Every value from
a report is escaped. What a reader asks first comes first: what was measured, on what, what was found,
pictures, courses, a glance, every figure, and how it was run.
"""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape, unescape
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import UsageError
from shoal.core.untrusted import visible, visible_line
from shoal.report.curves import is_histogram, resolution_of
from shoal.report.diff import Diff, RowDiff, RowVerdict, busy
from shoal.report.html.distributions import (
    gathered,
    group_reports,
    key_cells,
    key_columns,
    metric_name,
    metric_section,
    number_cell,
    row_label,
    telling_names,
)
from shoal.report.html.figures import FEW, changes_figure
from shoal.report.html.markup import (
    Markup,
    Section,
    element,
    folded,
    how,
    joined,
    listed,
    pill,
    swatch,
    table,
)
from shoal.report.html.plots import (
    CONTENDERS,
    Chapter,
    PageFigures,
    Shown,
    dotted,
    drawn_sections,
    is_wait,
    scaling_groups,
)
from shoal.report.html.published import beside_documents
from shoal.report.schema import Identity, Report, Row, flatten, is_in_virtual_time, text
from shoal.report.statistics import (
    MIN_SEEDS,
    MIN_TIMED_STARTS,
    PERCENTILES,
    half_interval,
    lead_of,
    mean_of,
    percentile,
    start_medians,
    usual_deviation,
)
from shoal.report.storage import write_atomically
from shoal.report.units import Scale, counted, percent
from shoal.report.views import Group, group_of, headline, interval_text, shared_key, verdict_text
from shoal.report.words import (
    ABSENT,
    BenchmarkWords,
    arrow_of,
    benchmark_words,
    key_label,
    metric_words,
    scale_of,
    sentence_case,
    value_words,
    words_used,
)

# --- the page ---

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
SCRIPTS = ("drawing.js", "page.js")
HOW_TO_READ = (
    "A run is one independent start of all processes, or one seed. Percentiles interpolate linearly and "
    "are numeric: p95 of a rate is its high end. Those for which there are too few measurements are left out "
    "(p95 needs twenty). Spread is the standard deviation of all measurements. The noise floor is how far "
    "equal runs lie apart: nine of ten pairs of runs have medians nearer to each other than that (with one "
    "run, two halves of its measurements)."
)
CHANGES_HOW = (
    "How much the median of each figure changed from the baseline to the test. A filled dot was judged, and "
    "its line is the interval of the change: where it reaches zero, no difference was found. A hollow dot "
    "has too few process starts to be judged."
)
HOW_TO_JUDGE = (
    "Negative is worse. A row is judged on the medians of its process starts: Welch's test on their "
    "logarithms, or the paired one where the starts took turns (--against), with Holm's correction, so that "
    "the chance to call any equal pair different is 1% over all rows together. The interval excludes zero "
    "exactly when the row is called different. Other percentiles are not tested."
)
BUSY_HOW = (
    "Other programs ran on this machine: times may be longer and rates lower than on an idle one, and "
    "they vary more from run to run. Counts of bytes, messages and steps are not changed."
)
BREAK = Markup("<br>")


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
    by_benchmark: dict[str, list[Shown]] = {}
    for item in shown:
        by_benchmark.setdefault(item.report.benchmark, []).append(item)
    words = [benchmark_words(name, items[0].report.config) for name, items in by_benchmark.items()]
    figures, is_alone, about = PageFigures(), len(words) == 1, facts(shown[0])
    parts = []
    for said, items in zip(words, by_benchmark.values(), strict=True):
        # a report alone in its chapter needs no name there
        own = items if len(items) > 1 else [replace(items[0], label="", number=0)]
        parts.append(PagePart([*chapter(own, figures), how_it_ran(own)], said, conditions(own)))
    parts.append(PagePart([environments(shown)]))
    if is_alone:
        parts = [PagePart([section for part in parts for section in part.sections])]
    if len(shown) > 1:
        about = folded("Reports on this page", reports_table(shown), is_open=is_alone)
    title = (
        words[0].title if is_alone else sentence_case(", ".join(each.topic or each.title for each in words))
    )
    head = [
        _about(words[0]) if is_alone else "",
        headlines(shown),
        conditions(shown) if is_alone else "",
        about,
        contents(parts),
        notices(shown),
    ]
    return _write(path, title, head, parts, figures)


def write_diff(diff: Diff, path: Path | str, sources: Sequence[str]) -> Path:
    """Write a page of a comparison; `sources` are the file names of baseline and test."""
    shown = [Shown(diff.baseline, "baseline", 0, sources[0]), Shown(diff.test, "test", 1, sources[1])]
    figures = PageFigures()
    verdicts = forest_plot(diff, figures) + verdicts_table(diff) + how(HOW_TO_JUDGE)
    changes = Section("Change of the median", CHANGES_HOW, verdicts)
    sections = [changes, *chapter(shown, figures, is_diff=True), how_it_ran(shown), environments(shown)]
    words = benchmark_words(diff.baseline.benchmark, diff.baseline.config)
    parts = [PagePart(sections)]
    head = [
        _about(words),
        element("p", verdict_counts(diff), kind="counts"),
        reports_table(shown),
        contents(parts),
        notices(shown, diff.warnings),
    ]
    return _write(path, f"{words.title}: two reports compared", head, parts, figures)


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


@dataclass(frozen=True)
class PagePart:
    """Sections, under what their benchmark measures where a page has several, and what it found."""

    sections: list[Section]
    words: BenchmarkWords | None = None
    found: str = ""


def _filled(parts: Sequence[PagePart]) -> Iterator[tuple[int, PagePart, list[tuple[str, Section]]]]:
    """The parts with their sections that say something, each with its place on the page."""
    for number, part in enumerate(parts):
        found = [(f"p{number}-{index}", section) for index, section in enumerate(part.sections)]
        yield number, part, [(place, section) for place, section in found if section.content]


def contents(parts: Sequence[PagePart]) -> Markup:
    """Say where everything is on the page; '' for a short one."""
    lines, count = [], 0
    for number, part, found in _filled(parts):
        links = [element("a", section.name, href=f"#{place}") for place, section in found]
        count += len(links)
        if part.words:
            links.insert(0, element("a", element("b", part.words.title), href=f"#p{number}"))
        lines += [joined(links, " ")] * bool(links)
    return element("nav", listed(lines), aria_label="Contents") if count > 3 else Markup()


def body(parts: Sequence[PagePart]) -> Markup:
    """Write all sections, in order."""
    written: list[str] = []
    for number, part, found in _filled(parts):
        if part.words:
            written.append(element("h2", part.words.title, kind="chapter", id=f"p{number}"))
            written += [_about(part.words), part.found]
        for place, section in found:
            title = element("h3" if part.words else "h2", section.name, title=section.key)
            lead = element("p", section.about, kind="lead")
            written.append(element("section", title, lead, section.content, id=place))
    return joined(written, "\n")


def _about(words: BenchmarkWords) -> Markup:
    return element("p", words.about, kind="about") if words.about else Markup()


def _write(
    path: Path | str, title: str, head: Sequence[str], parts: Sequence[PagePart], figures: PageFigures
) -> Path:
    content = joined([*head, body(parts)], "\n")
    above, below = joined(head, "\n"), joined([body(parts), glossary(content), how(HOW_TO_READ)], "\n")
    encoded = visible(msgspec.json.encode(figures.data).decode()).replace("<", "\\u003c")
    title, newline = escape(visible_line(title)), "\n"
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Shoal</title>
<style>
{_asset("page.css")}</style>
</head>
<body>
<header>
<div class="bar"><span class="brand">Shoal</span><button id="theme" type="button">theme</button></div>
<h1>{title}</h1>
{visible(above)}
</header>
<main>
<noscript><p class="notices">The plots need JavaScript; the tables do not.</p></noscript>
{visible(below)}
</main>
<script type="application/json" id="shoal-data">{encoded}</script>
<!-- plotly.js (basic bundle), Copyright Plotly, Inc., MIT license: compressed, and unpacked by the page -->
<script type="text/plain" id="plotly">{_plotly()}</script>
<script>
"use strict";
{{
{newline.join(map(_asset, SCRIPTS))}
}}
</script>
</body>
</html>
"""
    return write_atomically(path, page.encode())


def glossary(page: str) -> Markup:
    """What the words mean that a page uses and that a reader may not know, folded."""
    used = words_used(unescape(_TAG.sub(" ", page)))
    lines = [element("dt", word) + element("dd", said) for word, said in used.items()]
    return folded("Words on this page", element("dl", *lines)) if used else Markup()


_TAG = re.compile("<[^>]*>")


def _asset(name: str) -> str:
    return resources.files("shoal.report").joinpath("assets", name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _plotly() -> str:
    """The program that draws: plotly.js's basic bundle, gzipped, in base64, which takes half of its bytes."""
    source = resources.files("shoal.report").joinpath("assets", "plotly-basic.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, mtime=0)).decode()


# --- one benchmark on a page ---

MAX_OPEN_ROWS = 16
"""A metric of more rows is folded."""
GLANCE_HOW = (
    "Everything that was measured, in one table: means over the runs, ± their 95 % interval; of a single run "
    "the median of what it measured, with the least and the most where that is little. "
)


def chapter(shown: Sequence[Shown], figures: PageFigures, *, is_diff: bool = False) -> list[Section]:
    """Make all sections of the reports of one benchmark: pictures first, then tables."""
    found = [section for section in drawn_sections(Chapter(shown, figures)) if section.content]
    glance = Section("At a glance", "", Markup()) if is_diff else glance_section(shown)
    last = [] if found else [glance]
    found += [glance] * bool(found) + ([] if is_diff else [beside_documents(shown)])
    drawn = scaling_groups(shown)
    folds = []
    for group in gathered(group_reports([item.report for item in shown])):
        if all(map(is_histogram, group.present)):
            continue
        is_shown = group.group in drawn or all(map(is_wait, group.present))
        is_shown = is_shown or (group.is_of_facts and bool(glance.content or is_diff))
        section = metric_section(group, shown, figures)
        if is_shown or len(group.rows) > MAX_OPEN_ROWS:
            title = f"{section.name} · {counted(len(group.rows), 'row')}"
            folds.append(folded(title, element("p", section.about, kind="lead") + section.content))
        else:
            found.append(section)
    about = "Figures that a closer look needs, folded; press one to open it."
    found += [*last, Section("More figures", about, joined(folds))]
    return [section for section in found if section.content]


def how_it_ran(shown: Sequence[Shown]) -> Section:
    """Command lines, configuration and results, folded unless they differ."""
    # a benchmark that has several seeds in one start says so itself
    configs = [
        ({"seeds": item.report.seeds} if item.report.seeds else {}) | item.report.config for item in shown
    ]
    told = ("headline", "conditions")  # at the top of the page
    results = [
        {name: value for name, value in item.report.result.items() if name not in told} for item in shown
    ]
    is_open = any(each != configs[0] for each in configs)
    commands = [
        (swatch(item.number, item.label) if item.label else Markup())
        + element("pre", shlex.join(item.report.command))
        for item in shown
        if item.report.command
    ]
    config = folded("Configuration", settings_table("config", configs, shown), is_open=is_open)
    result = folded("Result", settings_table("result", results, shown))
    about = "The command that repeats this measurement, every setting that it had, and its RESULT line."
    return Section("How it ran", about, joined([*commands, config, result]))


def environments(shown: Sequence[Shown]) -> Section:
    """Shows on which machines everything ran."""
    content = settings_table("environment", [item.report.environment for item in shown], shown)
    about = (
        "The machine on which all of this was measured, how busy it was, and the versions of its programs."
    )
    return Section("Environment", about, folded("Machine and versions", content))


# --- a comparison ---


def forest_plot(diff: Diff, figures: PageFigures) -> Markup:
    """The change of every row with its interval."""
    shared = shared_key(row.baseline for row in diff.rows)
    has_metrics = len({row.baseline.metric: True for row in diff.rows}) > 1
    labels = []
    for row in diff.rows:
        label, words = row_label(row.baseline, shared), metric_words(row.baseline.metric)
        labels.append(dotted(label, words) if has_metrics and label != words else label)
    return figures.place(changes_figure(labels, diff.rows))


def signed(value: float | None) -> str:
    """A percentage with a real minus sign."""
    return percent(value).replace("-", "−")


def verdicts_table(diff: Diff) -> Markup:
    """Every pair of rows: percentiles of both sides, the change of the median and the verdict."""
    rows = [row.baseline for row in diff.rows]
    names = telling_names(rows)
    has_metrics = len({row.metric: True for row in rows}) > 1 or not names
    figures = [*(f"p{q}" for q in PERCENTILES), "median change", "starts"]
    head = [
        *key_columns(rows, names),
        *([element("th", "metric")] if has_metrics else []),
        *(element("th", name, kind="number") for name in figures),
        element("th", "verdict"),
    ]
    lines = []
    for row in diff.rows:
        cells = key_cells(row.baseline, names)
        if has_metrics:
            cells.append(element("td", metric_name(row.baseline.metric)))
        lines.append([*cells, *_verdict_cells(row)])
    for side, only in (("baseline", diff.only_baseline), ("test", diff.only_test)):
        for lone in only:
            label = [pill(f"only in {side}", "unsure"), f" {key_label(lone.key)} ", metric_name(lone.metric)]
            error = f": failed, {lone.error}" if lone.error is not None else ""
            lines.append([element("td", *label, error, colspan=len(head))])
    return table(head, [element("tr", *cells, kind="first") for cells in lines], "verdicts")


def _verdict_cells(row: RowDiff) -> list[Markup]:
    verdict = pill(row.verdict.label, row.verdict.tone)
    starts = number_cell(f"{len(row.baseline.starts)}, {len(row.test.starts)}")
    if not row.changes:
        error = row.test.error or row.baseline.error or ""
        failed = element("td", error, kind="error", colspan=len(PERCENTILES) + 1)
        return [failed, starts, element("td", verdict)]
    scale = scale_of(row.baseline.metric, row.baseline.unit, [row.changes[0].baseline or 0.0])
    cells = []
    for change in row.changes:
        if change.baseline is None or change.test is None:
            cells.append(number_cell("–", kind="number quiet-text"))
        else:
            sides = f"{scale.number(change.baseline)} → {scale.format(change.test)}"
            cells.append(number_cell(_quiet(sides), BREAK, signed(change.percent)))
    interval = interval_text(row).replace("-", "−") if row.judgement.low_percent is not None else "not judged"
    median = element("b", signed(row.judgement.change_percent))
    is_unsure = row.verdict is RowVerdict.TOO_FEW
    detail = BREAK + _quiet(verdict_text(row).partition(", ")[2]) if is_unsure else ""
    return [*cells, number_cell(median, BREAK, _quiet(interval)), starts, element("td", verdict, detail)]


def _quiet(words: str) -> Markup:
    return element("span", words, kind="pair")


def verdict_counts(diff: Diff) -> Markup:
    """One pill for each verdict that occurs."""
    counts = [
        pill(f"{diff.count(verdict)} {verdict.label}", verdict.tone)
        for verdict in RowVerdict
        if diff.count(verdict)
    ]
    lone = len(diff.only_baseline) + len(diff.only_test)
    return joined([*counts, pill(f"{lone} in one report only", "unsure") if lone else ""], " ")


# --- at a glance ---

MAX_LINES = 40
DETAILS = ("rank", "waited_for", "behind", "start")
"""Entries of keys that belong to a closer look."""
CEILING = "none"
"""The strategy without any sharing, which nobody can beat and nobody has to."""


def glance_section(shown: Sequence[Shown]) -> Section:
    """A table for each kind of key with several metrics and lines; no content without any."""
    kinds: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for index, item in enumerate(shown):
        for row in item.report.rows:
            if not any(name in row.key for name in DETAILS):
                kind = tuple(sorted({name: True for name in row.key if name not in ABSENT}))
                kinds.setdefault(kind, []).append((index, row))
    best: set[tuple[int, Identity]] = set()
    tables = joined(_glance_table(found, shown, best) for found in kinds.values())
    told = (
        "Green: better than every other row of the same setting beyond the noise."
        if best
        else "Nothing is green: these runs do not tell one row from the others."
    )
    return Section("At a glance", f"{GLANCE_HOW}{told} ↑ higher is better, ↓ lower is better.", tables)


def _glance_table(
    rows: list[tuple[int, Row]], shown: Sequence[Shown], found: set[tuple[int, Identity]]
) -> Markup:
    """One of them; adds the best to `found`."""
    lines: dict[tuple[int, tuple[str, ...]], dict[Group, Row]] = {}
    entries = sorted({name: True for _, row in rows for name in row.key})
    for index, row in rows:
        key = tuple(value_words(name, row.key.get(name), row.metric) for name in entries)
        lines.setdefault((index, key), {})[group_of(row)] = row
    said = dict.fromkeys(group_of(row) for _, row in rows if row.error is not None or any(row.samples))
    columns = {group: [row for _, row in rows if row.starts and group_of(row) == group] for group in said}
    if len(columns) < 2 or not 1 < len(lines) <= MAX_LINES:
        return Markup()
    firsts = [next(iter(cells.values())) for cells in lines.values()]
    names = telling_names(firsts)
    best = best_cells(rows, [item.report for item in shown])
    found |= best
    least = {group: usual_deviation(map(start_medians, of_one)) for group, of_one in columns.items()}
    scales = {
        group: scale_of(*group[:2], [percentile(row.samples, 50) for row in of_one])
        for group, of_one in columns.items()
    }
    heads = [
        *key_columns(firsts, names),
        *([element("th", "report")] if len(shown) > 1 else []),
        *(_head(group, scale) for group, scale in scales.items()),
    ]
    body = []
    for ((index, _), cells), first in zip(lines.items(), firsts, strict=True):
        item = shown[index]
        line = key_cells(first, names)
        if len(shown) > 1:
            line.append(element("td", swatch(item.number, item.label)))
        for group, scale in scales.items():
            cell = cells.get(group)
            line.append(_cell(cell, scale, least[group], cell is not None and (index, cell.identity) in best))
        is_chosen = any(name == "chosen" for name, _, _ in cells)
        body.append(element("tr", *line, kind="first chosen" if is_chosen else "first"))
    return table(heads, body, "glance")


def best_cells(rows: Sequence[tuple[int, Row]], reports: Sequence[Report]) -> set[tuple[int, Identity]]:
    """Those that win their contest by more than chance, against those that differ in the contender alone.

    A row comes with the number of its report. Timings of a real machine need more starts than what a seed
    decides.
    """
    contests: dict[tuple[int, str, object], dict[str, Row]] = {}
    for index, row in rows:
        contender = _contender(row, rows)
        is_ceiling = any(row.key.get(name) == CEILING for name in CONTENDERS)
        if contender is not None and row.starts and not is_ceiling:
            setting = tuple(entry for entry in row.identity[1] if entry[0] not in contender)
            rivals = contests.setdefault((index, row.metric, setting), {})
            rivals[str(len(rivals))] = row
    best = set()
    for (index, _, _), rivals in contests.items():
        report, first = reports[index], rivals["0"]
        is_timed = (first.unit == "s" or first.unit.endswith("/s")) and not is_in_virtual_time(report)
        lead = lead_of(
            {name: start_medians(row) for name, row in rivals.items()},
            first.direction,
            MIN_TIMED_STARTS if is_timed else MIN_SEEDS,
            {name: resolution_of(report, row) for name, row in rivals.items()},
        )
        if lead.is_told_apart:
            best.add((index, rivals[lead.names[0]].identity))
    return best


def _contender(row: Row, rows: Sequence[tuple[int, Row]]) -> tuple[str, ...] | None:
    """The entries of its key by which it competes: known names, or the one that differs, if it is text."""
    known = tuple(name for name in CONTENDERS if name in row.key)
    if known:
        return known
    names = telling_names([other for _, other in rows])
    if len(names) == 1 and all(isinstance(other.key.get(names[0]), str) for _, other in rows):
        return tuple(names)
    return None


def _head(group: Group, scale: Scale) -> Markup:
    metric, _, direction = group
    unit = f"{scale.unit} " if scale.unit else ""
    return element("th", metric_name(metric), _below(unit + arrow_of(metric, direction)), kind="number")


def _below(words: str) -> Markup:
    """A small second line of a cell."""
    return BREAK + element("small", words)


def _cell(row: Row | None, scale: Scale, least: float, is_best: bool) -> Markup:
    """The mean over the runs with its interval, or the median of a single one with its reach."""
    if row is None:
        return number_cell("–", kind="number quiet-text")
    if not row.starts:
        return element("td", "failed", kind="number error", title=row.error or "")
    if row.metric == "chosen":
        return number_cell("yes")
    medians, more = start_medians(row), ""
    value = mean_of(medians)
    if len(medians) > 1:
        half = half_interval(medians, 0.0, least * abs(value))
        more = f"± {scale.number(half)}" if half else ""
    elif min(row.samples) < max(row.samples) and len(row.samples) <= FEW:
        more = f"{scale.number(min(row.samples))} to {scale.number(max(row.samples))}"
    shown = scale.number(value)
    return number_cell(element("b", shown, kind="best") if is_best else shown, _below(more) if more else "")


# --- what is said around the figures ---


def headlines(shown: Sequence[Shown]) -> Markup:
    """What each benchmark found, in the sentences that it wrote; '' where none did."""
    return listed((_of(item) + said for item in shown for said in headline(item.report)), "headline")


def conditions(shown: Sequence[Shown]) -> Markup:
    """On what each benchmark was run, in the sentences that it wrote; '' where none did."""
    items = []
    for item in shown:
        told = item.report.result.get("conditions", [])
        if told and isinstance(told, list):
            words = " ".join(map(text, told))
            items.append(element("p", element("b", "On what:"), " ", _of(item), words, kind="conditions"))
    return joined(items)


def _of(item: Shown) -> Markup:
    """Whose sentence follows, where a page has several reports."""
    return element("span", item.label, kind="of") + " " if item.label else Markup()


def facts(item: Shown) -> Markup:
    """What a single report is, as one line."""
    report = item.report
    code = f"code {report.code}" if report.code.version else ""
    machine = _machine(report.environment)
    words = dotted(item.source, report.created, code, "" if machine == "–" else machine)
    return element("p", words, kind="facts")


def notices(shown: Sequence[Shown], warnings: Sequence[str] | None = None) -> Markup:
    """What a reader must know before the figures: warnings, and rows that failed."""
    items, is_busy = list(warnings or []), False
    for item in shown:
        prefix = f"{item.label}: " if item.label else ""
        signs = [] if is_in_virtual_time(item.report) else busy(item.report)
        is_busy = is_busy or bool(signs)
        items += [prefix + sign for sign in signs if warnings is None]
        items += [
            f"{prefix}{key_label(row.key)} {metric_words(row.metric)} failed: {row.error}".lstrip()
            for row in item.report.failed
        ]
    if not items:
        return Markup()
    effect = [BUSY_HOW] * is_busy
    if len(items) == 1:
        only = f" ({items[0]}.)" if is_busy else items[0]
        return element("p", *effect, only, kind="notices")
    num_failed = sum(len(item.report.failed) for item in shown)
    failed = f", {num_failed} of them of figures that failed" if num_failed else ""
    told = element("p", *effect, kind="notices") if is_busy else Markup()
    return told + folded(f"{len(items)} warnings{failed}", listed(items), kind="notices")


def reports_table(shown: Sequence[Shown]) -> Markup:
    """Which reports the page shows."""
    names = ["report"] * (len(shown) > 1) + ["file", "benchmark", "created", "code", "machine"]
    rows = []
    for item in shown:
        report = item.report
        code = str(report.code) if report.code.version else "–"
        cells = [item.source, report.benchmark, report.created or "–", code, _machine(report.environment)]
        cells[:0] = [swatch(item.number, item.label)] * (len(shown) > 1)
        rows.append(element("tr", *(element("td", cell) for cell in cells)))
    return table([element("th", name) for name in names], rows, "reports")


def _machine(environment: dict[str, Any]) -> str:
    parts = {
        name: text(environment[name]) for name in ("machine", "cores", "device") if environment.get(name)
    }
    if "cores" in parts:
        parts["cores"] += " cores"
    return ", ".join(parts.values()) or "–"


def settings_table(name: str, values: Sequence[dict[str, Any]], shown: Sequence[Shown]) -> Markup:
    """Configurations or environments side by side; what is equal is said once, what differs is marked."""
    sides = [flatten(value) for value in values]
    names = sorted({entry: True for side in sides for entry in side})
    swatches = [swatch(item.number, item.label) if len(shown) > 1 else "" for item in shown]
    rows = []
    for entry in names:
        written = [text(side[entry]) if entry in side else "–" for side in sides]
        cells = [_value(side.get(entry), value) for side, value in zip(sides, written, strict=True)]
        are_equal = all(value == written[0] for value in written)
        columns = [element("td", cell) for cell in cells]
        if are_equal:
            columns = [element("td", cells[0], colspan=len(sides) if len(sides) > 1 else "")]
        head = element("th", entry, scope="row")
        rows.append(element("tr", head, *columns, kind="" if are_equal else "differs"))
    heads = [element("th", each) for each in (name, *swatches)]
    return table(heads, rows, "settings") if rows else Markup()


def _value(value: Any, shown: str) -> str:
    """A list of dictionaries as a table of its own, anything else as it is written."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return shown
    names = list({name: True for item in value for name in item})
    rows = [element("tr", *(element("td", text(item.get(name))) for name in names)) for item in value]
    return table([element("th", str(name)) for name in names], rows)
