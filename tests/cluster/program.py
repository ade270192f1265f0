"""A worker that learns to read digits, as a user would write it, and says in a line of JSON how it went.

    shoal run -np 4 -H a:2,b:2 --strategy neighbor tests/cluster/program.py --epochs 6
    torchrun … tests/cluster/program.py --strategy parameter-server --num-servers 1 --option mode=sync

What `shoal run` was asked for counts, and what is given here wins. Bytes are those that this process has sent
to and received from other machines: `training` from the first step to the last, `whole` with beginning and
end.
"""

import argparse
import json
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data import digits

IMAGE, CLASSES = 64, 10
BATCH_SIZE = 32


def make_model(hidden=128):
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(IMAGE, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def judge(model):
    """Loss and accuracy of what it has not seen."""
    x, y = digits(train=False)
    with torch.no_grad():
        output = model(x)
    return {
        "loss": nn.functional.cross_entropy(output, y).item(),
        "accuracy": (output.argmax(1) == y).float().mean().item(),
    }


def traffic(group):
    """Bytes sent and received, over the streams of the group and, with servers, of the group of all."""
    sent = received = 0
    for one in (getattr(group, "inner", group), group.everybody):
        mesh = getattr(one, "mesh", None)
        if mesh is not None:
            sent += sum(mesh.sent_bytes.values())
            received += sum(mesh.received_bytes.values())
    return sent, received


def describe(group):
    everybody = group.everybody or group
    return {
        "rank": everybody.rank,
        "role": group.role,
        "size": group.size,
        "machine": everybody.machine,
        "num_machines": everybody.num_machines,
    }


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--strategy")
    parser.add_argument("--option", action="append", default=[])
    parser.add_argument("--num-servers", type=int)
    return parser.parse_args()


def main():
    args = parse()
    model = make_model(args.hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    group = shoal.init(num_servers=args.num_servers)
    options = dict(option.split("=", 1) for option in args.option)
    strategy = shoal.from_args(group, strategy=args.strategy, **options)
    loader = DataLoader(TensorDataset(*digits()), batch_size=BATCH_SIZE, shuffle=True)
    loader = shoal.shard(loader, group)
    told = {**describe(group), "before": judge(model)}
    try:
        with strategy.attach(model, optimizer):
            group.barrier().wait()
            began = traffic(group)
            for _ in range(args.epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
            strategy.settle()
            group.barrier().wait()
            told["training"] = [ended - begun for ended, begun in zip(traffic(group), began, strict=True)]
            told["steps"] = strategy.steps
            told["distance"] = strategy.consensus_distance()
        told["after"] = judge(model)
    finally:  # a server ends its program where a worker begins to train
        told["whole"] = traffic(group)
        sys.stdout.write(f"{json.dumps(told)}\n")  # in one piece, for torchrun's workers share a pipe
        sys.stdout.flush()


if __name__ == "__main__":
    main()
