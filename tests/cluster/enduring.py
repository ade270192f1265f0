"""A worker that trains until it has lost so many others, and then some steps more.

It prints its process when training is under way, and a line at its end. A server prints its process before
it serves.
"""

import os
import sys

import torch
from torch import nn

import shoal

STEPS_BEFORE = 5
STEPS_AFTER = 20
MAX_STEPS = 10**6


def main(num_lost):
    group = shoal.init()
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if group.role == "server":
        print("training", os.getpid(), flush=True)
    num_after = 0
    with shoal.from_args(group).attach(model, optimizer):
        for step in range(1, MAX_STEPS):
            x = torch.rand(4, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            if step == STEPS_BEFORE:
                print("training", os.getpid(), flush=True)
            num_after += len(group.lost) >= num_lost
            if num_after == STEPS_AFTER:
                break
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    print(f"{num_after} steps without {sorted(group.lost)}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
