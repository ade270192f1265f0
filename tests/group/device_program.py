"""What `test_devices.py` runs under `shoal run`: collectives of a device's tensors, and strategies on it.

shoal run -np N tests/group/device_program.py BACKEND DEVICE
"""

import sys

import torch
from torch import nn

import shoal
from shoal.group.functions import share
from shoal.strategies import make_strategy
from shoal.topology import Weights

STRATEGIES = ("all-reduce", "neighbor", "hierarchical", "sma", "local-sgd", "diloco")
STRATEGIES += ("pair", "push-sum", "window")


def operations(group, device):
    """Each against what it can reckon alone."""
    rank, size = group.rank, group.size
    mine = torch.full((1000,), float(rank), device=device)
    for op, wanted in (("sum", sum(range(size))), ("mean", (size - 1) / 2), ("min", 0), ("max", size - 1)):
        got = group.all_reduce(mine.clone(), op).wait()
        assert got.device == mine.device
        assert got.unique().tolist() == [float(wanted)], (op, got)
    assert group.broadcast(mine.clone(), size - 1).wait().unique().tolist() == [float(size - 1)]
    parts = group.all_gather(torch.full((rank + 1, 2), float(rank), device=device)).wait()
    assert [list(part.shape) for part in parts] == [[other + 1, 2] for other in range(size)]
    others = [other for other in range(size) if other != rank]
    mixed = group.exchange(mine.clone(), Weights.uniform(others, others)).wait()
    assert torch.allclose(mixed, torch.full_like(mixed, (size - 1) / 2))
    group.barrier().wait()
    assert share(group, rank) == list(range(size))


def train(group, device, name):
    """A small net on the device; the loss before and after."""
    torch.manual_seed(group.rank)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = make_strategy(group, name, **({"local_steps": 2} if name in ("local-sgd", "diloco") else {}))
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(group.rank)).to(device)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    losses = []
    with strategy.attach(model, optimizer, stays=True):
        # where workers do not wait, how soon they learn depends on who gets the processor
        for number in range(20 if strategy.is_lockstep else 200):
            if number >= 20 and losses[-1] < 0.7 * losses[0]:
                break
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert next(model.parameters()).device.type == device.type
    assert losses[-1] < 0.7 * losses[0], (name, losses)
    return losses


def main():
    backend, device = sys.argv[1:]
    device = torch.device(device)
    group = shoal.init(backend=None if backend == "none" else backend)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", group.rank % torch.cuda.device_count())
    operations(group, device)
    for name in STRATEGIES:
        train(group, device, name)
    if group.rank == 0:
        print(f"{backend} on {device}: {group.size} workers did it all")


if __name__ == "__main__":
    main()
