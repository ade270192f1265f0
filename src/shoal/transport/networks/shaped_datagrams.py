"""Datagrams on a real socket, under conditions: delayed, lost, repeated and damaged on their way."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoal.core import Address
from shoal.transport.conditions.conditions import Conditions
from shoal.transport.conditions.lines import WayLink
from shoal.transport.networks.pipes import corrupted
from shoal.transport.networks.timers import PreciseTimers

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Owner(Protocol):
    """Whose datagrams they are."""

    conditions: Conditions
    here: Address | None

    def address_of(self, where: tuple[Any, ...]) -> Address:
        """The address that a socket address was resolved from."""

    def on_datagrams_open(self, datagrams: ShapedDatagrams, bound: Address, *, is_named: bool) -> None:
        """They are in use now; `is_named`: at an address that others may know."""

    def on_datagrams_over(self, datagrams: ShapedDatagrams) -> None:
        """They are closed."""


class ShapedDatagrams(asyncio.DatagramTransport):
    """What a protocol sends through; the socket closes when the last datagram has left it."""

    def __init__(
        self,
        owner: Owner,
        timers: PreciseTimers,
        protocol: asyncio.DatagramProtocol,
        *,
        is_named: bool = True,
    ) -> None:
        super().__init__()
        self._is_named = is_named
        self.receiver = _Receiver(self)
        self.protocol = protocol
        self._owner = owner
        self._timers = timers
        self._socket: asyncio.DatagramTransport | None = None
        self._here: Address | None = None
        self._links: dict[Any, WayLink] = {}
        self._down: WayLink | None = None
        self._choice = random.Random(owner.conditions.seed)
        self._num_leaving = 0
        self._is_closing = False

    # --- sending ---

    def sendto(self, data: Buffer, addr: Any = None) -> None:
        """Send one packet on its way."""
        if self._is_closing or self._socket is None:
            return
        packet = bytes(data)
        for arrives_s, arriving in self._passages(self._link_to(addr), packet):
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
            self._down = self._owner.conditions.arriving(None, here)

    def _link_to(self, where: tuple[Any, ...]) -> WayLink:
        self._look_where_it_is()
        link = self._links.get(where)
        if link is None:
            assert self._here is not None, "set when the socket was opened"
            link = self._owner.conditions.leaving(self._here, self._owner.address_of(where))
            self._links[where] = link
        return link

    def _leave(self, packet: bytes, where: tuple[Any, ...]) -> None:
        self._num_leaving -= 1
        if self._socket is not None:
            self._socket.sendto(packet, where)
            if self._is_closing and self._num_leaving == 0:
                self._socket.close()

    def _passages(self, link: WayLink, packet: bytes) -> list[tuple[float, bytes]]:
        return [
            (arrives_s, corrupted(packet, self._choice) if is_corrupt and packet else packet)
            for _, arrives_s, is_corrupt in link.carry_datagram(self._timers.time(), len(packet))
        ]

    # --- receiving ---

    def opened(self, transport: asyncio.DatagramTransport) -> None:
        """The socket is there."""
        self._socket = transport
        self._owner.on_datagrams_open(
            self, Address(*transport.get_extra_info("sockname")[:2]), is_named=self._is_named
        )
        self._look_where_it_is()
        self.protocol.connection_made(self)

    def arrived(self, packet: bytes, where: tuple[Any, ...]) -> None:
        """A packet has come to the end of its way, and to the beginning of the line down."""
        if self._is_closing:
            return
        self._look_where_it_is()
        assert self._down is not None, "set when the socket was opened"
        for arrives_s, arriving in self._passages(self._down, packet):
            if arrives_s <= self._timers.time():
                self.protocol.datagram_received(arriving, where)
            else:
                self._timers.call_at(arrives_s, self._hear, arriving, where)

    def _hear(self, packet: bytes, where: tuple[Any, ...]) -> None:
        if not self._is_closing:
            self.protocol.datagram_received(packet, where)

    def lost(self, error: Exception | None) -> None:
        """The socket is gone."""
        self._is_closing = True
        self._socket = None
        self._owner.on_datagrams_over(self)
        self.protocol.connection_lost(error)

    # --- as any datagram transport ---

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the socket says."""
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
        """End it at once."""
        self._is_closing = True
        if self._socket is not None:
            self._socket.abort()


class _Receiver(asyncio.DatagramProtocol):
    def __init__(self, datagrams: ShapedDatagrams) -> None:
        self._datagrams = datagrams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._datagrams.opened(cast("asyncio.DatagramTransport", transport))

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        self._datagrams.arrived(data, addr)

    def error_received(self, exc: Exception) -> None:
        self._datagrams.protocol.error_received(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        self._datagrams.lost(exc)
