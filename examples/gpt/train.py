"""Trains a GPT that writes one character after another, from text to samples, under any strategy.

python examples/gpt/train.py
shoal run -np 2 --strategy diloco examples/gpt/train.py --out out-gpt
shoal run -np 2 --strategy swarm --option target_samples=24 examples/gpt/train.py

The size is that of nanoGPT on a CPU (0.8 million parameters), which takes some minutes; README.md has the
flags of its size on a GPU. The text is Shoal's documentation, or a file of your own (--text).
"""

import argparse
import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from sample import SHAPE_FILE, generate
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.data.text_set import NUM_CHARACTERS, decode, encode, next_characters
from shoal.models.gpt import Gpt, GptShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
data = parser.add_argument_group("data")
data.add_argument("--text", type=Path, help="a text file of your own, in ASCII")
data.add_argument("--block", type=int, default=64, help="characters that the model sees at once")
data.add_argument("--batch-size", type=int, default=12, help="sequences of one worker in a forward pass")
size = parser.add_argument_group("model")
size.add_argument("--layers", type=int, default=4)
size.add_argument("--heads", type=int, default=4)
size.add_argument("--width", type=int, default=128)
steps = parser.add_argument_group("training")
steps.add_argument("--steps", type=int, default=2000, help="optimizer steps of each worker")
steps.add_argument("--accumulate", type=int, default=1, metavar="N", help="forward passes of one step")
steps.add_argument("--lr", type=float, default=1e-3, help="learning rate after the warm-up")
steps.add_argument("--min-lr", type=float, default=1e-4, help="learning rate at the end")
steps.add_argument("--warmup", type=int, default=100, metavar="N", help="steps in which the rate rises")
steps.add_argument("--weight-decay", type=float, default=0.1)
steps.add_argument("--clip", type=float, default=1.0, help="norm to which gradients are clipped; 0: never")
steps.add_argument("--seed", type=int, default=1337, help="give each shell of a swarm another one")
machine = parser.add_argument_group("machine")
machine.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
machine.add_argument("--dtype", choices=DTYPES, default="float32", help="below float32: mixed precision")
machine.add_argument("--compile", action="store_true", help="torch.compile; the first step takes a while")
output = parser.add_argument_group("output")
output.add_argument("--eval-every", type=int, default=250, metavar="N")
output.add_argument("--eval-batches", type=int, default=50, metavar="N")
output.add_argument("--out", type=Path, metavar="DIR", help="save checkpoints here")
output.add_argument("--save-every", type=int, default=500, metavar="N")
output.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of --out")
output.add_argument("--sample", type=int, default=300, metavar="N", help="characters to write at the end")
args = parser.parse_args()
if args.resume and args.out is None:
    parser.error("--resume goes on from a checkpoint: name its folder with --out DIR")


def sequences(*, train: bool) -> torch.Tensor:
    """Every run of `block` characters and the one that follows, of the first or the last 10 % of a text."""
    if args.text is None:
        before, following = next_characters(args.block, train=train)
        return torch.cat([before, following[:, None].to(torch.uint8)], dim=1)
    codes = encode(args.text.read_text())
    end = len(codes) * 9 // 10
    part = codes[:end] if train else codes[end:]
    if len(part) <= args.block:
        parser.error(f"{args.text} is too short: a tenth of it must be longer than --block {args.block}")
    return part.unfold(0, args.block + 1, 1)


def rate_factor(step: int) -> float:
    """The share of --lr after so many steps: a linear warm-up, then half a cosine down to --min-lr."""
    if step < args.warmup:
        return (step + 1) / (args.warmup + 1)
    progress = min(1.0, (step - args.warmup) / max(1, args.steps - args.warmup))
    lowest = args.min_lr / args.lr
    return lowest + (1 - lowest) * (1 + math.cos(math.pi * progress)) / 2


