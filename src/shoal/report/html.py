"""One self-contained HTML page of reports or of a comparison; it opens from disk and never asks the network.

The page's policy forbids any request. Plots are drawn by plotly.js, which the extra `report` brings along.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import ReportError, UsageError
from shoal.report import sections
from shoal.report.charts import Group, forest_data, group_data, group_reports
from shoal.report.diff import Diff
from shoal.report.schema import Report
from shoal.report.storage import write_atomically

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
HOW_TO_READ = (
    "Percentiles interpolate linearly and are numeric: p95 of a rate is its high end. Spread is the standard "
    "deviation of all samples. The noise floor is how far equal measurements lie apart: nine of ten pairs of "
    "process starts have medians nearer to each other than that (with one start, two halves of its samples)."
)
HOW_TO_JUDGE = (
    "Negative is worse. A row is judged on the medians of its process starts: Welch's test on their "
    "logarithms with Holm's correction, so that the chance to call any equal pair different is 1% over all "
    "rows together. The interval excludes zero exactly when the row is called different. Other percentiles "
    "are not tested."
)


def write_reports(reports: Sequence[Report], path: Path | str, sources: Sequence[str]) -> Path:
    """Write a page of one report, or of several side by side; `sources` are their file names."""
    if not reports:
        raise UsageError("no reports to show", next_step="shoal report FILE -o out.html")
    labels = [""] if len(reports) == 1 else [_letter(number) for number in range(len(reports))]
    benchmarks = list({report.benchmark: True for report in reports})
    body = [
        sections.notices(reports, labels),
        *_groups(reports, labels),
        f'<p class="how">{escape(HOW_TO_READ)}</p>',
        *_context(reports, labels),
    ]
    head = sections.reports_table(reports, labels, sources)
    return _write(path, ", ".join(benchmarks), head, body, _data(reports, labels))


def write_diff(diff: Diff, path: Path | str, sources: Sequence[str]) -> Path:
    """Write a page of a comparison; `sources` are the file names of baseline and test."""
    reports, labels = (diff.baseline, diff.test), ("baseline", "test")
    body = [
        f'<p class="counts">{sections.verdict_counts(diff)}</p>',
        sections.notices(reports, labels, diff.warnings),
        "<section><h2>Change of the median</h2>",
        '<div class="plot" id="forest"></div>',
        sections.verdicts_table(diff),
        f'<p class="how">{escape(HOW_TO_JUDGE)}</p></section>',
        *_groups(reports, labels),
        f'<p class="how">{escape(HOW_TO_READ)}</p>',
        *_context(reports, labels),
    ]
    data = _data(reports, labels) | {"forest": forest_data(diff)}
    head = sections.reports_table(reports, labels, sources)
    return _write(path, f"{diff.baseline.benchmark}: baseline and test", head, body, data)


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else f"R{number + 1}"


def _data(reports: Sequence[Report], labels: Sequence[str]) -> dict[str, Any]:
    return {"labels": list(labels), "groups": [group_data(group) for group in group_reports(reports)]}


def _groups(reports: Sequence[Report], labels: Sequence[str]) -> list[str]:
    groups = group_reports(reports)
    has_benchmarks = len({group.benchmark: True for group in groups}) > 1
    return [_group(group, number, labels, has_benchmarks) for number, group in enumerate(groups)]


def _group(group: Group, number: int, labels: Sequence[str], has_benchmarks: bool) -> str:
    metric = f"{group.benchmark} · {group.metric}" if has_benchmarks else group.metric
    unit = f"{group.unit}, " if group.unit else ""
    where = group.title.partition("better)")[2].strip()
    options = "".join(
        f'<option value="{index}">{escape(row.label or row.metric)}</option>'
        for index, row in enumerate(group.present)
    )
    figures = ""
    if any(row is not None and row.starts for line in group.rows for row in line):
        figures = (
            f'<div class="plot" id="overview-{number}"></div>'
            f"<details open><summary>Samples by process start</summary>"
            f'<label>Row <select id="pick-{number}">{options}</select></label>'
            f'<div class="plot" id="spread-{number}"></div></details>'
        )
    return (
        f"<section><h2>{escape(metric)} <small>{escape(unit)}{escape(group.direction)} is better"
        f"{' · ' + escape(where) if where else ''}</small></h2>"
        f"{sections.statistics_table(group, labels)}{figures}</section>"
    )


def _context(reports: Sequence[Report], labels: Sequence[str]) -> list[str]:
    environments = [report.environment for report in reports]
    configs = [report.config | ({"seeds": report.seeds} if report.seeds else {}) for report in reports]
    parts = [
        ("Environment", sections.settings_table("environment", environments, labels)),
        ("Configuration", sections.settings_table("config", configs, labels)),
        ("Command", sections.commands(reports, labels)),
        ("Result", sections.settings_table("result", [report.result for report in reports], labels)),
    ]
    return [f"<section><h2>{name}</h2>{content}</section>" for name, content in parts if content]


def _write(path: Path | str, title: str, head: str, body: Sequence[str], data: dict[str, Any]) -> Path:
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    content = "\n".join(body)
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
{head}
</header>
<main>
<noscript><p class="notices">The plots need JavaScript; the tables do not.</p></noscript>
{content}
</main>
<script type="application/json" id="shoal-data">{encoded}</script>
<script>{_plotly()}</script>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""
    return write_atomically(path, page.encode())


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
