"""Bytes in, frames out: the receiving half of the wire format, without a socket.

It says where the next bytes should go (`get_buffer`), so that the chunks of a large message land in their
final memory and are never copied. Small frames share one scratch buffer, many of them in one read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core import LimitExceeded, ProtocolError, ShoalError, VersionMismatch
from shoal.transport.frames import (
    DECODERS,
    HEADER,
    INLINE_BYTES,
    MAGIC,
    MAX_CHUNK_BYTES,
    UNREADABLE,
    VERSION,
    FrameKind,
)
from shoal.transport.memory import Cursor, fill

_FIRST_BYTES = 512  # scratch, until more comes at once
_STRANGER_BYTES = 4 << 10  # most of it, and the largest head, for whoever has not said hello yet
_SCRATCH_BYTES = 128 << 10
_GROWTH = 4
_DIRECT_FROM_BYTES = 16 << 10  # a smaller target is filled by a copy: cheaper than a read of its own
_CHUNKS = (int(FrameKind.CHUNK), int(FrameKind.CHUNK_FROM_START))
_BODY_LIMITS = {
    FrameKind.REQUEST: INLINE_BYTES,
    FrameKind.REPLY: INLINE_BYTES,
    FrameKind.ITEM: INLINE_BYTES,
    FrameKind.CHUNK: MAX_CHUNK_BYTES,
    FrameKind.CHUNK_FROM_START: MAX_CHUNK_BYTES,
}
# looked up by number for every frame: a tuple is faster than a dict of enum members
_NUM_KINDS = len(FrameKind) + 1
_TLS_STARTS = (b"\x15\x03", b"\x16\x03")  # an alert, a handshake
_MAX_BODY_BYTES = tuple(
    _BODY_LIMITS.get(FrameKind(number), 0) if number else 0 for number in range(_NUM_KINDS)
)
WORD_FIRST = struct.Struct("<IIQQ")
"""A header, whose magic, version and kind are read as one number."""


def first_word(kind: FrameKind) -> int:
    """What `WORD_FIRST` gives first for a frame of this kind."""
    return int.from_bytes(struct.pack("<2sBB", MAGIC, VERSION, kind), "little")


_USUAL: dict[int, tuple[int, Any]] = {
    first_word(kind): (int(kind), DECODERS[kind]) for kind in (FrameKind.REQUEST, FrameKind.REPLY)
}


OnFrame = Callable[[int, int, Any, memoryview], None]
"""Takes a whole frame that is no chunk: a FrameKind's number, call id, head and body, which is valid only
until it returns.
"""


class FrameDecoder:
    """Raises ProtocolError or LimitExceeded on bytes that no honest peer sends, and is of no use then."""

    def __init__(self, on_frame: OnFrame, max_head_bytes: int) -> None:
        self._on_frame = on_frame
        self.arrivals = Arrivals(self)
        """Where chunks belong."""
        self.num_frames = 0
        """Frames that have begun to arrive."""
        self._friends_head_bytes = max_head_bytes
        self._is_welcome = False
        self._max_head_bytes = _STRANGER_BYTES
        self._usual_bytes = _FIRST_BYTES
        self._most_bytes = _STRANGER_BYTES
        self._scratch = memoryview(bytearray(_FIRST_BYTES))
        self._filled = 0
        self._call_id = 0
        self._chunk_left = 0
        self._targets: list[memoryview] = []  # of the current chunk, the next one last
        self._is_dropping = False
        self.expects_chunk = False
        """Set by `arrivals` while chunks of some message are still to come."""

    @property
    def is_inside_frame(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._filled > 0 or self._chunk_left > 0

    def welcome(self) -> None:
        """The other side has said hello: take heads of up to `max_head_bytes` from it."""
        self._is_welcome = True
        self._max_head_bytes = self._friends_head_bytes
        self._most_bytes = _SCRATCH_BYTES

    def close(self) -> None:
        """Throw away whatever may still come, and let go of the memory for it."""
        self._scratch = memoryview(bytearray(HEADER.size))
        self._filled = 0
        self._chunk_left = 1 << 63
        self.drop_chunk(self._call_id)

    def drop_chunk(self, call_id: int) -> None:
        """Have the rest of a chunk thrown away that is arriving: its memory belongs to somebody else now."""
        if self._chunk_left and self._call_id == call_id:
            self._is_dropping = True
            self._targets = []

    def get_buffer(self) -> memoryview:
        """Where the next bytes should be written."""
        if self._chunk_left:
            if self._is_dropping:
                return self._scratch[: min(self._chunk_left, len(self._scratch))]
            if self._is_direct():
                return self._targets[-1]
        elif self.expects_chunk and self._filled < HEADER.size:
            # the next chunk should go to its place by a read of its own: take no more than the header now
            return self._scratch[self._filled : HEADER.size]
        return self._scratch[self._filled :]

    def buffer_updated(self, num_bytes: int) -> None:
        """Tell how many bytes were written where `get_buffer` said."""
        if self._chunk_left and (self._is_dropping or self._is_direct()):
            self._advance(num_bytes)
            return
        if not self._filled and not self._chunk_left and self._is_one_frame(num_bytes):
            return
        self._filled += num_bytes
        if self._filled == len(self._scratch) and self._usual_bytes < self._most_bytes:
            # there is more than fits: only a connection that is busy gets much memory
            self._usual_bytes = min(_GROWTH * self._usual_bytes, self._most_bytes)
        self._parse()

    def _is_one_frame(self, num_bytes: int) -> bool:
        """Pass a whole request or reply on, when nothing else has come; all the rest is `_parse`'s."""
        scratch = self._scratch
        if not HEADER.size <= num_bytes < len(scratch):
            return False
        word, head_bytes, call_id, body_bytes = WORD_FIRST.unpack_from(scratch)
        usual = _USUAL.get(word)
        body_start = HEADER.size + head_bytes
        if usual is None or body_start + body_bytes != num_bytes or head_bytes > self._max_head_bytes:
            return False
        number, decoder = usual
        try:
            head = decoder.decode(bytes(scratch[HEADER.size : body_start]))
        except UNREADABLE:
            return False
        if body_bytes > INLINE_BYTES:
            return False
        self.num_frames += 1
        self._on_frame(number, call_id, head, scratch[body_start:num_bytes])
        return True

    def _is_direct(self) -> bool:
        return len(self._targets) == 1 or len(self._targets[-1]) >= _DIRECT_FROM_BYTES

    def _advance(self, num_bytes: int) -> None:
        self._chunk_left -= num_bytes
        if not self._is_dropping:
            target = self._targets[-1]
            if num_bytes == len(target):
                self._targets.pop()
            else:
                self._targets[-1] = target[num_bytes:]
        if not self._chunk_left:
            was_dropping, self._is_dropping = self._is_dropping, False
            if not was_dropping:
                self.arrivals.on_chunk_end(self._call_id)

    def _parse(self) -> None:
        """Use up what lies in scratch."""
        start, filled, scratch = 0, self._filled, self._scratch
        needed_bytes = 0
        while start < filled:
            if self._chunk_left:
                start += self._copy_chunk(scratch[start:filled])
                continue
            if filled - start < HEADER.size:
                if (
                    bytes(scratch[start : start + len(MAGIC)]) in _TLS_STARTS
                ):  # an alert is no longer than that
                    raise _stranger(bytes(scratch[start:filled]))
                break
            magic, version, number, head_bytes, call_id, body_bytes = HEADER.unpack_from(scratch, start)
            if magic != MAGIC or version != VERSION:
                raise _stranger(bytes(scratch[start : start + HEADER.size]))
            if not 0 < number < _NUM_KINDS:
                raise ProtocolError(f"A frame of the unknown kind {number} arrived.")
            decoder = DECODERS[number]
            if (
                head_bytes > self._max_head_bytes
                or body_bytes > _MAX_BODY_BYTES[number]
                or (head_bytes and decoder is None)
            ):
                raise self._refusal(number, head_bytes, body_bytes)
            body_start = start + HEADER.size + head_bytes
            if number in _CHUNKS:
                self.num_frames += 1
                start = body_start
                self._begin_chunk(call_id, body_bytes, is_from_start=number == FrameKind.CHUNK_FROM_START)
                continue
            end = body_start + body_bytes
            if end > filled:
                needed_bytes = end - start
                break
            head = None
            if decoder is not None:
                try:
                    head = decoder.decode(bytes(scratch[start + HEADER.size : body_start]))
                except UNREADABLE as error:
                    name = FrameKind(number).name
                    raise ProtocolError(f"The head of a {name} frame cannot be read: {error}.") from error
            start = end
            self.num_frames += 1
            self._on_frame(number, call_id, head, scratch[body_start:end])
        self._filled = filled - start
        if start and self._filled:
            scratch[: self._filled] = bytes(scratch[start:filled])
        if needed_bytes > len(scratch) or len(scratch) != self._usual_bytes:
            self._fit_scratch(needed_bytes)

    def _begin_chunk(self, call_id: int, body_bytes: int, *, is_from_start: bool) -> None:
        if not self._is_welcome:
            raise ProtocolError("A CHUNK frame came before the hello.")
        targets = self.arrivals.targets(call_id, body_bytes, is_from_start=is_from_start)
        self._call_id, self._chunk_left = call_id, body_bytes
        self._is_dropping = targets is None and body_bytes > 0
        self._targets = list(reversed(targets)) if targets else []

    def _copy_chunk(self, available: memoryview) -> int:
        """Move what came along with the header to its place; the number of bytes used."""
        if self._is_dropping:
            used = min(self._chunk_left, len(available))
        else:
            target = self._targets[-1]
            used = min(len(target), len(available))
            target[:used] = available[:used]
        self._advance(used)
        return used

    def _refusal(self, number: int, head_bytes: int, body_bytes: int) -> ShoalError:
        """Why a header is not acceptable."""
        name = FrameKind(number).name
        if head_bytes > self._max_head_bytes:
            return LimitExceeded(
                f"A head of {head_bytes:,} bytes arrived; {self._max_head_bytes:,} are allowed."
            )
        if body_bytes > (limit := _MAX_BODY_BYTES[number]):
            return LimitExceeded(
                f"A {name} frame claims a body of {body_bytes:,} bytes; the limit is {limit:,}."
            )
        return ProtocolError(f"A {name} frame came with a head, which it must not have.")

    def _fit_scratch(self, needed_bytes: int) -> None:
        """Grow for a head that does not fit, and go back to the usual size after it."""
        wanted = max(self._usual_bytes, needed_bytes)
        if wanted != len(self._scratch):
            fitting = memoryview(bytearray(wanted))
            fitting[: self._filled] = self._scratch[: self._filled]
            self._scratch = fitting


