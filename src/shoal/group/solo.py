"""The group of one: nothing to wait for, nobody to lose."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch

from shoal.core import Deadline, DeadlineExceeded, TensorError, UsageError
from shoal.group.base import Done, Group, Handle, Loss, Reduction, Snapshot
from shoal.group.kernels import check_reduction
from shoal.group.solo_window import SoloWindow
from shoal.group.writing import WritingWindow, copy_out
from shoal.topology import Weights

_NOBODY: Mapping[int, Loss] = MappingProxyType({})


class SoloGroup(Group):
    """One worker alone; every operation is over when it returns."""

    def __init__(self, patience: float = 1.0) -> None:
        self.rank = 0
        self.size = 1
        self.machine = 0
        self.num_machines = 1
        self.patience = patience
        self._has_left = False
        self._published: dict[str, _SoloSnapshot] = {}
        self._reclaimed: dict[str, int] = {}
        self._held: list[str] = []

    @property
    def members(self) -> Sequence[int]:
        """Oneself, until one leaves."""
        return () if self._has_left else (0,)

    @property
    def lost(self) -> Mapping[int, Loss]:
        """Nobody."""
        return _NOBODY

    @property
    def waited_s(self) -> Sequence[float]:
        """No time at all."""
        return (0.0,)

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """None: there is nobody to send to."""
        return 0, 0

    def machine_of(self, rank: int) -> int:
        """The only one."""
        _check_rank(rank)
        return 0

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Ordinary memory, which torch aligns."""
        self._check_member()
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Nothing: the memory goes with its last tensor."""

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """The tensor as it is."""
        self._check_member()
        check_reduction(tensor, op)
        return Done(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """The tensor as it is."""
        self._check_member()
        _check_rank(root)
        return Done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """A copy of the tensor."""
        self._check_member()
        return Done([tensor.detach().clone()])

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """`own` times the tensor."""
        self._check_member()
        weights.check(self.rank, self.size)
        with torch.no_grad():
            if out is not None:
                _check_alike(tensor, out)
                out.copy_(tensor)
            result = tensor if out is None else out
            return Done(result if weights.own == 1 else result.mul_(weights.own))

    def settle(self, tensor: torch.Tensor) -> None:
        """Nothing: nobody reads it."""

    def barrier(self) -> Handle[None]:
        """All have come."""
        self._check_member()
        return Done(None)

    def publish(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """For oneself to fetch."""
        self._check_member()
        self._published[name] = _SoloSnapshot(tensor, version, self._reclaimed, name)

    def reclaim(self, name: str, version: int) -> None:
        """Snapshots of this version and older ones are void."""
        newest = self._published.get(name)
        if newest is not None and newest.version <= version:
            raise UsageError(
                f"Version {version} of {name!r} is the newest that is published, and cannot be reclaimed.",
                next_step="publish a newer version first.",
            )
        self._reclaimed[name] = version

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """What this worker itself has published."""
        _check_rank(peer)
        return Done(self._published.get(name))

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """Nobody else reads it meanwhile."""
        self._check_member()
        published = self._published.get(name)
        if published is None:
            raise UsageError(
                f"Nothing is published as {name!r}, so it cannot be changed.", next_step="publish it first."
            )
        if version < published.version:
            raise UsageError(
                f"{name!r} is of version {published.version} and cannot become {version}.",
                next_step="count upwards.",
            )
        self._reclaimed[name] = published.version
        yield
        self._published[name] = _SoloSnapshot(published.tensor, version, self._reclaimed, name)

    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Of what this worker itself has published; a version that there is not yet is a DeadlineExceeded."""
        _check_rank(peer)
        return _SoloRead(self._published, name, into.detach(), version)

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
    ) -> WritingWindow:
        """With a slot for oneself, if that is asked for."""
        self._check_member()
        return SoloWindow(name, num_elements, dtype, has_slot=sources is not None and 0 in sources)

    @contextlib.contextmanager
    def mutex(self, name: str, owner: int) -> Iterator[None]:
        """Nobody else wants it."""
        _check_rank(owner)
        if name in self._held:
            raise UsageError(
                f"rank 0 waits for mutex {name!r} of rank 0, which it holds itself.",
                next_step="end the first `with` block before the second begins.",
            )
        self._held.append(name)
        try:
            yield
        finally:
            self._held.remove(name)

    def progress(self) -> None:
        """Nothing is ever under way."""

    def leave(self) -> None:
        """Take part in nothing more."""
        self._has_left = True
        self._published.clear()

    def close(self) -> None:
        """Leave."""
        self.leave()

    def abandon(self) -> None:
        """Nobody is there to find this worker lost."""
        self.leave()

    def _check_member(self) -> None:
        if self._has_left:
            raise UsageError(
                "rank 0 has left the group and takes part in nothing more.",
                next_step="make it the last thing to leave or to close.",
            )


class _SoloSnapshot(Snapshot):
    def __init__(self, tensor: torch.Tensor, version: int, reclaimed: Mapping[str, int], name: str) -> None:
        self.rank = 0
        self.version = version
        self.tensor = tensor
        self._reclaimed = reclaimed
        self._name = name

    def is_intact(self) -> bool:
        """Until its version is reclaimed."""
        return self._name not in self._reclaimed or self._reclaimed[self._name] < self.version


class _SoloRead(Handle[int | None]):
    def __init__(
        self, published: Mapping[str, _SoloSnapshot], name: str, into: torch.Tensor, version: int
    ) -> None:
        self._published = published
        self._name = name
        self._into = into
        self._version = version
        self._result: list[int | None] = []
        self.is_done()

    def wait(self, deadline: Deadline | None = None) -> int | None:
        """The version that was copied."""
        if not self.is_done():
            raise DeadlineExceeded(
                f"Version {self._version} of {self._name!r} is not published, and nobody else is there to do "
                "it.",
                next_step="publish it, or change it, first.",
            )
        return self._result[0]

    def is_done(self) -> bool:
        """Once it is of that version."""
        found = self._published.get(self._name)
        if not self._result and found is None and not self._version:
            self._result.append(None)
        elif not self._result and found is not None and found.version >= self._version:
            self._result.append(copy_out(found, self._into, self._name))
        return bool(self._result)


def _check_rank(rank: int) -> None:
    if rank != 0:
        raise UsageError(f"There is no rank {rank} in a group of one.", next_step="name rank 0.")


def _check_alike(tensor: torch.Tensor, out: torch.Tensor) -> None:
    if tensor.shape != out.shape or tensor.dtype != out.dtype:
        raise TensorError(
            f"An exchange of {tensor.dtype} of shape {list(tensor.shape)} does not fit into {out.dtype} of "
            f"shape {list(out.shape)}."
        )
