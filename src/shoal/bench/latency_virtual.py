"""The sweep of `shoal bench latency` in virtual time: the same clients' loop and pings, simulated devices.

An expert server has threads and sockets, which virtual time has no place for. So its line of requests is the
real one (`experts.jobs.JobQueue`: whose turn it is, what is computed together), and its device and network
are simulated: a batch keeps the device for as long as its samples take, and bytes take no time but the ping.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec

from shoal.bench.frame import Tell
from shoal.bench.latency_config import BACKWARD_COST, RECOMPUTED_COST, LatencyConfig, Method, Passes
from shoal.bench.latency_flow import Client, Load, Pings, latencies, rates
from shoal.core import Deadline, Scope
from shoal.core.virtual import run_virtual
from shoal.experts.expert import Expert
from shoal.experts.server.jobs import Job, JobKind, JobQueue
from shoal.experts.settings import ServerSettings
from shoal.transport import Reply


class Point(msgspec.Struct, frozen=True):
    """One method at one ping."""

    config: LatencyConfig
    seed: int
    method: Method
    passes: Passes
    ping_s: float


def run_point(task: dict[str, Any], tell: Tell) -> dict[str, list[float]]:
    """Latencies and rates, for `pool.run_tasks`; too short to tell of its progress."""
    point = msgspec.convert(task, Point)
    simulate = {"fast": _fast, "slow": _slow, "ours": _ours}[point.method]
    latency_s, samples_per_s = simulate(point)
    return {"latency_s": latency_s, "samples_per_s": samples_per_s}


def _block_s(point: Point) -> float:
    """Of one batch in one block, there and back."""
    forwards = 1.0 if point.passes == "forward" else 1.0 + BACKWARD_COST
    return point.config.compute_ms * 1e-3 * forwards


def _fast(point: Point) -> tuple[list[float], list[float]]:
    """An upper bound: forward, every device is busy with a batch of its own; trained, one batch at a time."""
    config, stage_s = point.config, _block_s(point) * point.config.layers_per_gpu
    batch_s = stage_s * len(config.gpus)
    every_s = stage_s if point.passes == "forward" else batch_s
    rate = config.batch_size / every_s
    return [batch_s] * config.batches_for_latency, [rate] * config.throughput_runs


def _slow(point: Point) -> tuple[list[float], list[float]]:
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


def _ours(point: Point) -> tuple[list[float], list[float]]:
    config = point.config
    load = Load(config.batch_size, config.batches_for_throughput, config.throughput_runs)

    async def alone(clients: list[Client]) -> list[float]:
        return await latencies(clients[0], config.batches_for_latency)

    async def together(clients: list[Client]) -> list[float]:
        return await rates(clients, load)

    return (
        run_virtual(_served(point, "latency", 1, alone)),
        run_virtual(_served(point, "throughput", config.jobs, together)),
    )


async def _served(
    point: Point, phase: str, num_clients: int, measure: Callable[[list[Client]], Any]
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
        """Compute whatever comes."""
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

    def __init__(self, point: Point, devices: list[_Device], phase: str, number: int) -> None:
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
