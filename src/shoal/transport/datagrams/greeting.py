"""First contact, as the one who greets sees it, and what strangers are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from shoal.core import Peer, PeerError, PeerId, PeerRefused
from shoal.transport.datagrams.acquaintance import AskingHub
from shoal.transport.datagrams.admission import DENIED, Admission, AdmittingHub, is_allowed
from shoal.transport.datagrams.allowances import Allowance
from shoal.transport.datagrams.asking import Asker
from shoal.transport.datagrams.hellos import SALT_BYTES, Greetings, Hello, Refusal, Welcome
from shoal.transport.datagrams.outcomes import other_peer, other_version
from shoal.transport.datagrams.packets import (
    COUNTER,
    MIN_PACKET_BYTES,
    SEALED,
    SESSION_BYTES,
    VERSION,
    Kind,
    UnreadablePacket,
    version_answer,
)
from shoal.transport.datagrams.pending import State
from shoal.transport.datagrams.sealing import TOKEN_BYTES
from shoal.transport.datagrams.sessions import peer_at

if TYPE_CHECKING:
    from shoal.transport.datagrams.ports import Port

_MAX_HELLOS = 4  # that a welcome may still answer; earlier ones are lost
_MAX_ANSWERS_A_S = 1000  # to packets of sessions that are not known here, or of another version
_GREET_AGAIN_S = 0.2


class GreetingHub(AskingHub, AdmittingHub, Protocol):
    """What first contact needs from the transport."""

    def open_asker(
        self, target: Peer, where: tuple[Any, ...], port: Port, not_before_s: float = 0.0
    ) -> Asker:
        """A new session, in the place of an earlier one."""


class Greeter:
    """All greetings of one transport."""

    def __init__(self, hub: GreetingHub, greetings: Greetings) -> None:
        self._hub = hub
        self._greetings = greetings
        self._greeting: dict[bytes, Asker] = {}  # by the salt of their hello
        self._asking: dict[bytes, Asker] = {}  # by the session id that their packets are marked with
        self.admission = Admission(hub, greetings)
        self._answers = Allowance(_MAX_ANSWERS_A_S)

    # --- asking ---

    def new_hello(self, asker: Asker) -> bytes:
        """A greeting; each is another one, so that a copy of it can keep nobody out."""
        hub = self._hub
        salt = hub.random.randbytes(SALT_BYTES)
        target = asker.target.id.digest if asker.target.id else b""
        hello = Hello(salt, self._greetings.ephemeral, asker.id, target, hub.clock.wall_s())
        packet = asker.hellos[salt] = self._greetings.write(Kind.HELLO, hello)
        self._greeting[salt] = asker
        if len(asker.hellos) > _MAX_HELLOS:
            oldest = next(iter(asker.hellos))
            del asker.hellos[oldest]
            self._greeting.pop(oldest, None)
        return packet

    def forget_asker(self, asker: Asker) -> None:
        """It takes no new calls."""
        self._end_greeting(asker)
        if asker.state is not State.RETIRED and self._asking.get(asker.their_id) is asker:
            del self._asking[asker.their_id]

    def _end_greeting(self, asker: Asker) -> None:
        for salt in asker.hellos:
            self._greeting.pop(salt, None)
        asker.hellos.clear()

    def on_unknown(self, packet: bytes) -> None:
        """The other side does not know a session: greet again, with the calls that may be made again."""
        hub = self._hub
        asker = self._asking.get(packet[4:12])
        counter = COUNTER.unpack_from(packet, 12)[0]
        if asker is None or counter >= asker.num_sent:
            hub.stats.refused += 1
            return
        if not self._greetings.is_genuine_unknown(packet, asker.peer.id):
            hub.stats.refused += 1
            return
        if (
            asker.num_open and asker.state is State.READY
        ):  # in place of a retired one there is another already
            not_before_s = asker.greeted_at_s + _GREET_AGAIN_S
            heir = hub.open_asker(asker.target, asker.where, asker.port, not_before_s)
            heir.inherit(asker, counter)
        asker.close("it does not know this session any more; it was started again, most likely.")

    def _on_welcome(self, peer_id: PeerId | None, welcome: Welcome) -> None:
        sizes = (len(welcome.salt), len(welcome.session_id), len(welcome.token))
        if sizes != (SALT_BYTES, SESSION_BYTES, TOKEN_BYTES) or welcome.session_id in self._asking:
            raise UnreadablePacket("a welcome that does not follow the protocol.")
        asker = self._greeting[welcome.hello_salt]
        target = asker.target
        peer = Peer(target.address, peer_id)
        if target.id is not None and peer_id != target.id:
            asker.refuse(other_peer(target, peer_id))
            return
        if not is_allowed(self._hub.access, peer_id):
            self._hub.complain_once("asked nothing", peer, DENIED)
            asker.refuse(PeerRefused(f"{peer} is not asked: {DENIED}", peer=peer))
            return
        seal = self._greetings.session_seal(welcome, peer_id, welcome.hello_salt)
        self._end_greeting(asker)
        self._asking[welcome.session_id] = asker
        asker.welcome(peer, seal, welcome.session_id, welcome.token, welcome.max_calls)

    def _on_refusal(self, peer_id: PeerId | None, refusal: Refusal) -> None:
        asker = self._greeting[refusal.hello_salt]
        peer = Peer(asker.target.address, peer_id)
        error: PeerError = PeerRefused(
            f"{peer} does not talk to this peer: {refusal.reason[:200]}", peer=peer
        )
        asker.refuse(error)

    # --- what comes ---

    def on_greeting(self, kind: int, packet: bytes, where: tuple[Any, ...], port: Port) -> None:
        """A hello, a welcome or a refusal."""
        hub, greetings = self._hub, self._greetings
        plain_kind = kind & ~SEALED
        if plain_kind == Kind.HELLO and not port.is_listening:
            hub.stats.refused += 1
            return
        if bool(kind & SEALED) != greetings.is_sealed:
            hub.stats.refused += 1
            why = "it has no secret." if greetings.is_sealed else "it has a swarm secret, this peer has none."
            hub.complain_once("refused a greeting", peer_at(where), why)
            return
        if plain_kind == Kind.HELLO and self.admission.is_repeated(packet, where, port):
            return
        try:
            greeting = greetings.open(packet)
            if plain_kind == Kind.HELLO:
                self.admission.on_hello(greeting, packet, where, port)
            elif greeting.body.hello_salt not in self._greeting:
                hub.stats.duplicates += 1
            elif plain_kind == Kind.WELCOME:
                self._on_welcome(greetings.verified(greeting), greeting.body)
            else:
                self._on_refusal(greetings.verified(greeting), greeting.body)
        except UnreadablePacket as error:
            hub.stats.refused += 1
            hub.complain_once("refused a greeting", peer_at(where), str(error))

    # --- strangers ---

    def on_stray(self, packet: bytes, where: tuple[Any, ...], port: Port) -> None:
        """A packet of a session that is not known here."""
        self._hub.stats.refused += 1
        if port.is_listening and len(packet) >= _UNKNOWN_BYTES and self._may_answer():
            port.send(self._greetings.unknown(packet), where)

    def on_other_version(self, packet: bytes, where: tuple[Any, ...], port: Port) -> None:
        """A packet of another version of the protocol, or the answer to one of ours."""
        hub = self._hub
        hub.stats.refused += 1
        version = packet[2]
        if packet[3] == Kind.VERSION:
            for asker in tuple(self._greeting.values()):
                if any(hello[4:12] == packet[4:12] for hello in asker.hellos.values()):
                    asker.refuse(other_version(asker.target, version))
            return
        hub.complain_once("refused a packet", peer_at(where), f"it speaks version {version}, not {VERSION}.")
        if port.is_listening and len(packet) >= MIN_PACKET_BYTES and self._may_answer():
            port.send(version_answer(packet), where)

    def _may_answer(self) -> bool:
        return self._answers.take(self._hub.loop.time())


_UNKNOWN_BYTES = 48  # the size of the answer to a stray packet
