"""A worker that learns the digits, and at some step of the first start waits to be killed.

However many workers there are, an update is made of equally many examples: of all workers together, or of
one where a server updates by each worker's gradients.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data import digits
from shoal.models.small import small_mlp

NUM_EXAMPLES = 64
NUM_EPOCHS = 12


def main(stop_at_step=0):
    group = shoal.init()
    torch.manual_seed(5)
    model = small_mlp()
    strategy = shoal.from_args(group)
    has_servers = group.everybody is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.025 if has_servers else 0.1, momentum=0.9)
    batch_size = NUM_EXAMPLES // (4 if has_servers else group.size)
    batches = DataLoader(TensorDataset(*digits()), batch_size=batch_size, shuffle=True)
    loader = shoal.shard(batches, group)
    if group.role == "server":
        print("training", os.getpid(), flush=True)
    with strategy.attach(model, optimizer):
        print("begins at", strategy.steps, flush=True)
        while loader.epoch < NUM_EPOCHS:
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                if strategy.steps == stop_at_step and os.environ["SHOAL_RESTART_COUNT"] == "0":
                    print("training", os.getpid(), flush=True)
                    time.sleep(600)
        print("ends at", strategy.steps, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
