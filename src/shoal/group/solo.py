"""The group of one: nothing to wait for, nobody to lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from shoal.core import TensorError, UsageError
from shoal.group.base import Done, Group, Handle, Loss, Reduction, Snapshot
from shoal.group.kernels import check_reduction
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

    def machine_of(self, rank: int) -> int:
        """The only one."""
        _check_rank(rank)
        return 0

    def empty(self, num_elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Ordinary memory, which torch aligns."""
        self._check_member()
        return torch.zeros(num_elements, dtype=dtype)

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


def _check_rank(rank: int) -> None:
    if rank != 0:
        raise UsageError(f"There is no rank {rank} in a group of one.", next_step="name rank 0.")


def _check_alike(tensor: torch.Tensor, out: torch.Tensor) -> None:
    if tensor.shape != out.shape or tensor.dtype != out.dtype:
        raise TensorError(
            f"An exchange of {tensor.dtype} of shape {list(tensor.shape)} does not fit into {out.dtype} of "
            f"shape {list(out.shape)}."
        )
