"""A worker of a run that grows and shrinks: it trains until a file `end` is there, and says what happens.

Rank 0 sees that file, and leaves word after which step all end.

In the end it prints a sum of its parameters to the bit, which is equal on all workers under all-reduce.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shoal
from shoal.core.run_options import RunOptions

STEP_S = 0.02
STEPS_AHEAD = 100


def is_over(folder, rank, steps):
    """Whether all have done the last step."""
    last = folder / "last-step"
    if rank == 0 and (folder / "end").exists() and not last.exists():
        (folder / "last-step.tmp").write_text(str(steps + STEPS_AHEAD))
        (folder / "last-step.tmp").rename(last)
    return last.exists() and steps >= int(last.read_text())


def main(folder):
    number = RunOptions.from_environment().number
    group = shoal.init()
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    strategy = shoal.from_args(group)
    with strategy.attach(model, optimizer) as session:
        session.on_resize(lambda old, new: print("size", new, "after", strategy.steps, flush=True))
        print("training", os.getpid(), "size", group.size, "from", strategy.steps, flush=True)
        while not is_over(folder, group.rank, strategy.steps):
            x = torch.rand(4, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
            if (folder / "lose").exists() and group.rank == 0:
                print("reached", strategy.steps, flush=True)
                (folder / "lose").unlink()
            time.sleep(STEP_S)
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"ends {total.hex()} size {group.size}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
