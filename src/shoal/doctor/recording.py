"""What `shoal doctor --record` does: measure the links to peers, and write them down as a profile.

Delays are half of a round trip: which half took longer cannot be seen from one end. Loss is what datagrams
had to be sent again for; bandwidth is what streams move while nothing else is measured.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from shoal.core import Address, Clock, Deadline, DeadlineExceeded, ShoalError, UsageError, fanout
from shoal.doctor.checks import STYLES
from shoal.doctor.joining import Member, date, failure_text, new_endpoint
from shoal.report.tables import Column, Table
from shoal.transport.endpoint import Endpoint
from shoal.transport.introductions import (
    MAX_BULK_BYTES,
    SINK,
    SOURCE,
    Introduction,
    IpProtocol,
    Source,
    ask_about,
)
from shoal.transport.limits import KIB, MIB
from shoal.transport.network.distributions import Recorded
from shoal.transport.network.profiles import Between, Profile, Way, Ways, patterns_of
from shoal.transport.network.sockets import Network, SocketNetwork

_MIN_DELAYS = 5
_PROBE_BYTES = 4 * KIB
_BLOCK_BYTES = 16 * KIB
_FIRST_CALL_S = 0.6  # over a modem; a block where that takes less
_QUICK_S = 0.1
_NUM_BULK_CALLS = 4  # under way at once, so that the line is never idle
_WARM_UP_SHARE = 0.25  # of a transfer: TCP begins slowly


class Effort(msgspec.Struct, frozen=True):
    """How much to measure."""

    num_calls: int = 100
    calls_s: float = 4.0
    """For all small calls together; a slow link is measured by fewer."""
    bulk_s: float = 2.0
    bulk_bytes: int = 32 * MIB
    """Each direction ends after this time, or this many bytes."""
    patience_s: float = 4.0
    """For the first answer, and for what is under way at the end of a transfer."""


class LinkMeasurement(msgspec.Struct, frozen=True):
    """What was measured of the link to one peer; `error` says why it was not."""

    peer: Address
    seen_as: str = ""
    """This machine's host as the peer sees it."""
    ip_protocol: IpProtocol = "udp"
    """What small calls went over: TCP where UDP does not get through."""
    delays_ms: tuple[float, ...] = ()
    """The delays of one way, in the order of measurement."""
    loss: float | None = None
    """The share of datagrams lost one way; it is not known over TCP."""
    up_mbit_s: float | None = None
    down_mbit_s: float | None = None
    error: str = ""
    next_step: str = ""


async def record(
    peers: list[Address],
    member: Member,
    *,
    tell: Callable[[str], None] = lambda _: None,
    network: Network | None = None,
    effort: Effort | None = None,
) -> list[LinkMeasurement]:
    """Measure the link to each peer, one after the other: they share this machine's line."""
    network, effort = network or SocketNetwork(), effort or Effort()
    links = []
    for peer in peers:
        async with new_endpoint(member, network) as endpoint:
            try:
                links.append(await _measure(endpoint, peer, effort, tell))
            except ShoalError as error:
                next_step = f"shoal doctor --join {peer} says what keeps it from answering."
                links.append(LinkMeasurement(peer, error=failure_text(error), next_step=next_step))
    return links


def to_profile(links: list[LinkMeasurement], wall_s: float) -> Profile:
    """The links that were measured, and for any other two peers what these have in common."""
    measured = [link for link in links if not link.error]
    if not measured:
        raise UsageError("No link was measured, so there is no profile.")
    between = []
    for link in measured:
        here, there = f"{patterns_of(Address(link.seen_as, 0))[1]}", str(link.peer)
        way = _way(link.delays_ms, link.loss)
        for from_, to, mbit_s in ((here, there, link.up_mbit_s), (there, here, link.down_mbit_s)):
            fields = msgspec.structs.asdict(way) | {"mbit_s": mbit_s}
            between.append(Between(from_=from_, to=to, one_way=True, **fields))
    delays_ms = tuple(delay for link in measured for delay in link.delays_ms)
    losses = [link.loss for link in measured if link.loss is not None]
    speeds = [speed for link in measured for speed in (link.up_mbit_s, link.down_mbit_s) if speed]
    default = _way(delays_ms, statistics.fmean(losses) if losses else None)
    default = msgspec.structs.replace(default, mbit_s=_round(statistics.median(speeds)) if speeds else None)
    return Profile(
        name="recorded",
        description=f"Links to {', '.join(str(link.peer) for link in measured)}, recorded {date(wall_s)}; "
        "other peers have links like all of these together.",
        ways=Ways(default=default, between=between),
    )