# The model, its optimizer and the data. Nothing here knows of other workers.
torch.manual_seed(args.seed)
shape = GptShape(args.layers, args.heads, args.width, NUM_CHARACTERS, args.block)
group = shoal.init()
device = torch.device(args.device)
if device.type == "cuda":
    device = torch.device("cuda", group.local_rank % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
model = Gpt(shape).to(device)
matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
optimizer = torch.optim.AdamW(
    [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},  # biases and norms are not drawn to zero
    ],
    lr=args.lr,
    betas=(0.9, 0.99),
)
scaler = torch.amp.GradScaler(device.type, enabled=args.dtype == "float16")
precision = torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "float32")
test_text = sequences(train=False)
loader = DataLoader(
    TensorDataset(sequences(train=True)),
    batch_size=args.batch_size,
    shuffle=True,
    drop_last=True,
    pin_memory=device.type == "cuda",
)
if args.compile:
    # of the forward alone: a strategy looks at what happens around it
    model.forward = torch.compile(model.forward)

# What makes it the training of a group: a strategy, and this worker's part of the data.
strategy = shoal.from_args(group)
is_swarm = strategy.name == "swarm"
counts_rounds = is_swarm and strategy.options.target_samples > 0  # all members make one step together
if counts_rounds:
    # the run counts the steps, and whoever joins late has to have the run's rate
    strategy = shoal.SwarmTraining(
        group, options=strategy.options, scheduler=lambda made: LambdaLR(made, rate_factor)
    )
loader = shoal.shard(loader, group, seed=args.seed)
saves = args.out is not None and (group.rank == 0 or not is_swarm)  # members of a swarm save alone
if saves and group.rank == 0:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / SHAPE_FILE).write_text(json.dumps({"layers": args.layers, "heads": args.heads}))
if args.resume and any(args.out.glob("step-*")):
    strategy.load(args.out)


def loss_of(text: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each character of some sequences from those before it, in nats."""
    text = text.to(device, non_blocking=True).long()
    with precision:
        logits = model(text[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, NUM_CHARACTERS), text[:, 1:].reshape(-1))


@torch.no_grad()
def evaluate() -> float:
    """The loss of text that nobody trains on, on sequences that are spread over all of it."""
    model.eval()
    num = min(len(test_text) // args.batch_size, args.eval_batches) * args.batch_size
    chosen = test_text[torch.linspace(0, len(test_text) - 1, num).long()]
    losses = [loss_of(batch) * len(batch) for batch in chosen.split(args.batch_size)]
    model.train()
    return float(torch.stack(losses).sum()) / num


def endless() -> Iterator[torch.Tensor]:
    """The batches of one epoch after another; in a run that was resumed from where it stopped."""
    while True:
        for (text,) in loader:
            yield text


num_parameters = sum(parameter.numel() for parameter in model.parameters())
workers = "1 worker" if group.size == 1 else f"{group.size} workers"
if group.rank == 0:
    print(f"{num_parameters:,} parameters, {strategy.name}, {workers}, on {device}", flush=True)
batches = endless()
with strategy.attach(model, optimizer):
    step = first = strategy.run_steps if counts_rounds else strategy.steps
    began_s = time.perf_counter()
    while step < args.steps:
        if not counts_rounds:
            for param_group in optimizer.param_groups:
                param_group["lr"] = args.lr * rate_factor(step)
        for number in range(args.accumulate):
            is_last = number == args.accumulate - 1
            with contextlib.nullcontext() if is_last else strategy.accumulate():
                loss = loss_of(next(batches)) / args.accumulate
                scaler.scale(loss).backward()
        if args.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        strategy.log(loss=loss.detach() * args.accumulate)
        before, step = step, strategy.run_steps if counts_rounds else strategy.steps
        if step == before:  # a swarm that has not enough samples yet
            continue
        if step % args.eval_every == 0 and group.rank == 0:
            step_ms = (time.perf_counter() - began_s) / (step - first) * 1000
            rate = optimizer.param_groups[0]["lr"]
            print(
                f"step {step}: loss {evaluate():.4f}, learning rate {rate:.1e}, {step_ms:.0f} ms a step",
                flush=True,
            )
        if saves and (step % args.save_every == 0 or step >= args.steps):
            strategy.save(args.out)

# Here the models of all workers are equal, or this worker's own is as good as any.
if group.rank == 0:
    print(f"loss {evaluate():.4f} after {step} steps of {workers} ({strategy.name})")
    if args.sample:
        model.eval()
        if args.compile:
            del model.forward  # a text that grows would be compiled once for each length
        start = torch.zeros(1, 1, dtype=torch.long, device=device)
        print("---\n" + decode(generate(model, start, args.sample, args.block)[0]))
