"""Real sockets that behave like a worse network: a profile's delays, bandwidth and loss, a script's faults.

Peers agree on nothing but the profile, the script and the seed. Whoever dials shapes the way between, in both
directions; whoever sends a datagram shapes its way; each shapes its own line. So a peer that is not shaped
can be talked to, and only its own line is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import math
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from shoal.core import Address, Clock
from shoal.core.fork import close_in_children, keep_in_children
from shoal.core.scope import settle
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.distributions import digest_of
from shoal.transport.network.faults import FaultScript
from shoal.transport.network.links import Link, nothing
from shoal.transport.network.pipes import Pipe, PreciseTimers, call_on_loop, corrupted
from shoal.transport.network.profiles import Profile
from shoal.transport.network.sockets import (
    Accepted,
    Listener,
    Network,
    SocketAccepted,
    SocketNetwork,
    Tls,
    is_wildcard,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NOBODY = Address("nobody", 0)
_DIAL_BYTES = 60
_LEAST_QUEUE_BYTES = 64 * 1024
_MOST_QUEUE_BYTES = 4 * 1024 * 1024
_QUEUE_S = 0.02
_LEAST_PIECE_BYTES = 4 * 1024
_MOST_PIECE_BYTES = 64 * 1024
_PIECE_S = 0.001
_PAIR_BYTES = 64 * 1024  # what the kernel may hold of the pair, unseen by the queue


class ShapedNetwork(Network):
    """A network of sockets under conditions; leave it as a context manager to end what is still on its way.

    `here` is the address that others know this peer by, and that profile and script name it by; without it,
    the first one that it listens on. A peer without any is nobody, in a place that chance picks. When the
    script kills this peer, its sockets end and `on_kill` is called. Conditions that it owns stop with it.
    """

    is_simulated = False
    linger_s = 2.0
    """How long `close` waits for what is still on its way."""

    def __init__(
        self,
        network: SocketNetwork,
        conditions: Conditions,
        here: Address | None = None,
        *,
        on_kill: Callable[[], None] | None = None,
        owns_conditions: bool = False,
    ) -> None:
        self.network = network
        self.conditions = conditions
        self.here = here
        self._is_here_named = here is not None
        self.random: random.Random = network.random
        self.clock: Clock = conditions.clock_for(lambda: self.here, network.clock)
        self._on_kill = on_kill
        self._owns_conditions = owns_conditions
        self._is_dead = False
        self._timers: dict[asyncio.AbstractEventLoop, PreciseTimers] = {}
        self._tunnels: dict[Tunnel, None] = {}
        self._listeners: dict[ShapedListener, None] = {}
        self._datagrams: dict[ShapedDatagrams, None] = {}
        self._known: dict[tuple[Any, ...], Address] = {}
        self._on_all_over: Callable[[], None] = nothing
        self._choices = random.Random(digest_of(conditions.seed, "tunnels", str(here)))
        self._stop_watching: Callable[[], None] | None = None

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Let what has been sent arrive, and end the rest."""
        for datagrams in tuple(self._datagrams):
            datagrams.close()
        for should_abort in (False, True):
            if should_abort:
                self._abort_all()
            all_over = asyncio.Event()
            # a tunnel may end in another thread
            self._on_all_over = functools.partial(call_on_loop, asyncio.get_running_loop(), all_over.set)
            self._check_over()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.linger_s):
                    await all_over.wait()
        if self._stop_watching is not None:
            self._stop_watching()
        if self._owns_conditions:
            self.conditions.stop()

    # --- streams ---

    async def listen(self, address: Address, *, is_shared: bool = False) -> Listener:
        """Accept TCP connections there; UsageError when that cannot be."""
        timers = self._begin()
        inner = await self.network.listen(address, is_shared=is_shared)
        listener = ShapedListener(inner, timers.loop, self._listeners)
        if not is_shared:
            self._be_known_as(listener.address)
        if self._is_dead:
            listener.kill()
        return listener

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol, *, tls: Tls = None) -> None:
        """Have `protocol` speak to whoever listens there, after one round trip."""
        timers = self._begin()
        if self.conditions.is_dead(address):
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"{address} was killed")
        here = self.here or _NOBODY
        leaving = self.conditions.link(here, address, "leaving")
        arriving = self.conditions.link(address, here, "arriving")
        await cross(leaving, timers, _DIAL_BYTES)
        try:
            outside = await self.network.connect(address)
        except OSError:
            await cross(arriving, timers, _DIAL_BYTES)
            raise
        try:
            await cross(arriving, timers, _DIAL_BYTES)
        except BaseException:
            outside.close()
            raise
        inside = await self._open_tunnel(outside, leaving, arriving, timers, address)
        await self.network.dial(address, protocol, tls=tls, sock=inside)

    async def connect_from(self, port: int, address: Address) -> Accepted:
        """Open a connection from a shared port; it is shaped as an accepted one, not the way between."""
        self._begin()
        return await self.network.connect_from(port, address)

    async def adopt(
        self,
        accepted: Accepted,
        protocol: asyncio.BufferedProtocol,
        *,
        tls: Tls = None,
        is_server: bool = True,
    ) -> None:
        """Have `protocol` serve a connection, on the running loop."""
        timers = self._begin()
        here = self.here or _NOBODY
        taken = cast("SocketAccepted", accepted)
        if not self.conditions.concern_line(here):
            await self.network.adopt(taken, protocol, tls=tls, is_server=is_server)
            return
        keep_in_children(taken.socket.fileno())  # the tunnel says so again once it holds it
        outside = socket.socket(fileno=taken.socket.detach())
        leaving, arriving = (
            self.conditions.link(here, None, "leaving"),
            self.conditions.link(None, here, "arriving"),
        )
        inside = await self._open_tunnel(outside, leaving, arriving, timers, None)
        accepted = SocketAccepted(inside, taken.origin)
        await self.network.adopt(accepted, protocol, tls=tls, is_server=is_server)

    async def splice(
        self,
        inside: asyncio.BufferedProtocol,
        outside: asyncio.BufferedProtocol,
        *,
        tls: Tls,
        is_server: bool,
    ) -> None:
        """Join two protocols of this process, between which nothing is shaped."""
        await self.network.splice(inside, outside, tls=tls, is_server=is_server)

    async def _open_tunnel(
        self,
        outside: socket.socket,
        leaving: Link,
        arriving: Link,
        timers: PreciseTimers,
        target: Address | None,
    ) -> socket.socket:
        tunnel = Tunnel(timers, leaving, arriving, random.Random(self._choices.random()))
        inside = await tunnel.open(outside)
        self._tunnels[tunnel] = None
        forget = nothing
        if target is not None:
            forget = self.conditions.on_kill(target, lambda: call_on_loop(tunnel.loop, tunnel.reset))

        def on_over() -> None:
            self._tunnels.pop(tunnel, None)
            forget()
            self._check_over()

        tunnel.on_over = on_over
        if self._is_dead:
            tunnel.abort()
        return inside

    # --- datagrams ---

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """A UDP socket there; UsageError when that cannot be."""
        is_named = address.port != 0 or not is_wildcard(address.host)
        datagrams = ShapedDatagrams(self, self._begin(), protocol, is_named=is_named)
        await self.network.open_datagrams(address, datagrams)
        return datagrams

    async def resolve(self, address: Address) -> tuple[Any, ...]:
        """A socket address; what it was called is remembered, since rules may go by names."""
        where = await self.network.resolve(address)
        self._known[where[:2]] = address
        return where

    def address_of(self, where: tuple[Any, ...]) -> Address:
        """The address that a socket address was resolved from."""
        return self._known.get(where[:2]) or Address(where[0], where[1])

    def on_datagrams_open(self, datagrams: ShapedDatagrams, bound: Address, *, is_named: bool) -> None:
        """They are in use now; `is_named`: at an address that others may know."""
        self._datagrams[datagrams] = None
        self._be_known_as(bound, is_named=is_named)
        if self._is_dead:
            datagrams.abort()

    def on_datagrams_over(self, datagrams: ShapedDatagrams) -> None:
        """Forget datagrams that were closed."""
        self._datagrams.pop(datagrams, None)
        self._check_over()

    # --- this peer ---

    def _begin(self) -> PreciseTimers:
        """Timers of the running loop; the script's time begins with the first use."""
        loop = asyncio.get_running_loop()
        timers = self._timers.get(loop)
        if timers is None:
            timers = self._timers[loop] = PreciseTimers(loop)
        self.conditions.start(timers)
        if self.here is not None:
            self._be_known_as(self.here, is_named=self._is_here_named)
        if self._is_dead:
            raise OSError(errno.ENETDOWN, "this peer was killed by the fault script")
        return timers

    def _be_known_as(self, address: Address, *, is_named: bool = True) -> None:
        """Be known by an address, the first that has a name, and until then the first of all."""
        if self.here is None or (is_named and not self._is_here_named):
            self.here, self._is_here_named = address, is_named
            if self._stop_watching is not None:
                self._stop_watching()
                self._stop_watching = None
        if self._stop_watching is None:
            self._stop_watching = self.conditions.on_kill(self.here, self._die)

    def _die(self) -> None:
        self._is_dead = True
        for listener in tuple(self._listeners):
            listener.kill()
        self._abort_all()
        if self._on_kill is not None:
            self._on_kill()

    def _abort_all(self) -> None:
        for tunnel in tuple(self._tunnels):
            call_on_loop(tunnel.loop, tunnel.abort)
        for datagrams in tuple(self._datagrams):
            datagrams.abort()

    def _check_over(self) -> None:
        if not self._tunnels and not self._datagrams:
            self._on_all_over()


