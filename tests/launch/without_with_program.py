"""A loop without `with`; the first argument says how it ends, the second where each worker notes it."""

import sys
from pathlib import Path

import torch
from torch import nn

import shoal

NUM_STEPS = 6


def main(ending, folder):
    group = shoal.init()
    torch.manual_seed(group.rank)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = shoal.from_args(group)
    strategy.attach(model, optimizer)
    is_first = group.rank == 0
    for number in range(NUM_STEPS):
        if number == 3 and is_first and ending == "raised":
            raise ValueError("boom")
        if number == 3 and is_first and ending in ("exit 0", "exit 3"):
            sys.exit(int(ending.split()[1]))
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
    if ending == "closed":
        strategy.close()
        strategy.close()
        note(folder, group.rank, model)
    else:  # what is registered before `attach` runs after it
        global at_end
        at_end = folder, group.rank, model


def note(folder, rank, model):
    (Path(folder) / str(rank)).write_text(str(model.weight.detach().double().flatten().tolist()))


if __name__ == "__main__":
    import atexit

    at_end = None
    atexit.register(lambda: at_end and note(*at_end))
    main(*sys.argv[1:])
