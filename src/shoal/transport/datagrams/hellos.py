"""Greetings: what peers that meet tell each other, sealed for the swarm and signed, or bare.

The seal, under a key that every member of the swarm has, tells outsiders apart at the price of one failed
decryption; the signature, with the peer's own key, tells who greets. A session's keys come from a
Diffie-Hellman exchange besides the secret: a member that knows the secret still cannot read or forge what two
others say.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.core import PeerId
from shoal.core.ids import ID_BYTES
from shoal.transport.datagrams.packets import HEADER_BYTES, PREFIX, SEALED, TAG_BYTES, Kind, UnreadablePacket
from shoal.transport.datagrams.sealing import AeadSeal, BareSeal
from shoal.transport.frames import UNREADABLE, encode

if TYPE_CHECKING:
    from shoal.transport.trust.membership import Membership

NONCE_BYTES = 12
SALT_BYTES = 16
GREETING_BYTES = 16  # header and nonce in front of a greeting
HELLO_BYTES = 352
"""A hello is padded to this size: no welcome or refusal is larger."""


class Hello(msgspec.Struct, array_like=True, frozen=True):
    """Begins a session; everything random in it is made for this one session, but for the ephemeral key."""

    salt: bytes
    ephemeral: bytes
    session_id: bytes
    """What packets to the one who greets are marked with."""
    target: bytes
    """The peer id that is expected there, or nothing."""
    wall_s: float


class Welcome(msgspec.Struct, array_like=True, frozen=True):
    """Answers a hello, whose salt it repeats."""

    hello_salt: bytes
    salt: bytes
    ephemeral: bytes
    session_id: bytes
    token: bytes
    max_calls: int


class Refusal(msgspec.Struct, array_like=True, frozen=True):
    """Says no to a hello, whose salt it repeats."""

    hello_salt: bytes
    reason: str


class _Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Who greets: a public key and a signature, or a claimed peer id where nothing is sealed."""

    who: bytes
    signature: bytes
    body: bytes
    padding: bytes = b""


class Greeting(NamedTuple):
    """A greeting that has been opened; nobody knows yet who wrote it."""

    kind: int
    envelope: _Envelope
    body: Any


_envelope_decoder = msgspec.msgpack.Decoder(_Envelope)
_body_decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
    Kind.HELLO: msgspec.msgpack.Decoder(Hello),
    Kind.WELCOME: msgspec.msgpack.Decoder(Welcome),
    Kind.REFUSAL: msgspec.msgpack.Decoder(Refusal),
}


class Greetings:
    """Makes and reads greetings, bare: a peer is whom it claims to be."""

    is_sealed = False

    def __init__(self, peer_id: PeerId | None, source: random.Random) -> None:
        self.peer_id = peer_id
        self.ephemeral = b""
        self._random = source

    def write(self, kind: Kind, body: Hello | Welcome | Refusal) -> bytes:
        """A greeting as it is sent."""
        content = encode(body)
        who, signature = self._signed(kind, content)
        size_bytes = HELLO_BYTES if kind is Kind.HELLO else 0
        sealed_bytes = GREETING_BYTES + TAG_BYTES * self.is_sealed
        envelope = encode((who, signature, content, b""))
        missing_bytes = size_bytes - sealed_bytes - len(envelope)
        if missing_bytes > 0:
            # from 256 bytes on the padding's own length takes a byte more
            envelope = encode((who, signature, content, bytes(missing_bytes - (missing_bytes > 255))))
        header = PREFIX + bytes([kind | self.is_sealed * SEALED]) + self._random.randbytes(NONCE_BYTES)
        return self._seal(header, envelope)

    def open(self, packet: bytes) -> Greeting:
        """What a greeting says; by whom is to be `verified` before it is believed."""
        kind = packet[3] & ~SEALED
        try:
            envelope = _envelope_decoder.decode(self._open(packet))
            return Greeting(kind, envelope, _body_decoders[kind].decode(envelope.body))
        except UNREADABLE:
            raise UnreadablePacket("a greeting that does not follow the protocol.") from None

    def verified(self, greeting: Greeting) -> PeerId | None:
        """Who greets; UnreadablePacket when it is not whom it claims to be."""
        return self._check(greeting.kind, greeting.envelope)

    def session_seal(self, theirs: Hello | Welcome, their_id: PeerId | None, my_salt: bytes) -> BareSeal:
        """What protects the packets of the session that two greetings have begun."""
        return BareSeal()

    def unknown(self, packet: bytes) -> bytes:
        """What a packet of a session that nobody knows is answered: its session id and counter again."""
        return PREFIX + bytes([Kind.UNKNOWN]) + packet[4:HEADER_BYTES]

    def is_genuine_unknown(self, packet: bytes, their_id: PeerId | None) -> bool:
        """Whether this peer, rather than a passer-by, says that it does not know a session."""
        return len(packet) == HEADER_BYTES

    def _signed(self, kind: int, content: bytes) -> tuple[bytes, bytes]:
        return (self.peer_id.digest if self.peer_id else b""), b""

    def _check(self, kind: int, envelope: _Envelope) -> PeerId | None:
        if len(envelope.who) not in (0, ID_BYTES):
            raise UnreadablePacket("a greeting with a peer id of the wrong length.")
        return PeerId(envelope.who) if envelope.who else None

    def _seal(self, header: bytes, envelope: bytes) -> bytes:
        return header + envelope

    def _open(self, packet: bytes) -> bytes:
        return packet[GREETING_BYTES:]


