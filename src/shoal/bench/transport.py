"""`shoal bench transport`: echoes between two processes, in the open and protected, beside bare sockets.

The server answers with a plain function, the quick way of handling a call that has nothing to wait for. Large
echoes and the sockets' take turns, so that a ratio is made of neighbours in time. Virtual time runs in this
process alone.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec

from shoal.bench.echo_client import EchoClient
from shoal.bench.frame import Measured, RowKey, Tell
from shoal.bench.raw_sockets import RawClient
from shoal.bench.raw_tls import RawTlsClient
from shoal.bench.virtual import run_world
from shoal.bench.workers import Parent, child
from shoal.core import Address, LoopThread, Peer
from shoal.core.identity import Identity, new_secret
from shoal.report import Report
from shoal.transport import Endpoint, Head, Membership, Reply, StreamTransport, SwarmSecret

SMALL_BYTES = 100
LARGE_BYTES = 8 << 20
_HOST = "127.0.0.1"
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
    virtual_peers: int = 200
    virtual_s: int = 60
    """Simulated seconds, in which every peer calls three others each second."""


SHORT = TransportConfig(repeats=2, block_s=0.25, num_latency_calls=500, virtual_peers=50)


def serve_echo(arguments: dict[str, Any], parent: Parent) -> None:
    """The process that answers: one address in the open, and one for members of a swarm."""
    plain, sealed = StreamTransport(), Endpoint(membership=_member(arguments["secret"]))
    with LoopThread() as loop, _opened(loop, plain), _opened(loop, sealed):
        for transport in (plain, sealed):
            transport.handle("echo", _echo)
        ports = [loop.run(transport.listen(Address(_HOST, 0))).port for transport in (plain, sealed)]
        parent.tell(plain_port=ports[0], sealed_port=ports[1])
        parent.wait_for_end()


def _member(secret: str) -> Membership:
    return Membership(Identity.generate(), SwarmSecret.parse(secret))


def _echo(head: Head, buffers: Any) -> Reply:
    return Reply(head.payload, buffers)


class _Ceiling(Protocol):
    """What Shoal's echoes are measured beside."""

    def echo_for(self, seconds: float) -> float:
        """Bytes a second, both directions counted."""

    def close(self) -> None:
        """Let the server go."""


