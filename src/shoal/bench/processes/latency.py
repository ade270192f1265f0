"""What measures `shoal bench latency`: model parallelism in this process, clients of servers, virtual time.

A client pushes batches through all blocks one after another; `latencies` and `rates` time it, whichever kind
of client it is. Those of a process of clients are coroutines on one loop: what they ask is computed by
servers over real sockets, and the ping of each answer is waited for where it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import torch
from torch import nn

from shoal.bench.frame import Tell
from shoal.bench.latency import BACKWARD_COST, RECOMPUTED_COST, LatencyConfig, Method, Passes
from shoal.bench.processes.experts import be_clients
from shoal.bench.workers import Parent
from shoal.core import Address, Deadline, LoopThread, Peer, Scope, ShoalError, fanout, results_of
from shoal.core.clock import Clock, running_clock
from shoal.core.identity import Identity
from shoal.core.placement import num_cores
from shoal.core.virtual import run_virtual
from shoal.experts.classes import TrainingSettings, expert_class, make_optimizer
from shoal.experts.client.client import ExpertClient
from shoal.experts.expert import Expert
from shoal.experts.server.jobs import Job, JobKind, JobQueue
from shoal.experts.settings import ServerSettings
from shoal.transport import Membership, Reply, SwarmSecret
from shoal.transport.network.distributions import Draws, Exponential, sampler_of

# --- pings and flows ---


class Client(Protocol):
    """Whoever sends batches through all blocks."""

    async def push(self) -> None:
        """One batch, from the first block to the last, and back where backward is measured."""


class Pings:
    """Waits of one client: mean × Exp(1), drawn as the links of a profile draw their delays.

    One wait for each answer, not for each packet: an answer of many packets with a delay each would arrive
    with the slowest of them. `who` and the seed decide the numbers, so that no two clients share theirs.
    """

    def __init__(self, ping_s: float, seed: int, who: str) -> None:
        delay_ms = Exponential(1e3 * ping_s) if ping_s > 0 else 0.0
        self._sample_s = sampler_of(delay_ms)
        self._uniform = Draws(seed, "bench latency", who, repr(ping_s)).uniform

    def draw_s(self) -> float:
        """The next wait of this client."""
        return self._sample_s(self._uniform())


async def latencies(client: Client, num_batches: int) -> list[float]:
    """Seconds of each batch of one client; one more goes first, and does not count."""
    clock = running_clock()
    took_s = []
    for _ in range(num_batches + 1):
        began_s = clock.now_s()
        await client.push()
        took_s.append(clock.now_s() - began_s)
    return took_s[1:]


async def rates(clients: Sequence[Client], config: LatencyConfig) -> list[float]:
    """Samples a second of all clients, in each run of so many batches of each, on average.

    Runs follow each other without a pause: nobody waits for the slowest client at the end of one, and what
    the first batches do (as many as there are clients) is in none. When the last run is over, what is still
    under way is given up.
    """
    flow = _Flow(len(clients), config, running_clock())
    failures: list[Exception] = []

    async def keep_pushing(client: Client) -> None:
        try:
            while not flow.is_over:
                await client.push()
                flow.count()
        except Exception as error:
            failures.append(error)
            raise

    calls = [keep_pushing(client) for client in clients]
    await fanout(calls, Deadline.never(), is_enough=lambda _: flow.is_over or bool(failures))
    if not flow.is_over:
        raise failures[0]
    return flow.rates


class _Flow:
    """Counts batches, and takes the time whenever a run is full."""

    def __init__(self, num_clients: int, config: LatencyConfig, clock: Clock) -> None:
        self.rates: list[float] = []
        self._config = config
        self._clock = clock
        self._run_size = num_clients * config.batches_for_throughput
        self._num_left = num_clients
        self._began_s: float | None = None

    @property
    def is_over(self) -> bool:
        return len(self.rates) == self._config.throughput_runs

    def count(self) -> None:
        self._num_left -= 1
        if self._num_left or self.is_over:
            return
        now_s = self._clock.now_s()
        if self._began_s is not None:
            self.rates.append(self._run_size * self._config.batch_size / (now_s - self._began_s))
        self._began_s = now_s
        self._num_left = self._run_size


# --- model parallelism in this process ---

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
            count = self._config.layers_per_gpu
            starts = range(0, len(self._blocks), count)
            stages = [nn.Sequential(*self._blocks[at : at + count]) for at in starts]
            return _piped_rates(stages, self._input, self._config)
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
        return loop.run(rates(clients, config))


class _Piped:
    """One of the batches that are under way."""

    def __init__(
        self, threads: Sequence[LoopThread], stages: Sequence[nn.Module], batch: torch.Tensor
    ) -> None:
        self._shares = list(zip(threads, stages, strict=True))
        self._input = batch

    async def push(self) -> None:
        x = self._input
        for thread, stage in self._shares:
            x = await thread.run_blocking(functools.partial(_compute, stage, x))


@torch.no_grad()
def _compute(stage: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = stage(x)
    return y


# --- a process of clients ---

_CALL_S = 600.0  # hundreds of clients may stand in one line


def attend(arguments: dict[str, Any], parent: Parent) -> None:
    """Be clients until there are no more orders."""
    be_clients(parent, lambda closing: _Crowd(msgspec.convert(arguments, _Share), closing))


class _Share(msgspec.Struct, frozen=True):
    """Which clients a process is, and whom they ask."""

    config: LatencyConfig
    seed: int
    numbers: list[int]
    servers: list[str]

    def peers(self) -> list[tuple[str, Peer]]:
        """The expert of each block and its server: one after another, in turn over the servers."""
        peers = [Peer(Address.parse(server)) for server in self.servers]
        return [
            (f"expert{layer // len(peers)}", peers[layer % len(peers)])
            for layer in range(self.config.layers_per_gpu * len(peers))
        ]

    def membership(self) -> Membership | None:
        """Find the swarm's secret, for servers that the benchmark has not started itself."""
        if not self.config.hosts:
            return None
        file = self.config.secret_file
        secret = SwarmSecret.load(Path(file)) if file is not None else SwarmSecret.from_environment()
        return None if secret is None else Membership(Identity.generate(), secret)


