"""First contact: hellos and welcomes, and what strangers are answered.

A stranger is answered with one packet, never larger than what it sent, and is remembered only in lists of
bounded length. Whoever has proven its address cannot be pushed out of its session by anybody who has not.
"""

from __future__ import annotations

import collections
import random
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core import Peer, PeerError, PeerId, PeerRefused, VersionMismatch
from shoal.transport.datagrams.answering import Answerer, AnsweringHub
from shoal.transport.datagrams.asking import Asker, AskingHub
from shoal.transport.datagrams.hellos import SALT_BYTES, Greetings, Hello, Refusal, Welcome
from shoal.transport.datagrams.newcomers import Newcomers
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
from shoal.transport.datagrams.ports import peer_at
from shoal.transport.datagrams.sealing import Tokens
from shoal.transport.frames import encode

if TYPE_CHECKING:
    from shoal.transport.datagrams.ports import Port
    from shoal.transport.trust.access import Access

MAX_CLOCK_GAP_S = 300.0
"""A hello older or newer than this is refused: it may be a recorded one."""
_MAX_REMEMBERED = 4096  # hellos that were answered
_MAX_ADDRESSES = 3  # from which the same hello is answered: more are copies of it
_MAX_ANSWERS_A_S = 1000  # to packets of sessions that are not known here, or of another version
_GREET_AGAIN_S = 0.2


class GreetingHub(AskingHub, AnsweringHub, Protocol):
    """What first contact needs from the transport."""

    access: Access | None
    random: random.Random

    def complain_once(self, what: str, peer: Peer, why: str) -> None:
        """One log line for this host and reason, not one for each packet."""

    def on_proven(self, answerer: Answerer) -> None:
        """A newcomer has shown that it receives at its address."""

    def open_asker(
        self, target: Peer, where: tuple[Any, ...], port: Port, not_before_s: float = 0.0
    ) -> Asker:
        """A new session, in the place of an earlier one."""


