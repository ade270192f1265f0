"""What two peers share once they have greeted each other: numbered, sealed packets with frames in them.

A session goes one way: one side calls (`caller`), the other answers (`callee`). Two peers that call each
other have two. Both directions have a key of their own and count their packets; where they are sealed, a
packet that comes twice is refused (`Session.read`, by `ReplayWindow`).
"""

from __future__ import annotations

import hashlib
import hmac
import random
from typing import TYPE_CHECKING, Any

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.core import Address, Peer
from shoal.transport.datagrams import wire
from shoal.transport.datagrams.wire import SocketAddress, UnreadablePacket
from shoal.transport.frames import encode

if TYPE_CHECKING:
    from shoal.transport.datagrams.transport import DatagramSocket, DatagramTransport

INITIAL_TIMEOUT_S = 0.5
MIN_TIMEOUT_S = 0.02
MAX_TIMEOUT_S = 8.0
TOKEN_BYTES = 8
REPLAY_WINDOW = 1024
"""How far a packet may be overtaken by others and still be taken."""
MIN_CALLER_CONTENT_BYTES = wire.MIN_PACKET_BYTES - wire.HEADER_BYTES - wire.TAG_BYTES
_WINDOW_MASK = (1 << REPLAY_WINDOW) - 1
_TOKEN_BUCKET_S = 60.0
_GRAIN_S = 0.001  # what loops know of time
_GOODBYES = 2  # nobody is there to repeat one that is lost


class Stats(msgspec.Struct):
    """What a datagram transport has done so far."""

    packets_in: int = 0
    packets_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    resent: int = 0
    """Requests sent again because no answer had come in time."""
    duplicates: int = 0
    """Packets, requests and answers that had come before: copies of the network, and replays."""
    refused: int = 0
    """Packets that were not taken: nonsense, forged, or from somebody who may not talk."""
    unheard: int = 0
    """Packets that the system had no room to send; their calls try again."""


class RoundTrips:
    """How long answers take, and so how long to wait for one (RFC 6298, section 2)."""

    __slots__ = ("_deviation_s", "smoothed_s", "timeout_s")

    def __init__(self) -> None:
        self.smoothed_s: float | None = None
        self._deviation_s = 0.0
        self.timeout_s = INITIAL_TIMEOUT_S

    def observe(self, trip_s: float) -> None:
        """A request that was sent once was answered after this time."""
        if self.smoothed_s is None:
            self.smoothed_s, self._deviation_s = trip_s, trip_s / 2
        else:
            self._deviation_s += (abs(self.smoothed_s - trip_s) - self._deviation_s) / 4
            self.smoothed_s += (trip_s - self.smoothed_s) / 8
        timeout_s = self.smoothed_s + max(_GRAIN_S, 4 * self._deviation_s)
        self.timeout_s = min(MAX_TIMEOUT_S, max(MIN_TIMEOUT_S, timeout_s))

    def missed(self, waited_s: float) -> None:
        """No answer came in this time: later requests wait longer, until an answer teaches better."""
        self.timeout_s = min(MAX_TIMEOUT_S, max(self.timeout_s, 2 * waited_s))


class Session:
    """One side's end of a session: packets out, packets in."""

    _min_content_bytes = 0

    def __init__(
        self, transport: DatagramTransport, socket: DatagramSocket, peer: Peer, where: SocketAddress
    ) -> None:
        self.transport = transport
        self.socket = socket
        self.peer = peer
        self.where = where
        self.id = transport.random.randbytes(wire.SESSION_BYTES)
        """What packets to this side are marked with."""
        self.their_id = b""
        self.used_at_s = transport.loop.time()
        self.is_open = True
        self.seal: BareSeal | None = None
        """None until both have greeted."""
        self._prefix = b""
        self.calls: dict[int, Any] = {}
        """Those under way: the caller's wait for an answer, the callee's have a handler that runs."""
        self.num_sent = 0
        """Packets sent so far: counters below this were used."""
        self._frames: list[bytes] = []
        self._frames_bytes = 0

    def begin(self, seal: BareSeal, their_id: bytes) -> None:
        """Both have greeted: packets may be sent."""
        self.seal = seal
        self.their_id = their_id
        self._prefix = wire.PREFIX + bytes([wire.PacketKind.DATA]) + their_id

    @property
    def num_open(self) -> int:
        """The number of calls under way."""
        return len(self.calls)

    @property
    def is_established(self) -> bool:
        """Whether both sides know each other, and where."""
        raise NotImplementedError

    def queue(self, frame: bytes) -> None:
        """Send a frame with the others of this turn of the loop."""
        frames = self._frames
        if not frames:
            self.transport.on_dirty(self)
        elif self._frames_bytes + len(frame) > wire.MAX_FRAME_BYTES:
            self._send()
        frames.append(frame)
        self._frames_bytes += len(frame)

    def flush(self) -> None:
        """Send what is queued."""
        if self._frames:
            self._send()

    def _send(self) -> None:
        try:
            if self.seal is not None and self.is_open:
                self.socket.send(self.packet(self._frames), self.where)
        finally:
            self._frames.clear()
            self._frames_bytes = 0

    def packet(self, frames: list[bytes]) -> bytes:
        """A packet with these frames; UnreadablePacket before the greetings."""
        if self.seal is None:
            raise UnreadablePacket("no keys yet.")
        header = self._prefix + wire.COUNTER.pack(self.num_sent)
        self.num_sent += 1
        return self.seal.seal(header, wire.encode_frames(self._oldest(), frames, self._min_content_bytes))

    def _oldest(self) -> int:
        return 0

    def read(self, packet: bytes, where: SocketAddress) -> wire.Frames | None:
        """The frames of a packet that is genuine and new; None, and counted, for any other."""
        content = self.seal.open(packet) if self.seal is not None else None
        if content is None:
            self.transport.on_bad_packet(peer_at(where), "a packet that is not genuine.")
            return None
        if not self.seal.is_fresh(wire.COUNTER.unpack_from(packet, 12)[0]):  # type: ignore[union-attr]
            self.transport.on_replay(peer_at(where))
            return None
        try:
            return wire.decode_frames(content)
        except UnreadablePacket:
            self.transport.on_bad_packet(peer_at(where), "frames that do not follow the protocol.")
            return None

    def receive(self, packet: bytes, where: SocketAddress, socket: DatagramSocket) -> None:
        """A packet of this session has come."""
        raise NotImplementedError

    def leave(self, reason: str, code: str = wire.LEFT) -> None:
        """Tell the other side that this one ends the session."""
        if self.is_established:
            for _ in range(_GOODBYES):
                self.queue(encode(wire.Goodbye(reason, code)))
                self.flush()

    def close(self, reason: str, code: str = wire.LEFT) -> None:
        """End it on this side; nothing is sent any more."""
        raise NotImplementedError


