"""Who waited for whom: rows of the metric `waited` with the keys `rank` and `waited_for`, as heat maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from shoal.report.figures import Contest, Figures, Shown, beside_one_another, titled
from shoal.report.schema import Row, Scalar, text
from shoal.report.statistics import mean_of
from shoal.report.units import scale_for

METRIC, WAITING, AWAITED = "waited", "rank", "waited_for"


def is_wait(row: Row) -> bool:
    """Whether a row says how long one waited for another."""
    return row.metric == METRIC and {WAITING, AWAITED} <= row.key.keys()


def wait_plots(shown: Sequence[Shown], figures: Figures) -> str:
    """A heat map for each strategy, setting and report, all in one scale; '' where no waits are known."""
    rows = [(item, row) for item in shown for row in item.report.rows if is_wait(row) and row.starts]
    if not rows:
        return ""
    contest = Contest((row.key for _, row in rows), aside=(WAITING, AWAITED))
    maps: dict[str, list[Row]] = {}
    for item, row in rows:
        names = (item.label, contest.contender(row.key), contest.setting(row.key))
        maps.setdefault(" · ".join(name for name in names if name), []).append(row)
    longest = max(mean_of(row.samples) for _, row in rows)
    parts = [titled(name, _map(found, longest, figures)) for name, found in maps.items()]
    return beside_one_another(*parts, kind="narrow")


def _map(rows: list[Row], longest: float, figures: Figures) -> str:
    scale = scale_for(rows[0].unit, longest)
    workers = sorted(
        {value: True for row in rows for value in (row.key[WAITING], row.key[AWAITED])}, key=_order
    )
    cells = {(row.key[WAITING], row.key[AWAITED]): mean_of(row.samples) for row in rows}
    data: dict[str, Any] = {
        "names": [text(worker) for worker in workers],
        "values": [
            [
                None if (waiting, awaited) not in cells else cells[waiting, awaited] / scale.factor
                for awaited in workers
            ]
            for waiting in workers
        ],
        "unit": scale.unit,
        "longest": longest / scale.factor,
    }
    return figures.place("waits", **data) + f'<p class="how">{_said(cells, workers, scale.format)}</p>'


def _order(worker: Scalar) -> tuple[bool, float, str]:
    is_number = isinstance(worker, int | float)
    return not is_number, float(worker) if is_number else 0.0, text(worker)


def _said(
    cells: dict[tuple[Scalar, Scalar], float], workers: list[Scalar], shown: Callable[[float], str]
) -> str:
    """The map in one sentence."""
    by_awaited = {
        worker: sum(value for (waiting, awaited), value in cells.items() if awaited == worker != waiting)
        for worker in workers
    }
    total = sum(by_awaited.values())
    if total <= 0:
        return "Nobody waited."
    worker = max(by_awaited, key=lambda name: by_awaited[name])
    name = text(worker) if isinstance(worker, str) else f"rank {worker}"
    share = 100 * by_awaited[worker] / total
    return escape(f"{shown(total)} of waiting in all, {share:.0f}% for {name} ({shown(by_awaited[worker])}).")
