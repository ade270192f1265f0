"""A world in virtual time: many peers that call each other under a network's profile, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.core import Address, Deadline, Peer, Scope, ShoalError, UsageError
from shoal.core.virtual import run_virtual
from shoal.transport.limits import Limits
from shoal.transport.memory_network import MemoryHost, MemoryNetwork
from shoal.transport.messages import Head, Reply
from shoal.transport.stream import StreamTransport

if TYPE_CHECKING:
    from shoal.transport.memory_network import Conditions
    from shoal.transport.messages import Transport

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
    seconds: float = 600,
    profile: str | None = "wan",
    seed: int = 0,
    kind: str = "stream",
) -> WorldResult:
    """Let every peer call `calls_per_s` random others each second; without a profile the network is ideal."""
    if kind not in KINDS or num_peers < 2:
        raise UsageError(
            f"There is no world of {num_peers} peers with {kind!r} calls.",
            next_step=f"give two peers or more, and one of {', '.join(KINDS)}.",
        )
    world = _World(num_peers, kind, seed)
    with _rare_collections():
        return run_virtual(world.run(calls_per_s, round(seconds), profile))


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """A world is millions of objects that live to its end; looking through them took 40 % of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 100, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


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
        network = MemoryNetwork(_conditions(profile, self._seed), self._seed)
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
            from shoal.transport.datagrams import DatagramTransport

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


def _conditions(profile: str | None, seed: int) -> Conditions | None:
    if profile is None:
        return None
    from shoal.transport.conditions import Conditions
    from shoal.transport.profiles import Profile

    return Conditions(Profile.load(profile), seed=seed)
