"""'At a glance': the metrics that share their keys, in one table with the best of each column marked."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from shoal.report.figures import CONTENDERS, Shown
from shoal.report.schema import Identity, Row, Scalar
from shoal.report.sections import html_table, key_cells, key_heads, swatch
from shoal.report.statistics import noise_floor, percentile
from shoal.report.units import Scale, scale_for

MAX_LINES = 40
DETAILS = ("rank", "waited_for", "behind", "start")
"""Entries of keys that belong to a closer look."""
CEILING = "none"
"""The strategy without any sharing, which nobody can beat and nobody has to."""

Line = tuple[int, tuple[tuple[str, bool, Scalar], ...]]
"""The number of the report, and the key."""
Best = dict[tuple[int, Identity], str]
"""By the number of the report and the figure's identity: 'best', or 'near' where noise may have decided."""


def glance_tables(shown: Sequence[Shown]) -> str:
    """A table for each kind of key with several metrics and lines; '' where there is none."""
    kinds: dict[tuple[str, ...], list[tuple[int, Row]]] = {}
    for index, item in enumerate(shown):
        for row in item.report.rows:
            if not any(name in row.key for name in DETAILS):
                kinds.setdefault(tuple(sorted(row.key)), []).append((index, row))
    tables = [_table(found, shown) for found in kinds.values()]
    return "".join(table for table in tables if table)


def _table(rows: list[tuple[int, Row]], shown: Sequence[Shown]) -> str:
    metrics = {(row.metric, row.unit, row.direction): True for _, row in rows}
    lines: dict[Line, dict[tuple[str, str, str], Row]] = {}
    for index, row in rows:
        cells = lines.setdefault((index, row.identity[1]), {})
        cells[row.metric, row.unit, row.direction] = row
    if len(metrics) < 2 or not 1 < len(lines) <= MAX_LINES:
        return ""
    firsts = [next(iter(cells.values())) for cells in lines.values()]
    names = _names(firsts)
    best = best_cells(rows)
    scales = {metric: _scale(metric, [row for _, row in rows]) for metric in metrics}
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
        figures = "".join(_cell(cells.get(metric), scales[metric], index, best) for metric in metrics)
        body.append(f'<tr class="first">{key_cells(first, names)}{report}{figures}</tr>')
    note = (
        '<p class="how">Medians. <b class=best>Best</b> among those that differ in nothing else; '
        "<b class=near>not told apart</b>: nearer to it than their noise floor.</p>"
        if best
        else ""
    )
    return html_table(heads, body, "glance") + note


def _names(rows: Sequence[Row]) -> list[str]:
    """Entries that differ."""
    names = {name: True for row in rows for name in row.key}
    return [name for name in names if any(row.key.get(name) != rows[0].key.get(name) for row in rows)]


def best_cells(rows: Sequence[tuple[int, Row]]) -> Best:
    """Those that win their contest, each against those that differ in the contender alone."""
    contests: dict[object, list[tuple[int, Row]]] = {}
    for index, row in rows:
        contender = _contender(row, rows)
        if contender is not None and row.starts:
            setting = tuple(entry for entry in row.identity[1] if entry[0] not in contender)
            contests.setdefault((index, row.metric, setting), []).append((index, row))
    best: Best = {}
    for found in contests.values():
        rivals = [entry for entry in found if not _is_ceiling(entry[1])]
        if len(rivals) < 2:
            continue
        medians = [percentile(row.samples, 50) for _, row in rivals]
        winner = max(medians) if rivals[0][1].direction == "higher" else min(medians)
        if min(medians) == max(medians):
            continue
        for (index, row), median in zip(rivals, medians, strict=True):
            if median == winner:
                best[index, row.identity] = "best"
            elif abs(median - winner) <= abs(winner) * (noise_floor(row) or 0.0) / 100:
                best[index, row.identity] = "near"
    return best


def _is_ceiling(row: Row) -> bool:
    """Whether it is of workers that share nothing, and so outside of the contest."""
    return any(row.key.get(name) == CEILING for name in CONTENDERS)


def _contender(row: Row, rows: Sequence[tuple[int, Row]]) -> tuple[str, ...] | None:
    """The entries of its key by which it competes: known names, or the one that differs, if it is text."""
    known = tuple(name for name in CONTENDERS if name in row.key)
    if known:
        return known
    names = _names([other for _, other in rows])
    if len(names) == 1 and all(isinstance(other.key.get(names[0]), str) for _, other in rows):
        return tuple(names)
    return None


def _scale(metric: tuple[str, str, str], rows: Sequence[Row]) -> Scale:
    medians = [
        abs(percentile(row.samples, 50))
        for row in rows
        if row.starts and (row.metric, row.unit, row.direction) == metric
    ]
    return scale_for(metric[1], percentile(medians, 50) if medians else 1.0)


def _head(metric: tuple[str, str, str], scale: Scale) -> str:
    name, _, direction = metric
    arrow = "↑" if direction == "higher" else "↓"
    unit = f"{scale.unit} " if scale.unit else ""
    return f'<th class="number">{escape(name)}<br><small>{escape(unit)}{arrow}</small></th>'


def _cell(row: Row | None, scale: Scale, index: int, best: Best) -> str:
    if row is None:
        return '<td class="number quiet-text">–</td>'
    if not row.starts:
        return f'<td class="number error" title="{escape(row.error or "", quote=True)}">failed</td>'
    place = best.get((index, row.identity))
    shown = escape(scale.number(percentile(row.samples, 50)))
    return f'<td class="number">{f"<b class={place}>{shown}</b>" if place else shown}</td>'
