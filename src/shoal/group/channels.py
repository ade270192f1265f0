"""What workers of one machine publish for each other and fetch without waiting: snapshots in memory."""

from __future__ import annotations

import hashlib

import torch

from shoal.core import UsageError
from shoal.group.arena import Arena
from shoal.group.base import Done, Handle, Snapshot
from shoal.group.control import CHANNELS, DTYPES, NOT_YET, PUBLISHED, Bells, Control, code_of

_DIGEST, _CURRENT, _RECLAIMED, _RECORDS = range(4)
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
        self._num_published += 1
        record = [code, tensor.numel(), code_of(tensor.dtype), self._num_published, version]
        # two records take turns, so that there is always a whole one
        turn = 1 - self._control.channel(self._rank, index)[_CURRENT]
        for word, value in enumerate(record):
            self._control.set_channel(index, _RECORDS + turn * _RECORD_WORDS + word, value)
        if name not in self._own:
            self._control.set_channel(index, _RECLAIMED, NOT_YET)
        self._control.set_channel(index, _CURRENT, turn)
        self._control.set_channel(index, _DIGEST, _digest(name))
        self._own[name] = index
        self._bells.tell(PUBLISHED, self._num_published)

    def reclaim(self, name: str, version: int) -> None:
        """Snapshots up to this version are void from now on."""
        if name in self._own:
            self._control.set_channel(self._own[name], _RECLAIMED, version)
            self._num_published += 1
            self._bells.tell(PUBLISHED, self._num_published)

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """The newest of a peer's; None when there is none, the peer is gone, or stopped while publishing."""
        self._bells.hear()
        if peer != self._rank and self._control.gone_after(peer) != NOT_YET:
            return Done(None)
        digest = _digest(name)
        for index in range(CHANNELS):
            if self._control.channel(peer, index)[_DIGEST] == digest:
                return Done(self._read(peer, index))
        return Done(None)

    def _read(self, peer: int, index: int) -> Snapshot | None:
        for _ in range(_LOOKS):
            record = self._record(peer, index)
            is_told = record[_NUMBER] <= self._control.get(peer, PUBLISHED)
            if is_told and record == self._record(peer, index):
                return _SharedSnapshot(self._control, self._bells, self._arena, peer, index, record)
            self._bells.hear()
        return None

    def _record(self, peer: int, index: int) -> list[int]:
        words = self._control.channel(peer, index)
        start = _RECORDS + words[_CURRENT] * _RECORD_WORDS
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
