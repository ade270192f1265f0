"""Trains with workers that come and go, and notes what it does; until the step that a file names."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal

folder, width, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(os.getpid())  # who comes later has another model, until it has taken the others'
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
inputs = torch.randn(203, 4, generator=torch.Generator().manual_seed(0))
data = TensorDataset(torch.arange(len(inputs)), inputs)

group = shoal.init()
strategy = shoal.from_args(group)
loader = shoal.shard(DataLoader(data, batch_size=2, shuffle=True), group, remainder="uneven")
notes = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)


def note(**what):
    notes.write(json.dumps({"pid": os.getpid(), "at_s": time.time(), **what}) + "\n")


def digest():
    found = hashlib.sha256()
    momenta = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    for tensor in [*model.state_dict().values(), *momenta]:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def is_over():
    try:
        return strategy.steps >= int((folder / "until").read_text())
    except (OSError, ValueError):
        return False


note(began=True)
with strategy.attach(model, optimizer) as session:
    session.on_resize(lambda old, new: note(resized=[old, new]))
    while not is_over():
        epoch = loader.epoch
        for numbers, x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            before, what = strategy.steps, {"epoch": epoch, "items": numbers.tolist()}
            note(taken=True, **what)
            try:
                optimizer.step()  # who is to leave does not return from it
            finally:
                if strategy.steps > before:
                    note(step=strategy.steps, model=digest(), size=group.size, **what)
            time.sleep(pause_s)
            if is_over():
                break
note(finished=True, model=digest(), lost=loader.lost_items)
