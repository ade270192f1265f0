"""How many bytes one worker has sent and received, by `Metered`'s formulas, for a few hundred nanoseconds.

They are added when an operation is issued; those of a read when its result is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator

import torch

from shoal.core import Deadline
from shoal.group.base import Handle, Snapshot
from shoal.group.control import LEFT, NOT_YET, VERDICT, Control
from shoal.group.operations import Tally
from shoal.topology import Weights


class HostTally(Tally):
    """Of a worker in a group of one machine."""

    def __init__(
        self, rank: int, size: int, members: Callable[[], Collection[int]], control: Control
    ) -> None:
        super().__init__(rank, size)
        self._members = members
        self._left = control._words[LEFT :: control._stride]
        self._verdicts = control._words[VERDICT :: control._stride]
        self._nobody = [NOT_YET] * size

    def exchange(self, size_bytes: int, weights: Weights) -> None:
        """With those that the weights name and that are there."""
        sources = weights.sources
        destinations = sources if weights.destinations is None else weights.destinations
        if self._is_complete():
            self.sent_bytes += size_bytes * len(destinations)
            self.received_bytes += size_bytes * len(sources)
        else:
            members = self._members()
            self.sent_bytes += size_bytes * sum(rank in members for rank in destinations)
            self.received_bytes += size_bytes * sum(rank in members for rank in sources)

    def write(self, size_bytes: int, to: int) -> None:
        """Into a window of `to`, if it is there."""
        if to != self._rank and (self._is_complete() or to in self._members()):
            self.sent_bytes += size_bytes

    def fetch(self, handle: Handle[Snapshot | None], peer: int) -> None:
        """What a peer has published; the handle is done."""
        snapshot = None if peer == self._rank else handle.wait()
        if snapshot is not None:
            self.received_bytes += snapshot.tensor.nbytes

    def read(self, handle: Handle[int | None], peer: int, into: torch.Tensor) -> Handle[int | None]:
        """A copy of what a peer has published, once it is there."""
        return handle if peer == self._rank else _CountedRead(handle, self, into.nbytes)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count."""
        counted = self.sent_bytes, self.received_bytes
        try:
            yield
        finally:
            self.sent_bytes, self.received_bytes = counted

    def _num_members(self) -> int:
        return self._size if self._is_complete() else max(1, len(self._members()))

    def _is_complete(self) -> bool:
        """Whether nobody is gone: in one look, since a look at each rank takes longer than all the rest."""
        return self._left.tolist() == self._nobody and self._verdicts.tolist() == self._nobody


class _CountedRead(Handle[int | None]):
    def __init__(self, inner: Handle[int | None], tally: Tally, size_bytes: int) -> None:
        self._inner = inner
        self._tally = tally
        self._size_bytes = size_bytes

    def wait(self, deadline: Deadline | None = None) -> int | None:
        version = self._inner.wait(deadline)
        if version is not None:
            self._tally.received_bytes += self._size_bytes
            self._size_bytes = 0
        return version

    def is_done(self) -> bool:
        return self._inner.is_done()