def shaped(
    network: SocketNetwork,
    profile: str | Path | Profile | None = None,
    script: str | Path | FaultScript | None = None,
    seed: int = 0,
    *,
    here: Address | None = None,
) -> ShapedNetwork:
    """Sockets under a profile and a fault script, given by name, path or as they are; for one run."""
    if isinstance(profile, str | Path):
        profile = Profile.load(profile)
    if isinstance(script, str | Path):
        script = FaultScript.load(script)
    return ShapedNetwork(network, Conditions(profile, script, seed=seed), here, owns_conditions=True)


class ShapedDatagrams(asyncio.DatagramTransport, asyncio.DatagramProtocol):
    """Stands between a socket and its protocol; the socket closes when the last datagram has left it."""

    def __init__(
        self,
        owner: ShapedNetwork,
        timers: PreciseTimers,
        protocol: asyncio.DatagramProtocol,
        *,
        is_named: bool = True,
    ) -> None:
        super().__init__()
        self._is_named = is_named
        self.protocol = protocol
        self._owner = owner
        self._timers = timers
        self._socket: asyncio.DatagramTransport | None = None
        self._here: Address | None = None
        self._links: dict[Any, Link] = {}
        self._down: Link | None = None
        self._choice = random.Random(owner.conditions.seed)
        self._num_leaving = 0
        self._is_closing = False

    # --- sending ---

    def sendto(self, data: Buffer, addr: Any = None) -> None:
        """Send one packet on its way."""
        if self._is_closing or self._socket is None:
            return
        self._look_where_it_is()
        link = self._links.get(addr)
        if link is None:
            assert self._here is not None, "set when the socket was opened"
            link = self._owner.conditions.link(self._here, self._owner.address_of(addr), "leaving")
            self._links[addr] = link
        for arrives_s, arriving in self._passages(link, bytes(data)):
            if arrives_s <= self._timers.time():
                self._socket.sendto(arriving, addr)
            else:
                self._num_leaving += 1
                self._timers.call_at(arrives_s, self._leave, arriving, addr)

    def _look_where_it_is(self) -> None:
        """A peer may be known by another address than before: then its links are others."""
        here = self._owner.here
        if here is not self._here and here is not None:
            self._here = here
            self._links.clear()
            self._down = self._owner.conditions.link(None, here, "arriving")

    def _leave(self, packet: bytes, where: tuple[Any, ...]) -> None:
        self._num_leaving -= 1
        if self._socket is not None:
            self._socket.sendto(packet, where)
            if self._is_closing and self._num_leaving == 0:
                self._socket.close()

    def _passages(self, link: Link, packet: bytes) -> list[tuple[float, bytes]]:
        return [
            (arrives_s, corrupted(packet, self._choice) if is_corrupt and packet else packet)
            for _, arrives_s, is_corrupt in link.carry_datagram(self._timers.time(), len(packet))
        ]

    # --- receiving ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with a socket that was opened."""
        self._socket = cast("asyncio.DatagramTransport", transport)
        self._owner.on_datagrams_open(
            self, Address(*transport.get_extra_info("sockname")[:2]), is_named=self._is_named
        )
        self._look_where_it_is()
        self.protocol.connection_made(self)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """A packet has come to the end of its way, and to the beginning of the line down."""
        if self._is_closing:
            return
        self._look_where_it_is()
        assert self._down is not None, "set when the socket was opened"
        for arrives_s, arriving in self._passages(self._down, data):
            if arrives_s <= self._timers.time():
                self.protocol.datagram_received(arriving, addr)
            else:
                self._timers.call_at(arrives_s, self._receive, arriving, addr)

    def _receive(self, packet: bytes, where: tuple[Any, ...]) -> None:
        if not self._is_closing:
            self.protocol.datagram_received(packet, where)

    def error_received(self, exc: Exception) -> None:
        """The socket tells of a packet that it could not send."""
        self.protocol.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol that the socket is gone."""
        self._is_closing = True
        self._socket = None
        self._owner.on_datagrams_over(self)
        self.protocol.connection_lost(exc)

    # --- as any datagram transport ---

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the socket's own transport knows."""
        return default if self._socket is None else self._socket.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        """What waits in the socket itself, not on the way."""
        return 0 if self._socket is None else cast("Any", self._socket).get_write_buffer_size()

    def is_closing(self) -> bool:
        """Whether it has been closed."""
        return self._is_closing

    def close(self) -> None:
        """Send and hear no more; what has been sent still arrives."""
        if not self._is_closing:
            self._is_closing = True
            if self._socket is not None and self._num_leaving == 0:
                self._socket.close()

    def abort(self) -> None:
        """Close the socket at once, whatever is on its way."""
        self._is_closing = True
        if self._socket is not None:
            self._socket.abort()


