"""A process of `shoal bench experts` that is some of the clients, each with a connection and a thread.

Threads share one network loop, as those of a user's program do; torch has one thread in each.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from shoal.bench.experts_config import ECHO, HOST, ExpertsConfig
from shoal.bench.experts_tally import Tally
from shoal.bench.workers import Answers, Parent, end_with_parent, serve
from shoal.core import Address, Deadline, LoopThread, Peer, fanout
from shoal.experts.classes import expert_class
from shoal.experts.client import ExpertClient
from shoal.experts.remote import RemoteExpert
from shoal.tensors import pack

T = TypeVar("T")
_CONNECT_S = 120.0  # hundreds of clients come at once
_ECHO_S = 60.0


def attend(arguments: dict[str, Any], parent: Parent) -> None:
    """Be clients until there are no more orders."""

    def answers(closing: contextlib.ExitStack) -> Answers:
        group = _Group(msgspec.convert(arguments, Place), closing)
        return {"connect": group.connect, "echo": group.echo, "experts": group.use_experts}

    be_clients(parent, answers)


def be_clients(parent: Parent, answers: Callable[[contextlib.ExitStack], Answers]) -> None:
    """Give these answers to orders until there are no more, then end the process."""
    end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what clients send is on the CPU, and a context takes memory
    torch.set_num_threads(1)
    with contextlib.ExitStack() as closing:
        serve(parent, answers(closing))
        parent.leave()


class Place(msgspec.Struct, frozen=True):
    """Which clients a process is, and whom they ask."""

    config: ExpertsConfig
    seed: int
    numbers: list[int]
    port: int
    uids: list[str]

    @property
    def peer(self) -> Peer:
        """The server."""
        return Peer(Address(HOST, self.port))


class _Group:
    """All clients of one process; its public methods are the orders that they take."""

    def __init__(self, place: Place, closing: contextlib.ExitStack) -> None:
        self._loop = closing.enter_context(LoopThread("shoal-net"))
        self._clients = [_Client(number, place, self._loop, closing) for number in place.numbers]
        self._threads = [closing.enter_context(LoopThread(f"client-{number}")) for number in place.numbers]

    def connect(self) -> None:
        """Every client has its connection, and knows what experts take."""
        for outcome in self._in_threads([client.connect for client in self._clients]):
            if isinstance(outcome, Exception):
                raise outcome

    def echo(self) -> Tally:
        """Every client sends what it would send to experts, and gets it back."""
        deadline = Deadline.never()
        tallies = self._loop.run(fanout([client.echo() for client in self._clients], deadline))
        return _total(tallies)

    def use_experts(self) -> Tally:
        """Every client sends its batches, one after another."""
        return _total(self._in_threads([client.use_experts for client in self._clients]))

    def _in_threads(self, works: Sequence[Callable[[], T]]) -> list[T | Exception]:
        calls = [thread.run_blocking(work) for thread, work in zip(self._threads, works, strict=True)]
        return self._loop.run(fanout(calls, Deadline.never()))


class _Client:
    """One of them."""

    def __init__(self, number: int, place: Place, loop: LoopThread, closing: contextlib.ExitStack) -> None:
        config = place.config
        self._config = config
        self._number = number
        self._peer = place.peer
        self._random = random.Random(f"{place.seed} {number}")
        torch.manual_seed(place.seed + number)
        example = expert_class(config.expert_class).example(config.hidden_dim, config.batch_size)
        self._args, self._kwargs = example
        for tensor in self._inputs:
            tensor.requires_grad_(config.backward and tensor.is_floating_point())
        self._client = closing.enter_context(ExpertClient(loop=loop))
        self._uids = place.uids
        self._experts: list[RemoteExpert] = []

    def connect(self) -> None:
        """Dial, learn what every expert takes and gives, and go both ways once before the clock runs."""
        self._experts = [self._client.expert(uid, self._peer) for uid in self._uids]
        self._client.run(self._learn())
        with contextlib.suppress(Exception), self._mode():  # what fails is counted when it is measured
            self._use(self._experts[self._number % len(self._experts)], Tally())

    async def _learn(self) -> None:
        deadline = Deadline.after(_CONNECT_S)
        for uid in self._uids:
            await self._client.schema_of(uid, [self._peer], deadline)
        await self._echo_once(self._frames(), deadline)

    async def echo(self) -> Tally:
        """As many calls, of as many bytes, as `use_experts` makes; on the loop itself."""
        tally, frames = Tally(), self._frames()
        num_ways = 2 if self._config.backward else 1
        for _ in range(self._config.num_batches_per_client):
            try:
                for _ in range(num_ways):
                    await self._echo_once(frames, Deadline.after(_ECHO_S))
                tally.num_samples += self._config.batch_size
            except Exception as error:  # noqa: BLE001 - a failure is a figure too
                tally.note(error)
        tally.ended_s = time.monotonic()
        return tally

    async def _echo_once(self, frames: Sequence[memoryview], deadline: Deadline) -> None:
        await self._client.transport.call(self._peer, ECHO, None, frames, deadline=deadline)

    def _frames(self) -> list[memoryview]:
        return pack(self._inputs)[1]

    @property
    def _inputs(self) -> tuple[torch.Tensor, ...]:
        return (*self._args, *self._kwargs.values())

    def use_experts(self) -> Tally:
        """Ask experts at random; forward, and backward where that is measured."""
        tally = Tally()
        with self._mode():
            for _ in range(self._config.num_batches_per_client):
                expert = self._random.choice(self._experts)
                try:
                    self._use(expert, tally)
                    tally.num_samples += self._config.batch_size
                except Exception as error:  # noqa: BLE001 - a failure is a figure too
                    tally.note(error)
        tally.ended_s = time.monotonic()
        return tally

    def _mode(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._config.backward else torch.no_grad()

    def _use(self, expert: RemoteExpert, tally: Tally) -> None:
        began_s = time.perf_counter()
        outputs = expert(*self._args, **self._kwargs)
        tally.forward_us.append(_us_since(began_s))
        if self._config.backward:
            loss = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).sum()
            began_s = time.perf_counter()
            loss.backward()
            tally.backward_us.append(_us_since(began_s))
            for tensor in self._inputs:
                tensor.grad = None


def _total(tallies: Sequence[Tally | Exception]) -> Tally:
    total = Tally()
    for tally in tallies:
        if isinstance(tally, Exception):
            raise tally
        total.add(tally)
    return total


def _us_since(began_s: float) -> int:
    return round(1e6 * (time.perf_counter() - began_s))
