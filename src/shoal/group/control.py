"""The page of counters by which workers of one machine tell each other how far they are.

Every word has one writer, save the verdicts, which all who write them write alike. On x86 a store is seen
after the stores before it; elsewhere a doorbell's system call orders them, which is why `hear` comes before
reading and `ring` after writing.
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import sys
from collections.abc import Sequence

import torch

from shoal.core import UsageError
from shoal.core.fork import close_in_children, keep_in_children
from shoal.group.arena import Segment

_LINE = 8  # words of 8 bytes: a cache line, so that two writers never share one
ARRIVED, FINISHED, BEAT, LEFT, VERDICT, ASLEEP = (line * _LINE for line in range(6))
_COUNTERS = 6 * _LINE
SLOTS = 512
"""Operations that one worker may be ahead of the slowest."""
SLOT_WORDS = 8
CHANNELS = 16
CHANNEL_WORDS = 8
NOT_YET = -1
IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def region_bytes(size: int) -> int:
    """How much of the control segment each rank has."""
    words = _COUNTERS + SLOTS * (SLOT_WORDS + size) + CHANNELS * CHANNEL_WORDS
    return -(-words * 8 // 4096) * 4096


def clear(segment: Segment, size: int) -> None:
    """Before the first use: nobody has left, nobody is judged."""
    words = segment.flat.view(torch.int64).view(size, -1)
    words[:, LEFT] = words[:, VERDICT] = NOT_YET


def code_of(dtype: torch.dtype) -> int:
    """The number by which descriptions name a dtype."""
    try:
        return DTYPES.index(dtype)
    except ValueError:
        raise UsageError(f"Tensors of {dtype} cannot be exchanged.", next_step="view it as uint8.") from None


class Control:
    """All ranks' words, read by all; `mine` is what this worker writes."""

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

    def get(self, rank: int, name: int) -> int:
        """A counter of a rank."""
        return self._words[rank * self._stride + name]

    def set(self, name: int, value: int) -> None:
        """A counter of this worker."""
        self._words[self._own_at + name] = value

    def judge(self, rank: int, value: int) -> None:
        """Say that a rank is gone after its operation `value`."""
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
    """One bell for each rank: ringing wakes it where it sleeps."""

    def __init__(self, rank: int, own: int, bells: Sequence[int], control: Control) -> None:
        self._rank = rank
        self._own = own
        self._bells = list(bells)
        self._control = control
        self._others = [other for other in range(len(bells)) if other != rank]
        self._poll = select.poll()
        self._poll.register(own, select.POLLIN)
        for descriptor in {own: None, **dict.fromkeys(self._bells)}:
            close_in_children(descriptor)

    def ring(self) -> None:
        """After a counter was set: wake those who sleep; where stores need ordering, ring for all."""
        for rank in self._others:
            if not IS_ORDERED or self._control.get(rank, ASLEEP):
                ring(self._bells[rank])

    def ring_own(self) -> None:
        """From the watching thread: something has changed that the waiting one should see."""
        ring(self._bells[self._rank])

    def hear(self) -> None:
        """Before counters are read, where loads need ordering."""
        if not IS_ORDERED:
            self._drain()

    def sleep(self, timeout_s: float) -> None:
        """Until a bell rings; the caller has said ASLEEP and looked once more."""
        self._poll.poll(timeout_s * 1e3)
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._own, 4096)

    def close(self) -> None:
        """Close all bells."""
        for descriptor in {self._own: None, **dict.fromkeys(self._bells)}:
            keep_in_children(descriptor)
            os.close(descriptor)


def new_bell() -> tuple[int, int]:
    """Descriptors to hear and to ring."""
    if hasattr(os, "eventfd"):
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        return bell, bell
    hear, ring_ = os.pipe()
    for descriptor in (hear, ring_):
        os.set_blocking(descriptor, False)
    return hear, ring_


def ring(bell: int) -> None:
    """Wake whoever hears it; one that rings already is enough."""
    with contextlib.suppress(BlockingIOError):
        os.write(bell, (1).to_bytes(8, sys.byteorder))


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
