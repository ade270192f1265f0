"""A gate over experts that are found in a DHT, as in Learning@home: forward, backward, and who took part.

python examples/gate_over_the_dht.py                          starts a root peer and two servers here, or:
shoal dht --listen 127.0.0.1:31337
shoal serve --join 127.0.0.1:31337 --uid-pattern 'expert.[0:32].[0:32]' --num-experts 8
python examples/gate_over_the_dht.py --join 127.0.0.1:31337
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator

import torch

import shoal

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--join", metavar="HOST:PORT", help="a peer of a swarm that has servers; none is started")
parser.add_argument("--num-servers", type=int, default=2, help="that are started here")
parser.add_argument("--num-experts", type=int, default=8, help="of each of them")
parser.add_argument("--hidden-dim", type=int, default=1024)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--k-best", type=int, default=4, help="experts of each sample")
parser.add_argument("--seed", type=int, default=0)


@contextlib.contextmanager
def shoal_program(*arguments: object) -> Iterator[subprocess.Popen]:
    """`shoal` in a process of its own, until the block ends."""
    command = [sys.executable, "-m", "shoal", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()


def first_words(process: subprocess.Popen) -> str:
    """What it says until it is ready, when it tells how to end it."""
    said = ""
    for line in process.stdout:
        said += line
        if "Ctrl-C ends it." in line:
            return said
    raise SystemExit(f"{' '.join(process.args[3:])} could not start.")


def start_swarm(stack: contextlib.ExitStack, args: argparse.Namespace) -> str:
    """A root peer and servers around it; where to join."""
    root = stack.enter_context(shoal_program("dht", "--listen", "127.0.0.1:0"))
    address = first_words(root).split("Listening on ")[1].split(",")[0]
    print(f"root peer at {address}")
    for _ in range(args.num_servers):  # one after another: each draws uids that nobody has
        where = ("--join", address, "--uid-pattern", "expert.[0:32].[0:32]")
        what = ("--num-experts", args.num_experts, "--hidden-dim", args.hidden_dim)
        print(first_words(stack.enter_context(shoal_program("serve", *where, *what))), end="")
    return address


def main() -> None:
    """Call the experts twice."""
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    with contextlib.ExitStack() as stack:
        address = args.join or start_swarm(stack, args)
        swarm = stack.enter_context(shoal.connect(address))
        moe = shoal.MixtureOfExperts(swarm, "expert", args.hidden_dim, (32, 32), k_best=args.k_best)
        x = torch.randn(args.batch_size, args.hidden_dim, requires_grad=True)
        for title in ("first call, which asks the DHT", "second call, which knows the grid"):
            output = moe(x)
            output.sum().backward()
            print(f"\n{title}\n{moe.last_call}")
        gradients = [x.grad, *(parameter.grad for parameter in moe.parameters())]
        norms = ", ".join(f"{gradient.norm():.3g}" for gradient in gradients)
        print(f"\noutput {list(output.shape)}; gradients of the input and of the gate: {norms}")


if __name__ == "__main__":
    main()
