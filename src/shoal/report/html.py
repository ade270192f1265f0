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
from collections.abc import Iterable, Iterator, Sequence
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
from shoal.report.diff import LABELS, TONES, Diff, RowDiff, RowVerdict, busy
from shoal.report.figures import FEW
from shoal.report.pictures import pictures
from shoal.report.plots import (
    CONTENDERS,
    SCALING_HOW,
    STALENESS_HOW,
    WAITS_HOW,
    Colours,
    PageFigures,
    ReportGroup,
    Section,
    Shown,
    closer,
    curve_plots,
    curves_title,
    distribution,
    forest_plot,
    gathered,
    group_reports,
    histogram_plots,
    is_wait,
    scaling_groups,
    scaling_plots,
    swatch,
    wait_plots,
)
from shoal.report.published import beside_documents
from shoal.report.schema import Identity, Report, Row, Scalar, flatten, is_in_virtual_time, is_number, text
from shoal.report.statistics import (
    MIN_SEEDS,
    MIN_TIMED_STARTS,
    PERCENTILES,
    half_interval,
    lead_of,
    mean_of,
    percentile,
    start_medians,
    summarize,
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
    figure_scale,
    key_label,
    key_words,
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
    words = {name: benchmark_words(name, items[0].report.config) for name, items in chapters.items()}
    is_alone = len(chapters) == 1
    parts = [
        PagePart(
            None if is_alone else words[name],
            [*chapter(_named(items), figures), how_it_ran(_named(items))],
            "" if is_alone else conditions(_named(items)),
        )
        for name, items in chapters.items()
    ]
    if is_alone:
        parts[0].sections.append(environments(shown))
    else:
        parts.append(PagePart(None, [environments(shown)]))
    about = facts(shown[0])
    if len(shown) > 1:
        about = folded("Reports on this page", reports_table(shown), is_open=is_alone)
    first = next(iter(words.values()))
    topics = ", ".join(each.topic or each.title for each in words.values())
    title = first.title if is_alone else sentence_case(topics)
    explained = f'<p class="about">{escape(first.about)}</p>' if is_alone and first.about else ""
    on_what = conditions(shown) if is_alone else ""
    head = [explained, headlines(shown), on_what, about, contents(parts), notices(shown)]
    return _write(path, title, head, [body(parts)], figures)


def write_diff(diff: Diff, path: Path | str, sources: Sequence[str]) -> Path:
    """Write a page of a comparison; `sources` are the file names of baseline and test."""
    shown = [Shown(diff.baseline, "baseline", 0, sources[0]), Shown(diff.test, "test", 1, sources[1])]
    figures = PageFigures()
    changes = Section(
        "Change of the median",
        CHANGES_HOW,
        forest_plot(diff, figures) + verdicts_table(diff) + _how(HOW_TO_JUDGE),
    )
    sections = [changes, *chapter(shown, figures, is_diff=True), how_it_ran(shown), environments(shown)]
    parts = [PagePart(None, sections)]
    words = benchmark_words(diff.baseline.benchmark, diff.baseline.config)
    head = [
        f'<p class="about">{escape(words.about)}</p>' if words.about else "",
        f'<p class="counts">{verdict_counts(diff)}</p>',
        reports_table(shown),
        contents(parts),
        notices(shown, diff.warnings),
    ]
    title = f"{words.title}: two reports compared"
    return _write(path, title, head, [body(parts)], figures)


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


def _how(words: str) -> str:
    """Words for a reader."""
    return f'<p class="how">{escape(words)}</p>'


@dataclass(frozen=True)
class PagePart:
    """Sections, under what their benchmark measures where a page has several, and what it found."""

    words: BenchmarkWords | None
    sections: list[Section]
    found: str = ""


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
            written.append(part.found)
        for place, section in found:
            key = f' title="{escape(section.key, quote=True)}"' if section.key else ""
            written.append(
                f'<section id="{place}"><h{level}{key}>{escape(section.name)}</h{level}>'
                f'<p class="lead">{escape(section.about)}</p>{section.content}</section>'
            )
    return "\n".join(written)


def _write(
    path: Path | str, title: str, head: Sequence[str], content: Sequence[str], figures: PageFigures
) -> Path:
    content = [*content, glossary(_joined([*head, *content])), _how(HOW_TO_READ)]
    encoded = visible(msgspec.json.encode(figures.data).decode()).replace("<", "\\u003c")
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
<!-- plotly.js (basic bundle), Copyright Plotly, Inc., MIT license: compressed, and unpacked by the page -->
<script type="text/plain" id="plotly">{_plotly()}</script>
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


def glossary(page: str) -> str:
    """What the words mean that a page uses and that a reader may not know, folded."""
    used = words_used(unescape(_TAG.sub(" ", page)))
    lines = "".join(f"<dt>{escape(word)}</dt><dd>{escape(said)}</dd>" for word, said in used.items())
    return folded("Words on this page", f"<dl>{lines}</dl>") if used else ""


_TAG = re.compile("<[^>]*>")


def _joined(parts: Sequence[str]) -> str:
    return "\n".join(part for part in parts if part)


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
    colours: Colours = {}
    over, how = curves_title(shown)
    curves = Section(over, how, curve_plots(shown, figures, colours))
    glance, told = ("", "") if is_diff else glance_tables(shown)
    found = [
        *pictures(shown, figures, colours),
        curves,
        Section("Speed by number of workers", SCALING_HOW, scaling_plots(shown, figures, colours)),
        Section("Who waited for whom", WAITS_HOW, wait_plots(shown, figures)),
        Section("Staleness", STALENESS_HOW, histogram_plots(shown, figures, colours)),
    ]
    at_a_glance = Section("At a glance", GLANCE_HOW + told, glance)
    is_drawn = any(section.content for section in found)
    found += [at_a_glance] * is_drawn
    if not is_diff:
        found.append(beside_documents(shown))
    drawn = dict.fromkeys(scaling_groups(shown), True)
    folds = []
    for group in gathered(group_reports([item.report for item in shown])):
        if all(map(is_histogram, group.present)):
            continue
        is_shown = group.group in drawn or all(map(is_wait, group.present))
        is_shown = is_shown or (group.is_of_facts and bool(glance or is_diff))
        section = _metric(group, shown, figures)
        if is_shown or len(group.rows) > MAX_OPEN_ROWS:
            title = f"{section.name} · {counted(len(group.rows), 'row')}"
            folds.append(folded(title, f'<p class="lead">{escape(section.about)}</p>{section.content}'))
        else:
            found.append(section)
    about = "Figures that a closer look needs, folded; press one to open it."
    found += [*([] if is_drawn else [at_a_glance]), Section("More figures", about, "".join(folds))]
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
    content = commands(shown)
    if config := settings_table("config", configs, shown):
        content += folded("Configuration", config, is_open=any(each != configs[0] for each in configs))
    if result := settings_table("result", results, shown):
        content += folded("Result", result)
    about = "The command that repeats this measurement, every setting that it had, and its RESULT line."
    return Section("How it ran", about, content)


def environments(shown: Sequence[Shown]) -> Section:
    """Shows on which machines everything ran."""
    content = settings_table("environment", [item.report.environment for item in shown], shown)
    about = (
        "The machine on which all of this was measured, how busy it was, and the versions of its programs."
    )
    return Section("Environment", about, folded("Machine and versions", content) if content else "")


def folded(name: str, content: str, *, is_open: bool = False) -> str:
    """Content under a line that opens and closes it."""
    return f"<details{' open' if is_open else ''}><summary>{escape(name)}</summary>{content}</details>"


def _metric(group: ReportGroup, shown: Sequence[Shown], figures: PageFigures) -> Section:
    drawn = distribution(group, shown, figures)
    near = closer(group, shown, figures)
    content = drawn + statistics_table(group, shown)
    content += folded("One row closer", near, is_open=len(shown) > 1) if near else ""
    if group.is_mixed:
        return Section(
            "Single figures", "Figures of which there is one of each kind; ↑ higher is better.", content
        )
    words = sentence_case(metric_words(group.metric))
    shared = key_label(shared_key(group.present))
    about = f"{words}{f', all with {shared}' if shared else ''}; {group.direction} is better."
    if drawn:
        about += (
            " A dot is a median, a thick line the middle half of the measurements, a thin one p5 to p95; "
            "where there are too few for these, each is drawn."
        )
    return Section(words, about, content, group.metric)


# --- tables of figures ---


def signed(value: float | None) -> str:
    """A percentage with a real minus sign."""
    return percent(value).replace("-", "−")


def pill(label: str, tone: str) -> str:
    """A small coloured word."""
    return f'<span class="pill {tone}">{escape(label)}</span>'


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
        kind = "key number" if is_number(value) else "key"
        shown = value_words(name, value, row.metric)
        cells.append(f'<th scope="row"{rows} class="{kind}">{escape(shown)}</th>')
    return "".join(cells)


def key_heads(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Headings of those entries, numbers to the right."""
    heads = []
    for name in names:
        are_numbers = all(is_number(row.key.get(name)) for row in rows)
        about = f' title="{escape(name, quote=True)}"'
        heads.append(
            f'<th class="key{" number" if are_numbers else ""}"{about}>{escape(key_words(name))}</th>'
        )
    return heads


def statistics_table(group: ReportGroup, shown: Sequence[Shown]) -> str:
    """Every row of a group with its figures, one line for each report that has it; '' where all are zero.

    A column that says nothing (percentiles that no row has samples enough for) is left out.
    """
    names, has_metrics = _key_columns(group.present), group.is_mixed
    zeros = [line for line in group.rows if _is_zero(line)]
    lines = [line for line in group.rows if line not in zeros]
    said = ", ".join(
        dict.fromkeys(
            group.label(index) if not has_metrics else metric_words(line_metric(line))
            for index, line in enumerate(group.rows)
            if line in zeros
        )
    )
    note = f'<p class="how">Zero throughout: {escape(said)}.</p>' if said else ""
    if not lines:
        return note
    summaries = [summarize(row) for line in lines for row in line if row is not None]
    known = [summary for summary in summaries if summary is not None]
    scale = None if has_metrics else scale_of(group.metric, group.unit, [each.median for each in known])
    figures = ["runs"]
    if any(each.num_samples > each.num_starts for each in known):
        figures.append("measurements")
    shown_percentiles = [q for q in PERCENTILES if any(q in each.percentiles for each in known)]
    figures += ["median" if q == 50 else f"p{q}" for q in shown_percentiles]
    if any(summary.num_samples > 1 for summary in known):
        figures += ["mean", "spread"]
    if any(summary.noise_percent is not None for summary in known):
        figures.append("noise floor")
    unit = f"<br><small>{escape(scale.unit)}</small>" if scale is not None and scale.unit else ""
    counts = ("runs", "measurements", "noise floor")
    head = [
        *key_heads(group.present, names),
        *(["<th>figure</th>"] if has_metrics else []),
        *(["<th>report</th>"] if len(shown) > 1 else []),
        *(f'<th class="number">{name}{"" if name in counts else unit}</th>' for name in figures),
    ]
    body = []
    for line in lines:
        present = [(number, row) for number, row in enumerate(line) if row is not None]
        for position, (number, row) in enumerate(present):
            key = key_cells(row, names, len(present)) if position == 0 else ""
            if has_metrics and position == 0:
                arrow = arrow_of(row.metric, row.direction)
                key += f'<td rowspan="{len(present)}">{_metric_name(row.metric)} {arrow}</td>'
            item = shown[number]
            report = f"<td>{swatch(item.number, item.label)}</td>" if len(shown) > 1 else ""
            kind = ' class="first"' if position == 0 else ""
            body.append(f"<tr{kind}>{key}{report}{_figure_cells(row, figures, scale)}</tr>")
    return html_table(head, body, "statistics") + note


def line_metric(line: Sequence[Row | None]) -> str:
    """The metric of a line, which has a row in some report."""
    return next(row.metric for row in line if row is not None)


def _is_zero(line: Sequence[Row | None]) -> bool:
    """Whether nothing happened in any report: a count or a time of zero, of which less is better."""
    return all(
        row is None or (row.direction == "lower" and bool(row.starts) and not any(row.samples))
        for row in line
    )


def _figure_cells(row: Row, figures: Sequence[str], scale: Scale | None) -> str:
    """Cells under those headings; in a scale of the row's own, with the unit, where the table has none."""
    summary = summarize(row)
    if summary is None:
        failed = f"{pill('failed', 'bad')} {escape(row.error or '')}"
        return f'<td colspan="{len(figures)}" class="error">{failed}</td>'
    own = scale or figure_scale(row.metric, row.unit, summary.median)

    def show(value: float) -> str:
        if row.unit in {"", "1"} and own.factor == 1.0 and value.is_integer() and abs(value) < 1e15:
            return f"{value:,.0f}"  # a count
        return own.format(value) if scale is None else own.number(value)

    noise = "–" if summary.noise_percent is None else "±" + percent(summary.noise_percent, signed=False)
    cells = {
        "runs": f"{summary.num_starts:,}",
        "measurements": f"{summary.num_samples:,}",
        **{f"p{q}": show(value) for q, value in summary.percentiles.items()},
        "median": show(summary.median),
        "mean": show(summary.mean),
        "spread": show(summary.spread) if summary.num_samples > 1 else "–",
        "noise floor": noise,
    }
    return "".join(f'<td class="number">{escape(cells.get(name, "–"))}</td>' for name in figures)


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
                f"{escape(key_label(lone.key))} {_metric_name(lone.metric)}{error}</td></tr>"
            )
    return html_table(head, body, "verdicts")


def _verdict_cells(row: RowDiff) -> str:
    verdict = pill(LABELS[row.verdict], TONES[row.verdict])
    starts = f'<td class="number">{len(row.baseline.starts)}, {len(row.test.starts)}</td>'
    if not row.changes:
        error = escape(row.test.error or row.baseline.error or "")
        return f'<td colspan="{len(PERCENTILES) + 1}" class="error">{error}</td>{starts}<td>{verdict}</td>'
    scale = figure_scale(row.baseline.metric, row.baseline.unit, row.changes[0].baseline or 0.0)
    cells = "".join(
        '<td class="number quiet-text">–</td>'
        if change.baseline is None or change.test is None
        else f'<td class="number"><span class="pair">{scale.number(change.baseline)} → '
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

Line = tuple[int, tuple[tuple[str, str], ...]]
"""The number of the report, and the key in words."""


def glance_tables(shown: Sequence[Shown]) -> tuple[str, str]:
    """A table for each kind of key with several metrics and lines, and how to read them; '' without any."""
    kinds: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for index, item in enumerate(shown):
        for row in item.report.rows:
            if not any(name in row.key for name in DETAILS):
                kind = tuple(sorted({name: True for name in row.key if name not in ABSENT}))
                kinds.setdefault(kind, []).append((index, row))
    best: set[tuple[int, Identity]] = set()
    tables = "".join(_glance_table(found, shown, best) for found in kinds.values())
    told = (
        "Green: better than every other row of the same setting beyond the noise."
        if best
        else "Nothing is green: these runs do not tell one row from the others."
    )
    return tables, told + " ↑ higher is better, ↓ lower is better."


def _glance_table(
    rows: list[tuple[int, Row]], shown: Sequence[Shown], found: set[tuple[int, Identity]]
) -> str:
    """One of them; adds the best to `found`."""
    metrics = {group_of(row): True for _, row in rows if row.error is not None or any(row.samples)}
    lines: dict[Line, dict[Group, Row]] = {}
    entries = sorted({name: True for _, row in rows for name in row.key})
    for index, row in rows:
        key = tuple((name, value_words(name, row.key.get(name), row.metric)) for name in entries)
        lines.setdefault((index, key), {})[group_of(row)] = row
    if len(metrics) < 2 or not 1 < len(lines) <= MAX_LINES:
        return ""
    firsts = [next(iter(cells.values())) for cells in lines.values()]
    names = _differing(firsts)
    best = best_cells(rows, [item.report for item in shown])
    found |= best
    least = {
        metric: usual_deviation(
            start_medians(row) for _, row in rows if group_of(row) == metric and row.starts
        )
        for metric in metrics
    }
    scales = {}
    for metric in metrics:
        found_rows = [row for _, row in rows if row.starts and group_of(row) == metric]
        scales[metric] = scale_of(*metric[:2], [percentile(row.samples, 50) for row in found_rows])
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
            _cell(cell, scales[metric], least[metric], cell is not None and (index, cell.identity) in best)
            for metric, cell in ((metric, cells.get(metric)) for metric in metrics)
        )
        is_chosen = any(name == "chosen" for name, _, _ in cells)
        kind = "first chosen" if is_chosen else "first"
        body.append(f'<tr class="{kind}">{key_cells(first, names)}{report}{figures}</tr>')
    return html_table(heads, body, "glance")


def _differing(rows: Sequence[Row]) -> list[str]:
    """Entries that differ."""
    names = {name: True for row in rows for name in row.key}
    return [name for name in names if any(row.key.get(name) != rows[0].key.get(name) for row in rows)]


def best_cells(rows: Sequence[tuple[int, Row]], reports: Sequence[Report]) -> set[tuple[int, Identity]]:
    """Those that win their contest by more than chance, against those that differ in the contender alone.

    A row comes with the number of its report. Timings of a real machine need more starts than what a seed
    decides.
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
        is_timed = (row.unit == "s" or row.unit.endswith("/s")) and not is_in_virtual_time(reports[index])
        lead = lead_of(
            {name: start_medians(rival) for name, (_, rival) in rivals.items()},
            row.direction,
            MIN_TIMED_STARTS if is_timed else MIN_SEEDS,
            {name: resolution_of(reports[index], rival) for name, (_, rival) in rivals.items()},
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


def _head(metric: Group, scale: Scale) -> str:
    name, _, direction = metric
    unit = f"{scale.unit} " if scale.unit else ""
    about = escape(unit) + arrow_of(name, direction)
    return f'<th class="number">{_metric_name(name)}<br><small>{about}</small></th>'


def _cell(row: Row | None, scale: Scale, least: float, is_best: bool) -> str:
    """The mean over the runs with its interval, or the median of a single one with its reach."""
    if row is None:
        return '<td class="number quiet-text">–</td>'
    if not row.starts:
        return f'<td class="number error" title="{escape(row.error or "", quote=True)}">failed</td>'
    if row.metric == "chosen":
        return '<td class="number">yes</td>'
    medians, more = start_medians(row), ""
    value = mean_of(medians)
    if len(medians) > 1:
        half = half_interval(medians, 0.0, least * abs(value))
        more = f"± {scale.number(half)}" if half else ""
    elif min(row.samples) < max(row.samples) and len(row.samples) <= FEW:
        more = f"{scale.number(min(row.samples))} to {scale.number(max(row.samples))}"
    shown = escape(scale.number(value))
    shown = f"<b class=best>{shown}</b>" if is_best else shown
    return f'<td class="number">{shown}{f"<br><small>{escape(more)}</small>" if more else ""}</td>'


# --- what is said around the figures ---


def headlines(shown: Sequence[Shown]) -> str:
    """What each benchmark found, in the sentences that it wrote; '' where none did."""
    items = [
        f"<li>{_of(item)}{escape(sentence)}</li>" for item in shown for sentence in headline(item.report)
    ]
    return f'<ul class="headline">{"".join(items)}</ul>' if items else ""


def conditions(shown: Sequence[Shown]) -> str:
    """On what each benchmark was run, in the sentences that it wrote; '' where none did."""
    items = []
    for item in shown:
        told = item.report.result.get("conditions", [])
        if told and isinstance(told, list):
            words = " ".join(text(line) for line in told)
            items.append(f'<p class="conditions"><b>On what:</b> {_of(item)}{escape(words)}</p>')
    return "".join(items)


def _of(item: Shown) -> str:
    """Whose sentence follows, where a page has several reports."""
    return f'<span class="of">{escape(item.label)}</span> ' if item.label else ""


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
        if warnings is None and not is_in_virtual_time(item.report):
            items += [prefix + reason for reason in busy(item.report)]
        items += [
            f"{prefix}{key_label(row.key)} {metric_words(row.metric)} failed: {row.error}".lstrip()
            for row in item.report.failed
        ]
    if not items:
        return ""
    is_busy = any(busy(item.report) for item in shown if not is_in_virtual_time(item.report))
    effect = (
        "Other programs ran on this machine: times may be longer and rates lower than on an idle one, and "
        "they vary more from run to run. Counts of bytes, messages and steps are not changed."
    )
    told = f'<p class="notices">{escape(effect)}</p>' if is_busy else ""
    if len(items) == 1:
        return (
            told[:-4] + f" ({escape(items[0])}.)</p>"
            if is_busy
            else f'<p class="notices">{escape(items[0])}</p>'
        )
    rest = "".join(f"<li>{escape(item)}</li>" for item in items)
    num_failed = sum(len(item.report.failed) for item in shown)
    failed = f", {num_failed} of them of figures that failed" if num_failed else ""
    return told + (
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
