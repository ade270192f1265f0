"""A DataLoader like another one, with one worker's part of its batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

from shoal.core import UsageError
from shoal.data.parts import Part
from shoal.data.sampler import ShardSampler

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


class ShardedLoader(DataLoader[T_co]):
    """Has the other loader's settings; its batch size is one worker's.

    The examples of a map-style dataset are divided before they are loaded, in an order that is new in each
    epoch if the other loader shuffles. An iterable dataset must give the same order to all workers; each
    reads all of it and keeps its own batches.
    """

    def __init__(self, loader: DataLoader[T_co], part: Part, *, seed: int = 0) -> None:
        if type(loader) is not DataLoader:
            raise UsageError(
                f"A {type(loader).__name__} cannot be made anew for one worker.",
                cause="it is no plain DataLoader, or it is one worker's part already.",
                next_step="make it of shoal.shard(dataset, group), or shard torch's own DataLoader, once.",
            )
        self.part = part
        self._order: ShardSampler | None = None
        kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        super().__init__(loader.dataset, **self._batching(loader, seed), **kept)

    def _batching(self, loader: DataLoader[T_co], seed: int) -> dict[str, Any]:
        is_custom = loader.batch_size is None and loader.batch_sampler is not None
        plain = {} if is_custom else {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        if isinstance(loader.dataset, IterableDataset):
            return plain
        name = "batch_sampler" if is_custom else "sampler"
        sampler = cast("Iterable[Any]", getattr(loader, name))
        if self.part.size > 1:
            sampler = self._order = ShardSampler(sampler, self.part, seed=seed)
        return {name: sampler, **plain}

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; without it each iteration is the one after the last."""
        if self._order is not None:
            self._order.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        return self.part.take(batches) if isinstance(self.dataset, IterableDataset) else batches

    def __len__(self) -> int:
        num_batches = super().__len__()
        return self.part.length(num_batches) if isinstance(self.dataset, IterableDataset) else num_batches
