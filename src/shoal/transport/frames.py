"""The wire format of streams: a fixed header, a MessagePack head, then raw bytes.

    0        2        3      4           8          16          24
    | magic  | version| kind | head size | call id  | body size | head ... | body ...

All numbers are little-endian. Magic and version never move, so that peers of different versions can tell each
other apart. A message with small buffers is one frame; larger buffers follow in CHUNK frames, between which
other frames may pass. Ids of calls that the dialing side makes are odd, those of the accepting side even.
"""

from __future__ import annotations

import enum
import struct
from typing import Any

import msgspec

from shoal.core import (
    DeadlineExceeded,
    LimitExceeded,
    Peer,
    PeerBusy,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    ProtocolError,
    RemoteFailure,
    ShoalError,
    TensorError,
    UsageError,
    VersionMismatch,
)

MAGIC = b"\xf0S"  # not ASCII, not valid UTF-8: no text protocol begins so
VERSION = 1
HEADER = struct.Struct("<2sBBIQQ")
INLINE_BYTES = 32 << 10  # buffers up to this travel inside their message's own frame
MAX_CHUNK_BYTES = 4 << 20
EAGER_BYTES = 8 << 20  # of a message's buffers, sent before the receiver has said that it has room
_REFUSALS = (PeerRefused, LimitExceeded, TensorError, UsageError)
_MAX_TEXT = 2000  # characters of one sentence: an error must fit where a head fits


class FrameKind(enum.IntEnum):
    """What a frame is for.

    A new kind needs the next number, how its head is read (`_DECODERS`), how large its body may be
    (`_BODY_LIMITS` in `streams/decoder`), whom it concerns (`_handlers` in `streams/connection`; where it may
    come to a thread that waits, `_BlockingConnection._on_frame` in `streams/blocking`), and another VERSION.
    One with a body is sent by the outbox.
    """

    HELLO = 1
    REQUEST = 2
    REPLY = 3
    ERROR = 4
    CHUNK = 5  # the next bytes of the message that this call is sending
    CHUNK_FROM_START = 6  # the same, from its first byte again: the receiver had no room before
    GRANT = 7  # the receiver has room now
    CANCEL = 8
    ITEM = 9  # one message of a channel
    END = 10  # a channel's sender has no more items
    WINDOW = 11  # a channel's receiver has taken bytes
    GOODBYE = 12


class Mode(enum.IntEnum):
    """What the caller of a request expects."""

    CALL = 0
    ONE_WAY = 1
    CHANNEL = 2


class HelloHead(msgspec.Struct, array_like=True, frozen=True):
    """The first frame each way: who speaks and how much it takes."""

    software: str
    peer_id: bytes
    max_calls: int
    max_message_bytes: int


class RequestHead(msgspec.Struct, array_like=True, frozen=True):
    """`timeout_ms` is the caller's remaining time, 0 when it has no deadline: clocks of peers differ."""

    method: str
    mode: int
    timeout_ms: int
    sizes: list[int]
    payload: msgspec.Raw


class MessageHead(msgspec.Struct, array_like=True, frozen=True):
    """The head of a reply and of a channel's item."""

    sizes: list[int]
    payload: msgspec.Raw


class ErrorHead(msgspec.Struct, array_like=True, frozen=True):
    """Why a call failed; `code` is a key of `ERRORS_BY_CODE`."""

    code: str
    what: str
    cause: str
    next_step: str


class GrantHead(msgspec.Struct, array_like=True, frozen=True):
    """`from_start`: what was sent so far had to be dropped."""

    from_start: bool


class WindowHead(msgspec.Struct, array_like=True, frozen=True):
    """How many bytes of a channel have been taken since the last WINDOW."""

    size_bytes: int


class GoodbyeHead(msgspec.Struct, array_like=True, frozen=True):
    """Why the sender ends the connection, and the last call id of the receiver's that it has served."""

    code: str
    reason: str
    last_call_id: int


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
"""Anything that MessagePack carries, as bytes."""

UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)
"""What decoding a head or payload raises when a peer sent nonsense."""

_decode_any = msgspec.msgpack.Decoder().decode

