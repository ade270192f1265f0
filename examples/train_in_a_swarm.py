"""Learns to read digits with whoever else runs this program: start it in as many shells as you like.

python examples/train_in_a_swarm.py --listen 127.0.0.1:31337
python examples/train_in_a_swarm.py --join 127.0.0.1:31337
python examples/train_in_a_swarm.py --join 127.0.0.1:31337 --local-steps 50
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data import digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--join", action="append", default=[], help="HOST:PORT of a peer of the swarm")
parser.add_argument("--listen", help="HOST:PORT that others join; without --join it begins a swarm")
parser.add_argument("--secret-file", help="file of the swarm's secret; needed between machines")
parser.add_argument("--run", default="digits", help="name of the run")
parser.add_argument("--target-samples", type=int, default=512, help="of all members, for one step")
parser.add_argument("--local-steps", type=int, default=0, help="DiLoCo rounds instead, after so many steps")
parser.add_argument("--min-peers", type=int, default=1, help="members to wait for at the beginning")
parser.add_argument("--steps", type=int, default=100, help="steps of the run after which this program ends")
parser.add_argument("--minority-after", type=float, default=120, help="seconds until a fork")
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 4 * 4, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
loss_fn = nn.CrossEntropyLoss()
torch.seed()  # every member draws batches of its own
loader = DataLoader(TensorDataset(*digits()), batch_size=32, shuffle=True)

listen = args.listen or "127.0.0.1:0"
rounds = {"local_steps": args.local_steps} if args.local_steps else {"target_samples": args.target_samples}
with shoal.connect(*args.join, listen=listen, secret_file=args.secret_file) as swarm:
    print(f"others join with --join {swarm.address}", flush=True)
    strategy = shoal.SwarmTraining(swarm, run=args.run, minority_after=args.minority_after, **rounds)
    with strategy.attach(model, optimizer):
        while strategy.num_peers < args.min_peers:
            time.sleep(0.1)
        told = strategy.run_steps
        while strategy.run_steps < args.steps:
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                strategy.log(loss=loss)
                if strategy.run_steps >= told + 10:
                    told = strategy.run_steps
                    print(f"step {told}: loss {loss:.4f}, {strategy.num_peers} members", flush=True)
                if strategy.run_steps >= args.steps:
                    break

x, y = digits(train=False)
with torch.no_grad():
    accuracy = (model(x).argmax(1) == y).float().mean().item()
ledger = strategy.ledger
print(f"accuracy on unseen digits: {accuracy:.1%}")
print(f"samples: {ledger.num_added} computed, {ledger.num_committed} counted, {ledger.num_lost} lost")
