"""The control page: words in shared memory by which workers of one machine tell each other how far they are.

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
MAX_AHEAD = 512
"""Operations that one worker may be ahead of the slowest: so many descriptions are kept."""
_DESCRIPTION_WORDS = 8
PUBLICATIONS = 512
"""Windows in which one worker may publish at the same time."""
PUBLICATION_WORDS = 16
NOT_YET = -1
_FAILED = -1
_MESSAGE = struct.Struct("<iiq")
_IN_PIPES = (ARRIVED, FINISHED, PUBLISHED)
_WAKE = _MESSAGE.pack(0, ASLEEP, 0)
_READ_BYTES = 1 << 16
_FULL_S = 1e-4
IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""In this order on all workers: a description names a dtype by its position."""


def code_of(dtype: torch.dtype) -> int:
    """Finds the number by which descriptions name a dtype."""
    try:
        return DTYPES.index(dtype)
    except ValueError:
        raise UsageError(f"Tensors of {dtype} cannot be exchanged.", next_step="view it as uint8.") from None


def failed_beat(culprit: int | None) -> int:
    """Makes the last beat of a worker that gives up, a negative one; it tells because of whose loss."""
    return _FAILED if culprit is None else _FAILED - 1 - culprit


def culprit_of(beat: int) -> int | None:
    """Finds the rank because of which a worker has given up, if its last beat tells."""
    return _FAILED - 1 - beat if beat < _FAILED else None


