"""A network inside this process: hosts by name, streams and datagrams between them, no sockets.

In virtual time everything on it happens the same way each time. `conditions` say what the links do; without
them bytes arrive in the next turn of the loop. Hosts may stand behind routers that translate addresses, as
at home: others see the router's name and one of its ports, and reach them only as its rules allow.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import logging
import math
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

from shoal.core import Address, Clock, UsageError, running_clock
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.links import IDEAL_LINK, Link
from shoal.transport.network.nat import AddressTranslation, Carrier, Mapping, NatRules
from shoal.transport.network.pipes import Pipe, corrupted
from shoal.transport.network.sockets import Accepted, Network, Tls

if TYPE_CHECKING:
    from typing_extensions import Buffer


log = logging.getLogger(__name__)

MAX_DATAGRAM_BYTES = 65_507  # UDP over IPv4
_BACKLOG = 4096
# what a socket's own buffer takes before the sender notices a slow line; small frames always fit
SOCKET_BYTES = 16 << 10
_HIGH_WATER_BYTES = 64 << 10
_FIRST_PORT = 1024
_FIRST_ORIGIN_PORT = 32_768  # from here on, ports of those who dial
_NUM_PORTS = 65_536 - _FIRST_ORIGIN_PORT
_KNOCK_AGAIN_S = (
    1.0  # as TCP: a greeting that a router dropped is sent again after this, then after twice that
)
_LONGEST_KNOCK_S = 64.0


class MemoryNetwork:
    """All hosts and what lies between them; lives on one loop."""

    def __init__(self, conditions: Conditions | None = None, seed: int = 0) -> None:
        self.conditions = conditions
        self.seed = seed
        self.hosts: dict[str, MemoryHost] = {}
        self.routers: dict[str, MemoryRouter] = {}
        self.links: dict[tuple[str, str], Link] = {}
        """Those that have been used, by the names of their ends."""

    def host(self, name: str, *, behind: str = "", known_as: Address | None = None) -> MemoryHost:
        """The network as this host sees it; made when it is first asked for, on the loop that it will use.

        `behind` is the name of the router that its packets leave through, if any. Conditions know it by the
        address that it is given first, or as it is told here.
        """
        if name not in self.hosts:
            self.hosts[name] = MemoryHost(self, name, self.routers[behind] if behind else None, known_as)
        return self.hosts[name]

    def router(self, name: str, kind: str | NatRules) -> MemoryRouter:
        """A router that hosts may stand behind, of a kind of `NATS` or with rules of its own."""
        self.routers[name] = MemoryRouter(name, kind, self.random_of(name))
        return self.routers[name]

    def random_of(self, name: str) -> random.Random:
        """Where the random numbers of a host or router come from."""
        # not by hash(): it differs from process to process
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=16).digest()
        return random.Random(int.from_bytes(digest, "big"))

    def link(self, source: Address, target: Address) -> Link:
        """The way between two hosts, whatever their ports."""
        names = (source.host, target.host)
        if (link := self.links.get(names)) is None:
            here, there = (
                host.address if (host := self.hosts.get(end.host)) else end for end in (source, target)
            )
            link = self.links[names] = self.conditions.link(here, there) if self.conditions else IDEAL_LINK
        return link

    def owner(self, carrier: Carrier, address: Address, now_s: float) -> Address:
        """Where what is sent to an address goes: to itself, or to who has that port of a router."""
        if (router := self.routers.get(address.host)) is None:
            return address
        mapping = router.table.owner(carrier, address.port, now_s)
        return address if mapping is None else mapping.inside

    def way_in(
        self, carrier: Carrier, sender: MemoryHost, origin: Address, target: Address, now_s: float
    ) -> tuple[Address, Mapping | None] | None:
        """Where something that was sent to an address arrives; None where a router drops it."""
        if (router := self.routers.get(target.host)) is not None:
            if router is sender.router:  # what leaves is not turned round
                return None
            mapping = router.table.enter(carrier, target.port, origin, now_s)
            return None if mapping is None else (mapping.inside, mapping)
        host = self.hosts.get(target.host)
        if host is not None and host.router is not None and host.router is not sender.router:
            return None  # nobody outside has a way to a private address
        return target, None


class MemoryRouter:
    """A router with one outside address, its name, for all hosts behind it."""

    def __init__(self, name: str, kind: str | NatRules, choice: random.Random) -> None:
        self.name = name
        self.table = AddressTranslation(kind, choice)


class _Dial:
    """One attempt of a host to open a stream, from its first greeting to its answer."""

    def __init__(self, origin: Address, target: Address, answer: asyncio.Future[MemoryStream]) -> None:
        self.origin = origin
        self.target = target
        self.answer = answer
        self.stream: MemoryStream | None = None
        self.is_met = False
        """Whether it is one stream with the attempt of the other side: both greeted at the same time."""


class MemoryHost(Network):
    """One host: a Network whose addresses have this host's name. It can be killed, and stays dead."""

    is_simulated = True

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        router: MemoryRouter | None = None,
        known_as: Address | None = None,
    ) -> None:
        self.name = name
        self.router = router
        self.address = known_as or Address(name, _FIRST_PORT)
        """What conditions know it by."""
        self.end = Address(name, _FIRST_PORT)
        """What the network's links know it by."""
        self.is_dead = False
        self.num_sent_bytes = 0
        """What has been given to its links, streams and datagrams together."""
        self.random = network.random_of(name)
        self.clock: Clock = running_clock()
        if network.conditions is not None:
            self.clock = network.conditions.clock_for(lambda: self.address, self.clock)
        self._network = network
        self._num_ports = 0
        self._num_origins = 0
        self._has_address = known_as is not None
        self._stop_watching: Callable[[], None] | None = None
        self._listeners: dict[int, MemoryListener] = {}
        self._datagrams: dict[int, MemoryDatagrams] = {}
        self._streams: dict[MemoryStream, None] = {}
        self._dials: dict[tuple[int, Address], _Dial] = {}  # by their own port and whom they greet
        self._be_known_as(self.address)

    def _be_known_as(self, address: Address) -> None:
        """Be known to the conditions by this address."""
        self.address = address
        self._network.links.clear()
        if (conditions := self._network.conditions) is not None:
            if self._stop_watching is not None:
                self._stop_watching()
            conditions.start()
            self._stop_watching = conditions.on_kill(address, self.kill)

    # --- streams ---

    async def listen(self, address: Address, *, is_shared: bool = False) -> MemoryListener:
        """Accept streams there; UsageError when that cannot be."""
        port = self._bind(address, self._listeners)
        listener = self._listeners[port] = MemoryListener(self, Address(self.name, port))
        return listener

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol, *, tls: Tls = None) -> None:
        """Have `protocol` speak to whoever listens there, after one round trip; nothing is encrypted."""
        self._num_origins += 1
        port = _FIRST_ORIGIN_PORT + (self._num_origins - 1) % _NUM_PORTS
        stream = await self._stream_to(address, port)
        try:
            stream.attach(protocol)
        except BaseException:
            stream.abort()
            raise

    async def connect_from(self, port: int, address: Address) -> MemoryAccepted:
        """A stream to whoever listens there, or dials this port from there at the same time."""
        return MemoryAccepted(await self._stream_to(address, port))

    async def _stream_to(self, address: Address, port: int) -> MemoryStream:
        self._check_alive()
        answer: asyncio.Future[MemoryStream] = asyncio.get_running_loop().create_future()
        if (key := (port, address)) in self._dials:
            raise OSError(errno.EADDRINUSE, f"{address} is being dialed from port {port} already")
        dial = self._dials[key] = _Dial(Address(self.name, port), address, answer)
        try:
            self._greet(dial, _KNOCK_AGAIN_S)
            stream = dial.stream = await answer
            self._check_alive()
        except BaseException:
            if dial.stream is not None:
                dial.stream.abort()
            raise
        finally:
            del self._dials[key]
            answer.cancel()
        return stream

    def _greet(self, dial: _Dial, again_s: float) -> None:
        """Ask for a stream; once more after a while if a router drops it."""
        if dial.answer.done() or dial.is_met:
            return
        loop, network, target = asyncio.get_running_loop(), self._network, dial.target
        sent_at_s = loop.time()
        origin, mapping = self._way_out("tcp", dial.origin, target, sent_at_s)
        there = network.owner("tcp", target, sent_at_s)
        host = network.hosts.get(there.host)
        near, far = MemoryStream(loop, dial.origin, target, self), MemoryStream(loop, there, origin, host)
        links = network.link(self.end, there), network.link(there, self.end)
        join(near, far, links, (self.random, host.random if host else self.random))
        dial.stream = near

        def offer() -> None:  # at the other host: hand over its end of the stream, and answer
            if dial.is_met:
                return
            way_in = network.way_in("tcp", self, origin, target, loop.time())
            if way_in is not None:
                inside, far_mapping = way_in
                host = network.hosts.get(inside.host)
                is_taken = host is not None and host._take(dial, far, inside.port, origin, far_mapping)
                far.send(functools.partial(on_answer, is_taken))
            elif again_s <= _LONGEST_KNOCK_S:
                loop.call_at(max(sent_at_s + again_s, loop.time()), self._greet, dial, 2 * again_s)
            elif not dial.answer.done():
                dial.answer.set_exception(TimeoutError(errno.ETIMEDOUT, f"nothing answers at {target}"))

        def on_answer(is_taken: bool) -> None:  # at this host: bytes may follow, and wait for the protocol
            if dial.answer.done():
                return
            if is_taken:
                dial.answer.set_result(near)
                self._open(near, mapping)
            else:
                nobody = ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {target}")
                dial.answer.set_exception(nobody)

        near.send(offer)

    def _take(
        self, dial: _Dial, stream: MemoryStream, port: int, origin: Address, mapping: Mapping | None
    ) -> bool:
        """Somebody greets a port of this host: whether it gets its stream."""
        own = self._dials.get((port, origin))
        if own is not None:  # both dial each other: the greeting that comes first makes the stream of both
            if own.is_met or own.answer.done():
                return False
            dial.is_met = own.is_met = True
            self._open(stream, mapping)
            own.answer.set_result(stream)
            return True
        listener = self._listeners.get(port)
        is_taken = listener is not None and listener.offer(stream)
        if is_taken:
            self._open(stream, mapping)
        return is_taken

    def _way_out(
        self, carrier: Carrier, source: Address, target: Address, now_s: float
    ) -> tuple[Address, Mapping | None]:
        """The address that others see something come from; its router keeps a port for it."""
        host = self._network.hosts.get(target.host)
        if self.router is None or (host is not None and host.router is self.router):
            return source, None
        mapping = self.router.table.leave(carrier, source, target, now_s)
        return Address(self.router.name, mapping.port), mapping

    def _open(self, stream: MemoryStream, mapping: Mapping | None = None) -> None:
        self._streams[stream] = None
        if mapping is not None:
            mapping.num_streams += 1

        def on_lost() -> None:
            self._streams.pop(stream, None)
            if mapping is not None:
                mapping.num_streams -= 1

        stream.wait_for_protocol(on_lost)

    async def adopt(
        self,
        accepted: Accepted,
        protocol: asyncio.BufferedProtocol,
        *,
        tls: Tls = None,
        is_server: bool = True,
    ) -> None:
        """Have `protocol` serve a stream; nothing is encrypted."""
        cast("MemoryAccepted", accepted).stream.attach(protocol)

    async def splice(
        self,
        inside: asyncio.BufferedProtocol,
        outside: asyncio.BufferedProtocol,
        *,
        tls: Tls,
        is_server: bool,
    ) -> None:
        """Join two protocols of this host by a stream without delay; nothing is encrypted."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        near, far = (MemoryStream(loop, self.address, self.address, None) for _ in range(2))
        join(near, far, (IDEAL_LINK, IDEAL_LINK), (self.random, self.random))
        for stream, protocol in ((far, outside), (near, inside)):
            self._open(stream)
            stream.attach(protocol)

    # --- datagrams ---

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """Send and receive datagrams there; UsageError when that cannot be."""
        port = self._bind(address, self._datagrams)
        carrier = self._datagrams[port] = MemoryDatagrams(self, Address(self.name, port), protocol)
        protocol.connection_made(carrier)
        return carrier

    async def resolve(self, address: Address) -> tuple[Any, ...]:
        """How a host names an address: its name and port."""
        return address.host, address.port

    def send_datagram(self, source: Address, data: bytes, target: tuple[str, int]) -> None:
        """Pass a packet to the link, which may lose it."""
        if self.is_dead:
            return
        self.num_sent_bytes += len(data)
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        network, (host, port) = self._network, target
        if network.routers:
            address = Address(host, port)
            source, _ = self._way_out("udp", source, address, now_s)
            host = network.owner("udp", address, now_s).host
        link = network.links.get((self.name, host)) or network.link(self.end, Address(host, port))
        for _, arrives_at_s, is_corrupt in link.carry_datagram(now_s, len(data)):
            packet = corrupted(data, self.random) if is_corrupt and data else data
            if arrives_at_s <= now_s:
                loop.call_soon(self._arrive, source, packet, *target)
            elif arrives_at_s < math.inf:
                loop.call_at(arrives_at_s, self._arrive, source, packet, *target)

    def _arrive(self, source: Address, packet: bytes, host: str, port: int) -> None:
        network = self._network
        if network.routers:
            now_s = asyncio.get_running_loop().time()
            way_in = network.way_in("udp", self, source, Address(host, port), now_s)
            if way_in is None:
                return
            host, port = way_in[0].host, way_in[0].port
        target = network.hosts.get(host)
        carrier = target._datagrams.get(port) if target else None
        if carrier is not None:
            carrier.protocol.datagram_received(packet, (source.host, source.port))

    # --- its life ---

    def kill(self) -> None:
        """End everything here without a word: others see their streams reset, and hear nothing more."""
        if self.is_dead:
            return
        self.is_dead = True
        for listener in tuple(self._listeners.values()):
            listener.close()
        for carrier in tuple(self._datagrams.values()):
            carrier.abort()
        for stream in tuple(self._streams):
            stream.kill()

    def release(self, what: MemoryListener | MemoryDatagrams) -> None:
        """Free the port of something that was closed."""
        taken: dict[int, Any] = self._listeners if isinstance(what, MemoryListener) else self._datagrams
        if taken.get(what.address.port) is what:
            del taken[what.address.port]

    def _bind(self, address: Address, taken: dict[int, Any]) -> int:
        """A port that may be used, the given one or the next that is free for both kinds."""
        if self.is_dead or address.host != self.name:
            raise UsageError(
                f"Host {self.name} cannot listen on {address}.",
                cause="it was killed." if self.is_dead else "that is another host's name.",
            )
        port = address.port
        if port in taken:
            raise UsageError(
                f"Cannot listen on {address}: it is in use.",
                next_step="choose another port, or 0 for any free one.",
            )
        while port == 0:
            port = _FIRST_PORT + self._num_ports
            self._num_ports += 1
            if port in self._listeners or port in self._datagrams:
                port = 0
        if not self._has_address:
            self._has_address = True
            if port != self.address.port:
                self._be_known_as(Address(self.name, port))
        return port

    def _check_alive(self) -> None:
        if self.is_dead:
            raise OSError(errno.ENETDOWN, f"host {self.name} was killed")


class MemoryListener:
    """Accepts the streams that others dial to one port of a host."""

    def __init__(self, host: MemoryHost, address: Address) -> None:
        self.address = address
        self._host = host
        self._backlog: asyncio.Queue[MemoryAccepted] = asyncio.Queue()

    def offer(self, stream: MemoryStream) -> bool:
        """A newcomer; False when too many wait already."""
        if self._backlog.qsize() >= _BACKLOG:
            return False
        self._backlog.put_nowait(MemoryAccepted(stream))
        return True

    async def accept(self) -> MemoryAccepted:
        """The next stream, in order of arrival; waits on when the listener is closed."""
        while True:
            accepted = await self._backlog.get()
            if not accepted.stream.is_closing():
                return accepted

    def close(self) -> None:
        """Accept no more; those who wait are cut off."""
        self._host.release(self)
        while not self._backlog.empty():
            self._backlog.get_nowait().stream.abort()


class MemoryAccepted:
    """A stream that somebody has dialed, here or there."""

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self.origin = Address(*stream.get_extra_info("peername"))

    def refuse(self, last_words: bytes) -> None:
        """Send these bytes and close the stream."""
        self.stream.write(last_words)
        self.close()

    def close(self) -> None:
        """Close it unserved; does nothing once it is served."""
        if self.stream.protocol is None:
            self.stream.close()


class MemoryDatagrams(asyncio.DatagramTransport):
    """Sends and receives datagrams at one port of a host."""

    def __init__(self, host: MemoryHost, address: Address, protocol: asyncio.DatagramProtocol) -> None:
        super().__init__({"sockname": (address.host, address.port)})
        self.address = address
        self.protocol = protocol
        self._host = host
        self._is_closing = False

    def sendto(self, data: Buffer, addr: Any = None) -> None:
        """Send one packet; one that is too large is told to the protocol."""
        if self._is_closing:
            return
        packet = bytes(data)
        if len(packet) > MAX_DATAGRAM_BYTES:
            self.protocol.error_received(OSError(errno.EMSGSIZE, "the datagram is too long"))
        elif type(addr) is not tuple:
            raise ValueError(f"a datagram needs an address, not {addr!r}")
        else:
            self._host.send_datagram(self.address, packet, addr)

    def get_write_buffer_size(self) -> int:
        """None wait: the link drops what it cannot take."""
        return 0

    def is_closing(self) -> bool:
        """Whether it has been closed."""
        return self._is_closing

    def close(self) -> None:
        """Stop sending and receiving."""
        if not self._is_closing:
            self._is_closing = True
            self._host.release(self)
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        """Close it, as `close` does: nothing waits here to be sent."""
        self.close()


class MemoryStream(asyncio.Transport):
    """One end of a stream. It takes part in the stream before a protocol is given to it with `attach`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, here: Address, there: Address, host: MemoryHost | None
    ) -> None:
        super().__init__({"sockname": (here.host, here.port), "peername": (there.host, there.port)})
        self._loop = loop
        self._host = host
        self.protocol: asyncio.BufferedProtocol | None = None
        self._outgoing: Pipe
        self._incoming: Pipe
        self._other: MemoryStream
        self._on_lost: Callable[[], object] | None = None
        self._unread = b""
        self._high_bytes = _HIGH_WATER_BYTES
        self._is_writing_paused = False
        self._is_reading_paused = False
        self._is_closing = False
        self._is_lost = False
        self._has_sent_eof = False
        self._has_sent_reset = False

    # --- joining ---

    def send(self, what: Callable[[], None]) -> None:
        """Have something happen at the other end, after all that was sent before."""
        self._outgoing.push_eof(what)

    def wait_for_protocol(self, on_lost: Callable[[], object]) -> None:
        """Open this end; bytes wait until `attach`."""
        self._on_lost = on_lost
        self._incoming.pause()

    def attach(self, protocol: asyncio.BufferedProtocol) -> None:
        """Have a protocol speak; ConnectionResetError when the stream has ended meanwhile."""
        if self._is_closing:
            raise ConnectionResetError("the stream was closed before it was served")
        self.protocol = protocol
        protocol.connection_made(self)
        if not self._is_reading_paused:
            self._incoming.resume()

    # --- what protocols use ---

    def write(self, data: Buffer) -> None:
        """Send a copy of these bytes; `bytes` need none."""
        if self._is_closing or self._has_sent_eof:
            return
        outgoing, sent = self._outgoing, bytes(data)
        outgoing.push(sent)
        if self._host is not None:
            self._host.num_sent_bytes += len(sent)
        if outgoing.is_full and not self._is_writing_paused:
            self._pause_writing_if_full()

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Send copies of all of them, in one piece."""
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        """Send nothing more; the other end may go on."""
        if not self._has_sent_eof:
            self._has_sent_eof = True
            self._outgoing.push_eof(self._other._receive_eof)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Pause the protocol above `high`; it goes on when everything has left, whatever `low` is."""
        self._high_bytes = (4 * low if low else _HIGH_WATER_BYTES) if high is None else high
        self._pause_writing_if_full()

    def get_write_buffer_size(self) -> int:
        """Bytes that wait beyond those in the socket's own buffer."""
        return max(0, self._outgoing.queued_bytes - SOCKET_BYTES)

    def pause_reading(self) -> None:
        """Pass nothing on until `resume_reading`."""
        if not self._is_closing:
            self._is_reading_paused = True
            self._incoming.pause()

    def resume_reading(self) -> None:
        """Pass bytes on again."""
        if self._is_reading_paused and not self._is_closing:
            self._is_reading_paused = False
            self._loop.call_soon(self._read_on)

    def is_reading(self) -> bool:
        """Whether bytes are passed on to the protocol."""
        return not self._is_reading_paused and not self._is_closing

    def is_closing(self) -> bool:
        """Whether it has ended or is about to."""
        return self._is_closing

    def close(self) -> None:
        """End it when everything has been sent."""
        if self._is_closing:
            return
        self.write_eof()
        self._is_closing = True
        self._incoming.resume()  # whoever sends on should hear that nobody listens
        if not self._outgoing.is_full:
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        """End it now and drop what has not left."""
        self._end(None)

    def reset(self) -> None:
        """End this side, because the other end is gone."""
        if not self._is_lost:
            self._is_closing = True
            self._outgoing.close()
            self._lose(ConnectionResetError("the connection was reset by the other side"))

    def kill(self) -> None:
        """Lose the host: the other end hears of it after all that has left, when the link lets it through."""
        self._end(ConnectionAbortedError("this host was killed"), is_soon=False)

    # --- what the pipes tell ---

    def _receive(self, data: bytes) -> None:
        protocol = self.protocol
        if self._is_closing or protocol is None:
            if self._is_lost:
                self._reset_other(is_cutting=False)
            return
        try:
            self._fill(protocol, data)
        except Exception as error:
            log.exception("a protocol failed in memory")  # which ends its stream, not the loop
            self._end(error)

    def _fill(self, protocol: asyncio.BufferedProtocol, data: bytes) -> None:
        """Copy into the protocol's own memory."""
        size_bytes = len(data)
        target: Any = protocol.get_buffer(size_bytes)
        if size_bytes <= len(target):
            target[:size_bytes] = data
            protocol.buffer_updated(size_bytes)
            return
        rest = memoryview(data)
        while rest and not self._is_closing:
            if self._is_reading_paused:
                self._unread = bytes(rest)
                return
            target = protocol.get_buffer(len(rest))
            num_bytes = min(len(target), len(rest))
            if not num_bytes:
                raise RuntimeError("get_buffer() returned an empty buffer")
            target[:num_bytes] = rest[:num_bytes]
            rest = rest[num_bytes:]
            protocol.buffer_updated(num_bytes)

    def _read_on(self) -> None:
        if self._is_reading_paused or self._is_closing:
            return
        unread, self._unread = self._unread, b""
        if unread:
            self._receive(unread)
        if not self._is_reading_paused:
            self._incoming.resume()

    def _receive_eof(self) -> None:
        if self._is_closing or self.protocol is None:
            self.close()
            return
        try:
            keeps_open = self.protocol.eof_received()
        except Exception as error:
            log.exception("a protocol failed in memory")
            self._end(error)
            return
        if not keeps_open:
            self.close()

    def _drained(self) -> None:
        if self._is_closing:
            self._lose(None)
        elif self._is_writing_paused and self.protocol is not None:
            self._is_writing_paused = False
            self.protocol.resume_writing()

    def _pause_writing_if_full(self) -> None:
        if (
            self.protocol is not None
            and not self._is_writing_paused
            and self.get_write_buffer_size() > self._high_bytes
        ):
            self._is_writing_paused = True
            self.protocol.pause_writing()

    def _reset_other(self, *, is_cutting: bool) -> None:
        if self._outgoing.is_unused:  # the other end does not know of this one yet, and never will
            self._outgoing.close()
        elif not self._has_sent_reset:
            self._has_sent_reset = True
            send = self._outgoing.cut if is_cutting else self._outgoing.push_eof
            send(self._other.reset)

    def _end(self, error: Exception | None, *, is_soon: bool = True) -> None:
        """Drop what has not left, and reset the other end."""
        if self._is_lost:
            return
        self._is_closing = True
        self._reset_other(is_cutting=True)
        if is_soon:
            self._loop.call_soon(self._lose, error)
        else:
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._unread = b""
        protocol, self.protocol = self.protocol, None
        if self._on_lost is not None:
            self._on_lost()
        if protocol is not None:
            protocol.connection_lost(error)


def join(
    one: MemoryStream,
    other: MemoryStream,
    links: tuple[Link, Link],
    choices: tuple[random.Random, random.Random],
) -> None:
    """Make two ends a stream; `links` and `choices` are those of `one`'s direction and of `other`'s."""
    for sender, receiver, link, choice in (
        (one, other, links[0], choices[0]),
        (other, one, links[1], choices[1]),
    ):
        sender._other = receiver
        sender._outgoing = receiver._incoming = Pipe(
            sender._loop, link, receiver._receive, sender._drained, buffer_bytes=SOCKET_BYTES, choice=choice
        )