def _stranger(header: bytes) -> ProtocolError:
    """What to say to bytes that are not of this protocol or version."""
    if header[:2] == MAGIC:
        return VersionMismatch(
            f"The other side speaks version {header[2]} of the protocol, this peer version {VERSION}.",
            next_step="install the same Shoal version on both sides; `shoal --version` tells it.",
        )
    if header[:2] in _TLS_STARTS:
        return ProtocolError(
            "The other side speaks TLS, and this peer has no swarm secret.",
            cause="the other side belongs to a swarm with a secret.",
            next_step="start this peer with the same --secret-file or SHOAL_SECRET.",
        )
    return ProtocolError(
        f"The other side does not speak Shoal's protocol: it began with {header[:16]!r}.",
        cause="another program is talking to this port, or the stream is damaged.",
        next_step="check the address and port.",
    )


class Assembly:
    """The memory of one message and how far it is filled.

    Without memory (no views yet) what arrives is dropped, until there is some and the sender begins again.
    """

    __slots__ = ("_cursor", "is_waiting_for_start", "left_bytes", "on_complete", "total_bytes", "views")

    def __init__(
        self, views: Sequence[memoryview], total_bytes: int, on_complete: Callable[[], None]
    ) -> None:
        self.on_complete = on_complete
        self.total_bytes = total_bytes
        self.is_waiting_for_start = not views
        self.views = views
        self._rewind()

    def _rewind(self) -> None:
        self.left_bytes = self.total_bytes
        self._cursor = Cursor(self.views)

    def next_targets(self, num_bytes: int, *, is_from_start: bool) -> list[memoryview] | None:
        """Where the next `num_bytes` belong, or None when they must be dropped."""
        if is_from_start:
            if not (self.is_waiting_for_start and self.views):
                raise ProtocolError("A message began again that was not asked to.")
            self.is_waiting_for_start = False
            self._rewind()
        elif self.is_waiting_for_start:
            return None
        if num_bytes > self.left_bytes:
            raise ProtocolError(f"{num_bytes:,} bytes arrived for a message that lacks {self.left_bytes:,}.")
        self.left_bytes -= num_bytes
        return self._cursor.take(num_bytes)


