"""A worker that torchrun may start anew: it trains epoch after epoch until a file `end` is there.

Before each step it writes down which examples it is of, so that a test can tell what has come how often.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.group import share

NUM_ITEMS, BATCH = 240, 2
STEP_S = 0.02


def main(folder, strategy, options):
    group = shoal.init()
    torch.manual_seed(group.rank)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    data = DataLoader(TensorDataset(torch.arange(float(NUM_ITEMS)).view(-1, 1)), BATCH, shuffle=True)
    loader = shoal.shard(data, group)
    strategy = shoal.from_args(group, strategy=strategy, **json.loads(options))
    is_over = False
    with strategy.attach(model, optimizer), (folder / "learned").open("a", buffering=1) as learned:
        print("training", os.getpid(), "size", group.size, "from", strategy.steps, flush=True)
        generation = group.form.generation
        while not is_over:
            epoch = loader.epoch
            for (x,) in loader:
                note = [generation, strategy.steps, epoch, x.flatten().int().tolist()]
                learned.write(json.dumps(note) + "\n")
                optimizer.zero_grad()
                (model(x) - x).square().mean().backward()
                optimizer.step()
                time.sleep(STEP_S)
            is_over = any(share(group, (folder / "end").exists()))
    if group.rank == 0:
        lost = {epoch: list(items) for epoch, items in loader.lost_items.items()}
        (folder / "lost.json").write_text(json.dumps([epoch, lost]))
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"ends {total.hex()} size {group.size}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
