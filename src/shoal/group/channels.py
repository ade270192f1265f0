"""What workers of one machine publish for each other and fetch without waiting: snapshots in memory."""

from __future__ import annotations

import hashlib

import torch

from shoal.core import UsageError
from shoal.group.arena import Arena
from shoal.group.base import Done, Handle, Snapshot
from shoal.group.control import CHANNELS, DTYPES, NOT_YET, PUBLISHED, Bells, Control, code_of

_DIGEST, _CURRENT, _RECLAIMED, _CHANGE, _RECORDS = range(5)
SETTLED, WANTED, CHANGING = range(3)
"""Whether a publisher is about to change what it has published, or in the midst of it."""
_PLACE, _COUNT, _DTYPE, _NUMBER, _VERSION, _RECORD_WORDS = range(6)
_LOOKS = 100  # a record changes under a reader only when two newer ones are published in the meantime


class Channels:
    """Those of this worker, and a view of the others'."""

    def __init__(self, rank: int, arena: Arena, control: Control, bells: Bells) -> None:
        self._rank = rank
        self._arena = arena
        self._control = control
        self._bells = bells
        self._own: dict[str, int] = {}
        self._num_published = 0
        self._indices: dict[tuple[int, int], int] = {}
        """Of channels that were found, by peer and digest: they stay where they are."""

    def publish(self, name: str, tensor: torch.Tensor, version: int, code: int) -> None:
        """Let others read `tensor`, which lies at `code`."""
        if version < 0:
            raise UsageError(f"Version {version} of {name!r} is negative.", next_step="count from 0.")
        index = self._own.get(name, len(self._own))
        if index == CHANNELS:
            raise UsageError(
                f"A worker publishes under at most {CHANNELS} names.",
                next_step="use one of the earlier names.",
            )
        if name not in self._own:
            self._control.set_channel(index, _RECLAIMED, NOT_YET)
        self._publish(name, index, [code, tensor.numel(), code_of(tensor.dtype)], version)
        self._own[name] = index

    def reclaim(self, name: str, version: int) -> None:
        """Snapshots up to this version are void from now on."""
        if name in self._own:
            self._control.set_channel(self._own[name], _RECLAIMED, version)
            self._num_published += 1
            self._bells.tell(PUBLISHED, self._num_published)

    def publish_again(self, name: str, version: int) -> None:
        """The same memory is of another version now."""
        index = self._own[name]
        code, count, dtype, *_ = self._record(self._rank, index)
        self._publish(name, index, [code, count, dtype], version)

    def own_version(self, name: str) -> int:
        """Of what this worker has published; UsageError when it is nothing."""
        if name not in self._own:
            raise UsageError(
                f"Nothing is published as {name!r}, so it cannot be changed.", next_step="publish it first."
            )
        return self._record(self._rank, self._own[name])[_VERSION]

    def set_change(self, name: str, state: int) -> None:
        """How it stands with a change of what this worker has published."""
        self._control.set_channel(self._own[name], _CHANGE, state)

    def change(self, name: str, peer: int) -> int:
        """The same of a peer that has published."""
        index = self._find(name, peer)
        return SETTLED if index is None else self._control.channel(peer, index)[_CHANGE]

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """The newest of a peer's; None when there is none, the peer is gone, or stopped while publishing."""
        self._bells.hear()
        if peer != self._rank and self._control.gone_after(peer) != NOT_YET:
            return Done(None)
        index = self._find(name, peer)
        return Done(None if index is None else self._look(peer, index))

    def _publish(self, name: str, index: int, what: list[int], version: int) -> None:
        self._num_published += 1
        # two records take turns, so that there is always a whole one
        turn = 1 - self._control.channel(self._rank, index)[_CURRENT]
        for word, value in enumerate([*what, self._num_published, version]):
            self._control.set_channel(index, _RECORDS + turn * _RECORD_WORDS + word, value)
        self._control.set_channel(index, _CURRENT, turn)
        self._control.set_channel(index, _DIGEST, _digest(name))
        self._bells.tell(PUBLISHED, self._num_published)

    def _find(self, name: str, peer: int) -> int | None:
        digest = _digest(name)
        found = self._indices.get((peer, digest))
        if found is not None:
            return found
        for index in range(CHANNELS):
            other = self._control.channel(peer, index)[_DIGEST]
            if other == digest:
                self._indices[peer, digest] = index
                return index
            if not other:
                break
        return None

    def _look(self, peer: int, index: int) -> Snapshot | None:
        for look in range(_LOOKS):
            # while a peer that publishes is held up, the one before is there
            is_newest = look % 2 == 0
            record = self._record(peer, index, is_newest=is_newest)
            is_told = 0 < record[_NUMBER] <= self._control.get(peer, PUBLISHED)
            if is_told and record == self._record(peer, index, is_newest=is_newest):
                return _SharedSnapshot(self._control, self._bells, self._arena, peer, index, record)
            self._bells.hear()
        return None

    def _record(self, peer: int, index: int, *, is_newest: bool = True) -> list[int]:
        words = self._control.channel(peer, index)
        turn = words[_CURRENT] if is_newest else 1 - words[_CURRENT]
        start = _RECORDS + turn * _RECORD_WORDS
        return words[start : start + _RECORD_WORDS]


class _SharedSnapshot(Snapshot):
    def __init__(
        self, control: Control, bells: Bells, arena: Arena, rank: int, index: int, record: list[int]
    ) -> None:
        self.rank = rank
        self.version = record[_VERSION]
        segment, offset = arena.at(record[_PLACE])
        self.tensor = segment.region(rank, offset, record[_COUNT], DTYPES[record[_DTYPE]])
        self._control = control
        self._bells = bells
        self._index = index

    def is_intact(self) -> bool:
        self._bells.hear()
        return self._control.channel(self.rank, self._index)[_RECLAIMED] < self.version


def _digest(name: str) -> int:
    """A number for a name, never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest()) + 1
