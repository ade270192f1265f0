"""`shoal bench transport`: small and large echoes between two processes, beside plain sockets.

The server answers with a plain function, the quick way of handling a call that has nothing to wait for. Large
echoes and the sockets' take turns, so that a ratio is made of neighbours in time.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from shoal.bench import raw_sockets
from shoal.bench.children import Parent, child
from shoal.bench.frame import Measured, RowKey, Tell
from shoal.core import Address, Deadline, LoopThread, Peer, fanout
from shoal.report import Report
from shoal.transport import Head, Reply, StreamTransport

SMALL_BYTES = 100
LARGE_BYTES = 8 << 20
_DEADLINE_S = 30.0
_MAIN_IN_FLIGHT = 4


class TransportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long and how often to measure; the rest is fixed, so that reports stay comparable."""

    repeats: int = 5
    """Measured blocks of each kind, after one block to warm up."""
    block_s: float = 0.5
    """Length of a block."""
    num_latency_calls: int = 2000
    """Calls, one after another, of which the latency is kept."""
    in_flight_small: int = 64
    in_flight_large: tuple[int, ...] = (1, 4)


SHORT = TransportConfig(repeats=2, block_s=0.25, num_latency_calls=500)


def serve_echo(arguments: dict[str, Any], parent: Parent) -> None:
    """The process that answers."""
    with LoopThread() as loop:
        transport = StreamTransport()
        transport.handle("echo", _echo)
        loop.run(transport.__aenter__())
        try:
            address = loop.run(transport.listen(Address("127.0.0.1", 0)))
            parent.tell(port=address.port)
            parent.wait_for_end()
        finally:
            loop.run(transport.__aexit__(None, None, None))


def _echo(head: Head, buffers: Any) -> Reply:
    return Reply(head.payload, buffers)


