"""The peers of a swarm, looked at again and again by a visitor that joins nobody."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal import __version__
from shoal.cli.output import counted
from shoal.cli.status import peers_document, peers_notes, peers_result, peers_table
from shoal.cli.top_metrics import swarm_metrics
from shoal.cli.top_view import Shot, View
from shoal.core.ids import Address
from shoal.report.statistics import percentiles
from shoal.report.units import scale_for

if TYPE_CHECKING:
    from shoal.dht.blocking import Swarm
    from shoal.dht.crawl import Crawl


class SwarmSource:
    """A swarm, from these addresses on."""

    def __init__(self, swarm: Swarm, starts: Sequence[Address], limit: int) -> None:
        self._swarm = swarm
        self._starts = list(starts)
        self._limit = limit

    def look(self) -> Shot:
        """Ask everybody; PeerUnreachable when nobody answers."""
        from shoal.dht.crawl import crawl

        seen = self._swarm.run(crawl(self._swarm.dht, self._starts, limit=self._limit))
        return shot_of(seen, self._starts)


def shot_of(seen: Crawl, starts: list[Address]) -> Shot:
    """What is shown of it; rows stay where they are from one look to the next."""
    # the round trips of two looks differ, and rows that change places are hard to follow
    by_address = sorted(seen.peers, key=lambda one: str(one.peer.address))
    table = peers_table(seen)
    order = {one.peer.id.short: place for place, one in enumerate(by_address) if one.peer.id is not None}
    rows = sorted(table.rows, key=lambda row: order[row[0]])
    abouts = [one.about for one in seen.peers if one.about is not None]
    num_records, record_bytes = sum(it.num_records for it in abouts), sum(it.record_bytes for it in abouts)
    (median_s,) = percentiles((one.round_trip_s for one in seen.peers), (50,))
    figures = (
        ("peers", f"{len(seen.peers):,}"),
        ("silent", f"{len(seen.silent):,}"),
        ("records", f"{num_records:,}"),
        ("size", scale_for("B", record_bytes).format(record_bytes)),
        ("round trip", scale_for("s", median_s).format(median_s)),
    )
    view = View(
        id=str(starts[0]),
        title=f"Swarm of {counted(len(seen.peers), 'peer')}",
        subtitle=f"from {', '.join(map(str, starts))}",
        figures=figures,
        table=dataclasses.replace(table, rows=rows),
        notes=tuple(peers_notes(seen, starts))[1:],
        series={"peers": float(len(seen.peers)), "records": float(num_records)},
    )
    document = {"shoal": __version__, **peers_document(seen)}
    return Shot([view], view, document, swarm_metrics(seen), peers_result(seen))