class ControlPage:
    """The words of all ranks, which everybody reads; a worker writes its own, and verdicts."""

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self._words = segment.flat.numpy().data.cast("B").cast("q")
        self._numbers = segment.flat.numpy().data.cast("B").cast("d")
        self._stride = segment.stride_bytes // 8
        self._rank = rank
        self._size = size
        self._descriptions_at = _COUNTERS
        self._factors_at = self._descriptions_at + MAX_AHEAD * _DESCRIPTION_WORDS
        self._publications_at = self._factors_at + MAX_AHEAD * size
        self._own_at = rank * self._stride
        self._left = self._words[LEFT :: self._stride]
        self._verdicts = self._words[VERDICT :: self._stride]
        self._all_there = [NOT_YET] * size
        self._told: list[dict[int, int]] = [dict.fromkeys(_IN_PIPES, 0) for _ in range(size)]
        """The counters that came through the pipe, by rank."""

    @staticmethod
    def region_bytes(size: int) -> int:
        """Says how much of the page's memory each rank needs."""
        words = _COUNTERS + MAX_AHEAD * (_DESCRIPTION_WORDS + size) + PUBLICATIONS * PUBLICATION_WORDS
        return -(-words * 8 // 4096) * 4096

    def clear(self) -> None:
        """Prepares the page before its first use: nobody has left, nobody is judged."""
        for rank in range(self._size):
            self._words[rank * self._stride + LEFT] = self._words[rank * self._stride + VERDICT] = NOT_YET

    def get(self, rank: int, name: int) -> int:
        """Reads a counter of a rank."""
        if not IS_ORDERED and rank != self._rank and name in _IN_PIPES:
            return self._told[rank][name]
        return self._words[rank * self._stride + name]

    def set(self, name: int, value: int) -> None:
        """Writes a counter of this worker; `WakePipes.tell` is for those that others wait for."""
        self._words[self._own_at + name] = value

    def take_in(self, rank: int, name: int, value: int) -> None:
        """Remembers a counter that has come through the pipe."""
        if name in _IN_PIPES:
            self._told[rank][name] = value

    def judge(self, rank: int, value: int) -> None:
        """Says that a rank is gone after its operation `value`; the first verdict stands.

        One that woke up when it was judged, and went one operation further, must not be judged again by its
        end: the others have begun that operation without it.
        """
        if self._words[rank * self._stride + VERDICT] == NOT_YET:
            self._words[rank * self._stride + VERDICT] = value

    def gone_after(self, rank: int) -> int:
        """Reads the last operation that a rank takes part in, NOT_YET for one that is there."""
        at = rank * self._stride
        left = self._words[at + LEFT]
        return left if left != NOT_YET else self._words[at + VERDICT]

    def is_complete(self) -> bool:
        """Tells whether nobody is gone, in one look: one at each rank takes longer than a whole count."""
        return self._left.tolist() == self._all_there and self._verdicts.tolist() == self._all_there

    def describe(self, seq: int, words: Sequence[int], factors: Sequence[float] | None = None) -> None:
        """Says what this worker's operation `seq` is."""
        at = self._own_at + self._descriptions_at + seq % MAX_AHEAD * _DESCRIPTION_WORDS
        for index, word in enumerate(words):
            self._words[at + index] = word
        if factors is not None:
            at = self._own_at + self._factors_at + seq % MAX_AHEAD * self._size
            for index, factor in enumerate(factors):
                self._numbers[at + index] = factor

    def description(self, rank: int, seq: int) -> list[int]:
        """Reads what a rank's operation `seq` is; valid once it has arrived there."""
        at = rank * self._stride + self._descriptions_at + seq % MAX_AHEAD * _DESCRIPTION_WORDS
        return self._words[at : at + _DESCRIPTION_WORDS].tolist()

    def factor(self, rank: int, seq: int, receiver: int) -> float:
        """Reads what a rank multiplies with before it sends to `receiver`."""
        return self._numbers[rank * self._stride + self._factors_at + seq % MAX_AHEAD * self._size + receiver]

    def publication(self, rank: int, index: int) -> list[int]:
        """Reads one entry of a rank's table of publications; `window` says what the words mean."""
        at = rank * self._stride + self._publications_at + index * PUBLICATION_WORDS
        return self._words[at : at + PUBLICATION_WORDS].tolist()

    def set_publication(self, index: int, first: int, *values: int) -> None:
        """Writes words of an entry of this worker's table, one after the other."""
        at = self._own_at + self._publications_at + index * PUBLICATION_WORDS + first
        for offset, value in enumerate(values):
            self._words[at + offset] = value


class WakePipes:
    """Tells the other workers that a counter has changed, and wakes those that sleep; one pipe for each."""

    def __init__(self, rank: int, own: int, pipes: Sequence[int], control: ControlPage) -> None:
        self._rank = rank
        self._own = own
        self._pipes = list(pipes)
        self._control = control
        self._others = [other for other in range(len(pipes)) if other != rank]
        self._unread = b""
        self._poll = select.poll()
        self._poll.register(own, select.POLLIN)
        for descriptor in {own: None, **dict.fromkeys(self._pipes)}:
            close_in_children(descriptor)

    @staticmethod
    def new_pipe() -> tuple[int, int]:
        """Makes a worker's own pipe: the descriptors to read and to write."""
        ends = os.pipe()
        for descriptor in ends:
            os.set_blocking(descriptor, False)
        return ends

    def tell(self, name: int, value: int) -> None:
        """Sets a counter of this worker, for all to see."""
        self._control.set(name, value)
        if not IS_ORDERED:
            message = _MESSAGE.pack(self._rank, name, value)
            for rank in self._others:
                self._send(rank, message)
            return
        for rank in self._others:
            if self._control.get(rank, ASLEEP):
                self._send(rank, _WAKE)

    def wake(self, rank: int) -> None:
        """Wakes a rank, if it sleeps."""
        if self._pipes and (not IS_ORDERED or self._control.get(rank, ASLEEP)):
            self._send(rank, _WAKE)

    def wake_self(self) -> None:
        """Lets this worker's waiting thread look again; from any thread."""
        if self._pipes:
            self._send(self._rank, _WAKE)

    def wake_others(self) -> None:
        """Wakes all others that sleep."""
        for rank in self._others:
            self.wake(rank)

    def take_in(self) -> None:
        """Reads what others have told, where their counters cannot be read as they are."""
        if not IS_ORDERED:
            self._drain()

    def sleep(self, timeout_s: float) -> None:
        """Sleeps until somebody tells something; the caller has said ASLEEP and looked once more."""
        self._poll.poll(timeout_s * 1e3)
        self._drain()

    def close(self) -> None:
        """Closes all pipes; telling only sets the counter afterwards."""
        descriptors = {self._own: None, **dict.fromkeys(self._pipes)}
        self._pipes, self._others = [], []
        for descriptor in descriptors:
            keep_in_children(descriptor)
            os.close(descriptor)

    def _send(self, rank: int, message: bytes) -> None:
        while True:
            try:
                os.write(self._pipes[rank], message)
            except BlockingIOError:
                if message is _WAKE or self._control.gone_after(rank) != NOT_YET:
                    return  # one that is not yet read is enough
                self._drain()  # it may be waiting for us to do the same
                time.sleep(_FULL_S)
            except BrokenPipeError:
                return
            else:
                return

    def _drain(self) -> None:
        if not self._pipes:
            return
        with contextlib.suppress(BlockingIOError):
            heard = self._unread + os.read(self._own, _READ_BYTES)
            whole = len(heard) - len(heard) % _MESSAGE.size
            for rank, name, value in _MESSAGE.iter_unpack(heard[:whole]):
                self._control.take_in(rank, name, value)
            self._unread = heard[whole:]
