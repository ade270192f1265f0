"""The wire format of datagrams: a header that never moves, then a greeting or the frames of a session.

    0       2         3      4            12        20
    | magic | version | kind | session id | counter | frames, sealed ...        DATA
    | magic | version | kind | nonce (12 bytes)     | greeting, sealed ...      HELLO, WELCOME, REFUSAL

A DATA packet carries an array of small frames in MessagePack, so that several messages for one peer share a
packet. Its session id was picked by its receiver; session id and counter are its nonce. A greeting is an
Envelope with a Hello, a Welcome or a Refusal in it.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.transport.frames import UNREADABLE, ErrorHead, encode

SocketAddress = tuple[Any, ...]
"""An address as sockets write it: host and port, and two more numbers for IPv6."""

MAGIC = b"\xf0D"
VERSION = 2
"""1 kept answers; a peer of one version refuses the other with a message."""
PREFIX = MAGIC + bytes([VERSION])
MAX_PACKET_BYTES = 1200
"""Passes every path of the internet unbroken, even inside a tunnel."""
MIN_PACKET_BYTES = 64
"""A caller's packet is padded to this, so that whatever a stranger is answered is not larger."""
HEADER_BYTES = 20
TAG_BYTES = 16
SESSION_BYTES = 8
NONCE_BYTES = 12
SALT_BYTES = 16
GREETING_BYTES = 16
"""Header and nonce in front of a greeting."""
HELLO_BYTES = 352
"""A hello is padded to this size: no welcome or refusal is larger."""
COUNTER = struct.Struct("<Q")
MAX_FRAME_BYTES = MAX_PACKET_BYTES - HEADER_BYTES - TAG_BYTES - 32
"""All frames of a packet together; the rest is for the array around them, `oldest` and a Proof."""
PART_BYTES = MAX_FRAME_BYTES - 32
MAX_PARTS = 8
"""An answer that takes more datagrams than this is asked for again over a stream."""


class PacketKind(enum.IntEnum):
    """What a packet is for; greetings that are sealed have SEALED added."""

    HELLO = 1
    WELCOME = 2
    REFUSAL = 3
    DATA = 4
    UNKNOWN = 5  # the receiver does not know this session: greet again
    VERSION = 127  # the receiver speaks another version; the same in all of them


SEALED = 0x80

LEFT, REFUSED, BUSY = "", "refused", "busy"
"""Why a session ends: its peer goes, may not talk there, or finds no room."""


# --- greetings ---


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


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Who greets: a public key and a signature, or a claimed peer id where nothing is sealed."""

    who: bytes
    signature: bytes
    body: bytes
    padding: bytes = b""


# --- frames of a session ---


class Request(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """`timeout_ms` is the caller's remaining time, 0 when it has no deadline."""

    id: int
    timeout_ms: int
    method: str
    mode: int
    payload: msgspec.Raw
    buffers: list[bytes] = []


