"""The page of counters by which workers of one machine tell each other how far they are.

Every word has one writer, save the verdicts, which all who write them write alike. On x86 a store is seen
after the stores before it, and counters are read where they lie. Elsewhere a counter could be seen before the
tensor that it speaks of: there its value travels through a pipe, which orders both.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import struct
import time
from collections.abc import Sequence

import torch

from shoal.core import UsageError
from shoal.core.fork import close_in_children, keep_in_children
from shoal.group.host.memory import Segment

_LINE = 8  # words of 8 bytes: a cache line, so that two writers never share one
ARRIVED, FINISHED, PUBLISHED, BEAT, LEFT, VERDICT, ASLEEP = (line * _LINE for line in range(7))
_COUNTERS = 7 * _LINE
SLOTS = 512
"""Operations that one worker may be ahead of the slowest."""
SLOT_WORDS = 8
CHANNELS = 512
"""Names under which one worker may publish."""
CHANNEL_WORDS = 16
NOT_YET = -1
_FAILED = -1
_MESSAGE = struct.Struct("<iiq")
_TOLD = (ARRIVED, FINISHED, PUBLISHED)
_WAKE = _MESSAGE.pack(0, ASLEEP, 0)
_HEARD_BYTES = 1 << 16
_FULL_S = 1e-4
IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def region_bytes(size: int) -> int:
    """How much of the control segment each rank has."""
    words = _COUNTERS + SLOTS * (SLOT_WORDS + size) + CHANNELS * CHANNEL_WORDS
    return -(-words * 8 // 4096) * 4096


def clear(segment: Segment, size: int) -> None:
    """Before the first use: nobody has left, nobody is judged."""
    words = segment.flat.view(torch.int64).view(size, -1)
    words[:, LEFT] = words[:, VERDICT] = NOT_YET


def failed_beat(culprit: int | None) -> int:
    """The last beat of a worker that has given up; it tells because of whose loss, if that is why."""
    return _FAILED if culprit is None else _FAILED - 1 - culprit


def has_failed(beat: int) -> bool:
    """Whether it is the beat of a worker that has given up."""
    return beat < 0


def culprit_of(beat: int) -> int | None:
    """The rank because of which a worker has given up, if it has told."""
    return _FAILED - 1 - beat if beat < _FAILED else None


def code_of(dtype: torch.dtype) -> int:
    """The number by which descriptions name a dtype."""
    try:
        return DTYPES.index(dtype)
    except ValueError:
        raise UsageError(f"Tensors of {dtype} cannot be exchanged.", next_step="view it as uint8.") from None


class Control:
    """All ranks' words, read by all."""

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self._words = segment.flat.numpy().data.cast("B").cast("q")
        self._numbers = segment.flat.numpy().data.cast("B").cast("d")
        self._stride = segment.stride_bytes // 8
        self._rank = rank
        self._size = size
        self._slots_at = _COUNTERS
        self._factors_at = self._slots_at + SLOTS * SLOT_WORDS
        self._channels_at = self._factors_at + SLOTS * size
        self._own_at = rank * self._stride
        self._heard = [{ARRIVED: 0, FINISHED: 0, PUBLISHED: 0} for _ in range(size)]

    def get(self, rank: int, name: int) -> int:
        """A counter of a rank."""
        if not IS_ORDERED and rank != self._rank and name in _TOLD:
            return self._heard[rank][name]
        return self._words[rank * self._stride + name]

    def hear(self, rank: int, name: int, value: int) -> None:
        """A rank has told a counter of its own."""
        if name in _TOLD:
            self._heard[rank][name] = value

    def set(self, name: int, value: int) -> None:
        """A counter of this worker."""
        self._words[self._own_at + name] = value

    def judge(self, rank: int, value: int) -> None:
        """Say that a rank is gone after its operation `value`; the first verdict stands.

        One that woke up when it was judged, and went one operation further, must not be judged again by its
        end: the others have begun that operation without it.
        """
        if self._words[rank * self._stride + VERDICT] == NOT_YET:
            self._words[rank * self._stride + VERDICT] = value

    def gone_after(self, rank: int) -> int:
        """The last operation that a rank takes part in, NOT_YET for one that is there."""
        at = rank * self._stride
        left = self._words[at + LEFT]
        return left if left != NOT_YET else self._words[at + VERDICT]

    def describe(self, seq: int, words: Sequence[int], factors: Sequence[float] | None = None) -> None:
        """Say what this worker's operation `seq` is."""
        at = self._own_at + self._slots_at + seq % SLOTS * SLOT_WORDS
        for index, word in enumerate(words):
            self._words[at + index] = word
        if factors is not None:
            at = self._own_at + self._factors_at + seq % SLOTS * self._size
            for index, factor in enumerate(factors):
                self._numbers[at + index] = factor

    def description(self, rank: int, seq: int) -> list[int]:
        """What a rank's operation `seq` is; valid once it has arrived there."""
        at = rank * self._stride + self._slots_at + seq % SLOTS * SLOT_WORDS
        return self._words[at : at + SLOT_WORDS].tolist()

    def factor(self, rank: int, seq: int, receiver: int) -> float:
        """What a rank multiplies with before it sends to `receiver`."""
        return self._numbers[rank * self._stride + self._factors_at + seq % SLOTS * self._size + receiver]

    def channel(self, rank: int, index: int) -> list[int]:
        """The words of a channel in which a rank publishes."""
        at = rank * self._stride + self._channels_at + index * CHANNEL_WORDS
        return self._words[at : at + CHANNEL_WORDS].tolist()

    def set_channel(self, index: int, word: int, value: int) -> None:
        """One word of an own channel."""
        self._words[self._own_at + self._channels_at + index * CHANNEL_WORDS + word] = value


