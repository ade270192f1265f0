"""A DataLoader like another one, with one worker's part of its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.core import UsageError
from shoal.data.parts import Part
from shoal.data.sampler import ShardSampler
from shoal.data.seeds import mix

T_co = TypeVar("T_co", covariant=True)

_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)
_ORDERS: WeakKeyDictionary[DataLoader[Any], dict[tuple[Part, int], ShardSampler]] = WeakKeyDictionary()
"""Of the loaders that were divided, by part and seed: who divides a loader anew goes on with its epochs."""


class ShardedLoader(DataLoader[T_co]):
    """Has the other loader's settings; its batch size is one worker's.

    The examples of a map-style dataset are divided before they are loaded, in an order that is new in each
    epoch if the other loader shuffles, and the processes that load them draw by seed, epoch and rank. Made of
    the same loader again, it goes on with the next epoch. An iterable dataset must give the same order to all
    workers; each reads all of it and keeps its own batches.
    """

    def __init__(self, loader: DataLoader[T_co], part: Part, *, seed: int = 0) -> None:
        if type(loader) is not DataLoader:
            raise UsageError(
                f"A {type(loader).__name__} cannot be made anew for one worker.",
                cause="it is no plain DataLoader, or it is one worker's part already.",
                next_step="make it of shoal.shard(dataset, group), or shard torch's own DataLoader, once.",
            )
        self.part = part
        self._seed = seed
        self._order: ShardSampler | None = None
        kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        kept |= self._batching(loader)
        super().__init__(loader.dataset, **kept)

    def _batching(self, loader: DataLoader[T_co]) -> dict[str, Any]:
        is_custom = loader.batch_size is None and loader.batch_sampler is not None
        plain = {} if is_custom else {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if isinstance(loader.dataset, IterableDataset):
            return plain
        name = "batch_sampler" if is_custom else "sampler"
        sampler = cast("Iterable[Any]", getattr(loader, name))
        if self.part.size == 1:
            return {name: sampler, **plain}
        orders, key = _ORDERS.setdefault(loader, {}), (self.part, self._seed)
        if key not in orders:
            orders[key] = ShardSampler(sampler, self.part, seed=self._seed)
        self._order = orders[key]
        return {name: self._order, "generator": torch.Generator(), **plain}

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; without it each iteration is the one after the last."""
        if self._order is not None:
            self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self._order is not None:
            # the order does not come from here, but the seeds of loading processes do
            self.generator.manual_seed(mix(self._seed, self._order.epoch, self.part.rank))
        batches = super().__iter__()
        return self.part.take(batches) if isinstance(self.dataset, IterableDataset) else batches

    def __len__(self) -> int:
        num_batches = super().__len__()
        return self.part.length(num_batches) if isinstance(self.dataset, IterableDataset) else num_batches