def _way(delays_ms: tuple[float, ...], loss: float | None) -> Way:
    return Way(delay_ms=Recorded(list(delays_ms)), loss=None if loss is None else round(loss, 6))


# --- measuring ---


async def _measure(
    endpoint: Endpoint, peer: Address, effort: Effort, tell: Callable[[str], None]
) -> LinkMeasurement:
    tell(f"{peer}: small calls")
    ip_protocol, about = await _first_answer(endpoint, peer, effort.patience_s)
    delays_s, loss = await _delays(endpoint, peer, ip_protocol, effort)
    tell(f"{peer}: bandwidth")
    up_mbit_s = down_mbit_s = None
    has_streams = ip_protocol == "tcp" or await _has_streams(endpoint, peer, effort.patience_s)
    if has_streams:
        clock = endpoint.network.clock
        block = memoryview(endpoint.network.random.randbytes(_BLOCK_BYTES))

        async def send(size_bytes: int, deadline: Deadline) -> None:
            blocks = [block] * (size_bytes // _BLOCK_BYTES) + [block[: size_bytes % _BLOCK_BYTES]]
            await endpoint.streams.call(peer, SINK, None, blocks, deadline=deadline)

        async def receive(size_bytes: int, deadline: Deadline) -> None:
            await endpoint.streams.call(peer, SOURCE, Source(size_bytes), deadline=deadline)

        round_trip_s = 2 * statistics.median(delays_s)
        up_mbit_s = await _transfer(send, effort, clock, round_trip_s)
        down_mbit_s = await _transfer(receive, effort, clock, round_trip_s)
    return LinkMeasurement(
        peer=peer,
        seen_as=Address.parse(about.seen_as).host,
        ip_protocol=ip_protocol,
        delays_ms=tuple(_round(delay_s * 1e3) for delay_s in delays_s),
        loss=loss,
        up_mbit_s=up_mbit_s,
        down_mbit_s=down_mbit_s,
    )


async def _first_answer(
    endpoint: Endpoint, peer: Address, patience_s: float
) -> tuple[IpProtocol, Introduction]:
    """Over UDP where that works."""
    try:
        return "udp", await ask_about(endpoint.datagrams, peer, "udp", Deadline.after(patience_s))
    except ShoalError:
        return "tcp", await ask_about(endpoint.streams, peer, "tcp", Deadline.after(patience_s))


async def _has_streams(endpoint: Endpoint, peer: Address, patience_s: float) -> bool:
    try:
        await ask_about(endpoint.streams, peer, "tcp", Deadline.after(patience_s))
    except ShoalError:
        return False
    return True


async def _delays(
    endpoint: Endpoint, peer: Address, ip_protocol: IpProtocol, effort: Effort
) -> tuple[list[float], float | None]:
    """One-way delays, and the share of datagrams that is lost one way."""
    transport = endpoint.datagrams if ip_protocol == "udp" else endpoint.streams
    clock, stats = endpoint.network.clock, endpoint.datagrams.stats
    began = msgspec.structs.replace(stats)
    end_s = clock.now_s() + effort.calls_s
    delays_s: list[float] = []
    late_s: list[float] = []
    num_calls = 0
    while num_calls < effort.num_calls:
        late_by_s = clock.now_s() - end_s
        if late_by_s > 0 and (len(delays_s) >= _MIN_DELAYS or late_by_s > effort.patience_s):
            break
        resent, sent_s = stats.resent, clock.now_s()
        num_calls += 1
        try:
            await ask_about(transport, peer, ip_protocol, Deadline.after(effort.patience_s))
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"{peer} stopped answering after {num_calls} small calls.",
                cause="it has ended, or the network between has failed.",
            ) from None
        took_s = clock.now_s() - sent_s
        # a call that was sent again tells how long this side waits, not how long the way is
        (late_s if stats.resent != resent else delays_s).append(took_s / 2)
    if ip_protocol == "tcp":
        return delays_s, None
    # what was sent again although the answer was on its way comes twice
    num_resent = stats.resent - began.resent
    num_lost = max(0, num_resent - (stats.duplicates - began.duplicates))
    lost_both_ways = min(num_lost / max(1, num_calls + num_resent), 0.99)
    return delays_s or late_s, 1 - math.sqrt(1 - lost_both_ways)


