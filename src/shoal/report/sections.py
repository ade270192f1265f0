"""The tables of the HTML page, as text in which every value from a report is escaped."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from shoal.report.charts import Group
from shoal.report.diff import Diff, RowDiff, busy
from shoal.report.judge import LABELS, Verdict
from shoal.report.schema import Report, Row, Scalar, flatten, text
from shoal.report.statistics import PERCENTILES, summarize
from shoal.report.units import percent, scale_for
from shoal.report.views import interval_text, shared_key, verdict_text

TONES = {
    Verdict.BETTER: "good",
    Verdict.FIXED: "good",
    Verdict.WORSE: "bad",
    Verdict.FAILED: "bad",
    Verdict.FAILED_BOTH: "bad",
    Verdict.TOO_FEW: "unsure",
    Verdict.NO_DIFFERENCE: "quiet",
}


def signed(value: float | None) -> str:
    """A percentage with a real minus sign."""
    return percent(value).replace("-", "−")


def pill(label: str, tone: str) -> str:
    """A small coloured word."""
    return f'<span class="pill {tone}">{escape(label)}</span>'


def swatch(number: int, label: str) -> str:
    """A report's colour and name."""
    return f'<span class="swatch s{number % 8}">{escape(label)}</span>'


def _table(head: Iterable[str], body: Iterable[str], kind: str = "") -> str:
    rows = "\n".join(body)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{"".join(head)}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _key_columns(rows: Sequence[Row]) -> list[str]:
    """Names of the key entries that tell the rows apart, in the order of the benchmark."""
    shared = shared_key(rows)
    names = {name: True for row in rows for name in row.key if name not in shared}
    return list(names)


def _key_cells(row: Row, names: Sequence[str], span: int = 1) -> str:
    rows = f' rowspan="{span}"' if span > 1 else ""
    cells = []
    for name in names:
        value: Scalar | None = row.key.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        shown = "–" if value is None else f"{value:,}" if is_number else text(value)
        cells.append(
            f'<th scope="row"{rows} class="key{" number" if is_number else ""}">{escape(shown)}</th>'
        )
    return "".join(cells)


