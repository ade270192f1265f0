"""One self-contained HTML page of reports or of a comparison; it opens from disk and never asks the network.

The page's policy forbids any request. Plots are drawn by plotly.js, which the extra `report` brings along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import import_module, resources
from pathlib import Path

import msgspec

from shoal.core.errors import ReportError, UsageError
from shoal.core.untrusted import visible, visible_line
from shoal.report.chapters import Section, chapter, environments, folded, how_it_ran
from shoal.report.charts import forest_data
from shoal.report.context import facts, headlines, notices, reports_table
from shoal.report.diff import Diff
from shoal.report.figures import Figures, Shown
from shoal.report.schema import Report
from shoal.report.sections import verdict_counts, verdicts_table
from shoal.report.storage import write_atomically

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
SCRIPTS = ("drawing.js", "rows.js", "lines.js", "page.js")
HOW_TO_READ = (
    "Percentiles interpolate linearly and are numeric: p95 of a rate is its high end. Spread is the standard "
    "deviation of all samples. The noise floor is how far equal measurements lie apart: nine of ten pairs of "
    "process starts have medians nearer to each other than that (with one start, two halves of its samples)."
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
    figures = Figures()
    parts = [
        Part(name if len(chapters) > 1 else "", [*chapter(_named(items), figures), how_it_ran(_named(items))])
        for name, items in chapters.items()
    ]
    if len(parts) > 1:
        parts.append(Part("", [environments(shown)]))
    else:
        parts[0].sections.append(environments(shown))
    about = facts(shown[0])
    if len(shown) > 1:
        about = folded("Reports on this page", reports_table(shown), is_open=len(chapters) == 1)
    head = [headlines(shown), about, contents(parts), notices(shown)]
    return _write(path, ", ".join(chapters), head, [body(parts), _how(HOW_TO_READ)], figures)


def write_diff(diff: Diff, path: Path | str, sources: Sequence[str]) -> Path:
    """Write a page of a comparison; `sources` are the file names of baseline and test."""
    shown = [
        Shown(diff.baseline, "baseline", 0, sources[0]),
        Shown(diff.test, "test", 1, sources[1]),
    ]
    figures = Figures()
    forest = figures.place("forest", rows=forest_data(diff))
    changes = Section("Change of the median", forest + verdicts_table(diff) + _how(HOW_TO_JUDGE))
    sections = [changes, *chapter(shown, figures, is_diff=True), how_it_ran(shown), environments(shown)]
    parts = [Part("", sections)]
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


def _how(words: str) -> str:
    return f'<p class="how">{escape(words)}</p>'


@dataclass(frozen=True)
class Part:
    """Sections, under the name of their benchmark where a page has several."""

    name: str
    sections: list[Section]


def _filled(parts: Sequence[Part]) -> Iterator[tuple[int, Part, list[tuple[str, Section]]]]:
    """The parts with their sections that say something, each with its place on the page."""
    for number, part in enumerate(parts):
        found = [(f"p{number}-{index}", section) for index, section in enumerate(part.sections)]
        yield number, part, [(place, section) for place, section in found if section.content]


def contents(parts: Sequence[Part]) -> str:
    """Where everything is on the page; '' for a short one."""
    lines = []
    count = 0
    for number, part, found in _filled(parts):
        links = [f'<a href="#{place}">{escape(section.name)}</a>' for place, section in found]
        count += len(links)
        if part.name:
            links.insert(0, f'<a href="#p{number}"><b>{escape(part.name)}</b></a>')
        if links:
            lines.append(f"<li>{' '.join(links)}</li>")
    return f'<nav aria-label="Contents"><ul>{"".join(lines)}</ul></nav>' if count > 3 else ""


def body(parts: Sequence[Part]) -> str:
    """All sections, in order."""
    written = []
    for number, part, found in _filled(parts):
        level = 3 if part.name else 2
        if part.name:
            written.append(f'<h2 class="chapter" id="p{number}">{escape(part.name)}</h2>')
        for place, section in found:
            about = f" <small>{escape(section.about)}</small>" if section.about else ""
            written.append(
                f'<section id="{place}"><h{level}>{escape(section.name)}{about}</h{level}>'
                f"{section.content}</section>"
            )
    return "\n".join(written)


def _write(
    path: Path | str, title: str, head: Sequence[str], content: Sequence[str], figures: Figures
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
    try:
        offline = import_module("plotly.offline")
    except ImportError as error:
        raise ReportError(
            "the HTML page needs plotly, which is not installed",
            next_step="pip install 'shoal[report]'",
        ) from error
    source: str = offline.get_plotlyjs()
    return source.replace("</script", "<\\/script")
