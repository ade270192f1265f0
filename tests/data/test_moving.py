"""Loaders whose workers change in the middle of an epoch: each example is given once."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shoal.core import UsageError
from shoal.data import shard
from shoal.data.course import merge
from shoal.data.kept import kept_loaders

NUM_EXAMPLES = 61
DATASET = TensorDataset(torch.arange(NUM_EXAMPLES))


class Stream(IterableDataset):
    def __iter__(self):
        return iter((torch.tensor(number),) for number in range(NUM_EXAMPLES))


KINDS = {
    "in order": lambda: DataLoader(DATASET, batch_size=2),
    "shuffled": lambda: DataLoader(DATASET, batch_size=2, shuffle=True),
    "processes": lambda: DataLoader(DATASET, batch_size=2, shuffle=True, num_workers=2),
    "lasting": lambda: DataLoader(
        DATASET, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
}


@dataclass(eq=False)
class Place:
    """A worker's place in a group that grows and shrinks; its loaders stay with it."""

    rank: int
    size: int
    is_elastic: bool = True


class Worker:
    def __init__(self, kind, place):
        self.place = place
        self.loader = shard(KINDS[kind](), place, remainder="uneven")
        self.iterator = iter(self.loader)
        self.seen: list[list[int]] = []

    def step(self):
        batch = next(self.iterator, None)
        if batch is not None:
            self.seen.append(batch[0].reshape(-1).tolist())
            kept_loaders(self.place).mark()
        return batch is not None


def step_all(workers):
    return [worker.step() for worker in workers]


def regroup(workers, old_size, lost=()):
    """Give all workers their new places, as a run does between two steps."""
    states = {worker.place.rank: kept_loaders(worker.place).states()[0] for worker in workers}
    places = {rank: [state["epoch"], state["legs"], state["num_taken"]] for rank, state in states.items()}
    state = merge(next(iter(states.values())), places, old_size, lost=lost)
    for rank, worker in enumerate(workers):
        worker.place.rank, worker.place.size = rank, len(workers)
        kept_loaders(worker.place).move(rank, len(workers), [state])
    return state


def join(kind, workers, state, rank, size):
    place = Place(rank, size)
    kept_loaders(place).load([state])
    workers.append(Worker(kind, place))


@pytest.mark.parametrize("kind", KINDS)
def test_each_example_comes_once_though_workers_come_and_go(kind):
    workers = [Worker(kind, Place(rank, 3)) for rank in range(3)]
    gone = []
    for _ in range(3):
        assert all(step_all(workers))
    gone.append(workers.pop(1))  # it has trained on all that it took
    regroup(workers, 3, lost=[1])
    for _ in range(2):
        assert all(step_all(workers))
    state = regroup(workers, 2)
    for worker in workers:  # as two of three
        kept_loaders(worker.place).move(worker.place.rank, 3, [state])
    join(kind, workers, state, 2, 3)
    while any(step_all(workers)):
        pass
    seen = sorted(itertools.chain(*(batch for worker in [*workers, *gone] for batch in worker.seen)))
    assert seen == list(range(NUM_EXAMPLES))
    assert [worker.loader.epoch for worker in workers] == [1, 1, 1]


def test_what_was_taken_for_a_step_that_is_dropped_comes_again():
    workers = [Worker("shuffled", Place(rank, 2)) for rank in range(2)]
    for worker in workers:
        worker.step()
    dropped = [next(worker.iterator)[0].tolist() for worker in workers]
    for worker in workers:
        kept_loaders(worker.place).roll_back()
    lost = workers.pop(0)
    regroup(workers, 2, lost=[0])
    while workers[0].step():
        pass
    seen = sorted(itertools.chain(*(batch for worker in [lost, *workers] for batch in worker.seen)))
    assert seen == list(range(NUM_EXAMPLES))
    assert set(itertools.chain(*dropped)) <= set(itertools.chain(*workers[0].seen))


def test_a_step_that_is_dropped_at_the_very_end_of_an_epoch_comes_again():
    (worker,) = [Worker("in order", Place(0, 1))]
    for _ in range(30):
        worker.step()
    assert next(worker.iterator)[0].tolist() == [60]
    kept_loaders(worker.place).roll_back()
    regroup([worker], 1)
    assert worker.step()
    assert worker.seen[-1] == [60]
    assert not worker.step()
    assert worker.loader.epoch == 1


def test_the_next_epoch_is_divided_among_those_who_are_there():
    workers = [Worker("shuffled", Place(rank, 2)) for rank in range(2)]
    while any(step_all(workers)):
        pass
    workers.pop()
    regroup(workers, 2, lost=[1])
    assert len(list(workers[0].loader)) == 31


def test_an_elastic_group_of_one_has_an_order_that_others_can_join():
    one, other = (Worker("shuffled", Place(0, 1)) for _ in range(2))
    torch.manual_seed(5)
    one.step()
    torch.manual_seed(6)
    other.step()
    assert one.seen == other.seen


def test_what_is_divided_once_for_all_is_refused():
    with pytest.raises(UsageError, match="come and go"):
        shard(DATASET, Place(0, 2))


@pytest.mark.parametrize("kind", ["in order", "shuffled"])
def test_what_a_lost_worker_had_taken_last_is_listed(kind):
    workers = [Worker(kind, Place(rank, 2)) for rank in range(2)]
    for _ in range(5):
        step_all(workers)
    kept, lost = kept_loaders(workers[0].place), workers[1]
    state = lost.loader.course.state_dict()
    place = [state["epoch"], state["legs"], state["num_taken"]]
    items = list(kept.note_lost(0, place, (1, 2), num_batches=2))
    assert items == [*lost.seen[-2], *lost.seen[-1]]
    assert workers[0].loader.lost_items == {0: items}
    assert list(kept.note_lost(0, place, (1, 2), num_batches=100)) == list(itertools.chain(*lost.seen))


def test_one_that_is_an_epoch_ahead_goes_back_and_then_on_in_its_own():
    workers = [Worker("shuffled", Place(rank, 2)) for rank in range(2)]
    slow, fast = workers
    slow.step()
    while fast.step():
        pass
    fast.iterator = iter(fast.loader)
    fast.step()
    regroup(workers, 2)
    while fast.step():  # what is left of the first epoch, then of the second
        pass
    while slow.step():
        pass
    slow.iterator = iter(slow.loader)
    while slow.step():
        pass
    assert slow.loader.epoch == fast.loader.epoch == 2
    seen = Counter(item for worker in workers for batch in worker.seen for item in batch)
    assert seen == Counter(dict.fromkeys(range(NUM_EXAMPLES), 2))


def test_a_wrapper_around_an_elastic_group_does_not_hide_it():
    """A worker that comes alone draws the orders that all agree on, and not those of a group of one."""

    @dataclass(eq=False)
    class Wrapper:
        inner: object
        rank: int = 0
        size: int = 1

    place = Place(0, 1)
    loader = shard(DataLoader(DATASET, batch_size=2, shuffle=True), Wrapper(place), seed=3)
    plain = shard(DataLoader(DATASET, batch_size=2, shuffle=True), Place(0, 1), seed=3)
    assert [batch[0].tolist() for batch in loader] == [batch[0].tolist() for batch in plain]
    assert kept_loaders(place).states() == kept_loaders(Wrapper(place)).states() != []
