"""What every endpoint answers: who it is, how the caller looks from here, and whether that can be reached.

`shoal doctor` asks these methods. None can be turned against a third party: a peer dials back to the host
that it sees the caller at and to no other, seldom, and with little patience.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shoal._version import __version__
from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerBusy,
    PeerRefused,
    PeerUnreachable,
    VersionMismatch,
    fanout,
)
from shoal.core.rates import RateLimiter
from shoal.core.untrusted import visible_line
from shoal.transport.datagrams.transport import DatagramTransport
from shoal.transport.frames import VERSION
from shoal.transport.limits import KIB, MIB
from shoal.transport.messages import Head, Reply, read_answer

if TYPE_CHECKING:
    from shoal.transport.endpoint import Endpoint

log = logging.getLogger(__name__)

ABOUT = "shoal.about"
DIAL_BACK = "shoal.dial-back"
SINK = "shoal.sink"
SOURCE = "shoal.source"

MAX_BULK_BYTES = 4 * MIB
MAX_PATIENCE_S = 4.0
_BLOCK_BYTES = 256 * KIB  # larger than what programs that compress a line look back at
_MAX_AT_ONCE = 4
_BURST = 6  # how often a host is dialed back at once
_EVERY_S = 5.0  # and then

IpProtocol = Literal["tcp", "udp"]
IP_PROTOCOLS: tuple[IpProtocol, ...] = ("tcp", "udp")
Outcome = Literal["ok", "refused", "silent", "unreachable", "unknown host", "other version", "failed"]
"""How an attempt to talk to a peer ended; `silent` means that nothing came back at all."""

_Text = Annotated[str, msgspec.Meta(max_length=200)]


class Caller(msgspec.Struct, frozen=True):
    """What a caller says of itself when it asks who is here."""

    software: _Text = ""
    ip_protocol: _Text = msgspec.field(default="", name="way")
    """Over which of `IP_PROTOCOLS` it asks, as far as it knows."""


class Introduction(msgspec.Struct, frozen=True):
    """Who answers, and how the caller looks from there."""

    software: _Text
    protocol: int
    peer_id: _Text
    """Empty where it has none."""
    wall_s: float
    seen_as: _Text
    """The address that the call came from; its port is the caller's own over UDP only."""
    listens: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)] = ()