def _key_heads(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    heads = []
    for name in names:
        values = [row.key.get(name) for row in rows]
        is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        heads.append(f'<th class="key{" number" if is_number else ""}">{escape(name)}</th>')
    return heads


def statistics_table(group: Group, labels: Sequence[str]) -> str:
    """Every row of a group with its figures, one line for each report that has it."""
    names = _key_columns(group.present)
    figures = ("starts", "samples", *(f"p{q}" for q in PERCENTILES), "mean", "spread", "noise floor")
    head = [
        *_key_heads(group.present, names),
        *(["<th>report</th>"] if len(labels) > 1 else []),
        *(f'<th class="number">{name}</th>' for name in figures),
    ]
    body = []
    for line in group.rows:
        present = [(number, row) for number, row in enumerate(line) if row is not None]
        for position, (number, row) in enumerate(present):
            key = _key_cells(row, names, len(present)) if position == 0 else ""
            report = f"<td>{swatch(number, labels[number])}</td>" if len(labels) > 1 else ""
            kind = ' class="first"' if position == 0 else ""
            body.append(f"<tr{kind}>{key}{report}{_figures(row, len(figures))}</tr>")
    return _table(head, body, "statistics")


def _figures(row: Row, count: int) -> str:
    summary = summarize(row)
    if summary is None:
        return f'<td colspan="{count}" class="error">{pill("failed", "bad")} {escape(row.error or "")}</td>'
    scale = scale_for(row.unit, summary.p50)
    values = (summary.p50, summary.p75, summary.p90, summary.p95, summary.mean, summary.spread)
    noise = "–" if summary.noise_percent is None else "±" + percent(summary.noise_percent, signed=False)
    cells = [f"{summary.num_starts:,}", f"{summary.num_samples:,}", *map(scale.format, values), noise]
    return "".join(f'<td class="number">{escape(cell)}</td>' for cell in cells)


def verdicts_table(diff: Diff) -> str:
    """Every pair of rows: percentiles of both sides, the change of the median and the verdict."""
    rows = [row.baseline for row in diff.rows]
    names = _key_columns(rows)
    has_metrics = len({row.metric: True for row in rows}) > 1 or not names
    head = [
        *_key_heads(rows, names),
        *(["<th>metric</th>"] if has_metrics else []),
        *(f'<th class="number">p{q}</th>' for q in PERCENTILES),
        '<th class="number">median change</th>',
        '<th class="number">starts</th>',
        "<th>verdict</th>",
    ]
    body = []
    for row in diff.rows:
        metric = f"<td>{escape(row.baseline.metric)}</td>" if has_metrics else ""
        body.append(f'<tr class="first">{_key_cells(row.baseline, names)}{metric}{_verdict_cells(row)}</tr>')
    for side, only in (("baseline", diff.only_baseline), ("test", diff.only_test)):
        for lone in only:
            error = f": failed, {escape(lone.error)}" if lone.error is not None else ""
            body.append(
                f'<tr class="first"><td colspan="{len(head)}">{pill(f"only in {side}", "unsure")} '
                f"{escape(lone.label)} {escape(lone.metric)}{error}</td></tr>"
            )
    return _table(head, body, "verdicts")


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
    if row.verdict is Verdict.TOO_FEW:
        detail = f'<br><span class="pair">{escape(verdict_text(row).partition(", ")[2])}</span>'
    return f'{cells}{change}<span class="pair">{interval}</span></td>{starts}<td>{verdict}{detail}</td>'


def verdict_counts(diff: Diff) -> str:
    """One pill for each verdict that occurs."""
    counts = [
        pill(f"{diff.count(verdict)} {LABELS[verdict]}", TONES[verdict])
        for verdict in Verdict
        if diff.count(verdict)
    ]
    lone = len(diff.only_baseline) + len(diff.only_test)
    return " ".join([*counts, *([pill(f"{lone} in one report only", "unsure")] if lone else [])])


def notices(reports: Sequence[Report], labels: Sequence[str], warnings: Sequence[str] | None = None) -> str:
    """What a reader must know before the figures: warnings, and rows that failed."""
    items = list(warnings or [])
    for label, report in zip(labels, reports, strict=True):
        prefix = f"{label}: " if len(reports) > 1 else ""
        if warnings is None:
            items += [prefix + reason for reason in busy(report)]
        items += [f"{prefix}{row.label} {row.metric} failed: {row.error}" for row in report.failed]
    if not items:
        return ""
    return '<ul class="notices">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def reports_table(reports: Sequence[Report], labels: Sequence[str], sources: Sequence[str]) -> str:
    """Which reports the page shows."""
    head = [
        f"<th>{name}</th>"
        for name in (
            *(["report"] if len(reports) > 1 else []),
            "file",
            "benchmark",
            "created",
            "code",
            "machine",
        )
    ]
    body = []
    for number, (report, label, source) in enumerate(zip(reports, labels, sources, strict=True)):
        name = f"<td>{swatch(number, label)}</td>" if len(reports) > 1 else ""
        code = str(report.code) if report.code.version else "–"
        cells = (source, report.benchmark, report.created or "–", code, _machine(report.environment))
        body.append(f"<tr>{name}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return _table(head, body, "reports")


def _machine(environment: dict[str, Any]) -> str:
    machine, cores, device = (environment.get(name) for name in ("machine", "cores", "device"))
    parts = [
        text(machine) if machine else "",
        f"{cores} cores" if cores else "",
        text(device) if device else "",
    ]
    return ", ".join(part for part in parts if part) or "–"


def settings_table(name: str, values: Sequence[dict[str, Any]], labels: Sequence[str]) -> str:
    """Configurations or environments side by side; lines that differ are marked."""
    sides = [flatten(value) for value in values]
    names = sorted({entry: True for side in sides for entry in side})
    if not names:
        return ""
    heads = [f"<th>{name}</th>"]
    heads += [
        f"<th>{swatch(number, label)}</th>" if len(labels) > 1 else "<th></th>"
        for number, label in enumerate(labels)
    ]
    body = []
    for entry in names:
        shown = [text(side[entry]) if entry in side else "–" for side in sides]
        kind = ' class="differs"' if any(value != shown[0] for value in shown) else ""
        cells = "".join(
            f"<td>{_value(side.get(entry), value)}</td>" for side, value in zip(sides, shown, strict=True)
        )
        body.append(f'<tr{kind}><th scope="row">{escape(entry)}</th>{cells}</tr>')
    return _table(heads, body, "settings")


def _value(value: Any, shown: str) -> str:
    """A list of dictionaries as a table of its own, anything else as it is written."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return escape(shown)
    names = list({name: True for item in value for name in item})
    heads = [f"<th>{escape(str(name))}</th>" for name in names]
    lines = ("".join(f"<td>{escape(text(item.get(name)))}</td>" for name in names) for item in value)
    return _table(heads, [f"<tr>{line}</tr>" for line in lines])


def commands(reports: Sequence[Report], labels: Sequence[str]) -> str:
    """The command line of each report."""
    blocks = []
    for number, (report, label) in enumerate(zip(reports, labels, strict=True)):
        if report.command:
            name = swatch(number, label) if len(reports) > 1 else ""
            blocks.append(f"{name}<pre>{escape(shlex.join(report.command))}</pre>")
    return "".join(blocks)