class TransportScenario:
    """One start: a server process, and this one as the client."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), TransportConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Measured]:
        """Small echoes, then large ones beside plain sockets."""
        with child("shoal.bench.transport:serve_echo", {}) as server, LoopThread() as loop:
            client = _Client(loop, server.expect()["port"], self._seed)
            try:
                yield from self._small(client, tell)
                for in_flight in self._config.in_flight_large:
                    yield from self._large(client, in_flight, tell)
            finally:
                client.close()

    def _small(self, client: _Client, tell: Tell) -> Iterator[Measured]:
        key: RowKey = {"scenario": "echo", "size_bytes": SMALL_BYTES}
        tell("100-byte echoes, one at a time")
        client.latencies_s(self._config.num_latency_calls // 4)
        latencies_s = client.latencies_s(self._config.num_latency_calls)
        yield Measured(
            key={**key, "in_flight": 1}, metric="latency", unit="s", direction="lower", samples=latencies_s
        )
        in_flight = self._config.in_flight_small
        tell(f"100-byte echoes, {in_flight} in flight")
        client.calls_per_s(in_flight, self._config.block_s)
        rates = [client.calls_per_s(in_flight, self._config.block_s) for _ in range(self._config.repeats)]
        yield Measured(
            key={**key, "in_flight": in_flight},
            metric="calls_per_s",
            unit="1/s",
            direction="higher",
            samples=rates,
        )

    def _large(self, client: _Client, in_flight: int, tell: Tell) -> Iterator[Measured]:
        tell(f"8 MiB echoes, {in_flight} in flight, beside plain sockets")
        key: RowKey = {"scenario": "echo", "size_bytes": LARGE_BYTES, "in_flight": in_flight}
        arguments = {"size_bytes": LARGE_BYTES, "in_flight": in_flight}
        ours: list[float] = []
        ceiling: list[float] = []
        with child("shoal.bench.raw_sockets:serve", arguments) as server:
            raw = raw_sockets.RawClient(server.expect()["port"], LARGE_BYTES, in_flight)
            with contextlib.closing(raw):
                for repeat in range(self._config.repeats + 1):
                    for is_ours in (True, False) if repeat % 2 == 0 else (False, True):
                        if is_ours:
                            ours.append(client.echo_bytes_per_s(in_flight, self._config.block_s) / 1e9)
                        else:
                            ceiling.append(raw.echo_for(self._config.block_s) / 1e9)
        del ours[0], ceiling[0]  # the warm-up
        for via, rates in (("shoal", ours), ("sockets", ceiling)):
            yield Measured(
                key={**key, "via": via}, metric="echo", unit="GB/s", direction="higher", samples=rates
            )
        fractions = [mine / raw for mine, raw in zip(ours, ceiling, strict=True)]
        yield Measured(key=key, metric="fraction_of_sockets", unit="", direction="higher", samples=fractions)


class _Client:
    """Measures calls to the echo server, on the loop's thread."""

    def __init__(self, loop: LoopThread, port: int, seed: int) -> None:
        self._loop = loop
        self._random = random.Random(seed)
        self._places: dict[tuple[int, int], list[_Place]] = {}
        self._peer = Peer(Address("127.0.0.1", port))
        self._transport = loop.run(StreamTransport().__aenter__())

    def close(self) -> None:
        self._loop.run(self._transport.__aexit__(None, None, None))

    def latencies_s(self, count: int) -> list[float]:
        return self._loop.run(self._latencies_s(count))

    def calls_per_s(self, in_flight: int, seconds: float) -> float:
        return self._loop.run(self._rate(in_flight, seconds, SMALL_BYTES))

    def echo_bytes_per_s(self, in_flight: int, seconds: float) -> float:
        return 2 * LARGE_BYTES * self._loop.run(self._rate(in_flight, seconds, LARGE_BYTES))

    async def _latencies_s(self, count: int) -> list[float]:
        data = bytes(SMALL_BYTES)
        latencies_s = []
        for _ in range(count):
            began_s = time.perf_counter()
            await self._transport.call(
                self._peer, "echo", None, (data,), deadline=Deadline.after(_DEADLINE_S)
            )
            latencies_s.append(time.perf_counter() - began_s)
        return latencies_s

    async def _rate(self, in_flight: int, seconds: float, size_bytes: int) -> float:
        """Calls a second with so many in flight; large answers arrive in memory that is used again."""
        places = self._places_of(in_flight, size_bytes)
        num_done = 0
        began_s = time.perf_counter()

        async def keep_calling(place: _Place) -> None:
            nonlocal num_done
            while True:  # at least once, however short the block
                place.reply = await self._transport.call(
                    self._peer,
                    "echo",
                    None,
                    place.outgoing,
                    deadline=Deadline.after(_DEADLINE_S),
                    into=place.into,
                )
                num_done += 1
                if time.perf_counter() - began_s >= seconds:
                    return

        outcomes = await fanout(
            [keep_calling(place) for place in places], Deadline.after(seconds + _DEADLINE_S)
        )
        took_s = time.perf_counter() - began_s
        for place, outcome in zip(places, outcomes, strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            if place.reply.buffers[0] != place.outgoing[0]:
                raise AssertionError("an echo came back changed")
        return num_done / took_s

    def _places_of(self, in_flight: int, size_bytes: int) -> list[_Place]:
        """What each call in flight sends and where its answer goes, made outside the measured time."""
        if (in_flight, size_bytes) not in self._places:
            self._places[in_flight, size_bytes] = [
                _Place(
                    (self._random.randbytes(size_bytes),),
                    (bytearray(size_bytes),) if size_bytes == LARGE_BYTES else None,
                )
                for _ in range(in_flight)
            ]
        return self._places[in_flight, size_bytes]


class _Place(msgspec.Struct):
    """One of the calls that are in flight at a time."""

    outgoing: tuple[bytes]
    into: tuple[bytearray] | None
    reply: Reply = msgspec.field(default_factory=Reply)


def summarize_transport(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts; the bare names are those with 4 in flight."""
    medians = {
        (row.metric, row.key.get("via"), row.key.get("in_flight")): statistics.median(row.samples)
        for row in report.rows
        if row.starts
    }
    result: dict[str, Any] = {}
    for (metric, via, in_flight), value in medians.items():
        if metric == "calls_per_s":
            result["calls_per_s"] = round(value)
        elif metric == "latency":
            result["p50_us"] = round(value * 1e6, 1)
        else:
            name = {"shoal": "echo_gb_s", "sockets": "raw_echo_gb_s"}.get(str(via), "fraction_of_raw")
            if in_flight == _MAIN_IN_FLIGHT:
                result[name] = round(value, 3)
            else:
                result[f"{name}_{in_flight}_in_flight"] = round(value, 3)
    failed = sum(row.error is not None for row in report.rows)
    return {**result, "failed": failed} if failed else result
