"""First contact: a signed hello each way, then keys that only the two peers have, and a proof of address.

The seal of a greeting, under a key that every member of the swarm has, tells outsiders apart at the price of
one failed decryption; the signature, with the peer's own key, tells who greets. A session's keys come from a
Diffie-Hellman exchange besides the secret: a member that knows the secret still cannot read or forge what two
others say.

A hello that was recorded and is sent again is refused by its time (`_untimely`), or was answered before and
gets that answer once more, at few addresses (`_is_answered_again`): from another one it can only begin a
session that its sender has no key for. A stranger is answered with one packet, never
larger than what it sent, and is remembered only in lists of bounded length. Whoever has proven its address
cannot be pushed out of its session by anybody who has not.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.core import Peer, PeerId, PeerRefused, VersionMismatch
from shoal.core.ids import ID_BYTES
from shoal.core.rates import RateLimiter
from shoal.transport.datagrams import wire
from shoal.transport.datagrams.callee import CalleeSession
from shoal.transport.datagrams.caller import CallerSession, CallerState
from shoal.transport.datagrams.sessions import (
    TOKEN_BYTES,
    AddressTokens,
    AeadSeal,
    BareSeal,
    Session,
    peer_at,
)
from shoal.transport.datagrams.wire import SocketAddress, UnreadablePacket
from shoal.transport.frames import UNREADABLE, encode
from shoal.transport.messages import other_peer

if TYPE_CHECKING:
    from shoal.transport.datagrams.transport import DatagramSocket, DatagramTransport
    from shoal.transport.trust.membership import Access, Membership

MAX_CLOCK_GAP_S = 300.0
"""A hello older or newer than this is refused: it may be a recorded one."""
MAX_UNPROVEN = 4096
"""Sessions whose other side has not proven its address."""
MAX_UNPROVEN_A_HOST = 256
DENIED = "it is not on this peer's list of those who may talk."
_FULL = "it serves as many callers as it can."
_MAX_HELLOS = 4  # that a welcome may still answer; earlier ones are lost
_MAX_REMEMBERED = 4096  # hellos that were answered
_MAX_ADDRESSES = 3  # from which the same hello is answered: more are copies of it
_MAX_ANSWERS_A_S = 1000  # to packets of sessions that are not known here, or of another version
_MAX_STALE_A_S = 100  # answers to hellos of another time, which are signed
_UNKNOWN_BYTES = 48  # the size of the answer to a stray packet
_GREET_AGAIN_S = 0.2


class Handshakes:
    """First contact of one transport with others, in both roles, and what strangers are answered."""

    def __init__(self, transport: DatagramTransport, codec: HandshakeCodec) -> None:
        self._transport = transport
        self._codec = codec
        self._greeting: dict[bytes, CallerSession] = {}  # by the salt of their hello
        self._asking: dict[
            bytes, CallerSession
        ] = {}  # by the session id that the callee's packets are marked with
        self._tokens = AddressTokens(transport.random)
        self.unproven = UnprovenSessions(transport.sessions)
        self._answered: dict[tuple[bytes, Any], bytes] = {}  # by a hello's nonce and where it came from
        self._num_addresses: dict[bytes, int] = {}  # that a hello has come from, by its nonce
        self._answers = RateLimiter(_MAX_ANSWERS_A_S, _MAX_ANSWERS_A_S)
        self._stale_answers = RateLimiter(_MAX_STALE_A_S, _MAX_STALE_A_S)

    # --- what comes ---

    def on_greeting(self, kind: int, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> None:
        """Takes a hello, a welcome or a refusal."""
        transport, codec = self._transport, self._codec
        plain_kind = kind & ~wire.SEALED
        if plain_kind == wire.PacketKind.HELLO and not socket.is_listening:
            transport.stats.refused += 1
            return
        if bool(kind & wire.SEALED) != codec.is_sealed:
            transport.stats.refused += 1
            why = "it has no secret." if codec.is_sealed else "it has a swarm secret, this peer has none."
            transport.complain_once("refused a greeting", peer_at(where), why)
            return
        if plain_kind == wire.PacketKind.HELLO and self._is_answered_again(packet, where, socket):
            return
        try:
            greeting = codec.open(packet)
            if plain_kind == wire.PacketKind.HELLO:
                self._on_hello(greeting, packet, where, socket)
            elif greeting.body.hello_salt not in self._greeting:
                transport.stats.duplicates += 1
            elif plain_kind == wire.PacketKind.WELCOME:
                self._on_welcome(codec.verified(greeting), greeting.body)
            else:
                self._on_refusal(codec.verified(greeting), greeting.body)
        except UnreadablePacket as error:
            transport.stats.refused += 1
            transport.complain_once("refused a greeting", peer_at(where), str(error))

    # --- the caller's side ---

    def new_hello(self, caller: CallerSession) -> bytes:
        """A greeting; each is another one, so that a copy of it can keep nobody out."""
        transport = self._transport
        salt = transport.random.randbytes(wire.SALT_BYTES)
        target = caller.target.id.digest if caller.target.id else b""
        hello = wire.Hello(salt, self._codec.ephemeral, caller.id, target, transport.clock.wall_s())
        packet = caller.hellos[salt] = self._codec.write(wire.PacketKind.HELLO, hello)
        self._greeting[salt] = caller
        if len(caller.hellos) > _MAX_HELLOS:
            oldest = next(iter(caller.hellos))
            del caller.hellos[oldest]
            self._greeting.pop(oldest, None)
        return packet

    def forget_caller(self, caller: CallerSession) -> None:
        """It takes no new calls."""
        self._end_greeting(caller)
        if caller.state is not CallerState.RETIRED and self._asking.get(caller.their_id) is caller:
            del self._asking[caller.their_id]

    def _end_greeting(self, caller: CallerSession) -> None:
        for salt in caller.hellos:
            self._greeting.pop(salt, None)
        caller.hellos.clear()

    def on_unknown(self, packet: bytes) -> None:
        """The other side does not know a session: greet again, and make its calls again."""
        transport = self._transport
        caller = self._asking.get(packet[4:12])
        counter = wire.COUNTER.unpack_from(packet, 12)[0]
        if (
            caller is None
            or counter >= caller.num_sent
            or not self._codec.is_genuine_unknown(packet, caller.peer.id)
        ):
            transport.stats.refused += 1
            return
        # in place of a retired one there is another already
        if caller.num_open and caller.state is CallerState.READY:
            not_before_s = caller.greeted_at_s + _GREET_AGAIN_S
            heir = transport.open_caller(caller.target, caller.where, caller.socket, not_before_s)
            heir.inherit(caller)
        caller.close("it does not know this session any more; it was started again, most likely.")

    def _on_welcome(self, peer_id: PeerId | None, welcome: wire.Welcome) -> None:
        sizes = (len(welcome.salt), len(welcome.session_id), len(welcome.token))
        if sizes != (wire.SALT_BYTES, wire.SESSION_BYTES, TOKEN_BYTES) or welcome.session_id in self._asking:
            raise UnreadablePacket("a welcome that does not follow the protocol.")
        caller = self._greeting[welcome.hello_salt]
        target = caller.target
        peer = Peer(target.address, peer_id)
        if target.id is not None and peer_id != target.id:
            caller.refuse(other_peer(target, peer_id))
            return
        if not is_allowed(self._transport.access, peer_id):
            self._transport.complain_once("asked nothing", peer, DENIED)
            caller.refuse(PeerRefused(f"{peer} is not asked: {DENIED}", peer=peer))
            return
        seal = self._codec.session_seal(welcome, peer_id, welcome.hello_salt)
        self._end_greeting(caller)
        self._asking[welcome.session_id] = caller
        caller.welcome(peer, seal, welcome.session_id, welcome.token, welcome.max_calls)

    def _on_refusal(self, peer_id: PeerId | None, refusal: wire.Refusal) -> None:
        caller = self._greeting[refusal.hello_salt]
        peer = Peer(caller.target.address, peer_id)
        caller.refuse(PeerRefused(f"{peer} does not talk to this peer: {refusal.reason[:200]}", peer=peer))

    # --- the callee's side ---

    def _is_answered_again(self, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> bool:
        """Sends the answer to a hello from this address again, or refuses a replay; False for a new one."""
        nonce = packet[4:16]
        if (answer := self._answered.get((nonce, where))) is not None:
            self._transport.stats.duplicates += 1
            socket.send(answer, where)
            return True
        if self._num_addresses.get(nonce, 0) >= _MAX_ADDRESSES:
            self._transport.on_replay(peer_at(where))
            return True
        return False

    def _on_hello(
        self, greeting: Greeting, packet: bytes, where: SocketAddress, socket: DatagramSocket
    ) -> None:
        """Answer a hello; UnreadablePacket when it does not follow the protocol."""
        hello = greeting.body
        if len(hello.salt) != wire.SALT_BYTES or len(hello.session_id) != wire.SESSION_BYTES:
            raise UnreadablePacket("a hello that does not follow the protocol.")
        if why := self._untimely(hello):
            self._on_stale_hello(why, hello, packet, where, socket)
            return
        peer_id = self._codec.verified(greeting)
        _remember(self._num_addresses, packet[4:16], self._num_addresses.get(packet[4:16], 0) + 1)
        transport = self._transport
        peer = Peer(peer_at(where).address, peer_id)
        reason = self._objection(peer_id, hello)
        if reason:
            transport.stats.refused += 1
            transport.complain_once("refused a hello", peer, reason)
            answer = self._codec.write(wire.PacketKind.REFUSAL, wire.Refusal(hello.salt, reason))
        else:
            answer = self._admit(peer, hello, packet[4:16], where, socket)
        if len(answer) <= len(packet):  # never more than it sent
            _remember(self._answered, (packet[4:16], where), answer)
            socket.send(answer, where)

    def _on_stale_hello(
        self, why: str, hello: wire.Hello, packet: bytes, where: SocketAddress, socket: DatagramSocket
    ) -> None:
        """Recorded ones can be had in any number: they cost no check of a signature, and few an answer."""
        transport = self._transport
        transport.stats.refused += 1
        transport.complain_once("refused a hello", peer_at(where), why)
        if self._stale_answers.allows(transport.loop.time()):
            answer = self._codec.write(wire.PacketKind.REFUSAL, wire.Refusal(hello.salt, why))
            if len(answer) <= len(packet):
                socket.send(answer, where)

    def _untimely(self, hello: wire.Hello) -> str:
        """Why a hello is not of this time, or nothing."""
        gap_s = hello.wall_s - self._transport.clock.wall_s()
        if not self._codec.is_sealed or abs(gap_s) <= MAX_CLOCK_GAP_S:
            return ""
        return f"the hello's time is {gap_s:+.0f} s off: a clock is wrong, or it was recorded."

    def _objection(self, peer_id: PeerId | None, hello: wire.Hello) -> str:
        """Why a peer may not talk here, or nothing."""
        me = self._codec.peer_id
        if hello.target and (me is None or hello.target != me.digest):
            return f"another peer is expected here: this one is {me.short if me else 'nobody in particular'}."
        return "" if is_allowed(self._transport.access, peer_id) else DENIED

    def _admit(
        self, peer: Peer, hello: wire.Hello, nonce: bytes, where: SocketAddress, socket: DatagramSocket
    ) -> bytes:
        """Begin a session whose address is not proven yet; the welcome to send."""
        transport, codec = self._transport, self._codec
        callee = CalleeSession(transport, socket, peer, where)
        callee.hello_nonce = nonce
        salt = transport.random.randbytes(wire.SALT_BYTES)
        callee.begin(codec.session_seal(hello, peer.id, salt), hello.session_id)
        self.unproven.add(callee)
        token = self._tokens.make(where, callee.id, transport.loop.time())
        return codec.write(
            wire.PacketKind.WELCOME,
            wire.Welcome(hello.salt, salt, codec.ephemeral, callee.id, token, transport.limits.max_calls),
        )

    def prove(
        self, callee: CalleeSession, packet: bytes, where: SocketAddress, socket: DatagramSocket, token: bytes
    ) -> bool:
        """Whether a token shows that the caller receives there; asks for one where it does not."""
        transport = self._transport
        now_s = transport.loop.time()
        if self._tokens.is_good(token, where, callee.id, now_s):
            if not callee.is_proven:
                self.unproven.remove(callee)
                _remember(
                    self._num_addresses, callee.hello_nonce, _MAX_ADDRESSES
                )  # a copy of it is worth nothing
                self._answered.pop((callee.hello_nonce, callee.where), None)
                if not transport.make_room():
                    socket.send(callee.packet([encode(wire.Goodbye(_FULL, wire.BUSY))]), where)
                    transport.drop(callee, _FULL)
                    return False
            return True
        challenge = callee.packet([encode(wire.Challenge(self._tokens.make(where, callee.id, now_s)))])
        if len(challenge) <= len(packet):
            socket.send(challenge, where)
        return False

    # --- strangers ---

    def on_stray(self, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> None:
        """A packet of a session that is not known here."""
        self._transport.stats.refused += 1
        if socket.is_listening and len(packet) >= _UNKNOWN_BYTES and self._may_answer():
            socket.send(self._codec.unknown(packet), where)

    def on_other_version(self, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> None:
        """A packet of another version of the protocol, or the answer to one of ours."""
        transport = self._transport
        transport.stats.refused += 1
        version = packet[2]
        if packet[3] == wire.PacketKind.VERSION:
            for caller in tuple(self._greeting.values()):
                if any(hello[4:12] == packet[4:12] for hello in caller.hellos.values()):
                    caller.refuse(
                        VersionMismatch(
                            f"{caller.target} speaks another version of the datagram protocol ({version}) "
                            f"than this peer ({wire.VERSION}).",
                            next_step="install the same Shoal version on both sides; `shoal --version` "
                            "tells it.",
                        )
                    )
            return
        transport.complain_once(
            "refused a packet", peer_at(where), f"it speaks version {version}, not {wire.VERSION}."
        )
        if socket.is_listening and len(packet) >= wire.MIN_PACKET_BYTES and self._may_answer():
            socket.send(wire.version_answer(packet), where)

    def _may_answer(self) -> bool:
        return self._answers.allows(self._transport.loop.time())


def is_allowed(access: Access | None, peer_id: PeerId | None) -> bool:
    """Whether a peer may talk; one without an id only where no list is kept."""
    return access is None or (peer_id is not None and access.is_allowed(peer_id))


def _remember(memory: dict[Any, Any], key: Any, value: Any) -> None:
    """Add to a memory as its latest; what was not met for longest is forgotten."""
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > _MAX_REMEMBERED:
        del memory[next(iter(memory))]


class UnprovenSessions:
    """The oldest of a host goes when the host has too many, the oldest of all when there are too many."""

    def __init__(self, sessions: dict[bytes, Session]) -> None:
        self._sessions = sessions
        self._by_host: dict[str, dict[bytes, CalleeSession]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, callee: CalleeSession) -> None:
        """Let packets reach a new session."""
        host = _host_of(callee)
        if len(self._by_host.get(host, ())) >= MAX_UNPROVEN_A_HOST:
            self._drop_oldest(host)
        elif self._num >= MAX_UNPROVEN:
            self._drop_oldest(next(iter(self._by_host)))
        self._by_host.setdefault(host, {})[callee.id] = callee
        self._num += 1
        self._sessions[callee.id] = callee

    def remove(self, callee: CalleeSession) -> None:
        """Forget a session here: its address is proven now."""
        host = _host_of(callee)
        of_host = self._by_host.get(host, {})
        if of_host.pop(callee.id, None) is not None:
            self._num -= 1
            if not of_host:
                del self._by_host[host]

    def _drop_oldest(self, host: str) -> None:
        callee = next(iter(self._by_host[host].values()))
        self.remove(callee)
        self._sessions.pop(callee.id, None)


def _host_of(callee: CalleeSession) -> str:
    return str(callee.where[0])


class Greeting(NamedTuple):
    """A greeting that has been opened; nobody knows yet who wrote it."""

    kind: int
    envelope: wire.Envelope
    body: Any


_envelope_decoder = msgspec.msgpack.Decoder(wire.Envelope)
_body_decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
    wire.PacketKind.HELLO: msgspec.msgpack.Decoder(wire.Hello),
    wire.PacketKind.WELCOME: msgspec.msgpack.Decoder(wire.Welcome),
    wire.PacketKind.REFUSAL: msgspec.msgpack.Decoder(wire.Refusal),
}


class HandshakeCodec:
    """Makes and reads greetings, bare: a peer is whom it claims to be."""

    is_sealed = False

    def __init__(self, peer_id: PeerId | None, source: random.Random) -> None:
        self.peer_id = peer_id
        self.ephemeral = b""
        self._random = source

    def write(self, kind: wire.PacketKind, body: wire.Hello | wire.Welcome | wire.Refusal) -> bytes:
        """A greeting as it is sent."""
        content = encode(body)
        who, signature = self._signed(kind, content)
        size_bytes = wire.HELLO_BYTES if kind is wire.PacketKind.HELLO else 0
        sealed_bytes = wire.GREETING_BYTES + wire.TAG_BYTES * self.is_sealed
        envelope = encode((who, signature, content, b""))
        missing_bytes = size_bytes - sealed_bytes - len(envelope)
        if missing_bytes > 0:
            # from 256 bytes on the padding's own length takes a byte more
            envelope = encode((who, signature, content, bytes(missing_bytes - (missing_bytes > 255))))
        header = (
            wire.PREFIX
            + bytes([kind | self.is_sealed * wire.SEALED])
            + self._random.randbytes(wire.NONCE_BYTES)
        )
        return self._seal(header, envelope)

    def open(self, packet: bytes) -> Greeting:
        """What a greeting says; by whom is to be `verified` before it is believed."""
        kind = packet[3] & ~wire.SEALED
        try:
            envelope = _envelope_decoder.decode(self._open(packet))
            return Greeting(kind, envelope, _body_decoders[kind].decode(envelope.body))
        except UNREADABLE:
            raise UnreadablePacket("a greeting that does not follow the protocol.") from None

    def verified(self, greeting: Greeting) -> PeerId | None:
        """Who greets; UnreadablePacket when it is not whom it claims to be."""
        who = greeting.envelope.who
        if len(who) not in (0, ID_BYTES):
            raise UnreadablePacket("a greeting with a peer id of the wrong length.")
        return PeerId(who) if who else None

    def session_seal(
        self, theirs: wire.Hello | wire.Welcome, their_id: PeerId | None, my_salt: bytes
    ) -> BareSeal:
        """What protects the packets of the session that two greetings have begun."""
        return BareSeal()

    def unknown(self, packet: bytes) -> bytes:
        """What a packet of a session that nobody knows is answered: its session id and counter again."""
        return wire.PREFIX + bytes([wire.PacketKind.UNKNOWN]) + packet[4 : wire.HEADER_BYTES]

    def is_genuine_unknown(self, packet: bytes, their_id: PeerId | None) -> bool:
        """Whether this peer, rather than a passer-by, says that it does not know a session."""
        return len(packet) == wire.HEADER_BYTES

    def _signed(self, kind: int, content: bytes) -> tuple[bytes, bytes]:
        return (self.peer_id.digest if self.peer_id else b""), b""

    def _seal(self, header: bytes, envelope: bytes) -> bytes:
        return header + envelope

    def _open(self, packet: bytes) -> bytes:
        return packet[wire.GREETING_BYTES :]


class SealedHandshakeCodec(HandshakeCodec):
    """Makes and reads the greetings of a swarm's member, sealed for the swarm and signed."""

    is_sealed = True

    def __init__(self, membership: Membership, source: random.Random) -> None:
        super().__init__(membership.peer_id, source)
        self._membership = membership
        self._swarm = AESGCM(membership.secret.derive("datagram greeting"))
        self._ephemeral_key = X25519PrivateKey.generate()
        self.ephemeral = self._ephemeral_key.public_key().public_bytes_raw()
        self._public_key = membership.identity.public_key.public_bytes_raw()

    def session_seal(
        self, theirs: wire.Hello | wire.Welcome, their_id: PeerId | None, my_salt: bytes
    ) -> BareSeal:
        """Keys for both directions; UnreadablePacket when the other side's half is no key."""
        mine = self._membership.peer_id.digest
        their = their_id.digest if their_id else b""
        try:
            shared = self._ephemeral_key.exchange(X25519PublicKey.from_public_bytes(theirs.ephemeral))
        except ValueError:
            raise UnreadablePacket("a greeting without a usable key.") from None
        derive = self._membership.secret.derive
        sending = derive("datagram", shared, mine, their, my_salt, theirs.salt)
        receiving = derive("datagram", shared, their, mine, theirs.salt, my_salt)
        return AeadSeal(sending, receiving)

    def unknown(self, packet: bytes) -> bytes:
        """The same, sealed for the swarm and naming this peer: an outsider must not be able to end sessions.

        It could have any member answer a packet that it saw; what another peer says of a session is worth
        nothing.
        """
        header = super().unknown(packet)
        nonce = self._random.randbytes(wire.NONCE_BYTES)
        return header + nonce + self._swarm.encrypt(nonce, b"", header + self._membership.peer_id.digest)

    def is_genuine_unknown(self, packet: bytes, their_id: PeerId | None) -> bool:
        """Whether a member says in this peer's name that it does not know a session."""
        header, nonce = (
            packet[: wire.HEADER_BYTES],
            packet[wire.HEADER_BYTES : wire.HEADER_BYTES + wire.NONCE_BYTES],
        )
        named = header + (their_id.digest if their_id else b"")
        try:
            return self._swarm.decrypt(nonce, packet[wire.HEADER_BYTES + wire.NONCE_BYTES :], named) == b""
        except (InvalidTag, ValueError):
            return False

    def _signed(self, kind: int, content: bytes) -> tuple[bytes, bytes]:
        return self._public_key, self._membership.identity.sign(_signed_text(kind, content))

    def verified(self, greeting: Greeting) -> PeerId | None:
        """Who has signed it; UnreadablePacket when that is not whom it names."""
        envelope = greeting.envelope
        try:
            key = Ed25519PublicKey.from_public_bytes(envelope.who)
            key.verify(envelope.signature, _signed_text(greeting.kind, envelope.body))
        except (InvalidSignature, ValueError):
            raise UnreadablePacket("a greeting whose signature is not of the peer that it names.") from None
        return PeerId.of_public_key(envelope.who)

    def _seal(self, header: bytes, envelope: bytes) -> bytes:
        return header + self._swarm.encrypt(header[4:], envelope, header)

    def _open(self, packet: bytes) -> bytes:
        header = packet[: wire.GREETING_BYTES]
        try:
            return self._swarm.decrypt(header[4:], packet[wire.GREETING_BYTES :], header)
        except (InvalidTag, ValueError):
            raise UnreadablePacket("a greeting that was sealed with another secret.") from None


def _signed_text(kind: int, content: bytes) -> bytes:
    return b"shoal datagram greeting %d:" % kind + content