class Bells:
    """How workers tell each other that a counter has changed, and wake who sleeps."""

    def __init__(self, rank: int, own: int, bells: Sequence[int], control: Control) -> None:
        self._rank = rank
        self._own = own
        self._bells = list(bells)
        self._control = control
        self._others = [other for other in range(len(bells)) if other != rank]
        self._unread = b""
        self._poll = select.poll()
        self._poll.register(own, select.POLLIN)
        for descriptor in {own: None, **dict.fromkeys(self._bells)}:
            close_in_children(descriptor)

    def tell(self, name: int, value: int) -> None:
        """Set a counter of this worker, for all to see."""
        self._control.set(name, value)
        if not IS_ORDERED:
            message = _MESSAGE.pack(self._rank, name, value)
            for rank in self._others:
                self._send(rank, message)
            return
        for rank in self._others:
            if self._control.get(rank, ASLEEP):
                self._send(rank, _WAKE)

    def wake_self(self) -> None:
        """From the watching thread: something has changed that the waiting one should see."""
        if self._bells:
            self._send(self._rank, _WAKE)

    def wake(self, rank: int) -> None:
        """Something has changed that a rank may sleep for."""
        if self._bells and (not IS_ORDERED or self._control.get(rank, ASLEEP)):
            self._send(rank, _WAKE)

    def hear(self) -> None:
        """Take in what others have told, where their counters cannot be read as they are."""
        if not IS_ORDERED:
            self._drain()

    def sleep(self, timeout_s: float) -> None:
        """Until somebody tells something; the caller has said ASLEEP and looked once more."""
        self._poll.poll(timeout_s * 1e3)
        self._drain()

    def close(self) -> None:
        """Close all bells; telling does nothing any more."""
        descriptors = {self._own: None, **dict.fromkeys(self._bells)}
        self._bells, self._others = [], []
        for descriptor in descriptors:
            keep_in_children(descriptor)
            os.close(descriptor)

    def _send(self, rank: int, message: bytes) -> None:
        while True:
            try:
                os.write(self._bells[rank], message)
            except BlockingIOError:
                if message is _WAKE or self._control.gone_after(rank) != NOT_YET:
                    return  # one that is not yet heard is enough
                self._drain()  # it may be waiting for us to do the same
                time.sleep(_FULL_S)
            except BrokenPipeError:
                return
            else:
                return

    def _drain(self) -> None:
        if not self._bells:
            return
        with contextlib.suppress(BlockingIOError):
            heard = self._unread + os.read(self._own, _HEARD_BYTES)
            whole = len(heard) - len(heard) % _MESSAGE.size
            for rank, name, value in _MESSAGE.iter_unpack(heard[:whole]):
                self._control.hear(rank, name, value)
            self._unread = heard[whole:]


def new_bell() -> tuple[int, int]:
    """Descriptors to hear and to ring."""
    hear, ring = os.pipe()
    for descriptor in (hear, ring):
        os.set_blocking(descriptor, False)
    return hear, ring


DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""In this order on all workers: a description names a dtype by its position."""