class Arrivals:
    """All messages that are arriving on one connection, by the call that they belong to."""

    def __init__(self, decoder: FrameDecoder) -> None:
        self._decoder = decoder
        self._assemblies: dict[int, Assembly] = {}
        self.arrived_bytes = 0
        """Of all parts that found their place, or are about to."""

    def __len__(self) -> int:
        return len(self._assemblies)

    def get(self, call_id: int) -> Assembly | None:
        """The message of this call that is arriving, if there is one."""
        return self._assemblies.get(call_id)

    def ids_with_room(self) -> list[int]:
        """Calls whose messages nothing here keeps from arriving."""
        return [call_id for call_id, assembly in self._assemblies.items() if assembly.views]

    def receive(
        self, call_id: int, views: Sequence[memoryview], body: memoryview, on_complete: Callable[[], None]
    ) -> None:
        """Fill a message's buffers with the body that came along, or with the chunks that will come."""
        total_bytes = sum(map(len, views)) if views else 0
        if len(body) != total_bytes:
            if len(body):
                raise ProtocolError(f"A message announced {total_bytes:,} bytes and carries {len(body):,}.")
            self._expect(call_id, Assembly(views, total_bytes, on_complete))
            return
        if self._assemblies and call_id in self._assemblies:
            raise _too_early(call_id)
        fill(views, body)
        on_complete()

    def is_plain(self, sizes: Sequence[int], body: memoryview) -> bool:
        """Whether a message has one buffer, which came along, or none: the quick case of `receive`."""
        return len(sizes) < 2 and len(body) == (sizes[0] if sizes else 0) and not self._assemblies

    def receive_later(self, call_id: int, total_bytes: int, on_complete: Callable[[], None]) -> None:
        """Expect a message for which there is no room yet; see `make_room`."""
        self._expect(call_id, Assembly((), total_bytes, on_complete))

    def _expect(self, call_id: int, assembly: Assembly) -> None:
        if call_id in self._assemblies:
            raise _too_early(call_id)
        self._assemblies[call_id] = assembly
        self._decoder.expects_chunk = True

    def make_room(self, call_id: int, views: Sequence[memoryview]) -> None:
        """There is memory for a message that was expected later; its sender is asked to begin again."""
        self._assemblies[call_id].views = views

    def targets(self, call_id: int, num_bytes: int, *, is_from_start: bool) -> list[memoryview] | None:
        """Where a part of a message belongs; parts of messages that were given up are dropped."""
        assembly = self._assemblies.get(call_id)
        if assembly is None:
            return None
        if targets := assembly.next_targets(num_bytes, is_from_start=is_from_start):
            self.arrived_bytes += num_bytes
        return targets

    def on_chunk_end(self, call_id: int) -> None:
        """A part is in its place; the message may be complete with it."""
        assembly = self._assemblies.get(call_id)
        if assembly is not None and assembly.left_bytes == 0:
            del self._assemblies[call_id]
            self._decoder.expects_chunk = bool(self._assemblies)
            assembly.on_complete()

    def forget(self, call_id: int) -> None:
        """Receive no more of a call's message; its memory is the owner's again."""
        if self._assemblies.pop(call_id, None) is not None:
            self._decoder.expects_chunk = bool(self._assemblies)
            self._decoder.drop_chunk(call_id)

    def clear(self) -> None:
        """Forget all messages that were arriving."""
        self._assemblies.clear()


def _too_early(call_id: int) -> ProtocolError:
    return ProtocolError(f"A message of call {call_id} began before the one before it had ended.")
