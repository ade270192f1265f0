"""The processes of `shoal bench experts`: one that serves experts and a bare echo, and those of the clients.

The server also tells how fast its experts are when nobody is in between, on the same thread, device and
numbers. In a process of clients each has a connection and a thread; threads share one network loop, as those
of a user's program do, and torch has one thread in each.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from shoal.bench.experts import ECHO, HOST, MAX_RAW_BYTES, ExpertsConfig, Tally
from shoal.bench.transport import receive_exactly
from shoal.bench.workers import Parent, end_with_parent, serve
from shoal.core import Address, Deadline, LoopThread, Peer, fanout, results_of
from shoal.core.loop import ByteThreads
from shoal.experts.classes import TrainingSettings, expert_class, make_expert
from shoal.experts.client.client import ExpertClient, RemoteExpert
from shoal.experts.expert import Expert
from shoal.experts.schema import Example
from shoal.experts.server.jobs import JobKind
from shoal.experts.server.server import ExpertServer
from shoal.experts.settings import ServerSettings
from shoal.tensors import pack
from shoal.transport import Endpoint, Head, Limits, Reply

# --- the server ---

_LOCAL_S = 0.4  # of one measurement: shorter ones are mostly noise
_MAX_REPEATS = 1 << 16
_OTHER_CONNECTIONS = 64


def host(arguments: dict[str, Any], parent: Parent) -> None:
    """Serve until there are no more orders."""
    end_with_parent()
    config = msgspec.convert(arguments["config"], ExpertsConfig)
    with contextlib.ExitStack() as closing:
        hosted = _Hosted(config, arguments["seed"], closing)
        parent.tell(**hosted.describe())
        serve(parent, hosted)
        parent.leave()


class _Hosted:
    """A server that listens; its public methods are the orders that it takes."""

    def __init__(self, config: ExpertsConfig, seed: int, closing: contextlib.ExitStack) -> None:
        self._config = config
        began_s = time.perf_counter()
        kind = expert_class(config.expert_class)
        self._example = kind.example(config.hidden_dim, config.batch_size)
        training = TrainingSettings()
        self.experts = [
            make_expert(f"expert{index}", kind, config.hidden_dim, training, seed + index)
            for index in range(config.num_experts)
        ]
        for expert in self.experts:
            expert.place(torch.device(config.device))
        self._synchronize()
        self.experts_s = time.perf_counter() - began_s
        loops = [closing.enter_context(LoopThread(f"shoal-net-{n}")) for n in range(config.num_handlers)]
        self._loop = loops[0]
        endpoint = Endpoint(limits=limits_for(config, self._example), helpers=loops[1:])
        endpoint.handle(ECHO, _echo)
        _open(self._loop, endpoint, closing)
        settings = ServerSettings(
            device=config.device,
            precision=config.precision,  # type: ignore[arg-type]  # one of them, as the flag's choices say
            max_batch_size=config.max_batch_size,
        )
        self._server = ExpertServer(endpoint, self.experts, settings)
        _open(self._loop, self._server, closing)
        self._port = self._loop.run(endpoint.listen(Address(HOST, 0))).port
        self._raw_port = 0
        if (num_bytes := _batch_bytes(self._example)) <= MAX_RAW_BYTES:
            self._raw_port = _serve_raw(num_bytes, closing)
        self.networking_s = time.perf_counter() - began_s - self.experts_s

    def describe(self) -> dict[str, Any]:
        """What others need to know of it."""
        return {
            "port": self._port,
            "raw_port": self._raw_port,
            "pid": os.getpid(),
            "uids": [expert.uid for expert in self.experts],
            "experts_s": self.experts_s,
            "networking_s": self.networking_s,
        }

    def local(self) -> float:
        """Samples a second of the experts in turn, each batch as large as a client's; nothing is sent."""
        return self._loop.run(self._server.on_device(self._measure))

    def _measure(self) -> float:
        args, kwargs = self._example
        inputs = [tensor.to(self._config.device) for tensor in self.experts[0].schema.flatten(args, kwargs)]
        outputs = self._server.device.compute(self.experts[0], JobKind.FORWARD, inputs, ())
        grads = [torch.ones_like(output) for output in outputs if output is not None]
        for expert in self.experts:
            self._pass(expert, inputs, grads)
        num_repeats = 1
        while True:
            began_s = time.perf_counter()
            for index in range(num_repeats):
                self._pass(self.experts[index % len(self.experts)], inputs, grads)
            self._synchronize()
            took_s = time.perf_counter() - began_s
            if took_s >= _LOCAL_S / 2 or num_repeats >= _MAX_REPEATS:
                return num_repeats * self._config.batch_size / took_s
            num_repeats = max(2 * num_repeats, min(_MAX_REPEATS, int(num_repeats * _LOCAL_S / took_s)))

    def _pass(self, expert: Expert, inputs: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        compute = self._server.device.compute
        compute(expert, JobKind.FORWARD, inputs, ())
        if self._config.backward:
            compute(expert, JobKind.BACKWARD, inputs, grads)

    def memory(self) -> dict[str, int]:
        """How many processes the server is, and the bytes that it holds on the device where that tells."""
        told = {"num_processes": num_processes()}
        if self._has_cuda:
            told["allocated_bytes"] = torch.cuda.memory_allocated(self._config.device)
            told["reserved_bytes"] = torch.cuda.memory_reserved(self._config.device)
        return told

    def _synchronize(self) -> None:
        if self._has_cuda:
            torch.cuda.synchronize(self._config.device)

    @property
    def _has_cuda(self) -> bool:
        return torch.device(self._config.device).type == "cuda"


def limits_for(config: ExpertsConfig, example: Example) -> Limits:
    """The transport's own, but for many clients, and for batches that would be above them."""
    batch_bytes = _batch_bytes(example)
    usual = Limits()
    message_bytes = max(usual.max_message_bytes, 4 * batch_bytes)  # of a backward: gradients, and inputs
    return Limits(
        max_connections=max(usual.max_connections, config.num_clients + _OTHER_CONNECTIONS),
        max_message_bytes=message_bytes,
        max_bytes_in_flight=max(usual.max_bytes_in_flight, 2 * message_bytes),
    )


def _batch_bytes(example: Example) -> int:
    args, kwargs = example
    return sum(tensor.nbytes for tensor in (*args, *kwargs.values()))


def _serve_raw(num_bytes: int, closing: contextlib.ExitStack) -> int:
    """Send back messages of so many bytes over blocking sockets, a thread for each; the port."""
    threads = ByteThreads()
    listener = closing.enter_context(socket.create_server((HOST, 0), backlog=1024))

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed: it has ended
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threads.start("raw echo", lambda connection=connection: echo(connection))  # type: ignore[misc]

    def echo(connection: socket.socket) -> None:
        buffer = memoryview(bytearray(num_bytes))
        with connection, contextlib.suppress(OSError, EOFError):  # its client has gone
            while True:
                receive_exactly(connection, buffer)
                connection.sendall(buffer)

    threads.start("raw accept", accept)
    return int(listener.getsockname()[1])


def num_processes() -> int:
    """The caller's own and all that it has started; 1 where the system does not tell."""
    if sys.platform != "linux":
        return 1
    return 1 + sum(1 for _ in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    for children in Path("/proc", str(pid), "task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield int(child)
                yield from _descendants(int(child))


def _echo(head: Head, buffers: Sequence[memoryview]) -> Reply:
    return Reply(None, buffers)


def _open(loop: LoopThread, opened: Endpoint | ExpertServer, closing: contextlib.ExitStack) -> None:
    loop.run(opened.__aenter__())
    closing.callback(lambda: loop.run(opened.__aexit__(None, None, None)))


# --- clients ---

T = TypeVar("T")
_CONNECT_S = 120.0  # hundreds of clients come at once
_ECHO_S = 60.0


def attend(arguments: dict[str, Any], parent: Parent) -> None:
    """Be clients until there are no more orders."""
    be_clients(parent, lambda closing: _Group(msgspec.convert(arguments, _Share), closing))


def be_clients(parent: Parent, make: Callable[[contextlib.ExitStack], object]) -> None:
    """Make clients, and have them take orders until there are no more; then end the process."""
    end_with_parent()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what clients send is on the CPU, and a context takes memory
    torch.set_num_threads(1)
    with contextlib.ExitStack() as closing:
        serve(parent, make(closing))
        parent.leave()


class _Share(msgspec.Struct, frozen=True):
    """Which clients a process is, and whom they ask."""

    config: ExpertsConfig
    seed: int
    numbers: list[int]
    port: int
    raw_port: int
    """Where blocking sockets are answered; 0 where batches are too large for that."""
    uids: list[str]

    @property
    def peer(self) -> Peer:
        """Returns the server that is asked."""
        return Peer(Address(HOST, self.port))


class _Group:
    """All clients of one process; its public methods are the orders that they take."""

    def __init__(self, share: _Share, closing: contextlib.ExitStack) -> None:
        self._loop = closing.enter_context(LoopThread("shoal-net"))
        self._clients = [_Client(number, share, self._loop, closing) for number in share.numbers]
        self._threads = [closing.enter_context(LoopThread(f"client-{number}")) for number in share.numbers]

    def connect(self) -> None:
        """Every client has its connection, and knows what experts take."""
        results_of(self._in_threads([client.connect for client in self._clients]))

    def echo(self) -> Tally:
        """Every client sends what it would send to experts, and gets it back."""
        deadline = Deadline.never()
        tallies = self._loop.run(fanout([client.echo() for client in self._clients], deadline))
        return _total(tallies)

    def raw(self) -> Tally:
        """The same over blocking sockets, where batches are small; an empty tally where they are not."""
        return _total(self._in_threads([client.use_raw for client in self._clients]))

    def experts(self) -> Tally:
        """Every client sends its batches, one after another."""
        return _total(self._in_threads([client.use_experts for client in self._clients]))

    def _in_threads(self, works: Sequence[Callable[[], T]]) -> list[T | Exception]:
        calls = [thread.run_blocking(work) for thread, work in zip(self._threads, works, strict=True)]
        return self._loop.run(fanout(calls, Deadline.never()))


class _Client:
    """One client, with a connection and a thread of its own."""

    def __init__(self, number: int, share: _Share, loop: LoopThread, closing: contextlib.ExitStack) -> None:
        config = share.config
        self._config = config
        self._number = number
        self._peer = share.peer
        self._random = random.Random(f"{share.seed} {number}")
        torch.manual_seed(share.seed + number)
        example = expert_class(config.expert_class).example(config.hidden_dim, config.batch_size)
        self._args, self._kwargs = example
        for tensor in self._inputs:
            tensor.requires_grad_(config.backward and tensor.is_floating_point())
        self._client = closing.enter_context(ExpertClient(loop=loop))
        self._uids = share.uids
        self._experts: list[RemoteExpert] = []
        self._raw: socket.socket | None = None
        if share.raw_port:
            self._raw = closing.enter_context(socket.create_connection((HOST, share.raw_port), _CONNECT_S))
            self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._raw.settimeout(None)

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
        """Make as many calls, of as many bytes, as `use_experts` does; on the loop itself."""
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

    def use_raw(self) -> Tally:
        """As many messages, of as many bytes, without any protocol, on this thread."""
        tally = Tally()
        if (connection := self._raw) is not None:
            message = b"".join(self._frames())
            buffer = memoryview(bytearray(len(message)))
            num_ways = 2 if self._config.backward else 1
            for _ in range(self._config.num_batches_per_client):
                for _ in range(num_ways):
                    connection.sendall(message)
                    receive_exactly(connection, buffer)
                tally.num_samples += self._config.batch_size
        tally.ended_s = time.monotonic()
        return tally

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
    for tally in results_of(tallies):
        total.add(tally)
    return total


def _us_since(began_s: float) -> int:
    return round(1e6 * (time.perf_counter() - began_s))
