"""A worker's part of the order that a sampler gives, in which all workers agree without talking."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.core import UsageError
from shoal.data.parts import Part
from shoal.data.seeds import mix, seeded

_NONE = object()
_BY_GENERATOR_ALONE: tuple[type, ...] = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class ShardSampler(Sampler[Any]):
    """Every `size`-th of what another sampler (of examples, or of batches) gives; each iteration is an epoch.

    A sampler with a torch `generator` draws from one that is seeded by `seed` and the epoch instead. One that
    has a length and is not torch's own is read to its end, with the global generators of torch (on the CPU),
    Python and numpy seeded so and then restored. To agree on all workers is the user's part where a sampler
    has no length, or draws from anything else.
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
        # an epoch begins with its first item: DataLoader makes iterators that it does not read
        epoch, self.epoch = self.epoch, self.epoch + 1
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        yield from self._part.take(_agreed(self._sampler, mix(self._seed, epoch)))

    def __len__(self) -> int:
        return self._part.length(len(cast(Sized, self._sampler)))


def _agreed(sampler: Iterable[Any], seed: int) -> Iterable[Any]:
    """The same order on all workers."""
    if isinstance(sampler, Sequence) or type(sampler) is SequentialSampler:
        return sampler
    if type(sampler) is BatchSampler:
        return BatchSampler(_agreed(sampler.sampler, seed), sampler.batch_size, sampler.drop_last)
    if isinstance(getattr(sampler, "generator", _NONE), torch.Generator | None):
        with_generator: Any = copy.copy(sampler)
        with_generator.generator = torch.Generator().manual_seed(seed)
        sampler = cast("Iterable[Any]", with_generator)
    if isinstance(sampler, Sized) and type(sampler) not in _BY_GENERATOR_ALONE:
        with seeded(seed):
            return list(sampler)
    return sampler
