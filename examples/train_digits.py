"""Learns to read digits: a plain PyTorch loop, and the lines with which a group of workers shares it.

python examples/train_digits.py
shoal run -np 2 --strategy neighbor examples/train_digits.py --epochs 5
torchrun --nproc-per-node 2 examples/train_digits.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data import digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
loader = DataLoader(TensorDataset(*digits()), batch_size=args.batch_size, shuffle=True)

group = shoal.init()
strategy = shoal.from_args(group)
loader = shoal.shard(loader, group, seed=args.seed)

with strategy.attach(model, optimizer):
    for epoch in range(loader.epoch, args.epochs):
        num_seen, num_right, total_loss = 0, 0, 0.0
        for x, y in loader:
            optimizer.zero_grad()
            output = model(x)
            loss = loss_fn(output, y)
            loss.backward()
            optimizer.step()
            strategy.log(loss=loss)
            num_seen += len(y)
            num_right += int((output.argmax(1) == y).sum())
            total_loss += loss.item() * len(y)
        if group.rank == 0:
            print(f"epoch {epoch + 1}: loss {total_loss / num_seen:.4f}, accuracy {num_right / num_seen:.1%}")
    distance = strategy.consensus_distance()

if group.rank == 0:
    x, y = digits(train=False)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    workers = "1 worker" if group.size == 1 else f"{group.size} workers"
    print(f"test accuracy {accuracy:.1%}, consensus distance {distance:.2g} ({strategy.name}, {workers})")