class TransportScenario:
    """One start: a server process, and this one as the client."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), TransportConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Measured]:
        """Small echoes, large ones beside bare sockets, and calls in virtual time."""
        secret = new_secret()
        with child("shoal.bench.transport:serve_echo", {"secret": secret}) as server, LoopThread() as loop:
            ports = server.expect()
            plain, sealed = StreamTransport(), Endpoint(membership=_member(secret))
            with _opened(loop, plain), _opened(loop, sealed):
                at_plain = Peer(Address(_HOST, ports["plain_port"]))
                at_sealed = Peer(Address(_HOST, ports["sealed_port"]))
                stream = EchoClient(loop, plain, at_plain, self._seed)
                tls = EchoClient(loop, sealed.streams, at_sealed, self._seed)
                udp = EchoClient(loop, sealed.datagrams, at_sealed, self._seed, in_payload=True)
                yield from self._small(stream, {}, tell)
                yield from self._small(udp, {"via": "udp"}, tell)
                for in_flight in self._config.in_flight_large:
                    yield from self._large(stream, "shoal", "sockets", in_flight, tell)
                yield from self._large(tls, "shoal-tls", "tls-sockets", _MAIN_IN_FLIGHT, tell)
        yield from self._virtual(tell)

    def _small(self, client: EchoClient, via: RowKey, tell: Tell) -> Iterator[Measured]:
        key: RowKey = {"scenario": "echo", "size_bytes": SMALL_BYTES, **via}
        kind = "sealed datagrams" if via else "streams"
        tell(f"100-byte echoes, {kind}, one at a time")
        client.latencies_s(SMALL_BYTES, self._config.num_latency_calls // 4)
        latencies_s = client.latencies_s(SMALL_BYTES, self._config.num_latency_calls)
        yield Measured(
            key={**key, "in_flight": 1}, metric="latency", unit="s", direction="lower", samples=latencies_s
        )
        in_flight, block_s = self._config.in_flight_small, self._config.block_s
        tell(f"100-byte echoes, {kind}, {in_flight} in flight")
        client.calls_per_s(SMALL_BYTES, in_flight, block_s)
        rates = [client.calls_per_s(SMALL_BYTES, in_flight, block_s) for _ in range(self._config.repeats)]
        yield Measured(
            key={**key, "in_flight": in_flight},
            metric="calls_per_s",
            unit="1/s",
            direction="higher",
            samples=rates,
        )

    def _large(
        self, client: EchoClient, via: str, raw_via: str, in_flight: int, tell: Tell
    ) -> Iterator[Measured]:
        tell(f"8 MiB echoes, {via}, {in_flight} in flight, beside {raw_via}")
        key: RowKey = {"scenario": "echo", "size_bytes": LARGE_BYTES, "in_flight": in_flight}
        block_s = self._config.block_s
        ours: list[float] = []
        ceiling: list[float] = []
        with _ceiling(raw_via, in_flight) as raw:
            for repeat in range(self._config.repeats + 1):
                for is_ours in (True, False) if repeat % 2 == 0 else (False, True):
                    if is_ours:
                        ours.append(client.bytes_per_s(LARGE_BYTES, in_flight, block_s) / 1e9)
                    else:
                        ceiling.append(raw.echo_for(block_s) / 1e9)
        del ours[0], ceiling[0]  # the warm-up
        for name, rates in ((via, ours), (raw_via, ceiling)):
            yield Measured(
                key={**key, "via": name}, metric="echo", unit="GB/s", direction="higher", samples=rates
            )
        yield Measured(
            key=key,
            metric=f"fraction_of_{raw_via.replace('-', '_')}",
            unit="",
            direction="higher",
            samples=[mine / theirs for mine, theirs in zip(ours, ceiling, strict=True)],
        )

    def _virtual(self, tell: Tell) -> Iterator[Measured]:
        num_peers, seconds = self._config.virtual_peers, self._config.virtual_s
        for kind in ("stream", "datagram"):
            tell(f"virtual time: {num_peers} peers under 'wan' for {seconds:g} s, {kind}s")
            began_s = time.perf_counter()
            world = run_world(num_peers, seconds=seconds, profile="wan", seed=self._seed, kind=kind)
            took_s = time.perf_counter() - began_s
            yield Measured(
                key={"scenario": "virtual", "via": kind, "num_peers": num_peers, "seconds": seconds},
                metric="virtual_calls_per_s",
                unit="1/s",
                direction="higher",
                samples=[world.num_calls / took_s],
            )


@contextlib.contextmanager
def _opened(loop: LoopThread, transport: StreamTransport | Endpoint) -> Iterator[None]:
    loop.run(transport.__aenter__())
    try:
        yield
    finally:
        loop.run(transport.__aexit__(None, None, None))


@contextlib.contextmanager
def _ceiling(via: str, in_flight: int) -> Iterator[_Ceiling]:
    """A process that echoes over bare sockets, and its client."""
    module, client = ("raw_sockets", RawClient) if via == "sockets" else ("raw_tls", RawTlsClient)
    with child(f"shoal.bench.{module}:serve", {"size_bytes": LARGE_BYTES, "in_flight": in_flight}) as server:
        ready = server.expect()
        with contextlib.closing(client(ready["port"], LARGE_BYTES, in_flight)) as ceiling:
            yield ceiling


_NAMES = {
    "shoal": "echo_gb_s",
    "sockets": "raw_echo_gb_s",
    "shoal-tls": "tls_echo_gb_s",
    "tls-sockets": "raw_tls_echo_gb_s",
    "fraction_of_sockets": "fraction_of_raw",
    "fraction_of_tls_sockets": "fraction_of_raw_tls",
}
_PREFIXES = {"udp": "udp_", "stream": "stream_"}


def summarize_transport(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts; names without a number are those with 4 in flight."""
    result: dict[str, Any] = {}
    for row in report.rows:
        if not row.starts:
            continue
        value = statistics.median(row.samples)
        via, in_flight = str(row.key.get("via")), row.key.get("in_flight")
        if row.metric.endswith("calls_per_s"):
            result[_PREFIXES.get(via, "") + row.metric] = round(value)
        elif row.metric == "latency":
            result[_PREFIXES.get(via, "") + "p50_us"] = round(value * 1e6, 1)
        else:
            name = _NAMES[via if row.metric == "echo" else row.metric]
            suffix = "" if in_flight == _MAIN_IN_FLIGHT else f"_{in_flight}_in_flight"
            result[name + suffix] = round(value, 3)
    failed = sum(row.error is not None for row in report.rows)
    return {**result, "failed": failed} if failed else result