class Greeter:
    """All greetings of one transport."""

    def __init__(self, hub: GreetingHub, greetings: Greetings) -> None:
        self._hub = hub
        self._greetings = greetings
        self._tokens = Tokens(hub.random)
        self._greeting: dict[bytes, Asker] = {}  # by the salt of their hello
        self._asking: dict[bytes, Asker] = {}  # by the session id that their packets are marked with
        self.newcomers = Newcomers(hub.sessions)
        self._answered: collections.OrderedDict[tuple[bytes, Any], bytes] = collections.OrderedDict()
        self._seen: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._answers_since_s = 0.0
        self._num_answers = 0

    # --- asking ---

    def new_hello(self, asker: Asker) -> bytes:
        """A greeting; each is another one, so that a copy of it can keep nobody out."""
        hub = self._hub
        salt = hub.random.randbytes(SALT_BYTES)
        target = asker.target.id.digest if asker.target.id else b""
        hello = Hello(salt, self._greetings.ephemeral, asker.id, target, hub.clock.wall_s())
        packet = asker.hellos[salt] = self._greetings.write(Kind.HELLO, hello)
        self._greeting[salt] = asker
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
        if asker is None or counter >= asker.num_sent or not self._greetings.is_genuine_unknown(packet):
            hub.stats.refused += 1
            return
        if asker.num_open:
            not_before_s = asker.greeted_at_s + _GREET_AGAIN_S
            heir = hub.open_asker(asker.target, asker.where, asker.port, not_before_s)
            heir.inherit(asker)
        asker.close("it does not know this session any more; it was started again, most likely.")

    def _on_welcome(self, peer_id: PeerId | None, welcome: Welcome) -> None:
        asker = self._greeting[welcome.hello_salt]
        target = asker.target
        peer = Peer(target.address, peer_id)
        if target.id is not None and peer_id != target.id:
            other = peer_id.short if peer_id else "nobody in particular"
            asker.refuse(
                PeerRefused(
                    f"The peer at {target.address} is {other}, not {target.id.short}.",
                    peer=target,
                    cause="another peer has taken that address.",
                    next_step="look the peer up again.",
                )
            )
            return
        if not self._is_allowed(peer_id):
            self._hub.complain_once("asked nothing", peer, _DENIED)
            asker.refuse(PeerRefused(f"{peer} is not asked: {_DENIED}", peer=peer))
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

    # --- answering ---

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
        nonce = packet[4:16]
        if plain_kind == Kind.HELLO:
            if (answer := self._answered.get((nonce, where))) is not None:
                hub.stats.duplicates += 1
                port.send(answer, where)
                return
            if self._seen.get(nonce, 0) >= _MAX_ADDRESSES:
                hub.on_replay(peer_at(where))
                return
        try:
            greeting = greetings.open(packet)
            if plain_kind != Kind.HELLO and greeting.body.hello_salt not in self._greeting:
                hub.stats.duplicates += 1
                return
            peer_id = greetings.verified(greeting)
            if plain_kind == Kind.HELLO:
                self._on_hello(peer_id, greeting.body, packet, where, port)
            elif plain_kind == Kind.WELCOME:
                self._on_welcome(peer_id, greeting.body)
            else:
                self._on_refusal(peer_id, greeting.body)
        except UnreadablePacket as error:
            hub.stats.refused += 1
            hub.complain_once("refused a greeting", peer_at(where), str(error))

    def _on_hello(
        self, peer_id: PeerId | None, hello: Hello, packet: bytes, where: tuple[Any, ...], port: Port
    ) -> None:
        if len(hello.salt) != SALT_BYTES or len(hello.session_id) != SESSION_BYTES:
            raise UnreadablePacket("a hello that does not follow the protocol.")
        _remember(self._seen, packet[4:16], self._seen.get(packet[4:16], 0) + 1)
        hub = self._hub
        peer = Peer(peer_at(where).address, peer_id)
        reason = self._objection(peer_id, hello)
        if reason:
            hub.stats.refused += 1
            hub.complain_once("refused a hello", peer, reason)
            answer = self._greetings.write(Kind.REFUSAL, Refusal(hello.salt, reason))
        else:
            answer = self._admit(peer, hello, packet[4:16], where, port)
        if len(answer) <= len(packet):  # never more than it sent
            _remember(self._answered, (packet[4:16], where), answer)
            port.send(answer, where)

    def _objection(self, peer_id: PeerId | None, hello: Hello) -> str:
        """Why a peer may not talk here, or nothing."""
        me = self._greetings.peer_id
        if hello.target and (me is None or hello.target != me.digest):
            return f"another peer is expected here: this one is {me.short if me else 'nobody in particular'}."
        gap_s = hello.wall_s - self._hub.clock.wall_s()
        if self._greetings.is_sealed and not abs(gap_s) <= MAX_CLOCK_GAP_S:
            return f"the hello's time is {gap_s:+.0f} s off: a clock is wrong, or it was recorded."
        return "" if self._is_allowed(peer_id) else _DENIED

    def _is_allowed(self, peer_id: PeerId | None) -> bool:
        access = self._hub.access
        return access is None or (peer_id is not None and access.is_allowed(peer_id))

    def _admit(self, peer: Peer, hello: Hello, nonce: bytes, where: tuple[Any, ...], port: Port) -> bytes:
        """Begin a session whose address is not proven yet; the welcome to send."""
        hub, greetings = self._hub, self._greetings
        answerer = Answerer(hub, port, peer, where, hub.random.randbytes(SESSION_BYTES))
        answerer.hello_nonce = nonce
        salt = hub.random.randbytes(SALT_BYTES)
        answerer.begin(greetings.session_seal(hello, peer.id, salt), hello.session_id)
        self.newcomers.add(answerer)
        token = self._tokens.make(where, answerer.id, hub.loop.time())
        return greetings.write(
            Kind.WELCOME,
            Welcome(hello.salt, salt, greetings.ephemeral, answerer.id, token, hub.limits.max_calls),
        )

    def prove(
        self, answerer: Answerer, packet: bytes, where: tuple[Any, ...], port: Port, token: bytes
    ) -> bool:
        """Whether a token shows that the caller receives there; asks for one where it does not."""
        hub = self._hub
        now_s = hub.loop.time()
        if self._tokens.is_good(token, where, answerer.id, now_s):
            if not answerer.is_proven:
                self.newcomers.remove(answerer)
                _remember(self._seen, answerer.hello_nonce, _MAX_ADDRESSES)  # a copy of it is worth nothing
                hub.on_proven(answerer)
            return True
        challenge = answerer.packet([encode((10, self._tokens.make(where, answerer.id, now_s)))])
        if len(challenge) <= len(packet):
            port.send(challenge, where)
        return False

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
                    asker.refuse(_other_version(asker.target, version))
            return
        hub.complain_once("refused a packet", peer_at(where), f"it speaks version {version}, not {VERSION}.")
        if port.is_listening and len(packet) >= MIN_PACKET_BYTES and self._may_answer():
            port.send(version_answer(packet), where)

    def _may_answer(self) -> bool:
        now_s = self._hub.loop.time()
        if now_s - self._answers_since_s >= 1.0:
            self._answers_since_s, self._num_answers = now_s, 0
        self._num_answers += 1
        return self._num_answers <= _MAX_ANSWERS_A_S


_UNKNOWN_BYTES = 48  # the size of the answer to a stray packet
_DENIED = "it is not on this peer's list of those who may talk."


def _other_version(peer: Peer, version: int) -> VersionMismatch:
    return VersionMismatch(
        f"{peer} speaks another version of the datagram protocol ({version}) than this peer ({VERSION}).",
        next_step="install the same Shoal version on both sides; `shoal --version` tells it.",
    )


def _remember(memory: collections.OrderedDict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _MAX_REMEMBERED:
        memory.popitem(last=False)