class _Crowd:
    """All clients of one process; its public methods are the orders that they take.

    What cannot be measured is an answer with its `error`: other pings may still do.
    """

    def __init__(self, share: _Share, closing: contextlib.ExitStack) -> None:
        self._config = share.config
        self._loop = closing.enter_context(LoopThread("shoal-net"))
        membership = share.membership()
        self._clients = [
            _Client(
                share, number, closing.enter_context(ExpertClient(loop=self._loop, membership=membership))
            )
            for number in share.numbers
        ]

    def connect(self) -> dict[str, Any]:
        """Every client dials, learns what experts take, and sends one batch through all of them."""
        return self._told(self._connect())

    async def _connect(self) -> list[float]:
        results_of(await fanout([client.warm_up() for client in self._clients], Deadline.never()))
        return []

    def latency(self, ping_s: float, passes: Passes) -> dict[str, Any]:
        """Measure the first client alone: seconds of each batch."""
        client = self._clients[0].under(ping_s, passes, "latency")
        return self._told(latencies(client, self._config.batches_for_latency))

    def throughput(self, ping_s: float, passes: Passes) -> dict[str, Any]:
        """Measure all clients at once: samples a second in each run."""
        clients = [client.under(ping_s, passes, "throughput") for client in self._clients]
        return self._told(rates(clients, self._config))

    def _told(self, work: Coroutine[Any, Any, list[float]]) -> dict[str, Any]:
        try:
            return {"values": self._loop.run(work)}
        except ShoalError as error:
            return {"error": " ".join(str(error).split())}


class _Client:
    """One of them; `under` says how long answers take."""

    def __init__(self, share: _Share, number: int, client: ExpertClient) -> None:
        config = share.config
        self._share = share
        self._number = number
        self._client = client
        self._chain = share.peers()
        torch.manual_seed(share.seed + number)
        (self._input,), _ = expert_class(config.expert_class).example(config.hid_dim, config.batch_size)
        self._gradient = torch.randn_like(self._input)
        self._pings = Pings(0.0, share.seed, "")
        self._is_trained = False

    def under(self, ping_s: float, passes: Passes, phase: str) -> _Client:
        """The same, with pings of its own."""
        self._pings = Pings(ping_s, self._share.seed, f"{phase} {passes} {self._number}")
        self._is_trained = passes == "forward+backward"
        return self

    async def warm_up(self) -> None:
        """Each way once that will be measured, without delays."""
        for passes in self._share.config.passes:
            await self.under(0.0, passes, "warm-up").push()

    async def push(self) -> None:
        """One batch through all blocks, and back where they are trained."""
        client, x, passed = self._client, self._input, []
        for uid, peer in self._chain:
            forwarded = await client.forward(
                uid, [peer], [x], deadline=Deadline.after(_CALL_S), is_kept=self._is_trained
            )
            if self._is_trained:
                passed.append((msgspec.structs.replace(forwarded, outputs=[]), x))
            x = forwarded.outputs[0]
            await asyncio.sleep(self._pings.draw_s())
        gradient = self._gradient
        for forwarded, given in reversed(passed):
            (answer,) = await client.backward(
                forwarded, [given], [gradient], deadline=Deadline.after(_CALL_S)
            )
            assert answer is not None
            gradient = answer
            await asyncio.sleep(self._pings.draw_s())


# --- virtual time ---


class _Point(msgspec.Struct, frozen=True):
    """One method at one ping."""

    config: LatencyConfig
    seed: int
    method: Method
    passes: Passes
    ping_s: float


def run_point(task: dict[str, Any], tell: Tell) -> dict[str, list[float]]:
    """Latencies and rates, for `pool.run_tasks`; too short to tell of its progress."""
    point = msgspec.convert(task, _Point)
    simulate = {"fast": _fast, "slow": _slow, "ours": _ours}[point.method]
    latency_s, samples_per_s = simulate(point)
    return {"latency_s": latency_s, "samples_per_s": samples_per_s}