class Cancel(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """The caller no longer wants the answer."""

    id: int


class Proof(msgspec.Struct, array_like=True, tag=4, frozen=True):
    """A token that was sent to the address which this comes from."""

    token: bytes


class AnswerFrame(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """What the handler returned."""

    id: int
    payload: msgspec.Raw
    buffers: list[bytes] = []


class Failure(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """Why there is no answer: an `ErrorHead` of a call."""

    id: int
    code: str
    what: str
    cause: str
    next_step: str


class AnswerPart(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """A piece of an answer that is too large for one datagram; a request may be answered several times."""

    id: int
    digest: bytes
    """The hash of the whole: parts of equal answers make up one, parts of different ones do not."""
    index: int
    num_parts: int
    data: bytes


class Working(msgspec.Struct, array_like=True, tag=8, frozen=True):
    """The request has come and is being served: no need to send it again soon."""

    id: int


class TooLarge(msgspec.Struct, array_like=True, tag=9, frozen=True):
    """The answer does not fit into a few datagrams: ask again over a stream."""

    id: int
    size_bytes: int


class Challenge(msgspec.Struct, array_like=True, tag=10, frozen=True):
    """Prove that you receive at the address you send from: send this token back."""

    token: bytes


class Goodbye(msgspec.Struct, array_like=True, tag=11, frozen=True):
    """The sender ends the session; `code` is LEFT, REFUSED or BUSY."""

    reason: str
    code: str = ""


# A new frame is a Struct with the next tag, a member of this union, a branch in `CalleeSession.receive` or
# `CallerSession.receive`, and a new VERSION: older peers drop the packet. Tag 3 was version 1's. Tags 1, 5,
# 6 and 7 are also written by hand, where a frame is encoded often.
Frame = (
    Request | Cancel | Proof | AnswerFrame | Failure | AnswerPart | Working | TooLarge | Challenge | Goodbye
)


class Frames(msgspec.Struct, array_like=True, frozen=True):
    """The content of a DATA packet; `oldest` is the first call that its sender still waits for."""

    oldest: int
    frames: list[Frame]
    padding: bytes = b""


class UnreadablePacket(Exception):
    """Bytes that do not follow the format."""


_frames_decoder = msgspec.msgpack.Decoder(Frames)
_answer_decoder = msgspec.msgpack.Decoder(AnswerFrame)
_MAX_TEXT_BYTES = 340
_COUNTS = [bytes([0x90 | count]) for count in range(16)]
_ID = struct.Struct(">Q")
_REQUEST_HEAD = {num_fields: bytes([0x92 + num_fields, 1, 0xCF]) for num_fields in (4, 5)}


def encode_request(call_id: int, rest: bytes) -> bytes:
    """A Request frame; `rest` is its other four or five fields as an encoded array."""
    return _REQUEST_HEAD[rest[0] & 0x0F] + _ID.pack(call_id) + rest[1:]


def encode_failure(call_id: int, head: ErrorHead) -> bytes:
    """A Failure frame, whose texts are cut so that it always fits into a datagram."""
    texts = (head.what, head.cause, head.next_step)
    cut = (text.encode()[:_MAX_TEXT_BYTES].decode(errors="ignore") for text in texts)
    return encode((6, call_id, head.code, *cut))


def encode_frames(oldest: int, frames: Sequence[bytes], min_bytes: int = 0) -> bytes:
    """The content of a DATA packet, from frames that are encoded already."""
    num_frames = len(frames)
    count = _COUNTS[num_frames] if num_frames < 16 else b"\xdc" + num_frames.to_bytes(2)
    content = b"".join((b"\x92", encode(oldest), count, *frames))
    missing_bytes = min_bytes - len(content)
    if missing_bytes > 0:
        return b"\x93" + content[1:] + encode(bytes(max(0, missing_bytes - 2)))
    return content


def decode_frames(content: bytes) -> Frames:
    """Read what `encode_frames` made; UnreadablePacket for anything else."""
    try:
        return _frames_decoder.decode(content)
    except UNREADABLE as error:
        raise UnreadablePacket(str(error)) from None


def decode_answer(content: bytes) -> AnswerFrame:
    """Read the AnswerFrame that parts were cut from."""
    try:
        return _answer_decoder.decode(content)
    except UNREADABLE as error:
        raise UnreadablePacket(str(error)) from None


def cut(call_id: int, answer: bytes) -> list[bytes]:
    """The AnswerPart frames of an encoded answer."""
    digest = hashlib.blake2b(answer, digest_size=8).digest()
    pieces = [answer[start : start + PART_BYTES] for start in range(0, len(answer), PART_BYTES)]
    return [encode((7, call_id, digest, index, len(pieces), piece)) for index, piece in enumerate(pieces)]


def version_answer(packet: bytes) -> bytes:
    """What a packet of another version is answered: this peer's version, and some of that packet's bytes."""
    return PREFIX + bytes([PacketKind.VERSION]) + packet[4:12]