_DECODERS: dict[FrameKind, msgspec.msgpack.Decoder[Any]] = {
    FrameKind.HELLO: msgspec.msgpack.Decoder(HelloHead),
    FrameKind.REQUEST: msgspec.msgpack.Decoder(RequestHead),
    FrameKind.REPLY: msgspec.msgpack.Decoder(MessageHead),
    FrameKind.ERROR: msgspec.msgpack.Decoder(ErrorHead),
    FrameKind.GRANT: msgspec.msgpack.Decoder(GrantHead),
    FrameKind.ITEM: msgspec.msgpack.Decoder(MessageHead),
    FrameKind.WINDOW: msgspec.msgpack.Decoder(WindowHead),
    FrameKind.GOODBYE: msgspec.msgpack.Decoder(GoodbyeHead),
}
DECODERS = tuple(_DECODERS.get(FrameKind(number)) if number else None for number in range(len(FrameKind) + 1))
"""How the head of a frame of each kind's number is read; None for kinds that have no head."""


def decode_payload(raw: msgspec.Raw, decoder: msgspec.msgpack.Decoder[Any] | None = None) -> Any:
    """The payload of a message, checked against `decoder`'s type where there is one; see UNREADABLE."""
    return _decode_any(raw) if decoder is None else decoder.decode(raw)


def frame(kind: FrameKind, call_id: int, head: bytes = b"", body_bytes: int = 0) -> bytes:
    """Header and head of a frame whose body, if any, the caller sends after it."""
    return HEADER.pack(MAGIC, VERSION, kind, len(head), call_id, body_bytes) + head


# --- how errors cross the wire: a code and three sentences, never an object ---

ERRORS_BY_CODE: dict[str, type[PeerError]] = {
    "busy": PeerBusy,
    "leaving": PeerLeaving,
    "refused": PeerRefused,
    "failed": RemoteFailure,
}
"""What a code from a peer is raised as; `deadline` is DeadlineExceeded, an unknown one a RemoteFailure."""


def to_wire(error: Exception) -> ErrorHead:
    """What the caller is told of an error that a handler raised."""
    if isinstance(error, DeadlineExceeded):
        code = "deadline"
    elif isinstance(error, PeerLeaving):
        code = "leaving"
    elif isinstance(error, PeerBusy):
        code = "busy"
    elif isinstance(error, _REFUSALS):
        code = "refused"
    else:
        code = "failed"
    if isinstance(error, ShoalError):
        return ErrorHead(code, _text(error.what), _text(error.cause), _text(error.next_step))
    try:
        what = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a handler's error need not be able to describe itself
        what = type(error).__name__
    return ErrorHead(code, _text(what), "", "")


def from_wire(head: ErrorHead, peer: Peer, method: str) -> ShoalError:
    """The error to raise at the caller, naming peer and method."""
    what, cause, next_step = (
        f"{method} at {peer}: {_text(head.what)}",
        _text(head.cause),
        _text(head.next_step),
    )
    if head.code == "deadline":
        return DeadlineExceeded(what, cause=cause, next_step=next_step)
    kind = ERRORS_BY_CODE.get(head.code, RemoteFailure)
    return kind(what, peer=peer, cause=cause, next_step=next_step)


def from_goodbye(head: GoodbyeHead, peer: Peer) -> ShoalError:
    """Why a connection ended, as its peer has said."""
    reason = _text(head.reason)
    if head.code == "version":
        return VersionMismatch(
            f"{peer} speaks another version of the protocol than this peer ({VERSION}): {reason}",
            next_step="install the same Shoal version on both sides; `shoal --version` tells it.",
        )
    if head.code == "busy":
        return PeerBusy(f"{peer} takes no connection now: {reason}", peer=peer, next_step="try again later.")
    if head.code == "refused":
        return PeerRefused(
            f"{peer} closed the connection: {reason}",
            peer=peer,
            next_step="ask who runs it to allow this peer's id, which `shoal keys show` prints.",
        )
    if head.code == "protocol":
        return ProtocolError(f"{peer} closed the connection: {reason}")
    return PeerLost(f"{peer} closed the connection: {reason}", peer=peer)


def _text(text: str) -> str:
    """Short enough to travel, and valid UTF-8: names of files may hold characters that are not."""
    return str(text)[:_MAX_TEXT].encode(errors="replace").decode()
