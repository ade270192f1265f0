"""Learns to read digits with a model whose middle is elsewhere: a mixture of experts that two servers hold.

python examples/train_with_experts.py                         starts two servers here, and trains
shoal dht --listen 127.0.0.1:31337                            or by hand, in several shells, two of the next:
shoal serve --join 127.0.0.1:31337 --uid-pattern 'digits.[0:2].[0:4]' --num-experts 4 --hidden-dim 64
python examples/train_with_experts.py --join 127.0.0.1:31337
"""

import argparse
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data import digits

HIDDEN, GRID = 64, (2, 4)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--lr", type=float, default=0.003, help="of what is trained here")
parser.add_argument("--join", metavar="HOST:PORT", help="a peer of a swarm that has servers; none is started")
parser.add_argument("--seed", type=int, default=0)


@contextlib.contextmanager
def expert_servers(address: shoal.Address) -> Iterator[None]:
    """Processes that serve the experts, a row of the grid each, in the swarm at this address."""
    num_rows, num_columns = GRID
    serve = [sys.executable, "-m", "shoal", "serve", "--join", str(address), "--hidden-dim", str(HIDDEN)]
    serve += ["--num-experts", str(num_columns), "--device", "cpu", "--num-threads", "1"]
    with contextlib.ExitStack() as stack:
        servers = []
        for row in range(num_rows):
            pattern = f"digits.[{row}:{row + 1}].[0:{num_columns}]"
            command = [*serve, "--uid-pattern", pattern]
            server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(server.communicate)
            servers.append(server)
        for server in servers:
            stack.callback(server.terminate)
        for server in servers:
            for line in server.stdout:
                print(line, end="")
                if line.startswith("Ready"):
                    break
            else:
                raise SystemExit("A server could not start.")
        yield


def accuracy_of(model: nn.Module) -> float:
    """On digits that it has not seen."""
    x, y = digits(train=False)
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


def main() -> None:
    """Train."""
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # leaves the cores to the servers
    with contextlib.ExitStack() as stack:
        if args.join:
            swarm = stack.enter_context(shoal.connect(args.join))
        else:
            swarm = stack.enter_context(shoal.connect(listen="127.0.0.1:0"))
            stack.enter_context(expert_servers(swarm.address))
        moe = shoal.MixtureOfExperts(swarm, "digits", HIDDEN, GRID, k_best=2)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, HIDDEN), nn.ReLU(), moe, nn.Linear(HIDDEN, 10))
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        loss_fn = nn.CrossEntropyLoss()
        loader = DataLoader(TensorDataset(*digits()), batch_size=args.batch_size, shuffle=True)

        num_by_peer = Counter()
        for epoch in range(args.epochs):
            total_loss = 0.0
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
                total_loss += loss.item() * len(y)
                for call in moe.last_call.experts:
                    num_by_peer[call.peer] += call.num_samples if call.is_answered else 0
            loss, accuracy = total_loss / len(loader.dataset), accuracy_of(model)
            print(f"epoch {epoch + 1}: loss {loss:.4f}, test accuracy {accuracy:.1%}")
        print("samples served: " + ", ".join(f"{num} by {peer}" for peer, num in num_by_peer.items()))
        print(moe.last_call)


if __name__ == "__main__":
    main()