class ShapedListener:
    """Stops when its peer is killed, without an error for those who wait."""

    def __init__(
        self, listener: Listener, loop: asyncio.AbstractEventLoop, siblings: dict[ShapedListener, None]
    ) -> None:
        self.address = listener.address
        self._listener = listener
        self._loop = loop
        self._waits: asyncio.Timeout | None = None
        self._is_dead = False
        self._siblings = siblings
        siblings[self] = None

    async def accept(self) -> Accepted:
        """The next connection; none ever when this peer is dead."""
        while not self._is_dead:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None) as self._waits:
                    return await self._listener.accept()
        self._waits = None
        self._listener.close()
        never: asyncio.Future[Accepted] = self._loop.create_future()
        return await never

    def kill(self) -> None:
        """Accept no more, from any thread."""
        call_on_loop(self._loop, self._kill)

    def _kill(self) -> None:
        self._is_dead = True
        if self._waits is not None:
            self._waits.reschedule(self._loop.time())

    def close(self) -> None:
        """Stop listening; nothing more is accepted."""
        self._siblings.pop(self, None)
        self._listener.close()


class _End(asyncio.Protocol):
    """One socket, and the pipe that leads away from it."""

    def __init__(self, timers: PreciseTimers, link: Link, choice: random.Random) -> None:
        self.transport: asyncio.Transport | None = None
        self.is_lost = False
        self.has_ended = False
        """It has said that no more will come."""
        self.other: _End
        self.on_lost: Callable[[], None]
        bytes_per_s = link.bytes_per_s
        self._queue_bytes = _within(_LEAST_QUEUE_BYTES, _QUEUE_S * bytes_per_s, _MOST_QUEUE_BYTES)
        self._piece_bytes = _within(_LEAST_PIECE_BYTES, _PIECE_S * bytes_per_s, _MOST_PIECE_BYTES)
        self._half_s = 0.0 if math.isinf(bytes_per_s) else self._queue_bytes / bytes_per_s / 2
        self._loop = timers.loop
        self._is_reading = True
        self._descriptor = -1
        self.pipe = Pipe(
            timers, link, self._deliver, self._resume, buffer_bytes=self._queue_bytes, choice=choice
        )

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._descriptor = transport.get_extra_info("socket").fileno()
        close_in_children(self._descriptor)

    def data_received(self, data: bytes) -> None:
        pipe, size_bytes = self.pipe, self._piece_bytes
        for start in range(0, len(data), size_bytes):
            pipe.push(data[start : start + size_bytes])
        if self._is_reading and self.transport is not None and pipe.queued_bytes > self._queue_bytes:
            self._is_reading = False
            self.transport.pause_reading()
            self._look_later()

    def eof_received(self) -> bool:
        self.has_ended = True
        self.pipe.push_eof(self.other.close)
        return True

    def pause_writing(self) -> None:
        self.other.pipe.pause()

    def resume_writing(self) -> None:
        self.other.pipe.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        keep_in_children(self._descriptor)
        self.is_lost = True
        self.other.pipe.close()
        if self.other.has_ended:  # it was closed because of that: nothing is left to be said
            self.pipe.close()
            self.other.abort()
        elif not self.has_ended:
            self.has_ended = True
            self.pipe.push_eof(self.other.abort)
        self.on_lost()

    # --- reading while the pipe is short ---

    def _look_later(self) -> None:
        if self._half_s:
            self._loop.call_later(self._half_s, self._look)

    def _look(self) -> None:
        """Read on before the pipe is empty, so that it never runs dry."""
        if self._is_reading or self.is_lost:
            return
        if self.pipe.queued_bytes <= self._queue_bytes // 2:
            self._resume()
        else:
            self._look_later()

    def _resume(self) -> None:
        if not self._is_reading and self.transport is not None and not self.is_lost:
            self._is_reading = True
            self.transport.resume_reading()

    # --- what the pipes and the tunnel do ---

    def _deliver(self, data: bytes) -> None:
        if self.other.transport is not None and not self.other.is_lost:
            self.other.transport.write(data)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


