import itertools
import random
from collections import Counter

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from shoal.data import Part, ShardedLoader, shard
from shoal.data.course import Course, merge
from shoal.data.kept import kept_loaders
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import Metered

NUM_EXAMPLES = 45
DATASET = TensorDataset(torch.arange(NUM_EXAMPLES))


class Stream(IterableDataset):
    def __iter__(self):
        return iter((torch.tensor(number),) for number in range(NUM_EXAMPLES))


def own_batches():
    return DataLoader(DATASET, batch_sampler=BatchSampler(RandomSampler(DATASET), 2, drop_last=False))


KINDS = {
    "in order": lambda: DataLoader(DATASET, batch_size=2),
    "shuffled": lambda: DataLoader(DATASET, batch_size=2, shuffle=True),
    "own batches": own_batches,
    "single": lambda: DataLoader(DATASET, batch_size=None, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
}


def loaders(kind, size, remainder="uneven"):
    return [ShardedLoader(KINDS[kind](), Part(rank, size, remainder)) for rank in range(size)]


def examples(batch):
    return batch[0].reshape(-1).tolist()


def read(loader, num_batches):
    """What a loop has got when it saves: it is still in the epoch."""
    iterator = iter(loader)
    return iterator, list(itertools.chain(*map(examples, itertools.islice(iterator, num_batches))))


def common(states, size):
    places = {rank: [state["epoch"], state["legs"], state["num_taken"]] for rank, state in enumerate(states)}
    return merge(states[0], places, size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 1, 2), (1, 3, 1), (4, 2, 3)])
def test_each_example_is_seen_once_however_often_the_number_of_workers_changes(kind, sizes):
    torch.manual_seed(0)
    seen, state = [], None
    for size in sizes:
        crew = loaders(kind, size)
        if state is not None:
            assert all(loader.course.load_state_dict(state) for loader in crew)
        reading = [read(loader, 3 + rank % 2) for rank, loader in enumerate(crew)]
        seen += itertools.chain(*(part for _, part in reading))
        state = common([loader.course.state_dict() for loader in crew], size)
    for iterator, _ in reading:
        seen += itertools.chain(*map(examples, iterator))
    assert sorted(seen) == list(range(NUM_EXAMPLES))
    assert {loader.epoch for loader in crew} == {1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remainder", ["drop", "repeat", "uneven"])
def test_as_many_workers_go_on_exactly(kind, remainder):
    for size in (1, 2, 4):
        torch.manual_seed(size)
        crew = loaders(kind, size, remainder)
        reading = [read(loader, 4) for loader in crew]
        states = [loader.course.state_dict() for loader in crew]
        expected = [list(itertools.chain(*map(examples, iterator))) for iterator, _ in reading]
        drawn = torch.rand(1)
        torch.manual_seed(99)
        again = loaders(kind, size, remainder)
        for loader, state in zip(again, states, strict=True):
            assert loader.course.load_state_dict(state)
        assert [read(loader, 99)[1] for loader in again] == expected
        torch.manual_seed(size)
        whole = loaders(kind, size, remainder)
        assert [read(loader, 99)[1] for loader in whole] == [
            first + rest for (_, first), rest in zip(reading, expected, strict=True)
        ]
        assert torch.rand(1) == drawn


def test_an_epoch_that_is_over_or_left_is_not_resumed():
    (loader,) = loaders("shuffled", 1)
    list(loader)
    assert (loader.course.state_dict()["epoch"], loader.course.state_dict()["num_taken"]) == (1, 0)
    next(iter(loader))
    assert (loader.course.state_dict()["epoch"], loader.course.state_dict()["num_taken"]) == (2, 0)


def test_who_is_ahead_has_taken_all_and_who_is_lost_what_the_others_have():
    own = {"epoch": 2, "legs": [], "num_taken": 4, "order": None, "num_items": 9, "generators": []}
    state = merge(own, {0: [2, [], 4], 1: [3, [], 1], 3: [2, [], 6]}, 5, lost=[2])
    taken = state["legs"][-1]
    assert taken[0] == 4
    assert taken[1] == taken[4] > 9
    assert taken[2] == taken[3] == 6


def order_of(epoch, num_items):
    return random.Random(epoch).sample(range(num_items), num_items)


def take(course, num_items, seen):
    """Takes one item, of the next epoch where nothing is left of this one."""
    while True:
        iteration = course.current
        if iteration is None or iteration.is_over:
            iteration = course.begin()
        item = next(course.own(order_of(iteration.epoch, num_items), iteration), None)
        if item is not None:
            iteration.num_taken += 1
            seen[iteration.epoch, item] += 1
            return
        iteration.is_over = True


@pytest.mark.parametrize("seed", range(100))
def test_however_many_epochs_workers_are_apart_when_their_number_changes(seed):
    """Each item comes once in each epoch: little may be left of several epochs after some changes."""
    dice, seen = random.Random(seed), Counter()
    num_items, size = dice.randrange(5, 12), dice.randrange(1, 5)
    courses = [Course(Part(rank, size, "uneven"), num_items) for rank in range(size)]
    for _ in range(8):
        for course in courses:
            for _ in range(dice.randrange(num_items)):
                take(course, num_items, seen)
        states = [course.state_dict() for course in courses]
        places = {
            rank: [state["epoch"], state["legs"], state["num_taken"]] for rank, state in enumerate(states)
        }
        merged = merge(dice.choice(states), places, size)
        size = dice.randrange(1, 5)
        courses = [*courses, *(Course(Part(0, 1, "uneven"), num_items) for _ in range(size))][:size]
        for rank, course in enumerate(courses):
            course.move(Part(rank, size, "uneven"), merged)
    last = max(epoch for epoch, _ in seen)
    for course in courses:
        while course.epoch <= last + 1:
            take(course, num_items, seen)
    assert all(seen[epoch, item] == 1 for epoch in range(last + 1) for item in range(num_items))


def test_loaders_of_a_group_are_kept_in_their_order():
    group = SoloGroup()
    loader = DataLoader(DATASET, batch_size=2)
    first = shard(loader, group)
    second = shard(DataLoader(DATASET, batch_size=3), Metered(group))
    anew = shard(loader, group)
    kept = kept_loaders(Metered(group))
    first.set_epoch(4)
    assert [state["epoch"] for state in kept.states()] == [4, 0]
    del second
    assert kept.states()[1] is None
    assert anew.epoch == 4


def test_a_loader_that_is_divided_after_the_resume_goes_on_too(caplog):
    before, after = SoloGroup(), SoloGroup()
    for group in (before, after):
        shard(DataLoader(DATASET), group)
    late = shard(DataLoader(DATASET, batch_size=5), before)
    iterator, _ = read(late, 2)
    kept_loaders(after).load(kept_loaders(before).states())
    late = shard(DataLoader(DATASET, batch_size=5), after)
    assert examples(next(iter(late))) == [10, 11, 12, 13, 14]
    assert examples(next(iterator)) == [10, 11, 12, 13, 14]
    other = SoloGroup()
    kept_loaders(other).load([{**late.course.state_dict(), "num_items": 7, "epoch": 3}])
    assert shard(DataLoader(DATASET), other).epoch == 0
    assert "other data" in caplog.text
