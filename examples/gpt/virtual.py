"""Trains the GPT of train.py on a network that is not here: in virtual time, by one strategy after another.

python examples/gpt/virtual.py
python examples/gpt/virtual.py --profile home --workers 8 --strategies all-reduce,diloco,swarm

Every gradient is computed for real, by workers that take turns in this process. A step is charged --step-ms,
and what strategies send takes the time that the network's profile says, so all that is printed but the losses
is of that network, and equal in every run.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import functional

import shoal
from shoal.data.text_set import NUM_CHARACTERS, next_characters
from shoal.models.gpt import Gpt, GptShape
from shoal.simulate.exact import SimulatedWorker, run_exact
from shoal.simulate.swarm import run_swarm
from shoal.simulate.world import Compute, World
from shoal.strategies import make_strategy
from shoal.transport import Profile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--strategies", default="all-reduce,diloco,swarm", metavar="NAME,...")
parser.add_argument("--profile", default="three-continents", help="a preset of networks, or a TOML file")
parser.add_argument("--workers", type=int, default=4)
parser.add_argument("--steps", type=int, default=400, help="optimizer steps of each worker")
parser.add_argument("--step-ms", type=float, default=100.0, help="what a step is charged")
parser.add_argument("--local-steps", type=int, default=50, help="of diloco and the swarm, between two rounds")
parser.add_argument("--codec", default="int8", help="of what the swarm sends")
parser.add_argument("--batch-size", type=int, default=12, help="sequences of one worker in a step")
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--block", type=int, default=64, help="characters that the model sees at once")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--warmup", type=int, default=50)
parser.add_argument("--eval-every", type=int, default=50, metavar="N")
args = parser.parse_args()

shape = GptShape(args.layers, args.heads, args.width, NUM_CHARACTERS, args.block)
texts = {
    train: torch.cat([before, following[:, None].to(torch.uint8)], dim=1)
    for train in (True, False)
    for before, following in [next_characters(args.block, train=train)]
}
test_text = texts[False][torch.linspace(0, len(texts[False]) - 1, 600).long()].long()


@dataclass
class Course:
    """How one strategy went: when rank 0 had done how many steps, and how good its model was then."""

    points: list[tuple[int, float, float]] = field(default_factory=list)
    sent_bytes: float = 0.0

    def loss_at(self, seconds: float) -> str:
        """The loss at the last evaluation until then; a dash where there was none."""
        return next((f"{loss:.2f}" for _, now_s, loss in reversed(self.points) if now_s <= seconds), "-")


def loss_of(model: Gpt, text: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each character of some sequences from those before it, in nats."""
    logits = model(text[:, :-1])
    return functional.cross_entropy(logits.reshape(-1, NUM_CHARACTERS), text[:, 1:].reshape(-1))


@torch.no_grad()
def evaluate(model: Gpt) -> float:
    """The loss of text that nobody trains on."""
    model.eval()
    loss = float(loss_of(model, test_text))
    model.train()
    return loss


def batches(rank: int) -> Iterator[torch.Tensor]:
    """Sequences that one worker draws from the text."""
    choice = torch.Generator().manual_seed(rank)
    while True:
        yield texts[True][torch.randint(len(texts[True]), (args.batch_size,), generator=choice)].long()


def strategy_for(name: str, worker: SimulatedWorker) -> shoal.Strategy:
    """The strategy, by the name that `shoal run --strategy` takes."""
    if worker.peer is not None:
        return shoal.SwarmTraining(
            worker.peer.swarm, run="gpt", local_steps=args.local_steps, overlap="delayed", codec=args.codec
        )
    options = {"local_steps": args.local_steps} if name in ("diloco", "local-sgd", "noloco") else {}
    return make_strategy(worker.group, name, **options)


def train(name: str, course: Course, worker: SimulatedWorker) -> float:
    """The usual loop of one worker; returns the bytes that it has sent."""
    torch.manual_seed(1337)
    model = Gpt(shape)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.99), weight_decay=0.1)
    text = batches(worker.rank)
    with worker.charged(model), strategy_for(name, worker).attach(model, optimizer):
        if worker.peer is not None:
            worker.peer.begin()
        began_s = worker.clock.now_s()
        for step in range(1, args.steps + 1):
            optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / args.warmup)
            optimizer.zero_grad()
            loss_of(model, next(text)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if worker.rank == 0 and step % args.eval_every == 0:
                course.points.append((step, worker.clock.now_s() - began_s, evaluate(model)))
                print("{}: step {}, {:.0f} s, loss {:.3f}".format(name, *course.points[-1]), flush=True)
    return worker.peer.num_sent_bytes() if worker.peer is not None else worker.group.stats.sent_bytes


def main() -> None:
    """Let each strategy train in a world of its own, and print the table."""
    torch.set_num_threads(1)
    courses = {}
    for name in args.strategies.split(","):
        course = courses[name] = Course()
        world = World(
            num_workers=args.workers,
            workers_per_machine=1,
            profile=Profile.load(args.profile),
            compute=Compute(step_ms=args.step_ms),
        )
        run = run_swarm if name == "swarm" else run_exact
        outcomes = run(world, lambda worker, name=name, course=course: train(name, course, worker))
        course.sent_bytes = sum(outcome.value or 0.0 for outcome in outcomes) / args.workers
    first_s = min(course.points[-1][1] for course in courses.values())
    print(f"\n{args.workers} workers, {args.profile}, a step {args.step_ms:g} ms")
    columns = f"loss after {args.steps} steps | seconds for them | loss after {first_s:.1f} s | MB sent"
    print(f"| strategy | {columns} |")
    print("|---|--:|--:|--:|--:|")
    for name, course in courses.items():
        _, seconds, loss = course.points[-1]
        sent_mb = course.sent_bytes / 1e6
        print(f"| `{name}` | {loss:.2f} | {seconds:.1f} | {course.loss_at(first_s)} | {sent_mb:.3g} |")


if __name__ == "__main__":
    main()