def _block_s(point: _Point) -> float:
    """Of one batch in one block, there and back."""
    forwards = 1.0 if point.passes == "forward" else 1.0 + BACKWARD_COST
    return point.config.compute_ms * 1e-3 * forwards


def _fast(point: _Point) -> tuple[list[float], list[float]]:
    """An upper bound: forward, every device is busy with a batch of its own; trained, one batch at a time."""
    config, stage_s = point.config, _block_s(point) * point.config.layers_per_gpu
    batch_s = stage_s * len(config.gpus)
    every_s = stage_s if point.passes == "forward" else batch_s
    rate = config.batch_size / every_s
    return [batch_s] * config.batches_for_latency, [rate] * config.throughput_runs


def _slow(point: _Point) -> tuple[list[float], list[float]]:
    """One batch at a time, which waits after every block."""
    config, compute_s = point.config, _block_s(point) * point.config.num_layers
    num_waits = config.calls(point.passes)

    def batch_s(pings: Pings) -> float:
        return compute_s + sum(pings.draw_s() for _ in range(num_waits))

    alone, flow = (Pings(point.ping_s, point.seed, f"{phase} slow") for phase in ("latency", "throughput"))
    latency_s = [batch_s(alone) for _ in range(config.batches_for_latency)]
    num_batches = config.batches_for_throughput
    runs_s = [sum(batch_s(flow) for _ in range(num_batches)) for _ in range(config.throughput_runs)]
    return latency_s, [num_batches * config.batch_size / run_s for run_s in runs_s]


def _ours(point: _Point) -> tuple[list[float], list[float]]:
    config = point.config
    num_batches = config.batches_for_latency
    return (
        run_virtual(_served(point, "latency", 1, lambda clients: latencies(clients[0], num_batches))),
        run_virtual(_served(point, "throughput", config.jobs, lambda clients: rates(clients, config))),
    )


async def _served(
    point: _Point, phase: str, num_clients: int, measure: Callable[[list[Client]], Any]
) -> list[float]:
    """What a measurement of so many clients gives, with a server for each device."""
    devices = [_Device(point.config) for _ in point.config.gpus]
    async with Scope("servers") as scope:
        for device in devices:
            scope.start(device.work())
        clients = [_SimulatedClient(point, devices, phase, number) for number in range(num_clients)]
        values: list[float] = await measure(cast("list[Client]", clients))
        scope.cancel()
    return values


class _Device:
    """A server in virtual time: takes the batch whose turn it is, and keeps it for its cost."""

    def __init__(self, config: LatencyConfig) -> None:
        self._forward_s = config.compute_ms * 1e-3 / config.batch_size
        self._has_news = asyncio.Event()
        settings = ServerSettings(max_batch_size=config.max_batch_size, max_waiting=1 << 30)
        self._queue = JobQueue(settings, self._has_news.set, lambda undone: None)

    async def ask(self, job: Job) -> None:
        """Until it is computed."""
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._queue.put(job, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._queue.leave(job, waiter)
            raise

    async def work(self) -> None:
        """Compute whatever comes, until it is cancelled."""
        while True:
            jobs, _ = self._queue.take()
            if not jobs:
                self._has_news.clear()
                await self._has_news.wait()
                continue
            num_samples = sum(job.num_samples for job in jobs)
            forwards = RECOMPUTED_COST if jobs[0].kind is JobKind.BACKWARD else 1.0
            await asyncio.sleep(self._forward_s * num_samples * forwards)
            self._queue.finish([(job, Reply(None)) for job in jobs])


class _Block(msgspec.Struct, frozen=True):
    """All that a line of requests needs to know of an expert."""

    uid: str


class _SimulatedClient:
    """Asks for one block after another, in turn over the devices."""

    def __init__(self, point: _Point, devices: list[_Device], phase: str, number: int) -> None:
        config = point.config
        self._number = number
        self._batch_size = config.batch_size
        self._pings = Pings(point.ping_s, point.seed, f"{phase} {point.passes} {number}")
        self._chain = [
            (cast("Expert", _Block(f"expert{layer // len(devices)}")), devices[layer % len(devices)])
            for layer in range(config.num_layers)
        ]
        self._is_trained = point.passes == "forward+backward"

    async def push(self) -> None:
        """One batch through all blocks, and back where they are trained."""
        for expert, device in self._chain:
            await self._ask(JobKind.FORWARD, expert, device)
        if self._is_trained:
            for expert, device in reversed(self._chain):
                await self._ask(JobKind.BACKWARD, expert, device)

    async def _ask(self, kind: JobKind, expert: Expert, device: _Device) -> None:
        await device.ask(Job(kind, expert, self._batch_size, self._number, Deadline.never()))
        if ping_s := self._pings.draw_s():
            await asyncio.sleep(ping_s)
