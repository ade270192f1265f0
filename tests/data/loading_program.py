"""A program of its own, since a DataLoader's workers are forked: not from a test run full of threads."""

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.data import Part, ShardedLoader

NUM_EXAMPLES = 22


class Noisy(Dataset):
    """An example, and what is drawn where it is loaded."""

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, index):
        return index, torch.rand(1)


def check(batching):
    def sharded(num_workers):
        loaders = []
        for rank in range(2):
            torch.manual_seed(0)
            loader = DataLoader(Noisy(), num_workers=num_workers, **batching)
            loaders.append(ShardedLoader(loader, Part(rank, 2, "drop")))
        return loaders

    def orders(loaded):
        return [[torch.as_tensor(index).tolist() for index, _ in part] for part in loaded]

    loaders, in_process = sharded(1), sharded(0)
    noises = []
    for _ in range(2):
        loaded = [list(loader) for loader in loaders]
        assert orders(loaded) == orders([list(loader) for loader in in_process])
        noises += [float(part[0][1].flatten()[0]) for part in loaded]
    assert len(set(noises)) == 4
    assert float(next(iter(sharded(1)[1]))[1].flatten()[0]) == noises[1]


if __name__ == "__main__":
    torch.set_num_threads(1)
    check({"batch_size": 4, "shuffle": True})
    check({"batch_size": None, "shuffle": True})
    print("checked")
