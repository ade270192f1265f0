import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.core import UsageError
from shoal.data import Part, ShardSampler

NUM_EXAMPLES = 23
EXAMPLES = range(NUM_EXAMPLES)


def unlike_on_each_rank(rank):
    """A generator as careless users make it."""
    torch.manual_seed(rank)
    return torch.Generator().manual_seed(100 + rank)


def epochs_of(make_sampler, size=3, num_epochs=2, **settings):
    """By epoch, what each worker has."""
    taken = []
    for rank in range(size):
        sampler = ShardSampler(make_sampler(rank), Part(rank, size, "uneven"), **settings)
        taken.append([list(sampler) for _ in range(num_epochs)])
    return list(zip(*taken, strict=True))


@pytest.mark.parametrize(
    "make_sampler",
    [
        lambda rank: RandomSampler(EXAMPLES, generator=unlike_on_each_rank(rank)),
        lambda rank: RandomSampler(EXAMPLES),
        lambda rank: SubsetRandomSampler(EXAMPLES, generator=unlike_on_each_rank(rank)),
    ],
    ids=["own generator", "global generator", "subset"],
)
def test_shuffled_orders_agree_on_all_workers_and_change_each_epoch(make_sampler):
    first, second = epochs_of(make_sampler)
    for epoch in (first, second):
        assert sorted(itertools.chain(*epoch)) == list(EXAMPLES)
    assert first != second
    again, _ = epochs_of(make_sampler)
    assert again == first
    other_seed, _ = epochs_of(make_sampler, seed=1)
    assert other_seed != first


def test_weights_are_kept():
    weights = [0.0] * 20 + [1.0] * 3
    ((first, second),) = epochs_of(lambda rank: WeightedRandomSampler(weights, 40), size=2, num_epochs=1)
    assert len(first) == len(second) == 20
    assert set(first) | set(second) == {20, 21, 22}


def by_torch(bound):
    return int(torch.randint(bound, ()))


class Careless(Sampler[int]):
    """Draws from a global generator, whenever it is asked."""

    def __init__(self, draw=by_torch):
        self.draw = draw

    def __iter__(self):
        left = list(EXAMPLES)
        while left:
            yield left.pop(self.draw(len(left)))

    def __len__(self):
        return NUM_EXAMPLES


class Heir(RandomSampler):
    """One of torch's by its class alone."""

    def __iter__(self):
        return iter(random.sample(EXAMPLES, NUM_EXAMPLES))


@pytest.mark.parametrize(
    "make_sampler",
    [
        Careless,
        lambda: Careless(random.randrange),
        lambda: Careless(np.random.randint),
        lambda: Heir(EXAMPLES),
    ],
    ids=["torch", "python", "numpy", "subclass"],
)
def test_a_sampler_of_the_users_own_agrees_too_and_global_generators_are_left_alone(make_sampler):
    def seed_all(seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def make(rank):
        seed_all(rank)
        return make_sampler()

    first, second = epochs_of(make)
    assert sorted(itertools.chain(*first)) == list(EXAMPLES)
    assert first != second
    drawn = []
    for should_read in (False, True):
        seed_all(5)
        if should_read:
            list(ShardSampler(make_sampler(), Part(0, 2)))
        drawn.append((float(torch.rand(1)), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_batches_are_divided_whole():
    def make(rank):
        return BatchSampler(RandomSampler(EXAMPLES, generator=unlike_on_each_rank(rank)), 4, drop_last=False)

    (first,) = epochs_of(make, size=2, num_epochs=1)
    assert [len(batch) for batch in first[0]] == [4, 4, 4]
    assert [len(batch) for batch in first[1]] == [4, 4, 3]
    assert sorted(itertools.chain(*first[0], *first[1])) == list(EXAMPLES)


def test_set_epoch_comes_back_to_an_order():
    sampler = ShardSampler(RandomSampler(EXAMPLES), Part(1, 2))
    epochs = [list(sampler) for _ in range(3)]
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    assert list(sampler) == epochs[2]


def test_an_epoch_that_is_broken_off_is_over():
    sampler, other = (ShardSampler(RandomSampler(EXAMPLES), Part(1, 2)) for _ in range(2))
    next(iter(sampler))
    list(other)
    assert list(sampler) == list(other)


def test_an_iterator_that_is_not_read_takes_no_epoch():
    sampler, other = (ShardSampler(RandomSampler(EXAMPLES), Part(1, 2)) for _ in range(2))
    iter(sampler)
    assert list(sampler) == list(other)


def test_the_users_sampler_is_told_the_epoch():
    class Staged(Careless):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            order = list(EXAMPLES)
            random.Random(self.epoch).shuffle(order)
            return iter(order)

    first, second = epochs_of(lambda rank: Staged())
    assert sorted(itertools.chain(*second)) == list(EXAMPLES)
    assert first != second


def test_what_already_gives_parts_is_refused():
    parted = DistributedSampler(EXAMPLES, num_replicas=2, rank=0)
    for sampler in (parted, BatchSampler(parted, 4, drop_last=False)):
        with pytest.raises(UsageError, match="DistributedSampler already gives each of 2 workers a part"):
            ShardSampler(sampler, Part(0, 2))
