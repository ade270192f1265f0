"""`shard`: one worker's part of whatever the user's loop reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from typing import Any, Protocol, TypeVar, cast, overload

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from shoal.core import UsageError
from shoal.data.kept import innermost, kept_loaders
from shoal.data.loader import ShardedLoader
from shoal.data.parts import Part, Remainder
from shoal.data.sampler import refuse_divided

T = TypeVar("T")
Array = TypeVar("Array", torch.Tensor, "np.ndarray[Any, Any]")


class Placed(Protocol):
    """What is known of a group here."""

    @property
    def rank(self) -> int:
        """The rank of this worker in its group."""

    @property
    def size(self) -> int:
        """How many workers share the data."""


class ShardedSubset(Subset[T]):
    """One worker's items of a map-style dataset."""

    def __init__(self, dataset: Dataset[T], part: Part) -> None:
        super().__init__(dataset, part.indices(len(cast(Sized, dataset))))
        self.num_parts = part.size


class ShardedStream(IterableDataset[T]):
    """Every `size`-th item of an iterable, which must give the same order to all workers."""

    def __init__(self, items: Iterable[T], part: Part) -> None:
        self._items = items
        self._part = part
        self.num_parts = part.size

    def __iter__(self) -> Iterator[T]:
        return self._part.take(self._items)

    def __len__(self) -> int:
        return self._part.length(len(cast(Sized, self._items)))


@overload
def shard(
    data: DataLoader[T], group: Placed, *, seed: int = 0, remainder: Remainder = "drop"
) -> ShardedLoader[T]: ...
@overload
def shard(data: Array, group: Placed, *, seed: int = 0, remainder: Remainder = "drop") -> Array: ...
@overload
def shard(data: list[T], group: Placed, *, seed: int = 0, remainder: Remainder = "drop") -> list[T]: ...
@overload
def shard(
    data: Sequence[T], group: Placed, *, seed: int = 0, remainder: Remainder = "drop"
) -> Sequence[T]: ...
@overload
def shard(data: Dataset[T], group: Placed, *, seed: int = 0, remainder: Remainder = "drop") -> Dataset[T]: ...
@overload
def shard(
    data: Iterable[T], group: Placed, *, seed: int = 0, remainder: Remainder = "drop"
) -> Iterable[T]: ...
def shard(data: Any, group: Placed, *, seed: int = 0, remainder: Remainder = "drop") -> Any:
    """Give this worker's part of `data`; a group of one has all of it, in its own order.

    - A DataLoader becomes one with the same settings and batch size, whose batches are this worker's. Each
      iteration is the next epoch, also of a loader that is sharded anew: call `set_epoch` where one worker
      alone has looked into the loader. A loader that shuffles has an order that depends on `seed` and the
      epoch alone; its `num_workers` processes draw by `seed`, epoch and rank. How far it is, is part of the
      checkpoints of this group's strategies.
    - A map-style dataset becomes a `Subset`, a sequence or array its slice: every `size`-th item, the same
      ones in each epoch.
    - An iterable gives every `size`-th item, a DataLoader of an iterable dataset every `size`-th batch. It
      must give the same order to all workers, and each reads all of it.

    - Under `shoal run --elastic` a DataLoader alone is divided: whenever workers come or go, those who are
      there divide what is left of the epoch. Under torchrun that restarts the workers (`--max-restarts`) a
      DataLoader is divided so as well, and all else anew at each start.

    `remainder` says what becomes of items that do not go round. 'drop' and 'repeat' give all workers equally
    many; with 'uneven' let a worker that is done call `strategy.join()`, or leave the `attach` block.
    """
    part = Part(group.rank, group.size, remainder)
    is_elastic = getattr(innermost(group), "is_elastic", False)
    if part.size > 1 or is_elastic:
        refuse_divided(data.dataset if isinstance(data, DataLoader) else data)
    if isinstance(data, DataLoader):
        if part.size == 1 and type(data) is not DataLoader:
            return data
        loader = ShardedLoader(data, part, seed=seed, is_elastic=is_elastic)
        kept_loaders(group).add(loader.course)
        return loader
    _refuse_what_has_no_common_order(data)
    if is_elastic and not getattr(innermost(group), "is_restarted", False):
        raise UsageError(
            f"A {type(data).__name__} is divided once for all, and the workers of this run come and go.",
            next_step="shard a DataLoader, which divides what is left of the epoch whenever they change: "
            "shoal.shard(DataLoader(dataset, batch_size=...), group).",
        )
    if part.size == 1:
        return data
    if isinstance(data, IterableDataset):
        return ShardedStream(data, part)
    if isinstance(data, torch.Tensor | np.ndarray | Sequence):
        return _slice(data, part)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return ShardedSubset(data, part)
    return ShardedStream(data, part)


def _slice(data: Any, part: Part) -> Any:
    indices = part.indices(len(data))
    if isinstance(indices, range):
        return data[indices.start : indices.stop : indices.step]
    if isinstance(data, torch.Tensor | np.ndarray):
        return data[list(indices)]
    return [data[index] for index in indices]


def _refuse_what_has_no_common_order(data: Any) -> None:
    is_columns = isinstance(data, tuple) and len(data) > 0 and all(isinstance(x, torch.Tensor) for x in data)
    if is_columns:
        raise UsageError(
            "A tuple of tensors cannot be divided: are they columns of one data set, or items?",
            next_step="shard torch.utils.data.TensorDataset(*tensors) for columns, or a list for items.",
        )
    has_items = hasattr(data, "__iter__") or hasattr(data, "__getitem__")
    is_scalar = isinstance(data, torch.Tensor | np.ndarray) and data.ndim == 0
    if isinstance(data, Mapping | Set | str | bytes) or is_scalar or not has_items:
        raise UsageError(
            f"A {type(data).__name__} cannot be divided among workers.",
            cause="its items have no order in which all workers would agree.",
            next_step="give a DataLoader, a dataset, a sequence, a tensor or an iterable.",
        )
