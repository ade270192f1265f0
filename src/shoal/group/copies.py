"""What is published once and then changed where it lies, by workers of one machine: read as a whole copy.

Each reader has a byte of the lock, and who changes the memory takes all bytes of those that are not gone. One
that was given up while it held its byte learns of it before it uses what it has copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from shoal.core import UsageError
from shoal.group.base import Handle
from shoal.group.channels import CHANGING, SETTLED, WANTED, Channels
from shoal.group.kernels import copy_out
from shoal.group.locks import place_of
from shoal.group.one_sided import OneSided


class Copies:
    """Changes of this worker, and copies of what the others have published."""

    def __init__(self, side: OneSided, channels: Channels) -> None:
        self._side = side
        self._channels = channels

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """After a block that ends in an exception nobody can read it until another one has ended well."""
        before = self._channels.own_version(name)
        if version < before:
            raise UsageError(
                f"{name!r} is of version {before} and cannot become {version}.", next_step="count upwards."
            )
        self._side.engine.check_usable()
        at = _place(name, self._side.rank)
        self._channels.set_change(name, WANTED)
        taken: list[tuple[int, int]] = []
        try:
            if not self._try_all(at, taken):
                self._side.engine.wait_until(lambda: self._try_all(at, taken), None, f"changing {name!r}")
            self._channels.set_change(name, CHANGING)
            self._channels.reclaim(name, before)
            yield
            self._channels.publish_again(name, version)
            self._channels.set_change(name, SETTLED)
        finally:
            self._give_back(taken)
            self._side.wake_others()

    def read(self, name: str, peer: int, into: torch.Tensor, version: int) -> Handle[int | None]:
        """Once it is of that version or newer, and nobody changes it."""
        self._side.check_rank(peer)
        into = into.detach()
        at = _place(name, peer) + self._side.rank

        def attempt() -> list[int | None] | None:
            if self._side.is_gone(peer):
                return [None]
            snapshot = self._channels.fetch(name, peer).wait()
            if snapshot is None:
                return None if version else [None]
            if snapshot.version < version:
                return None
            if peer == self._side.rank:
                return [copy_out(snapshot, into, name)]
            # one that waits to change it comes first: readers alone would never let it
            if self._channels.change(name, peer) != SETTLED or not self._side.locks.try_take(at):
                return None
            try:
                if self._channels.change(name, peer) == CHANGING:
                    return None  # it has ended in the midst of it
                snapshot = self._channels.fetch(name, peer).wait()
                if snapshot is None:
                    return None
                got = copy_out(snapshot, into, name)
            finally:
                self._side.locks.release(at)
                self._side.bells.wake(peer)
            self._side.engine.check_own_verdict()
            return [got]

        return self._side.errands.begin(
            object(), f"read {name!r} of rank {self._side.name_of(peer)}", attempt
        )

    def _try_all(self, at: int, taken: list[tuple[int, int]]) -> bool:
        """Have all of them, or none."""
        if taken:
            return True
        for first, count in self._runs():
            if not self._side.locks.try_take(at + first, count):
                self._give_back(taken)
                blocker = self._side.locks.first_taken(at + first, count)
                if blocker is not None:
                    self._side.engine.blocked_by(first + blocker)
                return False
            taken.append((at + first, count))
        return True

    def _runs(self) -> list[tuple[int, int]]:
        """Ranks that follow each other and are there: the first, and how many."""
        runs: list[tuple[int, int]] = []
        for rank in range(self._side.size):
            if self._side.is_gone(rank):
                continue
            if runs and sum(runs[-1]) == rank:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((rank, 1))
        return runs

    def _give_back(self, taken: list[tuple[int, int]]) -> None:
        while taken:
            self._side.locks.release(*taken.pop())


def _place(name: str, owner: int) -> int:
    """The byte of rank 0."""
    return place_of("copy", name, owner) + 1
