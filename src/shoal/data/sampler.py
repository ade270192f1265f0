"""A worker's part of the order that a sampler gives, in which all workers agree without talking."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from shoal.core import UsageError
from shoal.data.parts import Part

_NONE = object()


class ShardSampler(Sampler[Any]):
    """Every `size`-th of what another sampler (of examples, or of batches) gives; each iteration is an epoch.

    A sampler with a torch generator draws from one that is seeded by `seed` and the epoch instead. Another
    one that has a length is read to its end with torch's global generator seeded so. One without a length
    must give the same order on all workers by itself.
    """

    def __init__(self, sampler: Iterable[Any], part: Part, *, seed: int = 0) -> None:
        for one in (sampler, getattr(sampler, "sampler", None)):
            if hasattr(one, "num_replicas"):
                raise UsageError(
                    f"{type(one).__name__} already gives each worker a part of the data.",
                    cause="a loader that is divided twice loses examples.",
                    next_step="make the loader with shuffle=True or a plain sampler; Shoal divides it.",
                )
        if isinstance(sampler, Sized):
            part.check(len(sampler))
        self.epoch = 0
        self._sampler = sampler
        self._part = part
        self._seed = seed

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; equal epochs have equal orders."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        return self._part.take(_agreed(self._sampler, _mix(self._seed, epoch)))

    def __len__(self) -> int:
        return self._part.length(len(cast(Sized, self._sampler)))


def _agreed(sampler: Iterable[Any], seed: int) -> Iterable[Any]:
    """The same order on all workers."""
    if isinstance(sampler, Sequence | SequentialSampler):
        return sampler
    if isinstance(getattr(sampler, "generator", _NONE), torch.Generator | None):
        seeded: Any = copy.copy(sampler)
        seeded.generator = torch.Generator().manual_seed(seed)
        return cast("Iterable[Any]", seeded)
    if type(sampler) is BatchSampler:
        return BatchSampler(_agreed(sampler.sampler, seed), sampler.batch_size, sampler.drop_last)
    if isinstance(sampler, Sized):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return list(sampler)
    return sampler


def _mix(seed: int, epoch: int) -> int:
    """A seed for the epoch, of 32 bits: torch's generator on the CPU uses no more of a seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest(), "big")
