"""What the page says around the figures: headlines, warnings, which reports these are, how they were made."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from shoal.report.diff import busy
from shoal.report.figures import Shown
from shoal.report.schema import flatten, text
from shoal.report.sections import html_table, swatch
from shoal.report.views import headline


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
    return '<ul class="notices">' + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def reports_table(shown: Sequence[Shown]) -> str:
    """Which reports the page shows."""
    head = [
        f"<th>{name}</th>"
        for name in (
            *(["report"] if len(shown) > 1 else []),
            "file",
            "benchmark",
            "created",
            "code",
            "machine",
        )
    ]
    body = []
    for item in shown:
        report = item.report
        name = f"<td>{swatch(item.number, item.label)}</td>" if len(shown) > 1 else ""
        code = str(report.code) if report.code.version else "–"
        cells = (item.source, report.benchmark, report.created or "–", code, _machine(report.environment))
        body.append(f"<tr>{name}{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    return html_table(head, body, "reports")


def _machine(environment: dict[str, Any]) -> str:
    machine, cores, device = (environment.get(name) for name in ("machine", "cores", "device"))
    parts = [
        text(machine) if machine else "",
        f"{cores} cores" if cores else "",
        text(device) if device else "",
    ]
    return ", ".join(part for part in parts if part) or "–"


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
