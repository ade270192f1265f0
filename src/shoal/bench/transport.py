"""`shoal bench transport`: echoes between two processes, in the open and protected, beside bare sockets.

The server answers with a plain function, the quick way of handling a call that has nothing to wait for. Large
echoes and the sockets' take turns, so that a ratio is made of neighbours in time. Virtual time runs in this
process alone.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import random
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec

from shoal.bench.frame import BenchmarkPlan, RowKey, RunFlags, Tell, measured
from shoal.bench.virtual import run_world
from shoal.bench.workers import Parent, child
from shoal.core import SYSTEM_CLOCK, Address, Deadline, LoopThread, Peer, fanout
from shoal.core.identity import Identity, new_secret
from shoal.core.run_options import flag
from shoal.report import Report, Row
from shoal.report.diff import MIN_STARTS
from shoal.report.schema import rows_of, with_failed
from shoal.report.statistics import start_medians
from shoal.report.units import counted, ranged
from shoal.transport import Endpoint, Head, Membership, Reply, StreamTransport, SwarmSecret, Transport
from shoal.transport.trust.tls import Authority, make_context

SMALL_BYTES = 100
LARGE_BYTES = 8 << 20
_HOST = "127.0.0.1"
_MAIN_IN_FLIGHT = 4


class TransportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long and how often to measure; what has no flag is fixed, so that reports stay comparable."""

    repeats: Annotated[int, flag("Measured blocks of each kind in a start.", ge=1)] = 5
    """After one block to warm up."""
    block_s: float = 0.5
    num_latency_calls: int = 2000
    """Calls, one after another, of which the latency is kept."""
    in_flight_small: int = 64
    in_flight_large: tuple[int, ...] = (1, 4)
    virtual_peers: int = 200
    virtual_s: int = 60
    """Simulated seconds, in which every peer calls three others each second."""


SHORT = TransportConfig(repeats=2, block_s=0.25, num_latency_calls=500, virtual_peers=50)


