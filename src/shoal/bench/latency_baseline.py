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
import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal.bench.latency_config import LatencyConfig, Passes
from shoal.bench.latency_flow import Load, Pings, rates
from shoal.core import LoopThread
from shoal.core.placement import num_cores
from shoal.experts.classes import TrainingSettings, expert_class, make_optimizer

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
        """Samples a second of each run; what goes before the first does not count."""
        if pings is not None or passes != "forward":
            return self._rates_alone(passes, pings)
        if self._config.device == "cpu":
            return _piped_rates(self._stages(), self._input, self._config)
        return self._rates_of_events()

    def _rates_alone(self, passes: Passes, pings: Pings | None) -> list[float]:
        """One batch at a time."""
        config, rates = self._config, []
        push = self._pusher(passes, pings)
        push()
        for _ in range(config.throughput_runs):
            self._synchronize(self._devices)
            began_s = time.perf_counter()
            for _ in range(config.batches_for_throughput):
                push()
            self._synchronize(self._devices)
            took_s = time.perf_counter() - began_s
            rates.append(config.batches_for_throughput * config.batch_size / took_s)
        return rates

    def _rates_of_events(self) -> list[float]:
        """Batch after batch, without a pause between runs: the last GPU says when each run's last is out."""
        config, push = self._config, self._pusher("forward", None)
        ends = []
        for run in range(config.throughput_runs + 1):
            for _ in range(config.batches_for_throughput if run else len(config.gpus)):
                push()
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record(torch.cuda.current_stream(self._devices[-1]))
            ends.append(end)
        self._synchronize(self._devices)
        took_s = [1e-3 * began.elapsed_time(end) for began, end in itertools.pairwise(ends)]
        return [config.batches_for_throughput * config.batch_size / run_s for run_s in took_s]

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


def _piped_rates(stages: Sequence[nn.Module], batch: torch.Tensor, config: LatencyConfig) -> list[float]:
    """A thread for each device of a CPU, through which batches go in order, one more than there are devices.

    So none of them waits, and runs follow each other without a pause.
    """
    with contextlib.ExitStack() as stack:
        loop = stack.enter_context(LoopThread("batches"))
        threads = [stack.enter_context(LoopThread(f"stage-{at}")) for at in range(len(stages))]
        clients = [_Piped(threads, stages, batch) for _ in range(len(stages) + 1)]
        load = Load(config.batch_size, config.batches_for_throughput, config.throughput_runs)
        return loop.run(rates(clients, load))


class _Piped:
    """One of the batches that are under way."""

    def __init__(
        self, threads: Sequence[LoopThread], stages: Sequence[nn.Module], batch: torch.Tensor
    ) -> None:
        self._places = list(zip(threads, stages, strict=True))
        self._input = batch

    async def push(self) -> None:
        x = self._input
        for thread, stage in self._places:
            x = await thread.run_blocking(functools.partial(_compute, stage, x))


@torch.no_grad()
def _compute(stage: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = stage(x)
    return y
