"""A network inside this process: hosts by name, streams and datagrams between them, no sockets.

In virtual time everything on it happens the same way each time. `conditions` say what the links do; without
them bytes arrive in the next turn of the loop.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import math
import random
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoal.core import Address, Clock, UsageError, running_clock
from shoal.transport.networks.memory_sockets import MemoryAccepted, MemoryDatagrams, MemoryListener
from shoal.transport.networks.memory_streams import MemoryStream, join
from shoal.transport.networks.network import Accepted
from shoal.transport.networks.pipes import IDEAL_LINK, Link, corrupted

if TYPE_CHECKING:
    from shoal.transport.networks.network import Network

_FIRST_PORT = 1024
_FIRST_ORIGIN_PORT = 32_768  # from here on, ports of those who dial
_NUM_PORTS = 65_536 - _FIRST_ORIGIN_PORT


class Conditions(Protocol):
    """What this file needs to know of a network's conditions."""

    def start(self) -> None:
        """Begin on the running loop, unless they have begun."""

    def link(self, source: Address, target: Address) -> Link:
        """The whole way from one host to another."""

    def on_kill(self, address: Address, callback: Callable[[], None]) -> Callable[[], None]:
        """Have it called when the host is killed; returns how to stop that."""

    def clock_for(self, address: Address, clock: Clock) -> Clock:
        """The clock that this host sees."""


class MemoryNetwork:
    """All hosts and what lies between them; lives on one loop."""

    def __init__(self, conditions: Conditions | None = None, seed: int = 0) -> None:
        self.conditions = conditions
        self.seed = seed
        self.hosts: dict[str, MemoryHost] = {}
        self.links: dict[tuple[str, str], Link] = {}
        """Those that have been used, by the names of their ends."""

    def host(self, name: str) -> MemoryHost:
        """The network as this host sees it; made when it is first asked for, on the loop that it will use."""
        if name not in self.hosts:
            self.hosts[name] = MemoryHost(self, name)
        return self.hosts[name]

    def link(self, source: Address, target: Address) -> Link:
        """The way between two hosts, whatever their ports."""
        names = (source.host, target.host)
        if (link := self.links.get(names)) is None:
            known = [host.address if (host := self.hosts.get(end.host)) else end for end in (source, target)]
            link = self.links[names] = self.conditions.link(*known) if self.conditions else IDEAL_LINK
        return link


class MemoryHost:
    """One host: a Network whose addresses have this host's name. It can be killed, and stays dead."""

    is_simulated = True

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.name = name
        self.address = Address(name, _FIRST_PORT)
        """What conditions know it by: the address that it is given first."""
        self.is_dead = False
        self.random = _random_of(network.seed, name)
        self.clock: Clock = running_clock()
        self._network = network
        self._own_clock = self.clock
        self._num_ports = 0
        self._num_origins = 0
        self._has_address = False
        self._stop_mourning: Callable[[], None] | None = None
        self._listeners: dict[int, MemoryListener] = {}
        self._datagrams: dict[int, MemoryDatagrams] = {}
        self._streams: dict[MemoryStream, None] = {}
        self._settle(self.address)

    def _settle(self, address: Address) -> None:
        """Be known to the conditions by this address."""
        self.address = address
        self._network.links.clear()
        if (conditions := self._network.conditions) is not None:
            if self._stop_mourning is not None:
                self._stop_mourning()
            conditions.start()
            self.clock = conditions.clock_for(address, self._own_clock)
            self._stop_mourning = conditions.on_kill(address, self.kill)

    # --- streams ---

    async def listen(self, address: Address) -> MemoryListener:
        """Accept streams there; UsageError when that cannot be."""
        port = self._bind(address, self._listeners)
        listener = self._listeners[port] = MemoryListener(self, Address(self.name, port))
        return listener

    async def dial(
        self, address: Address, protocol: asyncio.BufferedProtocol, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Have `protocol` speak to whoever listens there, after one round trip; nothing is encrypted."""
        self._check_alive()
        loop = asyncio.get_running_loop()
        network = self._network
        target = network.hosts.get(address.host)
        origin = Address(self.name, _FIRST_ORIGIN_PORT + self._num_origins % _NUM_PORTS)
        self._num_origins += 1
        here, there = MemoryStream(loop, origin, address), MemoryStream(loop, address, origin)
        links = network.link(self.address, address), network.link(address, self.address)
        join(here, there, links, (self.random, target.random if target else self.random))
        answer: asyncio.Future[bool] = loop.create_future()
        here.send(functools.partial(self._knock, address, there, functools.partial(self._hear, here, answer)))
        try:
            is_taken = await answer
            self._check_alive()
            if is_taken:
                here.attach(protocol)
        except BaseException:
            here.abort()
            raise
        if not is_taken:
            raise ConnectionRefusedError(errno.ECONNREFUSED, f"nobody listens at {address}")

    def _knock(self, address: Address, there: MemoryStream, answer: Callable[[bool], None]) -> None:
        """At the other host: hand over its end of a new stream, and answer."""
        target = self._network.hosts.get(address.host)
        listener = target._listeners.get(address.port) if target else None
        is_taken = target is not None and listener is not None and listener.offer(there)
        if target is not None and is_taken:
            target._open(there)
        there.send(functools.partial(answer, is_taken))

    def _hear(self, here: MemoryStream, answer: asyncio.Future[bool], is_taken: bool) -> None:
        """At this host again: bytes may follow at once, and wait for the protocol."""
        if not answer.done():
            answer.set_result(is_taken)
            self._open(here)

    def _open(self, stream: MemoryStream) -> None:
        self._streams[stream] = None
        stream.wait_for_protocol(self._forget)

    def _forget(self, stream: MemoryStream) -> None:
        self._streams.pop(stream, None)

    async def adopt(
        self, accepted: Accepted, protocol: asyncio.BufferedProtocol, *, tls: ssl.SSLContext | None = None
    ) -> None:
        """Have `protocol` serve an accepted stream; nothing is encrypted."""
        cast("MemoryAccepted", accepted).stream.attach(protocol)

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
        """Name and port."""
        return address.host, address.port

    def send_datagram(self, source: Address, data: bytes, target: tuple[str, int]) -> None:
        """Pass a packet to the link, which may lose it."""
        if self.is_dead:
            return
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        host, port = target
        network = self._network
        link = network.links.get((self.name, host)) or network.link(self.address, Address(host, port))
        for _, arrives_at_s, is_corrupt in link.carry_datagram(now_s, len(data)):
            packet = corrupted(data, self.random) if is_corrupt and data else data
            if arrives_at_s <= now_s:
                loop.call_soon(self._arrive, source, packet, host, port)
            elif arrives_at_s < math.inf:
                loop.call_at(arrives_at_s, self._arrive, source, packet, host, port)

    def _arrive(self, source: Address, packet: bytes, host: str, port: int) -> None:
        target = self._network.hosts.get(host)
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
                self._settle(Address(self.name, port))
        return port

    def _check_alive(self) -> None:
        if self.is_dead:
            raise OSError(errno.ENETDOWN, f"host {self.name} was killed")


def _random_of(seed: int, name: str) -> random.Random:
    """Not by hash(): it differs from process to process."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=16).digest()
    return random.Random(int.from_bytes(digest, "big"))


if TYPE_CHECKING:

    def _is_a_network(host: MemoryHost) -> Network:
        """Held by mypy."""
        return host
