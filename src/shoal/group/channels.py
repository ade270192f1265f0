"""What workers of one machine publish for each other and fetch without waiting: snapshots in memory."""

from __future__ import annotations

import hashlib

import torch

from shoal.core import UsageError
from shoal.group.arena import Arena
from shoal.group.base import Done, Handle, Snapshot
from shoal.group.control import CHANNELS, DTYPES, NOT_YET, Bells, Control, code_of

_DIGEST, _PLACE, _COUNT, _DTYPE, _VERSION, _RECLAIMED = range(6)


class Channels:
    """Those of this worker, and a view of the others'."""

    def __init__(self, rank: int, arena: Arena, control: Control, bells: Bells) -> None:
        self._rank = rank
        self._arena = arena
        self._control = control
        self._bells = bells
        self._own: dict[str, int] = {}

    def publish(self, name: str, tensor: torch.Tensor, version: int, code: int) -> None:
        """Let others read `tensor`, which lies at `code`."""
        if version < 0:
            raise UsageError(f"Version {version} of {name!r} is negative.", next_step="count from 0.")
        index = self._own.get(name)
        if index is None:
            if len(self._own) == CHANNELS:
                raise UsageError(f"A worker publishes under at most {CHANNELS} names.")
            index = self._own[name] = len(self._own)
            self._control.set_channel(index, _RECLAIMED, -1)
        # a reader takes a record only when it is the same before and after
        self._control.set_channel(index, _VERSION, NOT_YET)
        self._control.set_channel(index, _PLACE, code)
        self._control.set_channel(index, _COUNT, tensor.numel())
        self._control.set_channel(index, _DTYPE, code_of(tensor.dtype))
        self._control.set_channel(index, _VERSION, version)
        self._control.set_channel(index, _DIGEST, _digest(name))
        self._bells.ring()

    def reclaim(self, name: str, version: int) -> None:
        """Snapshots up to this version are void from now on."""
        if name in self._own:
            self._control.set_channel(self._own[name], _RECLAIMED, version)
            self._bells.ring()

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """The newest of a peer's; None when there is none, or the peer is gone."""
        self._bells.hear()
        digest = _digest(name)
        for index in range(CHANNELS):
            words = self._control.channel(peer, index)
            if not words[_DIGEST]:
                break
            if words[_DIGEST] != digest:
                continue
            while self._control.gone_after(peer) == NOT_YET or peer == self._rank:
                again = self._control.channel(peer, index)
                if words == again and words[_VERSION] != NOT_YET:
                    return Done(_SharedSnapshot(self._control, self._bells, self._arena, peer, index, words))
                words = again
        return Done(None)


class _SharedSnapshot(Snapshot):
    def __init__(
        self, control: Control, bells: Bells, arena: Arena, rank: int, index: int, words: list[int]
    ) -> None:
        self.rank = rank
        self.version = words[_VERSION]
        segment, offset = arena.at(words[_PLACE])
        self.tensor = segment.region(rank, offset, words[_COUNT], DTYPES[words[_DTYPE]])
        self._control = control
        self._bells = bells
        self._index = index

    def is_intact(self) -> bool:
        self._bells.hear()
        return self._control.channel(self.rank, self._index)[_RECLAIMED] < self.version


def _digest(name: str) -> int:
    """A number for a name, never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest()) + 1
