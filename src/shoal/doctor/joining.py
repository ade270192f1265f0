"""What `shoal doctor --join` does on the network: call a peer both ways, and have it call back.

It gathers facts and judges nothing; what they mean is for `advice` to say. Every step has its limit, so that
the whole takes no longer than about 15 s with the usual patience. Where a call over TCP fails, `look` looks
closer, by two short connections: one that only listens, as a peer without a secret speaks first, and one that
begins TLS and believes any certificate, to see whose it is. Nothing is sent through either.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import NameOID

from shoal.core import Address, Deadline, Peer, PeerId, ShoalError, UsageError, fanout
from shoal.core.ids import is_loopback
from shoal.dht.crawl import crawl
from shoal.dht.node import DHT
from shoal.dht.settings import DHTSettings
from shoal.transport import introductions
from shoal.transport.endpoint import Endpoint
from shoal.transport.frames import HEADER, MAGIC
from shoal.transport.introductions import (
    DIAL_BACK,
    IP_PROTOCOLS,
    Attempt,
    DialBack,
    DialedBack,
    Introduction,
    IpProtocol,
    Outcome,
    ask_about,
    outcome_of,
)
from shoal.transport.messages import read_answer
from shoal.transport.network.sockets import Network, SocketNetwork
from shoal.transport.trust.membership import Membership
from shoal.transport.trust.secret import SwarmSecret
from shoal.transport.trust.tls import AUTHORITY_NAME, VALID_BEFORE_S, Authority

# --- what is seen ---

CLOCK_WARN_S = 1.0
CLOCK_FAIL_S = 30.0


class CallResult(msgspec.Struct, frozen=True):
    """How calling the peer went over one protocol."""

    outcome: Outcome
    says: str = ""
    about: Introduction | None = None
    round_trip_s: float = 0.0
    ahead_s: float = 0.0
    """How far the peer's clock is ahead of this one."""


class WayIn(msgspec.Struct, frozen=True):
    """How others can reach this peer although they cannot dial it."""

    seen: tuple[str, ...] = ()
    """Where each peer that was asked sees this one's UDP port: one port for all, or another for each."""
    relay: Address | None = None
    """A peer that would relay for this one."""
    relay_error: str = ""
    """Why none would."""

    @property
    def has_one_port(self) -> bool:
        """Whether the router shows all the same port, as far as there were several to ask."""
        return len(self.seen) > 1 and len(dict.fromkeys(self.seen)) == 1


class JoinFacts(msgspec.Struct, frozen=True):
    """All that `join` has seen."""

    target: Address
    listens: Address
    has_secret: bool
    tcp: CallResult
    udp: CallResult
    look: CloserLook | None = None
    """What a closer look saw, where the call over TCP failed."""
    attempts: tuple[Attempt, ...] = ()
    """How the peer's dialing back went."""
    dial_back_error: str = ""
    """Why the peer did not even try."""
    seen_as: Address | None = None
    """Where the peer sees this machine, with the port that this peer listens on."""
    is_own_address: bool = True
    """Whether that host is an address of this machine."""
    way_in: WayIn | None = None
    """Looked for where others could not dial this peer."""
    port_to_open: int = 0
    """The port that advice should name: the one that was asked for, else the one that the peer uses."""
    wall_s: float = 0.0
    patience_s: float = 0.0

    @property
    def about(self) -> Introduction | None:
        """What the peer says of itself."""
        return self.tcp.about or self.udp.about

    def out(self, ip_protocol: IpProtocol) -> CallResult:
        """How calling the peer went over this protocol."""
        return self.tcp if ip_protocol == "tcp" else self.udp


def any_host(like: str) -> str:
    """Name all addresses of a machine, of the same kind as this one."""
    return "::" if ":" in like else "0.0.0.0"


