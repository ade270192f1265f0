import inspect
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from shoal.core import UsageError
from shoal.data import Part, ShardedLoader

NUM_EXAMPLES = 22
DATASET = TensorDataset(torch.arange(NUM_EXAMPLES), torch.arange(NUM_EXAMPLES) * 2)


def sharded(make_loader, size=2, remainder="drop", **settings):
    return [ShardedLoader(make_loader(), Part(rank, size, remainder), **settings) for rank in range(size)]


def batches(loader):
    return [x.tolist() for x, _ in loader]


def all_of(loaders):
    return list(itertools.chain(*(batch for loader in loaders for batch in batches(loader))))


class Stream(IterableDataset):
    def __init__(self, num_items):
        self.num_items = num_items

    def __iter__(self):
        return iter(range(self.num_items))


def test_in_order_each_step_takes_the_next_examples():
    first, second = sharded(lambda: DataLoader(DATASET, batch_size=4))
    assert batches(first) == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20]]
    assert batches(second) == [[1, 3, 5, 7], [9, 11, 13, 15], [17, 19, 21]]
    assert len(first) == len(second) == 3


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shuffled_epochs_have_no_example_twice(size):
    loaders = sharded(lambda: DataLoader(DATASET, batch_size=3, shuffle=True), size)
    first, second = all_of(loaders), all_of(loaders)
    for epoch in (first, second):
        assert len(set(epoch)) == len(epoch) == NUM_EXAMPLES - NUM_EXAMPLES % size
    assert first != second


def test_uneven_covers_everything_and_says_how_many_batches():
    loaders = sharded(lambda: DataLoader(DATASET, batch_size=1, shuffle=True), 4, "uneven")
    assert [len(loader) for loader in loaders] == [6, 6, 5, 5]
    assert sorted(all_of(loaders)) == list(range(NUM_EXAMPLES))


def test_repeat_covers_everything_with_equally_many():
    loaders = sharded(lambda: DataLoader(DATASET, batch_size=1, shuffle=True), 4, "repeat")
    assert {len(batches(loader)) for loader in loaders} == {6}
    assert set(all_of(loaders)) == set(range(NUM_EXAMPLES))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_group_of_one_has_the_loaders_own_order(shuffle):
    def make():
        return DataLoader(DATASET, batch_size=5, shuffle=shuffle)

    torch.manual_seed(3)
    plain = make()
    expected = [batches(plain), batches(plain)]
    torch.manual_seed(3)
    (alone,) = sharded(make, size=1)
    alone.set_epoch(0)
    assert [batches(alone), batches(alone)] == expected


def test_settings_are_kept():
    loader = DataLoader(
        DATASET,
        batch_size=4,
        shuffle=True,
        num_workers=1,
        collate_fn=len,
        drop_last=True,
        timeout=7,
        worker_init_fn=print,
        multiprocessing_context="spawn",
        generator=torch.Generator(),
        prefetch_factor=3,
        persistent_workers=True,
    )
    copy = ShardedLoader(loader, Part(0, 2))
    changed = {"self", "shuffle", "sampler", "batch_sampler", "generator"}
    for name in inspect.signature(DataLoader.__init__).parameters.keys() - changed:
        assert getattr(copy, name) == getattr(loader, name), name
    assert isinstance(copy, DataLoader)
    assert len(copy) == 2


def test_worker_processes_load_the_part_and_draw_their_own():
    program = Path(__file__).with_name("loading_program.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=50)
    assert done.stdout == "checked\n", done.stderr


def test_who_divides_a_loader_in_each_epoch_goes_on_with_its_epochs():
    once, anew = (DataLoader(DATASET, batch_size=3, shuffle=True) for _ in range(2))
    loader = ShardedLoader(once, Part(1, 2))
    expected = [batches(loader) for _ in range(3)]
    assert [batches(ShardedLoader(anew, Part(1, 2))) for _ in range(3)] == expected
    assert expected[0] != expected[1]
    assert batches(ShardedLoader(anew, Part(0, 2))) == batches(ShardedLoader(once, Part(0, 2)))


def test_a_batch_sampler_of_the_users_own_is_divided_by_batches():
    def make():
        order = RandomSampler(DATASET, generator=torch.Generator().manual_seed(torch.seed() % 1000))
        return DataLoader(DATASET, batch_sampler=BatchSampler(order, 5, drop_last=False))

    loaders = sharded(make, 2, "uneven")
    assert [len(loader) for loader in loaders] == [3, 2]
    assert sorted(all_of(loaders)) == list(range(NUM_EXAMPLES))


def test_without_batches_single_examples_are_divided():
    loaders = sharded(lambda: DataLoader(DATASET, batch_size=None))
    assert [int(x) for x, _ in loaders[1]] == list(range(1, NUM_EXAMPLES, 2))


def test_an_iterable_dataset_is_divided_by_batches():
    loaders = sharded(lambda: DataLoader(Stream(14), batch_size=2), 3)
    assert [[batch.tolist() for batch in loader] for loader in loaders] == [
        [[0, 1], [6, 7]],
        [[2, 3], [8, 9]],
        [[4, 5], [10, 11]],
    ]


def test_set_epoch_comes_back_to_an_order():
    loader, other = (sharded(lambda: DataLoader(DATASET, batch_size=3, shuffle=True))[0] for _ in range(2))
    first = batches(loader)
    other.set_epoch(1)
    assert batches(other) == batches(loader) != first


def test_other_loaders_are_refused():
    class Special(DataLoader):
        pass

    with pytest.raises(UsageError, match="A Special cannot be made anew"):
        ShardedLoader(Special(DATASET), Part(0, 2))
    once = ShardedLoader(DataLoader(DATASET), Part(0, 2))
    with pytest.raises(UsageError, match="one worker's part already"):
        ShardedLoader(once, Part(0, 2))
