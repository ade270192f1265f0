from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from shoal.core import UsageError
from shoal.data import ShardedLoader, shard

ALONE = SimpleNamespace(rank=0, size=1)
PAIR = [SimpleNamespace(rank=rank, size=2) for rank in range(2)]


class Squares(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        return index * index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))

    def __len__(self):
        return 7


def test_a_loader_gives_pairs_of_x_and_y():
    x = torch.arange(12.0)
    for group in PAIR:
        loader = shard(DataLoader(TensorDataset(x, -x), batch_size=2), group)
        assert isinstance(loader, ShardedLoader)
        assert len(loader) == 3
        for ours, theirs in loader:
            assert torch.equal(ours, -theirs)
            assert ours.shape == (2,)


@pytest.mark.parametrize(
    ("data", "second"),
    [
        ([10, 11, 12, 13, 14], [11, 13]),
        (range(5), range(1, 4, 2)),
        ((1, 2, 3, 4), (2, 4)),
    ],
)
def test_sequences_keep_their_type(data, second):
    assert shard(data, PAIR[1]) == second


def test_tensors_and_arrays_are_not_copied():
    tensor = torch.arange(10).reshape(5, 2)
    part = shard(tensor, PAIR[1])
    assert part.tolist() == [[2, 3], [6, 7]]
    tensor[1] = 0
    assert part[0].tolist() == [0, 0]
    array = np.arange(5)
    assert np.shares_memory(shard(array, PAIR[0], remainder="uneven"), array)
    assert shard(array, PAIR[0], remainder="uneven").tolist() == [0, 2, 4]


def test_repeated_items_come_from_the_front():
    assert shard(torch.arange(5), PAIR[1], remainder="repeat").tolist() == [1, 3, 0]
    assert shard([5, 6, 7], PAIR[1], remainder="repeat") == [6, 5]


def test_a_dataset_becomes_a_subset():
    parts = [shard(Squares(), group, remainder="uneven") for group in PAIR]
    assert all(isinstance(part, Subset) for part in parts)
    assert [list(part) for part in parts] == [[0, 4, 16, 36], [1, 9, 25]]


def test_iterables_give_every_other_item_again_and_again():
    part = shard(Stream(), PAIR[1])
    assert isinstance(part, IterableDataset)
    assert list(part) == list(part) == [1, 3, 5]
    assert len(part) == 3
    assert list(shard((letter for letter in "abcd"), PAIR[0])) == ["a", "c"]


@pytest.mark.parametrize("data", [[1, 2], torch.ones(3), Squares(), Stream(), range(3)])
def test_a_group_of_one_gets_what_it_gave(data):
    assert shard(data, ALONE) is data


def test_a_loader_of_an_own_class_works_alone():
    class Special(DataLoader):
        pass

    loader = Special([1, 2])
    assert shard(loader, ALONE) is loader
    with pytest.raises(UsageError, match="Special"):
        shard(loader, PAIR[0])


@pytest.mark.parametrize("data", [{"a": 1}, {1, 2}, "text", torch.tensor(1.0), 7, None])
def test_what_has_no_order_is_refused(data):
    with pytest.raises(UsageError, match="cannot be divided among workers"):
        shard(data, PAIR[0])


def test_a_tuple_of_tensors_is_refused_because_it_may_be_columns():
    with pytest.raises(UsageError, match="TensorDataset"):
        shard((torch.ones(4), torch.ones(4)), PAIR[0])


def test_too_little_data_is_refused_at_once():
    with pytest.raises(UsageError, match="1 items cannot be divided among 2"):
        shard(DataLoader(TensorDataset(torch.ones(1))), PAIR[0])


class AcceleratesBatchSampler(BatchSampler):
    """As Accelerate and Hugging Face's Trainer leave it in a loader: a part of another's batches."""

    def __init__(self, batch_sampler, num_processes):
        self.batch_sampler, self.num_processes = batch_sampler, num_processes
        self.batch_size, self.drop_last = 2, False

    def __iter__(self):
        return iter([*self.batch_sampler][:: self.num_processes])

    def __len__(self):
        return sum(1 for _ in self)


def twice(kind):
    data, batches = Squares(), BatchSampler(range(7), 2, drop_last=False)
    parted = DistributedSampler(data, num_replicas=2, rank=0)
    return {
        "a sampler": lambda: DataLoader(data, sampler=parted),
        "inside a batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(parted, 2, False)),
        "accelerate": lambda: DataLoader(data, batch_sampler=AcceleratesBatchSampler(batches, 2)),
        "a sharded loader": lambda: shard(DataLoader(data), PAIR[0]),
        "of a sharded dataset": lambda: DataLoader(shard(data, PAIR[0])),
        "a sharded dataset": lambda: shard(data, PAIR[0]),
        "inside a subset": lambda: Subset(shard(data, PAIR[0]), [0, 1]),
        "a sharded stream": lambda: DataLoader(shard(Stream(), PAIR[0])),
    }[kind]()


KINDS = "a sampler,inside a batch sampler,accelerate,a sharded loader,of a sharded dataset,a sharded dataset"


@pytest.mark.parametrize("kind", [*KINDS.split(","), "inside a subset", "a sharded stream"])
def test_what_is_divided_already_is_refused(kind):
    data = twice(kind)
    with pytest.raises(UsageError, match=r"already gives each of 2 workers|one worker's part already"):
        shard(data, PAIR[0])
    shard(data, ALONE)


def test_one_process_of_accelerate_divides_nothing():
    batches = AcceleratesBatchSampler(BatchSampler(range(7), 2, drop_last=False), 1)
    assert len([*shard(DataLoader(Squares(), batch_sampler=batches), PAIR[0])]) == 2
