"""Two workers of a parameter server that take different times for a step; each prints what was counted.

Arguments: the seconds that a step takes the second worker, and how many it takes.
"""

import json
import sys
import time

import torch

import shoal

STEP_S = 0.03
NUM_STEPS = 60


def main(slow_step_s, num_slow_steps):
    group = shoal.init()
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = shoal.from_args(group)
    with strategy.attach(model, optimizer):
        step_s, num_steps = [(STEP_S, NUM_STEPS), (slow_step_s, int(num_slow_steps))][group.rank]
        began_s = time.perf_counter()
        for _ in range(num_steps):
            time.sleep(step_s)
            optimizer.zero_grad()
            model(torch.rand(4, 8)).square().mean().backward()
            optimizer.step()
        elapsed_s = time.perf_counter() - began_s
    # of its own server: what it had counted when this worker said goodbye
    print(json.dumps({"elapsed_s": elapsed_s, "server": strategy.stats["servers"][0]}), flush=True)


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
