"""A process of `shoal bench latency` that is some of the clients, each with connections of its own.

Clients are coroutines on one loop. What they ask is computed by servers over real sockets; the ping of each
answer is waited for here, where it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.bench.children import Parent
from shoal.bench.crew import Answers
from shoal.bench.experts_workers import be_clients
from shoal.bench.latency_config import LatencyConfig, Passes
from shoal.bench.latency_flow import Load, Pings, latencies, rates
from shoal.core import Address, Deadline, LoopThread, Peer, ShoalError, fanout
from shoal.core.identity import Identity
from shoal.experts.classes import expert_class
from shoal.experts.client import ExpertClient
from shoal.transport import Membership, SwarmSecret

_CALL_S = 600.0  # hundreds of clients may stand in one line


def attend(arguments: dict[str, Any], parent: Parent) -> None:
    """Be clients until there are no more orders."""

    def answers(closing: contextlib.ExitStack) -> Answers:
        crowd = _Crowd(msgspec.convert(arguments, Place), closing)
        return {"connect": crowd.connect, "latency": crowd.latency, "throughput": crowd.throughput}

    be_clients(parent, answers)


class Place(msgspec.Struct, frozen=True):
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
        """For servers that the benchmark has not started itself."""
        if not self.config.hosts:
            return None
        file = self.config.secret_file
        secret = SwarmSecret.load(Path(file)) if file is not None else SwarmSecret.from_environment()
        return None if secret is None else Membership(Identity.generate(), secret)


class _Crowd:
    """All clients of one process; its public methods are the orders that they take.

    What cannot be measured is an answer with its `error`: other pings may still do.
    """

    def __init__(self, place: Place, closing: contextlib.ExitStack) -> None:
        self._config = place.config
        self._loop = closing.enter_context(LoopThread("shoal-net"))
        membership = place.membership()
        self._clients = [
            _Client(
                place, number, closing.enter_context(ExpertClient(loop=self._loop, membership=membership))
            )
            for number in place.numbers
        ]

    def connect(self) -> dict[str, Any]:
        """Every client dials, learns what experts take, and sends one batch through all of them."""
        return self._told(self._connect())

    async def _connect(self) -> list[float]:
        for outcome in await fanout([client.warm_up() for client in self._clients], Deadline.never()):
            if isinstance(outcome, Exception):
                raise outcome
        return []

    def latency(self, ping_s: float, passes: Passes) -> dict[str, Any]:
        """Of the first client alone: seconds of each batch."""
        client = self._clients[0].under(ping_s, passes, "latency")
        return self._told(latencies(client, self._config.batches_for_latency))

    def throughput(self, ping_s: float, passes: Passes) -> dict[str, Any]:
        """Of all clients at once: samples a second in each run."""
        clients = [client.under(ping_s, passes, "throughput") for client in self._clients]
        config = self._config
        load = Load(config.batch_size, config.batches_for_throughput, config.throughput_runs)
        return self._told(rates(clients, load))

    def _told(self, work: Coroutine[Any, Any, list[float]]) -> dict[str, Any]:
        try:
            return {"values": self._loop.run(work)}
        except ShoalError as error:
            return {"error": " ".join(str(error).split())}


class _Client:
    """One of them; `under` says how long answers take."""

    def __init__(self, place: Place, number: int, client: ExpertClient) -> None:
        config = place.config
        self._place = place
        self._number = number
        self._client = client
        self._chain = place.peers()
        torch.manual_seed(place.seed + number)
        (self._input,), _ = expert_class(config.expert_class).example(config.hid_dim, config.batch_size)
        self._gradient = torch.randn_like(self._input)
        self._pings = Pings(0.0, place.seed, "")
        self._is_trained = False

    def under(self, ping_s: float, passes: Passes, phase: str) -> _Client:
        """The same, with pings of its own."""
        self._pings = Pings(ping_s, self._place.seed, f"{phase} {passes} {self._number}")
        self._is_trained = passes == "forward+backward"
        return self

    async def warm_up(self) -> None:
        """Each way once that will be measured, without delays."""
        for passes in self._place.config.passes:
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
