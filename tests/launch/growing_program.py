"""Trains with workers that come and go, and notes what it does; until the step that a file names.

With a width of hidden units it learns noise, which needs no time; with the word `digits` it learns digits.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data import digits
from shoal.tensors.transfer import StateDonor, StateTaker

folder, task, pause_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
torch.manual_seed(os.getpid())  # who comes later has another model, until it has taken the others'
torch.set_num_threads(1)
if task == "digits":
    x, y = digits()
    x, widths = x.flatten(1), [64, 32, 10]
    data, batch_size, lr = TensorDataset(torch.arange(len(x)), x, y), 16, 0.05
else:
    x = torch.randn(203, 4, generator=torch.Generator().manual_seed(0))
    data, batch_size, lr, widths = TensorDataset(torch.arange(len(x)), x), 2, 0.01, [4, int(task), 1]
model = torch.nn.Sequential(
    torch.nn.Linear(widths[0], widths[1]), torch.nn.Tanh(), torch.nn.Linear(widths[1], widths[2])
)
optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

group = shoal.init()
strategy = shoal.from_args(group)
loader = shoal.shard(DataLoader(data, batch_size=batch_size, shuffle=True), group, remainder="uneven")
notes = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1)


def note(**what):
    notes.write(json.dumps({"pid": os.getpid(), "at_s": time.time(), **what}) + "\n")


if leaf_s := float(os.environ.get("GROWING_LEAF_S", 0)):
    # a state of a test is there in milliseconds: this one takes longer, so that workers are lost meanwhile
    serve_leaf, take = StateDonor._serve_leaf, StateTaker.take

    def serve_slowly(self, head, buffers):
        note(giving=True)
        time.sleep(leaf_s)
        return serve_leaf(self, head, buffers)

    async def take_and_say_so(self, donors, deadline):
        note(taking=True)
        return await take(self, donors, deadline)

    StateDonor._serve_leaf, StateTaker.take = serve_slowly, take_and_say_so


def digest():
    found = hashlib.sha256()
    momenta = [state["momentum_buffer"] for state in optimizer.state_dict()["state"].values()]
    for tensor in [*model.state_dict().values(), *momenta]:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def loss_of(x, *labels):
    return torch.nn.functional.cross_entropy(model(x), *labels) if labels else model(x).square().mean()


@torch.no_grad()
def accuracy():
    x, y = digits(train=False)
    return (model(x.flatten(1)).argmax(1) == y).float().mean().item()


def is_over():
    try:
        return strategy.steps >= int((folder / "until").read_text())
    except (OSError, ValueError):
        return False


if group.role == "worker":
    note(began=True)
with strategy.attach(model, optimizer) as session:
    session.on_resize(lambda old, new: note(resized=[old, new]))
    while not is_over():
        for numbers, *batch in loader:
            # an iteration may go back to what is left of earlier epochs when the number of workers changes
            before, what = strategy.steps, {"epoch": loader.epoch - 1, "items": numbers.tolist()}
            note(taken=True, **what)  # before the backward pass, in which gradients are shared
            optimizer.zero_grad()
            loss_of(*batch).backward()
            try:
                optimizer.step()  # who is to leave does not return from it
            finally:
                if strategy.steps > before:
                    note(step=strategy.steps, model=digest(), size=group.size, **what)
            time.sleep(pause_s)
            if is_over():
                break
learned = {"accuracy": accuracy()} if task == "digits" else {}
note(finished=True, model=digest(), lost=loader.lost_items, **learned)
