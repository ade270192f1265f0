"""The one process of `shoal bench experts` that serves: experts, and beside them a bare echo.

It also tells how fast its experts are when nobody is in between, on the same thread, device and numbers.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.bench.experts_config import ECHO, HOST, ExpertsConfig
from shoal.bench.workers import Parent, end_with_parent, serve
from shoal.core import Address, LoopThread
from shoal.experts.classes import expert_class, make_expert
from shoal.experts.expert import Expert
from shoal.experts.jobs import JobKind
from shoal.experts.schema import Example
from shoal.experts.server import ExpertServer
from shoal.experts.settings import ServerSettings
from shoal.experts.training import TrainingSettings
from shoal.transport import Endpoint, Head, Limits, Reply

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
        serve(parent, {"local": hosted.local, "memory": hosted.memory})
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
        self.networking_s = time.perf_counter() - began_s - self.experts_s

    def describe(self) -> dict[str, Any]:
        """What others need to know of it."""
        return {
            "port": self._port,
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
    args, kwargs = example
    batch_bytes = sum(tensor.nbytes for tensor in (*args, *kwargs.values()))
    usual = Limits()
    message_bytes = max(usual.max_message_bytes, 4 * batch_bytes)  # of a backward: gradients, and inputs
    return Limits(
        max_connections=max(usual.max_connections, config.num_clients + _OTHER_CONNECTIONS),
        max_message_bytes=message_bytes,
        max_bytes_in_flight=max(usual.max_bytes_in_flight, 2 * message_bytes),
    )


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
