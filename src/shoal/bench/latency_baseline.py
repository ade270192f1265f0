"""Model parallelism without servers: one process holds all blocks and sends one batch after another through.

'fast': consecutive blocks lie on one device and nothing is waited for, an upper bound; forward, a device
works on the next batch while others work on this one, as GPUs do by themselves. 'slow': blocks are dealt to
devices in turn, as strangers would hold them, and every block's answer takes a random delay, one batch at a
time.
On a CPU a device is a thread with its share of the cores.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal.bench.latency_config import LatencyConfig, Passes
from shoal.bench.latency_flow import Pings
from shoal.core import Deadline, LoopThread, fanout
from shoal.core.placement import num_cores
from shoal.experts.classes import expert_class
from shoal.experts.training import TrainingSettings, make_optimizer

Rest = Callable[[torch.device], None]
"""What follows a block on its device."""


class Baseline:
    """All blocks of the model, to be placed and then measured."""

    def __init__(self, config: LatencyConfig, seed: int) -> None:
        if config.device == "cpu":
            torch.set_num_threads(max(1, num_cores() // len(config.gpus)))
        torch.manual_seed(seed)
        self._config = config
        kind = expert_class(config.expert_class)
        self._blocks = [kind.make(config.hid_dim) for _ in range(config.num_layers)]
        (self._input,), _ = kind.example(config.hid_dim, config.batch_size)
        self._gradient = torch.randn_like(self._input)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._devices: list[torch.device] = []

    def place(self, *, in_turn: bool) -> None:
        """Put every block on its device: consecutive ones together, or one here and one there."""
        config = self._config
        numbers = [
            config.gpus[layer % len(config.gpus) if in_turn else layer // config.layers_per_gpu]
            for layer in range(config.num_layers)
        ]
        names = ["cpu" if config.device == "cpu" else f"cuda:{number}" for number in numbers]
        self._devices = [torch.device(name) for name in names]
        for block, device in zip(self._blocks, self._devices, strict=True):
            block.to(device)
        if "forward+backward" in config.passes:
            made = [make_optimizer(block, TrainingSettings()) for block in self._blocks]
            self._optimizers = [optimizer for optimizer in made if optimizer is not None]

    def latencies(self, passes: Passes, pings: Pings | None = None) -> list[float]:
        """Seconds of each batch, the first left out."""
        push, took_s = self._pusher(passes, pings), []
        for _ in range(self._config.batches_for_latency + 1):
            began_s = time.perf_counter()
            push()
            self._synchronize(self._devices)
            took_s.append(time.perf_counter() - began_s)
        return took_s[1:]

    def rates(self, passes: Passes, pings: Pings | None = None) -> list[float]:
        """Samples a second of each run, after one batch that does not count."""
        config, rates = self._config, []
        with contextlib.ExitStack() as stack:
            push_all = self._many_pusher(passes, pings, stack)
            push_all(1)
            for _ in range(config.throughput_runs):
                self._synchronize(self._devices)
                began_s = time.perf_counter()
                push_all(config.batches_for_throughput)
                self._synchronize(self._devices)
                took_s = time.perf_counter() - began_s
                rates.append(config.batches_for_throughput * config.batch_size / took_s)
        return rates

    def _many_pusher(
        self, passes: Passes, pings: Pings | None, stack: contextlib.ExitStack
    ) -> Callable[[int], None]:
        """What sends so many batches through; threads that it needs live as long as the stack."""
        if self._config.device == "cpu" and pings is None and passes == "forward":
            return _Stages(self._stages(), self._input, stack).push_all
        push = self._pusher(passes, pings)

        def push_all(num_batches: int) -> None:
            for _ in range(num_batches):
                push()

        return push_all

    def _stages(self) -> list[nn.Sequential]:
        """The blocks of each device."""
        count = self._config.layers_per_gpu
        return [nn.Sequential(*self._blocks[at : at + count]) for at in range(0, len(self._blocks), count)]

    def _pusher(self, passes: Passes, pings: Pings | None) -> Callable[[], None]:
        push = self._forward if passes == "forward" else self._train
        return functools.partial(push, self._rester(pings))

    def _rester(self, pings: Pings | None) -> Rest:
        """Nothing, or the way of an answer, which begins when the answer is there."""
        if pings is None:
            return lambda device: None

        def rest(device: torch.device) -> None:
            self._synchronize([device])
            time.sleep(pings.draw_s())

        return rest

    @torch.no_grad()
    def _forward(self, rest: Rest) -> None:
        x = self._input
        for block, device in zip(self._blocks, self._devices, strict=True):
            x = block(x.to(device, non_blocking=True))
            rest(device)

    def _train(self, rest: Rest) -> None:
        """Forward and backward block by block; each steps when its gradient is there, as experts do."""
        x, passed = self._input, []
        for block, device in zip(self._blocks, self._devices, strict=True):
            leaf = x.detach().to(device, non_blocking=True).requires_grad_()
            x = block(leaf)
            passed.append((leaf, x))
            rest(device)
        gradient = self._gradient
        for (leaf, y), optimizer, device in zip(
            reversed(passed), reversed(self._optimizers), reversed(self._devices), strict=True
        ):
            torch.autograd.backward(y, gradient.to(device, non_blocking=True))
            assert leaf.grad is not None
            gradient = leaf.grad
            optimizer.step()
            optimizer.zero_grad()
            rest(device)

    def _synchronize(self, devices: Sequence[torch.device]) -> None:
        if self._config.device == "cuda":
            for device in dict.fromkeys(devices):
                torch.cuda.synchronize(device)


class _Stages:
    """A thread for each device of a CPU, through which batches go in order."""

    def __init__(self, stages: Sequence[nn.Module], batch: torch.Tensor, stack: contextlib.ExitStack) -> None:
        self._stages = stages
        self._input = batch
        self._loop = stack.enter_context(LoopThread("batches"))
        self._threads = [stack.enter_context(LoopThread(f"stage-{at}")) for at in range(len(stages))]

    def push_all(self, num_batches: int) -> None:
        """Until the last of them has come out."""
        pushes = [self._push() for _ in range(num_batches)]
        for outcome in self._loop.run(fanout(pushes, Deadline.never())):
            if outcome is not None:
                raise outcome

    async def _push(self) -> None:
        x = self._input
        for thread, stage in zip(self._threads, self._stages, strict=True):
            x = await thread.run_blocking(functools.partial(_compute, stage, x))


@torch.no_grad()
def _compute(stage: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = stage(x)
    return y