class TransportRunFlags(RunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark, with as many starts as a comparison needs."""

    starts: Annotated[int, flag("Independent process starts; 5 or more to compare.")] = MIN_STARTS
    short: Annotated[bool, flag("Quickly, and one start unless told otherwise.")] = False


def transport_command(
    config: TransportConfig, run: TransportRunFlags, typed: Mapping[str, str]
) -> BenchmarkPlan:
    """Echoes between two processes, by streams, TLS and sealed datagrams, beside bare sockets."""
    if run.short:
        config = msgspec.structs.replace(SHORT, repeats=config.repeats) if "repeats" in typed else SHORT
    starts = 1 if run.short and "starts" not in typed else run.starts
    run = msgspec.structs.replace(run, starts=starts)
    return BenchmarkPlan(config, run, summarize_transport)


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


class TransportScenario:
    """One start: a server process, and this one as the client."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), TransportConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Row]:
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

    def _small(self, client: EchoClient, via: RowKey, tell: Tell) -> Iterator[Row]:
        key: RowKey = {"scenario": "echo", "size_bytes": SMALL_BYTES, **via}
        kind = "sealed datagrams" if via else "streams"
        tell(f"100-byte echoes, {kind}, one at a time")
        client.latencies_s(SMALL_BYTES, self._config.num_latency_calls // 4)
        latencies_s = client.latencies_s(SMALL_BYTES, self._config.num_latency_calls)
        yield measured("latency", {**key, "in_flight": 1}, latencies_s)
        in_flight, block_s = self._config.in_flight_small, self._config.block_s
        tell(f"100-byte echoes, {kind}, {in_flight} in flight")
        client.calls_per_s(SMALL_BYTES, in_flight, block_s)
        rates = [client.calls_per_s(SMALL_BYTES, in_flight, block_s) for _ in range(self._config.repeats)]
        yield measured("calls_per_s", {**key, "in_flight": in_flight}, rates)

    def _large(self, client: EchoClient, via: str, raw_via: str, in_flight: int, tell: Tell) -> Iterator[Row]:
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
            yield measured("echo", {**key, "via": name}, rates)
        fractions = [mine / theirs for mine, theirs in zip(ours, ceiling, strict=True)]
        yield measured(f"fraction_of_{raw_via.replace('-', '_')}", key, fractions)

    def _virtual(self, tell: Tell) -> Iterator[Row]:
        num_peers, seconds = self._config.virtual_peers, self._config.virtual_s
        for kind in ("stream", "datagram"):
            tell(f"virtual time: {num_peers} peers under 'wan' for {seconds:g} s, {kind}s")
            gc.collect()  # a world that has ended is much garbage, which the next one should not pay for
            began_s = time.perf_counter()
            world = run_world(num_peers, seconds=seconds, profile="wan", seed=self._seed, kind=kind)
            took_s = time.perf_counter() - began_s
            key = {"scenario": "virtual", "via": kind, "num_peers": num_peers, "seconds": seconds}
            yield measured("virtual_calls_per_s", key, [world.num_calls / took_s])


@contextlib.contextmanager
def _opened(loop: LoopThread, transport: StreamTransport | Endpoint) -> Iterator[None]:
    loop.run(transport.__aenter__())
    try:
        yield
    finally:
        loop.run(transport.__aexit__(None, None, None))


@contextlib.contextmanager
def _ceiling(via: str, in_flight: int) -> Iterator[RawClient]:
    """A process that echoes over bare sockets, and its client."""
    serve, client = ("serve_raw", RawClient) if via == "sockets" else ("serve_raw_tls", RawTlsClient)
    arguments = {"size_bytes": LARGE_BYTES, "in_flight": in_flight}
    with child(f"shoal.bench.transport:{serve}", arguments) as server:
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
    for told in report.rows:
        if not told.starts:
            continue
        value = statistics.median(told.samples)
        via, in_flight = str(told.key.get("via")), told.key.get("in_flight")
        if told.metric.endswith("calls_per_s"):
            result[_PREFIXES.get(via, "") + told.metric] = round(value)
        elif told.metric == "latency":
            result[_PREFIXES.get(via, "") + "p50_us"] = round(value * 1e6, 1)
        else:
            name = _NAMES[via if told.metric == "echo" else told.metric]
            suffix = "" if in_flight == _MAIN_IN_FLIGHT else f"_{in_flight}_in_flight"
            result[name + suffix] = round(value, 3)
    if headline := _headline(report):
        result["headline"] = headline
    result["conditions"] = [
        "One process asks and another answers, both on this machine.",
        "Plain sockets, which have no protocol, are measured in turns with the same bytes.",
        f"{counted(len(report.seeds), 'run')}.",
    ]
    return with_failed(report, result)


def _headline(report: Report) -> list[str]:
    """How long a small call takes, and how near large ones come to sockets, in every case."""
    sentences = []
    for row in rows_of(report, "latency"):
        via = "an encrypted datagram" if row.key.get("via") == "udp" else "a stream"
        sentences.append(
            f"A call of {row.key['size_bytes']} bytes over {via} takes {ranged(start_medians(row), 's')}."
        )
    fractions = {"fraction_of_sockets": "plain sockets", "fraction_of_tls_sockets": "TLS sockets"}
    for metric, beside in fractions.items():
        shares = []
        for row in rows_of(report, metric):
            share = ranged([100 * median for median in start_medians(row)], "%")
            shares.append(f"{share} with {row.key.get('in_flight')} in flight")
        if shares:
            size = f"{LARGE_BYTES >> 20} MiB"
            sentences.append(
                f"Echoes of {size} pass at this share of the speed of {beside}: {', '.join(shares)}."
            )
    return sentences


# --- calls to an echo server ---

_DEADLINE_S = 30.0


class EchoClient:
    """Calls `echo` at one peer through one transport, on the loop's thread.

    With `in_payload` the bytes travel as payloads, as small records do, and not as buffers.
    """

    def __init__(
        self, loop: LoopThread, transport: Transport, peer: Peer, seed: int, *, in_payload: bool = False
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._peer = peer
        self._random = random.Random(seed)
        self._in_payload = in_payload
        self._places: dict[tuple[int, int], list[_Place]] = {}

    def latencies_s(self, size_bytes: int, count: int) -> list[float]:
        """How long each of so many calls takes, one after another."""
        return self._loop.run(self._latencies_s(self._places_of(1, size_bytes)[0], count))

    def calls_per_s(self, size_bytes: int, in_flight: int, seconds: float) -> float:
        """Calls a second with so many in flight; large answers arrive in memory that is used again."""
        return self._loop.run(self._rate(self._places_of(in_flight, size_bytes), seconds))

    def bytes_per_s(self, size_bytes: int, in_flight: int, seconds: float) -> float:
        """The same in bytes, both directions counted."""
        return 2 * size_bytes * self.calls_per_s(size_bytes, in_flight, seconds)

    async def _call(self, place: _Place) -> None:
        place.reply = await self._transport.call(
            self._peer,
            "echo",
            place.payload,
            place.outgoing,
            deadline=Deadline.after(_DEADLINE_S),
            into=place.into,
        )

    async def _latencies_s(self, place: _Place, count: int) -> list[float]:
        latencies_s = []
        for _ in range(count):
            began_s = time.perf_counter()
            await self._call(place)
            latencies_s.append(time.perf_counter() - began_s)
        return latencies_s

    async def _rate(self, places: list[_Place], seconds: float) -> float:
        num_done = 0
        began_s = time.perf_counter()

        async def keep_calling(place: _Place) -> None:
            nonlocal num_done
            while True:  # at least once, however short the block
                await self._call(place)
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
            if (place.reply.payload, list(place.reply.buffers)) != (place.payload, list(place.outgoing)):
                raise AssertionError("an echo came back changed")
        return num_done / took_s

    def _places_of(self, in_flight: int, size_bytes: int) -> list[_Place]:
        """What each call in flight sends and where its answer goes, made outside the measured time."""
        key = (in_flight, size_bytes)
        if key not in self._places:
            self._places[key] = [self._new_place(size_bytes) for _ in range(in_flight)]
        return self._places[key]

    def _new_place(self, size_bytes: int) -> _Place:
        data = self._random.randbytes(size_bytes)
        if self._in_payload:
            return _Place(data, (), None)
        return _Place(None, (data,), (bytearray(size_bytes),) if size_bytes >= _REUSED_BYTES else None)


_REUSED_BYTES = 1 << 20


class _Place(msgspec.Struct):
    """One of the calls that are in flight at a time."""

    payload: Any
    outgoing: tuple[bytes, ...]
    into: tuple[bytearray] | None
    reply: Reply = msgspec.field(default_factory=Reply)


# --- the ceiling: bare sockets ---

# Plain blocking sockets, full duplex, and no protocol at all. Each side has one sending and one receiving
# thread, and buffers that are made once. Nothing in Python that moves bytes both ways over TCP can be much
# faster.
_Buffers = queue.SimpleQueue[memoryview | None]


def serve_raw(arguments: dict[str, Any], parent: Parent) -> None:
    """A process that echoes messages of `size_bytes` on one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.tell(port=listener.getsockname()[1])
        connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        echo_all(connection, connection, arguments["size_bytes"], arguments["in_flight"])


def echo_all(receiving: socket.socket, sending: socket.socket, size_bytes: int, in_flight: int) -> None:
    """Send back every message that comes, until the other side has gone."""
    free: _Buffers = queue.SimpleQueue()
    full: _Buffers = queue.SimpleQueue()
    for _ in range(in_flight + 1):
        free.put(memoryview(bytearray(size_bytes)))
    with _thread(_send_all, sending, full, free):
        with contextlib.suppress(ConnectionError, EOFError):
            while True:
                buffer = free.get()
                assert buffer is not None
                receive_exactly(receiving, buffer)
                full.put(buffer)
        full.put(None)


def _send_all(connection: socket.socket, full: _Buffers, free: _Buffers) -> None:
    with contextlib.suppress(ConnectionError):
        while (buffer := full.get()) is not None:
            connection.sendall(buffer)
            free.put(buffer)


class RawClient:
    """The other end: keeps a number of messages under way and counts what comes back."""

    def __init__(self, port: int, size_bytes: int, in_flight: int) -> None:
        self._sending, self._receiving = self._connect(port)
        self._size_bytes = size_bytes
        self._in_flight = in_flight
        self._outgoing = [memoryview(bytearray(size_bytes)) for _ in range(in_flight)]
        self._incoming = [memoryview(bytearray(size_bytes)) for _ in range(in_flight)]

    def _connect(self, port: int) -> tuple[socket.socket, socket.socket]:
        """Where to send and where to receive: one connection does both here."""
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection, connection

    def close(self) -> None:
        """Let the server go."""
        self._sending.close()
        self._receiving.close()

    def echo_for(self, seconds: float) -> float:
        """Echo for about so long; bytes a second, both directions counted."""
        todo: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        num_echoes = 0
        with _thread(_send_all, self._sending, todo, queue.SimpleQueue()):
            for buffer in self._outgoing:
                todo.put(buffer)
            num_open = len(self._outgoing)
            began_s = time.perf_counter()
            while num_open:
                receive_exactly(self._receiving, self._incoming[num_echoes % self._in_flight])
                num_echoes += 1
                if time.perf_counter() - began_s < seconds:
                    todo.put(self._outgoing[num_echoes % self._in_flight])
                else:
                    num_open -= 1
            took_s = time.perf_counter() - began_s
            todo.put(None)
        return 2 * self._size_bytes * num_echoes / took_s


def receive_exactly(connection: socket.socket, buffer: memoryview) -> None:
    """Fill a buffer; EOFError when the other side has gone."""
    received = 0
    while received < len(buffer):
        count = connection.recv_into(buffer[received:])
        if count == 0:
            raise EOFError
        received += count


@contextlib.contextmanager
def _thread(function: Any, *arguments: Any) -> Iterator[None]:
    thread = threading.Thread(
        target=function, args=arguments
    )  # law: the ceiling is blocking sockets in threads
    thread.start()
    try:
        yield
    finally:
        thread.join()


# --- the ceiling under TLS ---

# Each socket is in Python's own TLS. One connection carries each direction, since two threads cannot use one
# TLS connection at a time. Ciphers and certificates are those of Shoal's own connections.

# nothing is protected by it: both ends are of this benchmark, on one machine
_SECRET_TEXT = "the ceiling has nothing to hide from anybody"


def serve_raw_tls(arguments: dict[str, Any], parent: Parent) -> None:
    """A process that echoes messages of `size_bytes`: from its first connection to its second."""
    context = _context(is_server=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        parent.tell(port=listener.getsockname()[1])
        receiving = _wrap(listener.accept()[0], context, is_server=True)
        sending = _wrap(listener.accept()[0], context, is_server=True)
    with receiving, sending:
        echo_all(receiving, sending, arguments["size_bytes"], arguments["in_flight"])


class RawTlsClient(RawClient):
    """A `RawClient` with one TLS connection for each direction."""

    def _connect(self, port: int) -> tuple[socket.socket, socket.socket]:
        context = _context(is_server=False)
        sending, receiving = (
            _wrap(socket.create_connection(("127.0.0.1", port)), context, is_server=False) for _ in range(2)
        )
        return sending, receiving


def _context(*, is_server: bool) -> ssl.SSLContext:
    authority = Authority.of(SwarmSecret.parse(_SECRET_TEXT))
    return make_context(Identity.generate(), authority, SYSTEM_CLOCK.wall_s(), is_server=is_server)


def _wrap(connection: socket.socket, context: ssl.SSLContext, *, is_server: bool) -> ssl.SSLSocket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return context.wrap_socket(connection, server_side=is_server)