def duration(seconds: float) -> str:
    """A duration for people: 12 ms, 3.4 s, 5 min."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"


def date(wall_s: float) -> str:
    """A date for people, in UTC."""
    return f"{datetime.datetime.fromtimestamp(wall_s, datetime.UTC):%Y-%m-%d %H:%M} UTC"


# --- calling and being called ---

PATIENCE_S = 4.0
_MARGIN_S = 1.0  # for an answer to come back that took its whole time
_LOOK_SHARE = 0.375  # of the patience, for each of the two steps of a closer look
_MIN_LOOK_S = 0.5  # a handshake takes its time on a busy machine, however impatient the caller
_NUM_ROUND_TRIPS = 3
_NUM_OTHERS = 3  # peers of the DHT that are asked where they see this one


class Member(msgspec.Struct, frozen=True):
    """Who this peer is: a member of a swarm, or just somebody with an id."""

    peer_id: PeerId | None = None
    membership: Membership | None = None
    is_insecure: bool = False


def new_endpoint(member: Member, network: Network | None = None) -> Endpoint:
    """An endpoint of this peer, to be opened."""
    return Endpoint(
        peer_id=member.peer_id,
        membership=member.membership,
        is_insecure=member.is_insecure,
        network=network,
    )


async def join(
    target: Address,
    member: Member,
    listen: Address | None = None,
    *,
    network: Network | None = None,
    patience_s: float = PATIENCE_S,
) -> JoinFacts:
    """Call the peer at `target` over TCP and UDP, ask it to dial back, and say what happened."""
    network = network or SocketNetwork()
    usual = await _where_to_listen(target, member, network, patience_s / 2)
    async with new_endpoint(member, network) as endpoint:
        listens = await endpoint.listen(listen or usual)
        out = await fanout(
            [_call(endpoint, one, target, patience_s) for one in IP_PROTOCOLS],
            Deadline.after(patience_s + _MARGIN_S),
        )
        tcp, udp = (_failed(each) if isinstance(each, Exception) else each for each in out)
        facts = JoinFacts(
            target=target,
            listens=listens,
            has_secret=member.membership is not None,
            tcp=tcp,
            udp=udp,
            port_to_open=(listen.port if listen else 0) or target.port,
            wall_s=network.clock.wall_s(),
            patience_s=patience_s,
        )
        if tcp.outcome != "ok":
            secret = member.membership.secret if member.membership else None
            look_s = max(patience_s * _LOOK_SHARE, _MIN_LOOK_S)
            seen = await look(network, target, secret, patience_s=look_s)
            facts = msgspec.structs.replace(facts, look=seen)
        facts = await _dialed_back(endpoint, facts)
        could_not = facts.attempts and all(attempt.outcome != "ok" for attempt in facts.attempts)
        if tcp.outcome == "ok" and could_not:
            way_in = await _look_for_way_in(endpoint, member, facts)
            facts = msgspec.structs.replace(facts, way_in=way_in)
        return facts


async def _where_to_listen(target: Address, member: Member, network: Network, patience_s: float) -> Address:
    """All addresses of the target's kind where that is allowed, else those of this machine alone."""
    host = target.host
    try:
        async with asyncio.timeout(patience_s):
            host = (await network.resolve(target))[0]
    except (OSError, ValueError):
        pass  # dialing it will tell
    is_v6 = ":" in host
    is_allowed = member.membership is not None or member.is_insecure
    if is_loopback(host) or not is_allowed:
        return Address("::1" if is_v6 else "127.0.0.1", 0)
    return Address("::" if is_v6 else "0.0.0.0", 0)


async def _call(
    endpoint: Endpoint, ip_protocol: IpProtocol, target: Address, patience_s: float
) -> CallResult:
    """Ask who is there, once to make a connection, then to measure: the quickest counts."""
    transport = endpoint.streams if ip_protocol == "tcp" else endpoint.datagrams
    clock = endpoint.network.clock
    deadline = Deadline.after(patience_s)
    best: CallResult | None = None
    try:
        await ask_about(transport, target, ip_protocol, deadline)
        for _ in range(_NUM_ROUND_TRIPS):
            began_s, began_wall_s = clock.now_s(), clock.wall_s()
            about = await ask_about(transport, target, ip_protocol, deadline)
            took_s = clock.now_s() - began_s
            if best is None or took_s < best.round_trip_s:
                best = CallResult("ok", "", about, took_s, about.wall_s - (began_wall_s + took_s / 2))
    except ShoalError as error:
        return best or _failed(error)
    assert best is not None
    return best


