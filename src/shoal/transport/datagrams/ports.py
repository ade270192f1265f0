"""One UDP socket, and which packet concerns whom."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoal.core import Clock, Peer
from shoal.core.fork import close_in_children, keep_in_children
from shoal.transport.datagrams.packets import (
    HEADER_BYTES,
    MAGIC,
    MAX_PACKET_BYTES,
    PREFIX,
    SEALED,
    VERSION,
    Kind,
)
from shoal.transport.datagrams.sessions import Session, Stats, peer_at
from shoal.transport.trust.membership import is_loopback

if TYPE_CHECKING:
    from shoal.transport.datagrams.greeting import Greeter

_DATA = int(Kind.DATA)
_CLOSING_S = 1.0  # for what the system had no room for


class Hub(Protocol):
    """What ports and sessions need from the transport that they belong to."""

    loop: asyncio.AbstractEventLoop
    clock: Clock
    stats: Stats
    sessions: dict[bytes, Session]
    """By the id that packets to this peer are marked with."""
    is_open: bool
    is_watching: bool

    def watch(self) -> None:
        """Look after who may talk, while there is traffic."""

    def on_dirty(self, session: Session) -> None:
        """A session has frames to send at the end of this turn of the loop."""

    def flush(self) -> None:
        """Send the frames of all sessions now."""

    def on_bad_packet(self, peer: Peer, why: str) -> None:
        """A packet was dropped."""

    def on_replay(self, peer: Peer) -> None:
        """A packet came that had come before."""


class Port(asyncio.DatagramProtocol):
    """Receives for all sessions of a socket."""

    def __init__(self, hub: Hub, greeter: Greeter, *, is_listening: bool) -> None:
        self._hub = hub
        self._sessions = hub.sessions
        self._stats = hub.stats
        self._greeter = greeter
        self.is_listening = is_listening
        """Whether strangers may begin a session here; a socket that was opened only to ask takes none."""
        self._carrier: asyncio.DatagramTransport | None = None
        self._is_full = False
        self._is_closing = False
        self._closed = asyncio.Event()
        self._descriptor: int | None = None
        self.where: tuple[Any, ...] = ()
        """Its own address."""

    # --- what asyncio calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there."""
        self._carrier = cast("asyncio.DatagramTransport", transport)
        self.where = tuple(transport.get_extra_info("sockname"))
        socket = transport.get_extra_info("socket")
        if socket is not None:
            self._descriptor = socket.fileno()
            close_in_children(self._descriptor)

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if self._descriptor is not None:
            keep_in_children(self._descriptor)
        self._carrier = None
        self._closed.set()

    def pause_writing(self) -> None:
        """The system takes no more: what is sent now is lost, as on a full line."""
        self._is_full = True

    def resume_writing(self) -> None:
        """There is room again."""
        self._is_full = False

    def error_received(self, exc: Exception) -> None:
        """Some packet could not be delivered; which one is not known, and its call tries again."""
        self._stats.unheard += 1

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        """A packet has come."""
        hub, stats = self._hub, self._stats
        if not hub.is_open:
            return
        stats.packets_in += 1
        stats.bytes_in += len(data)
        if not hub.is_watching:
            hub.watch()
        if data[:3] == PREFIX and len(data) >= HEADER_BYTES:
            kind = data[3]
            if kind == _DATA and len(data) <= MAX_PACKET_BYTES:
                session = self._sessions.get(data[4:12])
                if session is not None:
                    session.receive(data, addr, self)
                else:
                    self._greeter.on_stray(data, addr, self)
            else:
                self._on_greeting(kind, data, addr)
        elif data[:2] == MAGIC and len(data) >= 12 and data[2] != VERSION:
            self._greeter.on_other_version(data, addr, self)
        else:
            hub.on_bad_packet(peer_at(addr), "bytes that are no packet of Shoal's.")
        hub.flush()

    def _on_greeting(self, kind: int, data: bytes, where: tuple[Any, ...]) -> None:
        greeter = self._greeter
        if kind == Kind.UNKNOWN:
            greeter.on_unknown(data)
        elif (kind & ~SEALED) in _GREETINGS and len(data) <= MAX_PACKET_BYTES:
            greeter.on_greeting(kind, data, where, self)
        else:
            self._hub.on_bad_packet(peer_at(where), "a packet of no known kind.")

    # --- sending ---

    def can_reach(self, where: tuple[Any, ...]) -> bool:
        """Whether an address can be sent to from here: the same family, and not elsewhere from loopback."""
        is_same_family = len(self.where) == len(where)
        return is_same_family and (is_loopback(where[0]) or not is_loopback(self.where[0]))

    def send(self, packet: bytes, where: tuple[Any, ...]) -> None:
        """Send one packet, or lose it."""
        if self._carrier is None or self._is_full:
            self._stats.unheard += 1
            return
        self._carrier.sendto(packet, where)
        self._stats.packets_out += 1
        self._stats.bytes_out += len(packet)

    def begin_closing(self) -> None:
        """Close the socket as soon as what waits is sent."""
        if self._carrier is not None and not self._is_closing:
            self._is_closing = True
            self._carrier.close()

    async def close(self) -> None:
        """Send what waits, and close the socket; its port is free when this returns."""
        if self._carrier is not None:
            self.begin_closing()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSING_S):
                    await self._closed.wait()


_GREETINGS = (Kind.HELLO, Kind.WELCOME, Kind.REFUSAL)
