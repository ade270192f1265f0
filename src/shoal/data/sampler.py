"""A worker's part of the order that a sampler gives, in which all workers agree without talking."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
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
from shoal.data.course import Course, Iteration
from shoal.data.parts import Part
from shoal.data.seeds import generator_states, kept_generators, mix, seeded, set_generators

_NONE = object()
_COUNTS = ("num_replicas", "num_processes", "num_parts")
"""How many have a part: of torch's samplers and all that follow them, of Accelerate's, of Shoal's own."""
_INSIDE = ("sampler", "batch_sampler", "dataset")
"""Where a sampler or dataset keeps the one that it is made of."""
_MAX_DEPTH = 16
_BY_GENERATOR_ALONE: tuple[type, ...] = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class ShardSampler(Sampler[Any]):
    """Every `size`-th of what another sampler (of examples, or of batches) gives; each iteration is an epoch.

    A sampler with a torch `generator` draws from one that is seeded by `seed` and the epoch instead. One that
    has a length and is not torch's own is read to its end, with the global generators of torch (on the CPU),
    Python and numpy seeded so and then restored. To agree on all workers is the user's part where a sampler
    has no length, or draws from anything else.
    """

    def __init__(
        self, sampler: Iterable[Any], part: Part, *, seed: int = 0, keeps_order: bool = False
    ) -> None:
        """With `keeps_order` the sampler draws by itself, as without Shoal; for a group of one."""
        if not keeps_order:
            refuse_divided(sampler)
        num_items = len(sampler) if isinstance(sampler, Sized) else None
        if num_items is not None and not keeps_order:
            part.check(num_items)
        self.course = Course(part, num_items, own_generators(sampler) if keeps_order else ())
        if num_items is not None and not keeps_order:
            self.course.order_of = self._items
        self._sampler = sampler
        self._seed = seed
        self._keeps_order = keeps_order

    @property
    def epoch(self) -> int:
        """Of the iteration that begins next."""
        return self.course.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; equal epochs have equal orders."""
        self.course.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        # an epoch begins with its first item: DataLoader makes iterators that it does not read
        iteration = self.course.begin()
        yield from self.course.own(self._items(iteration), iteration)

    def _items(self, iteration: Iteration) -> Iterable[Any]:
        """The order of the epoch."""
        if iteration.order is not None:
            return self._drawn_again(iteration.order)
        if (
            self._keeps_order and not iteration.legs
        ):  # several workers began it in an order that they agreed on
            if isinstance(self._sampler, Sized) and not _is_fixed(self._sampler):
                iteration.order = generator_states(own_generators(self._sampler))
            return self._sampler
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(iteration.epoch)
        return _agreed(self._sampler, mix(self._seed, iteration.epoch))

    def _drawn_again(self, states: Mapping[str, Any]) -> Iterable[Any]:
        own = own_generators(self._sampler)
        with kept_generators(own):
            set_generators(states, own)
            return list(self._sampler)

    def __len__(self) -> int:
        return self.course.part.length(len(cast(Sized, self._sampler)))


def refuse_divided(data: object) -> None:
    """UsageError when a sampler or dataset, or one inside of it, gives a part of the data already."""
    one: Any = data
    for _ in range(_MAX_DEPTH):
        num_parts = next((getattr(one, name) for name in _COUNTS if hasattr(one, name)), 1)
        if isinstance(num_parts, int) and num_parts > 1:
            raise UsageError(
                f"{type(one).__name__} already gives each of {num_parts} workers a part of the data.",
                cause="data that is divided twice loses examples.",
                next_step="make the loader with shuffle=True or a plain sampler; Shoal divides it.",
            )
        one = next((getattr(one, name) for name in _INSIDE if getattr(one, name, None) is not None), None)


def own_generators(sampler: object) -> list[torch.Generator]:
    """Those that a sampler, or the one inside of it, was given."""
    found = [getattr(one, "generator", None) for one in (sampler, getattr(sampler, "sampler", None))]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def _agreed(sampler: Iterable[Any], seed: int) -> Iterable[Any]:
    """The same order on all workers."""
    if _is_fixed(sampler):
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


def _is_fixed(sampler: Iterable[Any]) -> bool:
    """Whether it gives the same order each time."""
    return isinstance(sampler, Sequence) or type(sampler) is SequentialSampler
