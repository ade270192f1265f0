"""`shoal status`: who is in a swarm, what each peer holds, and how far away it is.

0 the swarm was looked at, 1 nobody answered.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from shoal import __version__
from shoal.cli.flags import with_flags
from shoal.cli.members import IdentityFile, SecretFile, member_of, passing_identity
from shoal.cli.output import JsonFile, text_stream, write_json
from shoal.cli.top_view import Shot, View, swarm_metrics
from shoal.core.ids import Address
from shoal.core.run_options import flag
from shoal.report.statistics import known_percentiles, percentiles
from shoal.report.tables import WIDTH, Column, Table, show, tell_result, wrap
from shoal.report.units import counted, digits, scale_for

if TYPE_CHECKING:
    from shoal.core.ids import Peer
    from shoal.dht.blocking import Swarm
    from shoal.dht.crawl import Crawl, Visited
    from shoal.experts.status import HostStatus, SeenExpert


_MAX_ROWS = 100  # of what is printed; JSON has them all
_MAX_NAMED = 5
_MAX_VERSION = 20  # characters of what a peer says
_MAX_NAME = 40
_CLOCK_GAP_S = 3.0


@with_flags
def status(
    join: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT",
            help="A peer of the swarm; may be given several times, which also tells whether it is one swarm.",
            show_default=False,
        ),
    ],
    secret_file: SecretFile = None,
    identity_file: IdentityFile = None,
    limit: Annotated[
        int, flag("Ask at most so many peers, and estimate how many there are.", ge=1, metavar="N")
    ] = 1000,
    json_file: JsonFile = None,
) -> None:
    """Show who is in a swarm, and what each peer holds.

    Every peer that listens, with its records, round-trip time, uptime and version; and every expert that they
    serve, with its class, server, replicas, load, queue and samples/s. It only asks, and leaves nothing
    behind. Peers that only dial out are not seen.
    """
    from shoal.bench.frame import show_progress
    from shoal.dht.blocking import Swarm
    from shoal.dht.crawl import crawl
    from shoal.dht.node import DHT
    from shoal.experts.status import look_at_experts

    starts = [Address.parse(text) for text in join]
    identity = passing_identity(identity_file)
    visitor = DHT(listen=None, membership=member_of(identity, secret_file).membership, identity=identity)
    with Swarm(visitor) as swarm, show_progress(f"status --join {join[0]}") as tell:
        seen = swarm.run(crawl(visitor, starts, limit=limit, tell=tell))
        tell("experts")
        experts = swarm.run(look_at_experts(visitor, [each.peer for each in seen.peers]))
    out = text_stream(json_file)
    notes = [line for note in peers_notes(seen, starts) for line in wrap(note, WIDTH)]
    show([peers_table(seen), *experts_tables(experts), *notes], out)
    result = {**peers_result(seen), "num_experts": len({each.uid for each in experts})}
    document = {**peers_document(seen), "experts": msgspec.to_builtins(experts)}
    write_json({"shoal": __version__, **document, "result": result}, json_file)
    tell_result(result, out)


def peers_table(seen: Crawl) -> Table:
    """A row for each peer, the nearest first."""
    from shoal.doctor.joining import duration

    numbers = map(Column, ("records", "size", "knows", "round trip", "up"))
    table = Table(
        "", (Column("peer", "left"), Column("address", "left"), *numbers, Column("version", "left"))
    )
    for each in sorted(seen.peers, key=lambda each: each.round_trip_s)[:_MAX_ROWS]:
        peer, about = each.peer, each.about
        assert peer.id is not None
        assert about is not None
        table.rows.append(
            (
                peer.id.short,
                str(peer.address),
                f"{about.num_records:,}",
                _size(about.record_bytes),
                f"{about.num_contacts:,}",
                duration(each.round_trip_s),
                duration(about.uptime_s),
                about.software[:_MAX_VERSION],
            )
        )
    return table


def experts_tables(experts: Sequence[SeenExpert]) -> list[Table]:
    """A row for each expert and server; no table where nobody serves any."""
    if not experts:
        return []
    numbers = map(Column, ("replicas", "load", "queue", "samples/s"))
    words = (Column(name, "left") for name in ("expert", "class", "server"))
    table = Table("", (*words, *numbers))
    for each in experts[:_MAX_ROWS]:
        table.rows.append(
            (
                each.uid[:_MAX_NAME],
                each.expert_class[:_MAX_NAME],
                each.server,
                f"{each.num_replicas:,}",
                "-" if each.load is None else f"{each.load:.0%}",
                f"{each.num_waiting:,}",
                "-" if each.samples_per_s is None else digits(each.samples_per_s),
            )
        )
    return [table]


def peers_notes(seen: Crawl, starts: list[Address]) -> Iterator[str]:
    """What to know beside the rows, most important last."""
    num_peers, counts = len(seen.peers), _totals(seen)
    yield (
        f"{counted(num_peers, 'peer')}, {counted(counts['num_records'], 'record')} "
        f"({_size(counts['record_bytes'])}), each counted at every peer that holds it."
    )
    if num_peers > _MAX_ROWS:
        yield f"The nearest {_MAX_ROWS} are shown; --json FILE has all."
    if seen.num_unasked:
        yield (
            f"Not everybody was asked: there are about {seen.estimated_size:,} peers. "
            "Next: raise --limit to count them."
        )
    if seen.silent:
        yield f"{counted(len(seen.silent), 'peer')} did not answer: {_named(seen.silent)}."
    versions = _versions(seen)
    if len(versions) > 1:
        yield f"Versions differ: {', '.join(f'{name} ({count})' for name, count in versions.items())}."
    if late := [each for each in seen.peers if abs(each.clock_gap_s) - each.round_trip_s / 2 > _CLOCK_GAP_S]:
        gaps = (f"{each.peer} {each.clock_gap_s:+.1f} s" for each in late[:_MAX_NAMED])
        yield (
            f"Clocks differ from this machine's by more than {_CLOCK_GAP_S:g} s: {', '.join(gaps)}. "
            "Records expire by the wall clock. Next: set clocks, for example with NTP."
        )
    if seen.num_swarms > 1:
        both = " ".join(f"--join {start}" for start in starts)
        yield (
            f"These addresses lead to {seen.num_swarms} swarms that do not know of each other. "
            f"Next: a peer that joins both makes them one: shoal dht {both}"
        )


def peers_document(seen: Crawl) -> dict[str, object]:
    """Describe all peers for programs."""
    return {
        "peers": [
            {
                "peer_id": str(each.peer.id),
                "address": str(each.peer.address),
                "round_trip_ms": 1e3 * each.round_trip_s,
                "clock_gap_s": each.clock_gap_s,
                **msgspec.to_builtins(each.about),
            }
            for each in seen.peers
        ],
        "silent": [
            {
                "peer_id": str(each.peer.id) if each.peer.id else None,
                "address": str(each.peer.address),
                "error": each.error,
            }
            for each in seen.silent
        ],
    }


def peers_result(seen: Crawl) -> dict[str, object]:
    """The numbers of the swarm."""
    round_trips_ms = known_percentiles((1e3 * each.round_trip_s for each in seen.peers), (50, 95))
    return {
        "num_peers": len(seen.peers),
        "num_silent": len(seen.silent),
        "num_unasked": seen.num_unasked,
        "estimated_size": seen.estimated_size,
        "num_swarms": seen.num_swarms,
        **_totals(seen),
        **{f"round_trip_p{q}_ms": value for q, value in round_trips_ms.items()},
        "versions": _versions(seen),
    }


def _totals(seen: Crawl) -> dict[str, int]:
    abouts = [each.about for each in seen.peers if each.about is not None]
    return {
        "num_records": sum(about.num_records for about in abouts),
        "record_bytes": sum(about.record_bytes for about in abouts),
    }


def _versions(seen: Crawl) -> dict[str, int]:
    told = Counter(each.about.software[:_MAX_VERSION] for each in seen.peers if each.about is not None)
    return dict(sorted(told.items()))


def _named(peers: list[Visited]) -> str:
    names = ", ".join(str(each.peer) for each in peers[:_MAX_NAMED])
    return names if len(peers) <= _MAX_NAMED else f"{names} and {len(peers) - _MAX_NAMED} more"


def _size(size_bytes: int) -> str:
    return scale_for("B", size_bytes).format(size_bytes)


# --- for `shoal top --join`: looked at again and again by a visitor that joins nobody ---


class SwarmSource:
    """A swarm, from these addresses on."""

    def __init__(self, swarm: Swarm, starts: Sequence[Address], limit: int) -> None:
        self._swarm = swarm
        self._starts = list(starts)
        self._limit = limit
        self._hosts: dict[Peer, HostStatus] = {}
        """Of the look before: what has changed since tells the rates."""

    def look(self) -> Shot:
        """Ask everybody; PeerUnreachable when nobody answers."""
        from shoal.dht.crawl import crawl
        from shoal.experts.status import ask_hosts, seen_experts

        dht = self._swarm.dht
        seen = self._swarm.run(crawl(dht, self._starts, limit=self._limit))
        before, self._hosts = self._hosts, self._swarm.run(ask_hosts(dht, [each.peer for each in seen.peers]))
        return swarm_shot(seen, self._starts, list(seen_experts(self._hosts, before)))


def swarm_shot(seen: Crawl, starts: list[Address], experts: Sequence[SeenExpert] = ()) -> Shot:
    """What is shown of it; rows stay where they are from one look to the next."""
    # the round trips of two looks differ, and rows that change places are hard to follow
    by_address = sorted(seen.peers, key=lambda one: str(one.peer.address))
    table = peers_table(seen)
    order = {one.peer.id.short: place for place, one in enumerate(by_address) if one.peer.id is not None}
    rows = sorted(table.rows, key=lambda row: order[row[0]])
    totals = _totals(seen)
    (median_s,) = percentiles((one.round_trip_s for one in seen.peers), (50,))
    figures = (
        ("peers", f"{len(seen.peers):,}"),
        ("silent", f"{len(seen.silent):,}"),
        ("records", f"{totals['num_records']:,}"),
        ("size", _size(totals["record_bytes"])),
        ("round trip", scale_for("s", median_s).format(median_s)),
    )
    view = View(
        id=str(starts[0]),
        title=f"Swarm of {counted(len(seen.peers), 'peer')}",
        subtitle=f"from {', '.join(map(str, starts))}",
        figures=figures,
        table=dataclasses.replace(table, rows=rows),
        more_tables=tuple(experts_tables(experts)),
        notes=tuple(peers_notes(seen, starts))[1:],
        series={"peers": float(len(seen.peers)), "records": float(totals["num_records"])},
    )
    document = {"shoal": __version__, **peers_document(seen), "experts": msgspec.to_builtins(experts)}
    return Shot([view], view, document, swarm_metrics(seen), peers_result(seen))