class DialBack(msgspec.Struct, frozen=True):
    """Asks to be called at a port of the host that the question comes from."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    ip_protocols: Annotated[tuple[IpProtocol, ...], msgspec.Meta(min_length=1, max_length=2)] = msgspec.field(
        default=IP_PROTOCOLS, name="ways"
    )
    patience_s: Annotated[float, msgspec.Meta(gt=0)] = MAX_PATIENCE_S


class Attempt(msgspec.Struct, frozen=True):
    """How dialing back went over one protocol."""

    ip_protocol: IpProtocol = msgspec.field(name="way")
    outcome: Outcome
    says: str = ""


class DialedBack(msgspec.Struct, frozen=True):
    """Tells how dialing back went, over each protocol."""

    address: _Text
    attempts: Annotated[tuple[Attempt, ...], msgspec.Meta(max_length=2)]


class Source(msgspec.Struct, frozen=True):
    """Asks for so many bytes of no meaning."""

    size_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_BULK_BYTES)]


class Introductions:
    """Answers the methods of this file for one endpoint."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._dial_backs = RateLimiter(1 / _EVERY_S, _BURST)
        self._num_dialing = 0
        self._block: memoryview | None = None

    def about(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Tell who this is, and how the caller looks from here."""
        endpoint, caller = self._endpoint, head.payload
        software = f", shoal {caller.software}" if caller.software else ""
        over = f" over {caller.ip_protocol.upper()}" if caller.ip_protocol in IP_PROTOCOLS else ""
        log.info("%s asks who is here%s%s", head.peer, over, visible_line(software))
        return Reply(
            Introduction(
                software=__version__,
                protocol=VERSION,
                peer_id=str(endpoint.peer_id or ""),
                wall_s=endpoint.network.clock.wall_s(),
                seen_as=str(head.peer.address),
                listens=tuple(str(address) for address in endpoint.addresses[:16]),
            )
        )

    async def dial_back(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Call the caller at the port that it names, over the protocols that it names."""
        if head.peer.address.is_relayed:
            raise PeerRefused("who calls through a relay is not dialed back: its host is the relay's.")
        host, wish = head.peer.address.host, head.payload
        if self._dial_backs.take(host, 1, self._endpoint.network.clock.now_s()):
            raise PeerBusy(
                f"{host} has asked to be dialed back too often.", next_step=f"wait for {_EVERY_S:g} s."
            )
        if self._num_dialing >= _MAX_AT_ONCE:
            raise PeerBusy("this peer dials back to others now.", next_step="try again in a few seconds.")
        target = Peer(Address(host, wish.port), head.peer.id)
        protocols = tuple(dict.fromkeys(wish.ip_protocols))
        deadline = Deadline.after(min(wish.patience_s, MAX_PATIENCE_S))
        self._num_dialing += 1
        try:
            outcomes = await fanout([self._dial(one, target, deadline) for one in protocols], deadline)
        finally:
            self._num_dialing -= 1
        attempts = tuple(
            Attempt(one, outcome_of(outcome), str(outcome)[:200])
            if isinstance(outcome, Exception)
            else Attempt(one, "ok")
            for one, outcome in zip(protocols, outcomes, strict=True)
        )
        told = ", ".join(f"{attempt.ip_protocol.upper()} {attempt.outcome}" for attempt in attempts)
        log.info("%s is dialed back at %s: %s", head.peer, target.address, told)
        return Reply(DialedBack(str(target.address), attempts))

    async def _dial(self, ip_protocol: IpProtocol, target: Peer, deadline: Deadline) -> None:
        endpoint = self._endpoint
        if ip_protocol == "tcp":
            await ask_about(endpoint.streams, target, ip_protocol, deadline)
            return
        # from a port that the caller has never sent to: routers and firewalls let answers in, not strangers
        stranger = DatagramTransport(
            membership=endpoint.membership,
            peer_id=endpoint.peer_id,
            limits=endpoint.limits,
            network=endpoint.network,
        )
        async with stranger:
            await ask_about(stranger, target, ip_protocol, deadline)

    def sink(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """Take the bytes of a caller that measures its line, and drop them."""

    def source(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Answer with as many bytes as were asked for."""
        whole, rest = divmod(head.payload.size_bytes, _BLOCK_BYTES)
        self._block = block = self._block or memoryview(self._endpoint.network.random.randbytes(_BLOCK_BYTES))
        return Reply(None, [block] * whole + ([block[:rest]] if rest else []))


def answer(endpoint: Endpoint) -> None:
    """Have an endpoint answer the methods of this file, unless it does so already."""
    if ABOUT in endpoint.routes:
        return
    introductions = Introductions(endpoint)
    endpoint.handle(ABOUT, introductions.about, payload_type=Caller)
    endpoint.handle(DIAL_BACK, introductions.dial_back, payload_type=DialBack)
    endpoint.handle(SINK, introductions.sink, allocate=_take_bulk)
    endpoint.handle(SOURCE, introductions.source, payload_type=Source)


def _take_bulk(head: Head) -> list[bytearray]:
    if head.total_bytes > MAX_BULK_BYTES:
        raise PeerRefused(f"{SINK} takes {MAX_BULK_BYTES:,} bytes at once, not {head.total_bytes:,}.")
    return [bytearray(size_bytes) for size_bytes in head.sizes]


# --- asking ---


async def ask_about(
    transport: Any, peer: Peer | Address, ip_protocol: IpProtocol, deadline: Deadline
) -> Introduction:
    """Ask a peer who it is."""
    reply = await transport.call(peer, ABOUT, Caller(__version__, ip_protocol), deadline=deadline)
    return read_answer(reply, Introduction, ABOUT)


def outcome_of(error: Exception) -> Outcome:
    """What kind of failure it was."""
    if isinstance(error, VersionMismatch):
        return "other version"
    if isinstance(error, DeadlineExceeded):
        return "silent"
    if isinstance(error, PeerUnreachable):
        if isinstance(error.__cause__, ConnectionRefusedError):
            return "refused"
        return "unknown host" if isinstance(error.__cause__, (socket.gaierror, ValueError)) else "unreachable"
    return "failed"