def peer_at(where: SocketAddress) -> Peer:
    """A peer of which only the socket's address is known."""
    return Peer(Address(str(where[0]), where[1]))


class BareSeal:
    """No protection, against replays neither: for loopback, simulated networks, and those who want none."""

    def seal(self, header: bytes, content: bytes) -> bytes:
        """Makes the packet to send."""
        return header + content

    def open(self, packet: bytes) -> bytes | None:
        """The content of a packet, None when it is not genuine."""
        return packet[wire.HEADER_BYTES :]

    def is_fresh(self, counter: int) -> bool:
        """Whether a genuine packet comes for the first time; ask once for each."""
        return True


class AeadSeal(BareSeal):
    """AES-256-GCM with a key for each direction of one session; the packet's counter is its nonce."""

    def __init__(self, sending_key: bytes, receiving_key: bytes) -> None:
        self._encrypt = AESGCM(sending_key).encrypt
        self._decrypt = AESGCM(receiving_key).decrypt
        # replays are refused here: the window itself is asked for each packet, without a method between
        self.is_fresh = ReplayWindow().is_fresh  # type: ignore[method-assign]

    def seal(self, header: bytes, content: bytes) -> bytes:
        """The packet to send; a header must never be used twice."""
        return header + self._encrypt(header[8:], content, header)

    def open(self, packet: bytes) -> bytes | None:
        """The content of a packet, None when it is not genuine."""
        header = packet[: wire.HEADER_BYTES]
        try:
            return self._decrypt(header[8:], packet[wire.HEADER_BYTES :], header)
        except (InvalidTag, ValueError):
            return None


class ReplayWindow:
    """Which of the last counters have come (as RFC 4303, section 3.4.3)."""

    __slots__ = ("_highest", "_seen")

    def __init__(self) -> None:
        self._highest = -1
        self._seen = 0  # bit n: the counter n below the highest

    def is_fresh(self, counter: int) -> bool:
        """Whether this counter comes for the first time and is not too old; ask once for each packet."""
        ahead = counter - self._highest
        if ahead > 0:
            self._highest = counter
            self._seen = (self._seen << ahead | 1) & _WINDOW_MASK if ahead < REPLAY_WINDOW else 1
            return True
        if ahead <= -REPLAY_WINDOW:
            return False
        bit = 1 << -ahead
        if self._seen & bit:
            return False
        self._seen |= bit
        return True


class AddressTokens:
    """Proofs of address that need no memory: only who receives at an address can know its token."""

    def __init__(self, source: random.Random) -> None:
        self._key = source.randbytes(32)

    def make(self, where: SocketAddress, session_id: bytes, now_s: float) -> bytes:
        """What to send to an address for it to send back."""
        return self._token(where, session_id, int(now_s // _TOKEN_BUCKET_S))

    def is_good(self, token: bytes, where: SocketAddress, session_id: bytes, now_s: float) -> bool:
        """Whether a token was sent to this address, for this session, one or two minutes ago at most."""
        bucket = int(now_s // _TOKEN_BUCKET_S)
        return any(hmac.compare_digest(token, self._token(where, session_id, bucket - age)) for age in (0, 1))

    def _token(self, where: SocketAddress, session_id: bytes, bucket: int) -> bytes:
        text = b"%d:%s:%s" % (bucket, session_id, repr(where[:2]).encode())
        return hashlib.blake2b(text, key=self._key, digest_size=TOKEN_BYTES, person=b"shoal address").digest()
