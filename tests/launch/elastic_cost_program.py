"""Times the steps of one loop, for a comparison of runs with and without --elastic; rank 0 prints them."""

import statistics
import sys
import time

import torch
from torch import nn

import shoal

NUM_WARM_UP, NUM_STEPS, NUM_BLOCKS = 50, 100, 10
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
group = shoal.init()
strategy = shoal.from_args(group)
num_calls = 0


def step():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def count(frame, event, argument):
    global num_calls
    num_calls += event == "call"


with strategy.attach(model, optimizer):
    for _ in range(NUM_WARM_UP):
        step()
    blocks_s = []
    for _ in range(NUM_BLOCKS):
        began_s = time.thread_time()
        for _ in range(NUM_STEPS):
            step()
        blocks_s.append((time.thread_time() - began_s) / NUM_STEPS)
    sys.setprofile(count)
    step()
    sys.setprofile(None)
if group.rank == 0:
    print(f"cpu_us {1e6 * min(blocks_s):.1f} {1e6 * statistics.median(blocks_s):.1f} calls {num_calls}")
