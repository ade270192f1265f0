"""The tables of figures of the HTML page, as text in which every value from a report is escaped.

What was run, where and how it ended is `context`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from shoal.report.charts import ReportGroup
from shoal.report.diff import Diff, RowDiff
from shoal.report.figures import NUM_COLOURS, Shown
from shoal.report.judge import LABELS, Verdict
from shoal.report.schema import Row, Scalar, text
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
    names = {name: True for row in rows for name in row.key if name not in shared}
    return list(names)


def key_cells(row: Row, names: Sequence[str], span: int = 1) -> str:
    """The entries of a row's key under `key_heads`."""
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


def key_heads(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Headings of those entries, numbers to the right."""
    heads = []
    for name in names:
        values = [row.key.get(name) for row in rows]
        is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        heads.append(f'<th class="key{" number" if is_number else ""}">{escape(name)}</th>')
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
    for line in group.rows:
        present = [(number, row) for number, row in enumerate(line) if row is not None]
        for position, (number, row) in enumerate(present):
            key = key_cells(row, names, len(present)) if position == 0 else ""
            if has_metrics and position == 0:
                arrow = "↑" if row.direction == "higher" else "↓"
                key += f'<td rowspan="{len(present)}">{escape(row.metric)} {arrow}</td>'
            item = shown[number]
            report = f"<td>{swatch(item.number, item.label)}</td>" if len(shown) > 1 else ""
            kind = ' class="first"' if position == 0 else ""
            body.append(f"<tr{kind}>{key}{report}{_figures(row, len(figures))}</tr>")
    return html_table(head, body, "statistics")


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
        *key_heads(rows, names),
        *(["<th>metric</th>"] if has_metrics else []),
        *(f'<th class="number">p{q}</th>' for q in PERCENTILES),
        '<th class="number">median change</th>',
        '<th class="number">starts</th>',
        "<th>verdict</th>",
    ]
    body = []
    for row in diff.rows:
        metric = f"<td>{escape(row.baseline.metric)}</td>" if has_metrics else ""
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
