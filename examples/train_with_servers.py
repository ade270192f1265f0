"""Learns to read digits with the model on parameter servers, on one machine or on several.

python examples/train_with_servers.py
shoal run -np 2 --num-servers 1 examples/train_with_servers.py
shoal run -np 6 --num-servers 2 -H node1:4,node2:4 examples/train_with_servers.py --mode bounded
shoal run -np 2 --num-servers 1 --checkpoint runs/digits --max-restarts 2 examples/train_with_servers.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data import digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--mode", default="async", choices=["async", "bounded", "sync"])
parser.add_argument("--staleness", type=int, default=2, help="of bounded: rounds that one may lead by")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=32, help="of one worker")
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
loss_fn = nn.CrossEntropyLoss()

group = shoal.init()
strategy = shoal.ParameterServer(group, mode=args.mode, staleness=args.staleness)
loader = DataLoader(TensorDataset(*digits()), batch_size=args.batch_size, shuffle=True)
loader = shoal.shard(loader, group)

# a server stays in this line until all workers are done, and ends there
with strategy.attach(model, optimizer):
    # after a resumption this is the epoch that was under way
    for epoch in range(loader.epoch, args.epochs):
        total_loss = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            total_loss += loss.item() / len(loader)
        print(f"worker {group.rank} on machine {group.machine}, epoch {epoch + 1}: loss {total_loss:.4f}")

if group.rank == 0:
    x, y = digits(train=False)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    workers = "1 worker" if group.size == 1 else f"{group.size} workers"
    print(f"test accuracy {accuracy:.1%} ({strategy.name}, {args.mode}, {workers})")
    # what each server had counted when this worker ended
    for number, counted in enumerate(strategy.stats.get("servers") or []):
        behind, leads = counted["staleness"], counted["leads"]
        bound = f", its worker leading by {leads['max_behind']} rounds at most" if leads["num_mixed"] else ""
        print(
            f"server {number}: {counted['num_applied']} gradients applied, {counted['num_dropped']} dropped, "
            f"{behind['mean_behind']:.2f} updates behind on average, {behind['max_behind']} at most{bound}"
        )