class Tunnel:
    """Joins a real connection to one end of a pair of sockets by two pipes: a network in between, below TLS.

    The other end of the pair is what the transport speaks through. Back-pressure passes through: an end is
    read only while the pipe behind it is short. The end of one side is the end of the connection; a half that
    stays open, which TLS knows nothing of, is not kept. It lives on one loop. `choice` picks
    the bytes that a corrupting link damages.
    """

    def __init__(self, timers: PreciseTimers, leaving: Link, arriving: Link, choice: random.Random) -> None:
        self.loop = timers.loop
        self._inside = _End(timers, leaving, choice)
        self._outside = _End(timers, arriving, choice)
        self._inside.other, self._outside.other = self._outside, self._inside
        self._inside.on_lost = self._outside.on_lost = self._check_over
        self.on_over: Callable[[], None] = nothing

    async def open(self, outside: socket.socket) -> socket.socket:
        """Join a connected socket, which belongs to the tunnel from now on; returns the end to speak to."""
        inside, ours = socket.socketpair()
        try:
            for each in (inside, ours):
                each.setblocking(False)
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _PAIR_BYTES)
            await self.loop.create_connection(lambda: self._inside, sock=inside)
            await self.loop.create_connection(lambda: self._outside, sock=outside)
        except BaseException:
            ours.close()
            for end, its_socket in ((self._inside, inside), (self._outside, outside)):
                if end.transport is None:
                    its_socket.close()
                    end.is_lost = True
            self.abort()
            raise
        return ours

    def abort(self) -> None:
        """End it at once: what is on its way is lost."""
        for end in (self._inside, self._outside):
            end.pipe.close()
            end.has_ended = True
            end.abort()

    def reset(self) -> None:
        """The other side is no more: this one hears of it when the way lets that through."""
        self._outside.pipe.cut(self.abort)

    def _check_over(self) -> None:
        if self._inside.is_lost and self._outside.is_lost:
            for end in (self._inside, self._outside):
                end.pipe.close()
            self.on_over()


async def cross(link: Link, timers: PreciseTimers, size_bytes: int) -> None:
    """Wait for as long as one packet takes; the caller's deadline ends a wait for a link that is cut."""
    while True:
        waiter: asyncio.Future[None] = timers.loop.create_future()
        wake = functools.partial(settle, waiter, None)
        arrives_s = link.carry_stream(timers.time(), size_bytes).arrives_at_s
        if arrives_s < math.inf:
            timer = timers.call_at(arrives_s, wake)
            try:
                return await waiter
            finally:
                timer.cancel()
        stop = link.when_changed(functools.partial(call_on_loop, timers.loop, wake))
        try:
            await waiter
        finally:
            stop()


def _within(least: int, wanted: float, most: int) -> int:
    return int(min(max(least, wanted), most))