class SealedGreetings(Greetings):
    """Greetings of a swarm's member."""

    is_sealed = True

    def __init__(self, membership: Membership, source: random.Random) -> None:
        super().__init__(membership.peer_id, source)
        self._membership = membership
        self._swarm = AESGCM(membership.secret.derive("datagram greeting"))
        self._ephemeral_key = X25519PrivateKey.generate()
        self.ephemeral = self._ephemeral_key.public_key().public_bytes_raw()
        self._public_key = membership.identity.public_key.public_bytes_raw()

    def session_seal(self, theirs: Hello | Welcome, their_id: PeerId | None, my_salt: bytes) -> BareSeal:
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
        nonce = self._random.randbytes(NONCE_BYTES)
        return header + nonce + self._swarm.encrypt(nonce, b"", header + self._membership.peer_id.digest)

    def is_genuine_unknown(self, packet: bytes, their_id: PeerId | None) -> bool:
        """Whether a member says in this peer's name that it does not know a session."""
        header, nonce = packet[:HEADER_BYTES], packet[HEADER_BYTES : HEADER_BYTES + NONCE_BYTES]
        named = header + (their_id.digest if their_id else b"")
        try:
            return self._swarm.decrypt(nonce, packet[HEADER_BYTES + NONCE_BYTES :], named) == b""
        except (InvalidTag, ValueError):
            return False

    def _signed(self, kind: int, content: bytes) -> tuple[bytes, bytes]:
        return self._public_key, self._membership.identity.sign(_signed_text(kind, content))

    def _check(self, kind: int, envelope: _Envelope) -> PeerId | None:
        try:
            key = Ed25519PublicKey.from_public_bytes(envelope.who)
            key.verify(envelope.signature, _signed_text(kind, envelope.body))
        except (InvalidSignature, ValueError):
            raise UnreadablePacket("a greeting whose signature is not of the peer that it names.") from None
        return PeerId.of_public_key(envelope.who)

    def _seal(self, header: bytes, envelope: bytes) -> bytes:
        return header + self._swarm.encrypt(header[4:], envelope, header)

    def _open(self, packet: bytes) -> bytes:
        header = packet[:GREETING_BYTES]
        try:
            return self._swarm.decrypt(header[4:], packet[GREETING_BYTES:], header)
        except (InvalidTag, ValueError):
            raise UnreadablePacket("a greeting that was sealed with another secret.") from None


def _signed_text(kind: int, content: bytes) -> bytes:
    return b"shoal datagram greeting %d:" % kind + content