async def _transfer(
    move: Callable[[int, Deadline], Coroutine[Any, Any, None]],
    effort: Effort,
    clock: Clock,
    round_trip_s: float,
) -> float:
    """Mbit/s of bulk calls, a few at a time, that grow until their bytes take longer than their way."""
    deadline = Deadline.after(effort.bulk_s + effort.patience_s)
    began_s = clock.now_s()
    await move(_PROBE_BYTES, deadline)
    bytes_per_s = _PROBE_BYTES / max(clock.now_s() - began_s - round_trip_s, 1e-9)
    began_s = clock.now_s()
    arrivals: list[tuple[float, int]] = []
    size_bytes = max(1, min(_BLOCK_BYTES, int(_FIRST_CALL_S * bytes_per_s)))
    num_bytes = 0

    async def keep_moving() -> None:
        nonlocal size_bytes, num_bytes
        while clock.now_s() - began_s < effort.bulk_s and num_bytes < effort.bulk_bytes:
            size, sent_s = size_bytes, clock.now_s()
            num_bytes += size
            await move(size, deadline)
            now_s = clock.now_s()
            arrivals.append((now_s, size))
            if now_s - sent_s < 2 * round_trip_s + _QUICK_S:
                size_bytes = min(MAX_BULK_BYTES, max(size_bytes, 2 * size))

    outcomes = await fanout([keep_moving() for _ in range(_NUM_BULK_CALLS)], deadline)
    for outcome in outcomes:
        if isinstance(outcome, Exception) and not arrivals:
            raise outcome
    return _round(_speed(began_s + round_trip_s, arrivals) * 8e-6)


def _speed(began_s: float, arrivals: list[tuple[float, int]]) -> float:
    """Bytes a second: how steeply they add up, without the beginning where there is enough after it."""
    end_s = arrivals[-1][0]
    warm_s = began_s + (end_s - began_s) * _WARM_UP_SHARE
    sums = itertools.accumulate(size for _, size in arrivals)
    steady = [(at_s, total) for (at_s, _), total in zip(arrivals, sums, strict=True) if at_s >= warm_s]
    # calls that share a line end together: two of them may be of one group, so look at all
    if len(steady) > 2 * _NUM_BULK_CALLS and steady[0][0] < end_s:
        times_s, totals = zip(*steady, strict=True)
        return statistics.linear_regression(times_s, totals).slope
    return sum(size for _, size in arrivals) / max(end_s - began_s, 1e-9)


def _round(number: float) -> float:
    """Four digits: more was not measured."""
    return float(f"{number:.4g}")


def links_table(links: Sequence[LinkMeasurement]) -> Table:
    """A row for each peer; under one that could not be measured, why."""
    numbers = map(Column, ("one way p50", "p95", "loss", "Mbit/s up", "down"))
    table = Table("", (Column("peer", "left"), *numbers, Column("calls over", "left")))
    for index, link in enumerate(links):
        if link.error:
            table.rows.append((str(link.peer), *("-" * 5), "failed"))
            table.notes[index] = (f"{link.error} Next: {link.next_step}", STYLES["fail"])
            continue
        delays_ms = sorted(link.delays_ms)
        p50_ms, p95_ms = statistics.median(delays_ms), delays_ms[int(0.95 * len(delays_ms))]
        loss = "-" if link.loss is None else f"{link.loss:.2%}"
        speeds = ("-" if speed is None else f"{speed:,g}" for speed in (link.up_mbit_s, link.down_mbit_s))
        table.rows.append(
            (str(link.peer), f"{p50_ms:.3g} ms", f"{p95_ms:.3g} ms", loss, *speeds, link.ip_protocol.upper())
        )
    return table