def _failed(error: Exception) -> CallResult:
    return CallResult(outcome_of(error), failure_text(error))


def failure_text(error: Exception) -> str:
    """An error in one line, without the advice in it."""
    if not isinstance(error, ShoalError):
        return " ".join(f"{type(error).__name__}: {error}".split())
    return f"{error.what} Likely cause: {error.cause}" if error.cause else error.what


async def _dialed_back(endpoint: Endpoint, facts: JoinFacts) -> JoinFacts:
    """The same facts, with what the peer found when it dialed back."""
    about = facts.about
    if about is None:
        return facts
    transport = endpoint.streams if facts.tcp.outcome == "ok" else endpoint.datagrams
    wish = DialBack(facts.listens.port, IP_PROTOCOLS, facts.patience_s)
    if (host := _host(about.seen_as)) is not None:
        is_own = await _is_own(endpoint.network, host)
        facts = msgspec.structs.replace(
            facts, seen_as=Address(host, facts.listens.port), is_own_address=is_own
        )
    try:
        reply = await transport.call(
            facts.target, DIAL_BACK, wish, deadline=Deadline.after(facts.patience_s + _MARGIN_S)
        )
        told = read_answer(reply, DialedBack, DIAL_BACK)
    except ShoalError as error:
        return msgspec.structs.replace(facts, dial_back_error=failure_text(error))
    return msgspec.structs.replace(facts, attempts=told.attempts)


async def _look_for_way_in(endpoint: Endpoint, member: Member, facts: JoinFacts) -> WayIn:
    """Ask several peers where they see this one, and whether they relay; takes as long as dialing back."""
    peers = await _other_peers(endpoint.network, member, facts)
    asked = [
        ask_about(endpoint.datagrams, peer, "udp", Deadline.after(facts.patience_s / 2)) for peer in peers
    ]
    answers = await fanout(asked, Deadline.after(facts.patience_s))
    way_in = WayIn(tuple(answer.seen_as for answer in answers if isinstance(answer, Introduction)))
    endpoint.relays.keep(lambda: peers, 1)
    try:
        await endpoint.relays.registered(Deadline.after(facts.patience_s / 2))
    except ShoalError as error:
        return msgspec.structs.replace(way_in, relay_error=failure_text(error))
    return msgspec.structs.replace(way_in, relay=endpoint.relays.addresses[0].relay)


async def _other_peers(network: Network, member: Member, facts: JoinFacts) -> list[Peer]:
    """Lists the peer that was called, and others of its DHT where it has one."""
    about = facts.about
    target = Peer(facts.target, PeerId.parse(about.peer_id) if about is not None and about.peer_id else None)
    anybody = Member(None, member.membership, member.is_insecure)
    peers = [target]
    try:
        async with asyncio.timeout(facts.patience_s), new_endpoint(anybody, network) as endpoint:
            settings = DHTSettings(is_client=True, call_s=facts.patience_s / 2)
            async with DHT(endpoint=endpoint, settings=settings) as dht:
                found = await crawl(dht, [facts.target], limit=_NUM_OTHERS)
                peers += [visited.peer for visited in found.peers if visited.peer.address != facts.target]
    except (ShoalError, TimeoutError):
        pass  # it has none: there is one peer to ask
    return peers


def _host(text: str) -> str | None:
    try:
        return Address.parse(text).host
    except UsageError:
        return None


async def _is_own(network: Network, host: str) -> bool:
    """Whether an address is this machine's: one can only bind to one's own."""
    try:
        carrier = await network.open_datagrams(Address(host, 0), asyncio.DatagramProtocol())
    except (ShoalError, OSError):
        return False
    carrier.close()
    return True


async def serve(
    address: Address,
    member: Member,
    *,
    on_ready: Callable[[Address], None],
    on_caller: Callable[[str], None],
    network: Network | None = None,
) -> None:
    """Be a peer that `join` can be pointed at, until cancelled; `on_caller` gets a line for each question."""
    with _heard_by(on_caller):
        async with new_endpoint(member, network) as endpoint:
            on_ready(await endpoint.listen(address))
            await asyncio.Event().wait()


