"""Who is let in: what hellos are answered, and who has proven its address.

A stranger is answered with one packet, never larger than what it sent, and is remembered only in lists of
bounded length. Whoever has proven its address cannot be pushed out of its session by anybody who has not.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core import Peer, PeerId
from shoal.transport.datagrams.allowances import Allowance
from shoal.transport.datagrams.answering import Answerer, AnsweringHub
from shoal.transport.datagrams.hellos import SALT_BYTES, Greeting, Greetings, Hello, Refusal, Welcome
from shoal.transport.datagrams.newcomers import Newcomers
from shoal.transport.datagrams.packets import BUSY, SESSION_BYTES, Kind, UnreadablePacket
from shoal.transport.datagrams.sealing import Tokens
from shoal.transport.datagrams.sessions import Session, peer_at
from shoal.transport.frames import encode

if TYPE_CHECKING:
    from shoal.transport.datagrams.ports import Port
    from shoal.transport.trust.membership import Access

MAX_CLOCK_GAP_S = 300.0
"""A hello older or newer than this is refused: it may be a recorded one."""
DENIED = "it is not on this peer's list of those who may talk."
_FULL = "it serves as many callers as it can."
_MAX_REMEMBERED = 4096  # hellos that were answered
_MAX_ADDRESSES = 3  # from which the same hello is answered: more are copies of it
_MAX_STALE_A_S = 100  # answers to hellos of another time, which are signed


class AdmittingHub(AnsweringHub, Protocol):
    """What letting others in needs from the transport."""

    access: Access | None
    random: random.Random

    def complain_once(self, what: str, peer: Peer, why: str) -> None:
        """One log line for this host and reason, not one for each packet."""

    def make_room(self) -> bool:
        """Whether there is room for one more session, at the price of others that nobody uses."""

    def drop(self, session: Session, reason: str) -> None:
        """End a session and forget it."""


class Admission:
    """The door of one transport."""

    def __init__(self, hub: AdmittingHub, greetings: Greetings) -> None:
        self._hub = hub
        self._greetings = greetings
        self._tokens = Tokens(hub.random)
        self.newcomers = Newcomers(hub.sessions)
        self._answered: dict[tuple[bytes, Any], bytes] = {}
        self._seen: dict[bytes, int] = {}
        self._stale_answers = Allowance(_MAX_STALE_A_S)

    def is_repeated(self, packet: bytes, where: tuple[Any, ...], port: Port) -> bool:
        """Whether a hello was answered before; that answer is sent again to the same address."""
        nonce = packet[4:16]
        if (answer := self._answered.get((nonce, where))) is not None:
            self._hub.stats.duplicates += 1
            port.send(answer, where)
            return True
        if self._seen.get(nonce, 0) >= _MAX_ADDRESSES:
            self._hub.on_replay(peer_at(where))
            return True
        return False

    def on_hello(self, greeting: Greeting, packet: bytes, where: tuple[Any, ...], port: Port) -> None:
        """Answer a hello; UnreadablePacket when it does not follow the protocol."""
        hello = greeting.body
        if len(hello.salt) != SALT_BYTES or len(hello.session_id) != SESSION_BYTES:
            raise UnreadablePacket("a hello that does not follow the protocol.")
        if why := self._untimely(hello):
            self._on_stale_hello(why, hello, packet, where, port)
            return
        peer_id = self._greetings.verified(greeting)
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

    def _on_stale_hello(
        self, why: str, hello: Hello, packet: bytes, where: tuple[Any, ...], port: Port
    ) -> None:
        """Recorded ones can be had in any number: they cost no check of a signature, and few an answer."""
        hub = self._hub
        hub.stats.refused += 1
        hub.complain_once("refused a hello", peer_at(where), why)
        if self._stale_answers.take(hub.loop.time()):
            answer = self._greetings.write(Kind.REFUSAL, Refusal(hello.salt, why))
            if len(answer) <= len(packet):
                port.send(answer, where)

    def _untimely(self, hello: Hello) -> str:
        """Why a hello is not of this time, or nothing."""
        gap_s = hello.wall_s - self._hub.clock.wall_s()
        if not self._greetings.is_sealed or abs(gap_s) <= MAX_CLOCK_GAP_S:
            return ""
        return f"the hello's time is {gap_s:+.0f} s off: a clock is wrong, or it was recorded."

    def _objection(self, peer_id: PeerId | None, hello: Hello) -> str:
        """Why a peer may not talk here, or nothing."""
        me = self._greetings.peer_id
        if hello.target and (me is None or hello.target != me.digest):
            return f"another peer is expected here: this one is {me.short if me else 'nobody in particular'}."
        return "" if is_allowed(self._hub.access, peer_id) else DENIED

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
                self._answered.pop((answerer.hello_nonce, answerer.where), None)
                if not hub.make_room():
                    port.send(answerer.packet([encode((11, _FULL, BUSY))]), where)
                    hub.drop(answerer, _FULL)
                    return False
            return True
        challenge = answerer.packet([encode((10, self._tokens.make(where, answerer.id, now_s)))])
        if len(challenge) <= len(packet):
            port.send(challenge, where)
        return False


def is_allowed(access: Access | None, peer_id: PeerId | None) -> bool:
    """Whether a peer may talk; one without an id only where no list is kept."""
    return access is None or (peer_id is not None and access.is_allowed(peer_id))


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    """As the latest; the one that was not met for longest is forgotten."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > _MAX_REMEMBERED:
        del memory[next(iter(memory))]
