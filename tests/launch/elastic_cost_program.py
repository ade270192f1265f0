"""Times the steps of one loop over an elastic group and over the plain group inside it, in turns.

Both loops run in the same processes, a few steps of one and then of the other, so that whatever else the
machine does meets both alike. What an elastic group costs does not depend on how large the tensors are, so
that a small model shows it best; a larger one of as many tensors shows what a step costs otherwise. Rank 0
prints a line of JSON: the processor time of each block's steps, in microseconds a step, and the fewest Python
functions that a step has called.
"""

import json
import sys
import time

import torch
from torch import nn

import shoal
from shoal.strategies import make_strategy

NUM_STEPS, NUM_TURNS, NUM_COUNTED, NUM_LARGE = 10, 300, 50, 10
torch.set_num_threads(1)
x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
group = shoal.init()


class Loop:
    """A model with hidden layers of that width, and its training over one of the groups."""

    def __init__(self, group, width):
        torch.manual_seed(0)
        layers = [nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.strategy = make_strategy(group, "all-reduce")
        self.blocks_us = []
        self.calls = []

    def attach(self):
        return self.strategy.attach(self.model, self.optimizer)

    def step(self):
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def time_block(self):
        began_s = time.thread_time()
        for _ in range(NUM_STEPS):
            self.step()
        self.blocks_us.append(1e6 * (time.thread_time() - began_s) / NUM_STEPS)

    def count_calls(self):
        num_calls = 0

        def count(frame, event, argument):
            nonlocal num_calls
            num_calls += event == "call"

        sys.setprofile(count)
        self.step()
        sys.setprofile(None)
        self.calls.append(num_calls)


plain, elastic, large = Loop(group.inner, 16), Loop(group, 16), Loop(group.inner, 1024)
with plain.attach(), elastic.attach(), large.attach():
    for loop in (plain, elastic, large):
        loop.time_block()
        loop.blocks_us.clear()
    for turn in range(NUM_TURNS):
        for loop in (plain, elastic) if turn % 2 else (elastic, plain):
            loop.time_block()
    for _ in range(NUM_COUNTED):
        plain.count_calls()
        elastic.count_calls()
    for _ in range(NUM_LARGE):
        large.time_block()
if group.rank == 0:
    told = {"plain_us": plain.blocks_us, "elastic_us": elastic.blocks_us, "large_us": large.blocks_us}
    print(json.dumps({**told, "plain_calls": min(plain.calls), "elastic_calls": min(elastic.calls)}))