@contextlib.contextmanager
def _heard_by(on_line: Callable[[str], None]) -> Iterator[None]:
    """Pass on what introductions log, and have it nowhere else."""

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            on_line(record.getMessage())

    log, handler = introductions.log, Listening(logging.INFO)
    before = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.level, log.propagate = before


# --- a closer look ---

Reach = Literal["open", "refused", "silent", "unreachable", "unknown host"]
"""How far a plain TCP connection comes; `silent` means that nothing came back at all."""


class ShownCertificate(msgspec.Struct, frozen=True):
    """What is of interest in a certificate."""

    is_of_shoal: bool
    """Whether some swarm of Shoal's has signed it."""
    is_of_this_swarm: bool
    begins_s: float
    ends_s: float

    @property
    def made_s(self) -> float:
        """When it was made, by the clock of the peer that made it."""
        return self.begins_s + VALID_BEFORE_S


class CloserLook(msgspec.Struct, frozen=True):
    """What a closer look at a TCP address saw."""

    reach: Reach
    detail: str = ""
    """Why it cannot be reached, in the system's words."""
    version: int | None = None
    """The version of the protocol that a peer without a secret speaks."""
    certificate: ShownCertificate | None = None
    says: bytes = b""
    """What came first from something that is no Shoal peer."""

    @property
    def is_shoal(self) -> bool:
        """Whether a Shoal peer is there, of whatever version and swarm."""
        return self.version is not None or (self.certificate is not None and self.certificate.is_of_shoal)


async def look(
    network: Network, address: Address, secret: SwarmSecret | None, *, patience_s: float = 1.5
) -> CloserLook:
    """Look twice, for `patience_s` each time at most."""
    listening = _Listening()
    try:
        try:
            async with asyncio.timeout(patience_s):
                await network.dial(address, listening)
        except TimeoutError:
            return CloserLook("silent")
        except ConnectionRefusedError:
            return CloserLook("refused")
        except (socket.gaierror, ValueError) as error:
            return CloserLook("unknown host", str(error))
        except OSError as error:
            return CloserLook("unreachable", error.strerror or str(error))
        try:
            async with asyncio.timeout(patience_s / 2):
                await listening.heard.wait()
        except TimeoutError:
            pass
        if listening.said.startswith(MAGIC) and len(listening.said) > len(MAGIC):
            return CloserLook("open", version=listening.said[len(MAGIC)])
        if listening.said:
            return CloserLook("open", says=listening.said)
    finally:
        listening.abort()
    shown = await _certificate(network, address, patience_s)
    return CloserLook("open", certificate=None if shown is None else _read(shown, secret))


class _Listening(asyncio.BufferedProtocol):
    """Hears the first bytes."""

    def __init__(self) -> None:
        self.heard = asyncio.Event()
        self.said = b""
        self.transport: Any = None
        self._buffer = memoryview(bytearray(HEADER.size))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.said = (self.said + bytes(self._buffer[:nbytes]))[: HEADER.size]
        self.heard.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.heard.set()

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()


async def _certificate(network: Network, address: Address, patience_s: float) -> bytes | None:
    """The certificate that is shown there; None where nobody speaks TLS 1.3."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is said to it, and nothing believed
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    listening = _Listening()
    try:
        async with asyncio.timeout(patience_s):
            await network.dial(address, listening, tls=context)
        session = listening.transport.get_extra_info("ssl_object")
        return None if session is None else session.getpeercert(binary_form=True)
    except (OSError, ValueError):  # of which ssl's errors and TimeoutError are
        return None
    finally:
        listening.abort()


def _read(shown: bytes, secret: SwarmSecret | None) -> ShownCertificate | None:
    try:
        certificate = x509.load_der_x509_certificate(shown)
        issuers = certificate.issuer.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:
        return None
    is_of_shoal = any(issuer.value == AUTHORITY_NAME for issuer in issuers)
    return ShownCertificate(
        is_of_shoal=is_of_shoal,
        is_of_this_swarm=is_of_shoal and secret is not None and _has_signed(secret, certificate),
        begins_s=certificate.not_valid_before_utc.timestamp(),
        ends_s=certificate.not_valid_after_utc.timestamp(),
    )


def _has_signed(secret: SwarmSecret, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(Authority.of(secret).certificate)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True
