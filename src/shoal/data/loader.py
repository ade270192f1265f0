"""A DataLoader like another one, with one worker's part of its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.core import UsageError
from shoal.data.course import Course
from shoal.data.parts import Part
from shoal.data.sampler import ShardSampler
from shoal.data.seeds import kept_generators, mix

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
_ORDERS: WeakKeyDictionary[DataLoader[Any], dict[tuple[Part | None, int], ShardSampler | Course]] = (
    WeakKeyDictionary()
)
"""Of the loaders that were divided, by part and seed: who divides a loader anew goes on with its epochs. None
stands for a part that changes with the workers."""


class ShardedLoader(DataLoader[T_co]):
    """Has the other loader's settings; its batch size is one worker's.

    The examples of a map-style dataset are divided before they are loaded, in an order that is new in each
    epoch if the other loader shuffles, and the processes that load them draw by seed, epoch and rank. Made of
    the same loader again, it goes on with the next epoch. An iterable dataset must give the same order to all
    workers; each reads all of it and keeps its own batches. Where workers come and go while it is read
    (`is_elastic`), what is left of the epoch is divided among those who are there.
    """

    def __init__(
        self, loader: DataLoader[T_co], part: Part, *, seed: int = 0, is_elastic: bool = False
    ) -> None:
        if type(loader) is not DataLoader:
            raise UsageError(
                f"A {type(loader).__name__} cannot be made anew for one worker.",
                cause="it is no plain DataLoader, or it is one worker's part already.",
                next_step="make it of shoal.shard(dataset, group), or shard torch's own DataLoader, once.",
            )
        self._seed = seed
        self._keeps_order = part.size == 1 and not is_elastic
        self._course: Course | None = None
        kept = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        kept |= self._batching(loader, part, (None if is_elastic else part, seed))
        super().__init__(loader.dataset, **kept)

    @property
    def course(self) -> Course:
        """How far it is, for a checkpoint."""
        assert self._course is not None, "a loader without a course"
        return self._course

    @property
    def part(self) -> Part:
        """Which part of the data is this worker's."""
        return self.course.part

    @property
    def epoch(self) -> int:
        """Of the iteration that begins next: after a resume the one that was under way."""
        return self.course.epoch

    @property
    def lost_items(self) -> Mapping[int, Sequence[Any]]:
        """By epoch: what workers had taken last that were lost, and what may be missing from the model.

        Under `shoal run --elastic`, where a lost worker had not shared what it had learned from them; under
        torchrun, which restarts the workers, where it may not have. Items are what the
        loader's sampler gives: numbers of examples.
        """
        return self.course.lost_items

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch; without it each iteration is the one after the last."""
        self.course.epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        epoch = self.epoch  # before loading processes begin to read
        return self._counted(self._batches(), epoch)

    def _batches(self) -> Iterator[Any]:
        """Begins to read what this worker has of the epoch that comes, or of what is left of one."""
        course, own = self.course, [self.generator] if isinstance(self.generator, torch.Generator) else []
        if not self._keeps_order and own:
            # the order does not come from here, but the seeds of loading processes do
            self.generator.manual_seed(mix(self._seed, course.epoch, self.part.rank))
        # an iteration that goes on has drawn its seed in the run before
        with kept_generators(own) if course.is_resuming else contextlib.nullcontext():
            return super().__iter__()

    def __len__(self) -> int:
        num_batches = super().__len__()
        return self.part.length(num_batches) if isinstance(self.dataset, IterableDataset) else num_batches

    def _batching(self, loader: DataLoader[T_co], part: Part, key: tuple[Part | None, int]) -> dict[str, Any]:
        is_custom = loader.batch_size is None and loader.batch_sampler is not None
        plain = {} if is_custom else {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        orders = _ORDERS.setdefault(loader, {})
        if isinstance(loader.dataset, IterableDataset):
            if key not in orders:
                orders[key] = Course(part)
            self._course = cast(Course, orders[key])
            return plain
        name = "batch_sampler" if is_custom else "sampler"
        if key not in orders:
            sampler = cast("Iterable[Any]", getattr(loader, name))
            orders[key] = ShardSampler(sampler, part, seed=self._seed, keeps_order=self._keeps_order)
        order = cast(ShardSampler, orders[key])
        self._course = order.course
        order.course.items_per_batch = 1 if is_custom else loader.batch_size or 1
        return {name: order, **({} if self._keeps_order else {"generator": torch.Generator()}), **plain}

    def _counted(self, batches: Iterator[Any], epoch: int) -> Iterator[Any]:
        """What the loop has got, not what was read ahead of it, is what a checkpoint counts.

        When the workers change, what is left is divided anew. Then the loop may go back to an epoch that
        others have not ended; it goes on until its own has ended, too.
        """
        course, iteration = self.course, None
        is_stream = isinstance(self.dataset, IterableDataset)
        num_items = 1 if is_stream or self.batch_size is None else self.batch_size
        is_batched = self.batch_sampler is not None
        num_moves = course.num_moves
        try:
            while True:
                iteration = None
                if is_stream:
                    iteration = course.begin()
                    batches = course.own(batches, iteration)
                for batch in batches:
                    iteration = iteration or course.current
                    assert iteration is not None, "a batch of an iteration that has not begun"
                    iteration.num_taken += num_items
                    course.num_examples += _num_examples(batch) if is_batched else 1
                    yield batch
                    if num_moves != course.num_moves:
                        break
                if num_moves == course.num_moves and (course.num_moves == 0 or course.epoch > epoch):
                    break
                num_moves, batches = course.num_moves, self._batches()
        finally:
            iteration = iteration or course.current
            if iteration is not None:
                iteration.is_over = True


def _num_examples(batch: Any) -> int:
    """By the first dimension of the first tensor; 1 for what holds none."""
    while True:
        if isinstance(batch, torch.Tensor):
            return batch.shape[0] if batch.ndim else 1
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
            batch = batch[0] if batch else None
        else:
            return 1
