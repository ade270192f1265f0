"""`shoal bench virtual`: peers that call each other under a profile, in one process, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import statistics
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from shoal.bench.frame import BenchmarkPlan, RowKey, Tell, WholeRunFlags, measured
from shoal.core import Address, Deadline, Peer, Scope, ShoalError, UsageError
from shoal.core.run_options import flag
from shoal.core.virtual import run_virtual
from shoal.report import Report, Row
from shoal.report.schema import with_failed
from shoal.transport import (
    Conditions,
    DatagramTransport,
    Head,
    Limits,
    MemoryNetwork,
    Profile,
    Reply,
    StreamTransport,
    Transport,
)
from shoal.transport.network.memory import MemoryHost

_CALL_S = 10.0
_PAYLOAD_BYTES = 64
_EVENT = struct.Struct("<dII")
KINDS = ("stream", "datagram")


@dataclass(frozen=True, slots=True)
class WorldResult:
    """What happened in a world; two runs with the same arguments give equal ones."""

    num_calls: int
    num_failed: int
    digest: str
    """Of every call made, served and answered: when, between whom, with which outcome."""
    simulated_s: float


def run_world(
    num_peers: int = 200,
    calls_per_s: int = 3,
    seconds: int = 600,
    profile: str | None = "wan",
    seed: int = 0,
    kind: str = "datagram",
) -> WorldResult:
    """Let every peer call `calls_per_s` random others each second; without a profile the network is ideal."""
    if kind not in KINDS or num_peers < 2:
        raise UsageError(
            f"There is no world of {num_peers} peers that call by {kind!r}.",
            next_step=f"give two peers or more, and one of {', '.join(KINDS)}.",
        )
    world = _World(num_peers, kind, seed)
    return run_virtual(world.run(calls_per_s, seconds, profile))


class VirtualConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The world that is simulated: its fields are the flags of `shoal bench virtual`."""

    num_peers: Annotated[int, flag("Peers in the world.", "--peers", ge=2)] = 200
    calls_per_s: Annotated[int, flag("Calls of each peer in a simulated second.", ge=1)] = 3
    seconds: Annotated[int, flag("Simulated seconds.", ge=1)] = 600
    profile: Annotated[str, flag("The network: a preset's name or a TOML file.")] = "wan"
    kind: Annotated[Literal["datagram", "stream"], flag("How they call.")] = "datagram"


class VirtualRunFlags(WholeRunFlags, frozen=True, kw_only=True):
    """The flags of every benchmark; each start is a world."""

    starts: Annotated[int, flag("Worlds, each in a process of its own.")] = 1


def virtual_command(config: VirtualConfig, run: VirtualRunFlags) -> BenchmarkPlan:
    """A world of peers in virtual time; the same seed gives the same digest of all that happened."""
    Profile.load(config.profile)  # complains before anything is started
    return BenchmarkPlan(config, run, summarize_virtual)


class VirtualScenario:
    """One start: one world."""

    def __init__(self, config: Mapping[str, Any], seed: int) -> None:
        self._config = msgspec.convert(dict(config), VirtualConfig)
        self._seed = seed

    def run(self, tell: Tell) -> Iterator[Row]:
        """Let it run, and tell how fast it was and what happened in it."""
        config = self._config
        tell(f"{config.num_peers} peers under {config.profile!r} for {config.seconds} s, {config.kind}s")
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        world = run_world(**msgspec.structs.asdict(config), seed=self._seed)
        took_s, took_cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        key: RowKey = {"scenario": "virtual", "via": config.kind, "num_peers": config.num_peers}
        yield measured("wall_time", key, [took_s])
        yield measured("cpu_time", key, [took_cpu_s])
        yield measured("virtual_calls_per_s", key, [world.num_calls / took_s])
        happened = {**key, "num_calls": world.num_calls, "seed": self._seed, "digest": world.digest}
        yield measured("failed_calls", happened, [float(world.num_failed)])


def summarize_virtual(report: Report) -> dict[str, Any]:
    """The RESULT line: medians over all starts, and what happened in each world."""
    result: dict[str, Any] = {}
    worlds = []
    for told in report.rows:
        if told.metric == "failed_calls":
            worlds.append({name: told.key[name] for name in ("seed", "num_calls", "digest")})
            result["failed_calls"] = result.get("failed_calls", 0) + int(sum(told.samples))
        elif told.starts:
            digits = 0 if told.unit == "1/s" else 2
            name = f"{told.metric}_s" if told.unit == "s" else told.metric
            result[name] = round(statistics.median(told.samples), digits)
    return with_failed(report, {**result, "worlds": worlds})


class _World:
    def __init__(self, num_peers: int, kind: str, seed: int) -> None:
        self._num_peers = num_peers
        self._kind = kind
        self._seed = seed
        self._events = hashlib.blake2b(digest_size=32)
        self._num_calls = 0
        self._num_failed = 0
        self._peers: list[Peer] = []

    async def run(self, calls_per_s: int, num_seconds: int, profile: str | None) -> WorldResult:
        loop = asyncio.get_running_loop()
        conditions = None if profile is None else Conditions(Profile.load(profile), seed=self._seed)
        network = MemoryNetwork(conditions, self._seed)
        async with contextlib.AsyncExitStack() as opened:
            transports = []
            for number in range(self._num_peers):
                host = network.host(f"peer{number}")
                transport = await opened.enter_async_context(self._transport(host))
                self._peers.append(Peer(await self._serve(transport, host, number)))
                transports.append((transport, host))
            async with Scope("world") as scope:
                for number, (transport, host) in enumerate(transports):
                    for _ in range(calls_per_s):
                        begins_s = host.random.random()
                        calls = self._call_others(transport, number, host.random, begins_s, num_seconds)
                        scope.start_soon(calls, name=f"peer {number}")
            simulated_s = loop.time()
        return WorldResult(self._num_calls, self._num_failed, self._events.hexdigest(), simulated_s)

    def _transport(self, host: MemoryHost) -> Any:
        if self._kind == "datagram":
            return DatagramTransport(network=host)
        # everybody knows everybody soon; dialing again after a short silence is another experiment
        return StreamTransport(network=host, limits=Limits(idle_s=3600.0))

    async def _serve(self, transport: Transport, host: MemoryHost, number: int) -> Address:
        loop = asyncio.get_running_loop()

        def serve(head: Head, buffers: object) -> Reply:
            self._note(loop.time(), number, head.payload[0], b"served")
            return Reply(head.payload)

        transport.handle("echo", serve)
        return await transport.listen(Address(host.name, 0))

    async def _call_others(
        self, transport: Transport, number: int, choice: random.Random, begins_s: float, num_seconds: int
    ) -> None:
        loop = asyncio.get_running_loop()
        payload = (number, bytes(_PAYLOAD_BYTES))
        for second in range(num_seconds):
            await asyncio.sleep(begins_s + second - loop.time())
            other = choice.randrange(self._num_peers - 1)
            other += other >= number
            self._num_calls += 1
            self._note(loop.time(), number, other, b"called")
            try:
                await transport.call(self._peers[other], "echo", payload, deadline=Deadline.after(_CALL_S))
            except ShoalError as error:
                self._num_failed += 1
                self._note(loop.time(), number, other, type(error).__name__.encode())
            else:
                self._note(loop.time(), number, other, b"answered")

    def _note(self, now_s: float, who: int, whom: int, what: bytes) -> None:
        self._events.update(_EVENT.pack(now_s, who, whom) + what)
