"""Servers and client processes of `shoal bench latency`, as the process sees them that gives orders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.bench.children import Child, child
from shoal.bench.experts import HOST, MAX_LOOPS, ExpertsConfig
from shoal.bench.frame import Tell
from shoal.bench.latency_config import LatencyConfig, Passes
from shoal.core import BenchmarkError
from shoal.core.placement import num_cores

_HOST_EXPERTS = "shoal.bench.experts_workers:host"
_ATTEND = "shoal.bench.latency_clients:attend"


class Fleet:
    """Clients that are connected; each order is for one ping and one kind of passes."""

    def __init__(self, clients: list[Child]) -> None:
        self._clients = clients

    def connect(self) -> None:
        """BenchmarkError when a server does not answer, or does not serve what it should."""
        for answer in self._ask("connect", self._clients, {}):
            _values(answer)

    def latencies(self, ping_s: float, passes: Passes) -> list[float]:
        """Seconds of each batch of one client, while the others are silent."""
        (answer,) = self._ask("latency", self._clients[:1], {"ping_s": ping_s, "passes": passes})
        return _values(answer)

    def rates(self, ping_s: float, passes: Passes) -> list[float]:
        """Samples a second of all clients, in each run."""
        answers = self._ask("throughput", self._clients, {"ping_s": ping_s, "passes": passes})
        return [sum(parts) for parts in zip(*map(_values, answers), strict=True)]

    @staticmethod
    def _ask(order: str, clients: list[Child], details: dict[str, Any]) -> list[dict[str, Any]]:
        for process in clients:
            process.order(order=order, details=details)
        return [process.expect()["answer"] for process in clients]


@contextlib.contextmanager
def opened_fleet(config: LatencyConfig, seed: int, tell: Tell) -> Iterator[Fleet]:
    """Clients, and the servers that they ask where those do not run already."""
    with contextlib.ExitStack() as stack:
        servers = list(config.hosts)
        if not servers:
            tell(f"starting {len(config.gpus)} servers of {config.layers_per_gpu} blocks each")
            ready = [stack.enter_context(_server(config, seed, number)) for number in range(len(config.gpus))]
            servers = [f"{HOST}:{server.expect()['port']}" for server in ready]
        num_processes = config.client_processes
        tell(f"connecting {config.jobs} clients in {num_processes} processes")
        arguments = {"config": msgspec.to_builtins(config), "seed": seed, "servers": servers}
        clients = []
        for rank in range(num_processes):
            numbers = list(range(rank, config.jobs, num_processes))
            attending = child(
                _ATTEND,
                {**arguments, "numbers": numbers},
                name=f"Client process {rank + 1} of {num_processes}",
                variables={"OMP_NUM_THREADS": "1"},
            )
            clients.append(stack.enter_context(attending))
        fleet = Fleet(clients)
        try:
            fleet.connect()
        except BenchmarkError as error:
            raise _explained(error, config) from error
        yield fleet


def _server(config: LatencyConfig, seed: int, number: int) -> contextlib.AbstractContextManager[Child]:
    """One for each device; those that share the cores of a CPU divide them."""
    cores = num_cores()
    gpu = config.gpus[number]
    experts = ExpertsConfig(
        preset="latency",
        num_experts=config.layers_per_gpu,
        num_clients=config.jobs,
        client_processes=1,
        batch_size=config.batch_size,
        max_batch_size=config.max_batch_size,
        num_handlers=max(1, min(MAX_LOOPS, cores // (2 * len(config.gpus)))),
        hidden_dim=config.hid_dim,
        expert_class=config.expert_class,
        backward="forward+backward" in config.passes,
        device="cpu" if config.device == "cpu" else f"cuda:{gpu}",
    )
    threads = {"OMP_NUM_THREADS": str(max(1, cores // len(config.gpus)))} if config.device == "cpu" else {}
    return child(
        _HOST_EXPERTS,
        {"config": msgspec.to_builtins(experts), "seed": seed + number * config.layers_per_gpu},
        name=f"Server {number + 1} of {len(config.gpus)}",
        variables=threads,
    )


def _values(answer: dict[str, Any]) -> list[float]:
    if "error" in answer:
        raise BenchmarkError(answer["error"])
    values: list[float] = answer["values"]
    return values


def _explained(error: BenchmarkError, config: LatencyConfig) -> BenchmarkError:
    if not config.hosts:
        return error
    return BenchmarkError(
        error.what,
        cause="a host serves nothing, other experts, or asks for a swarm's secret (--secret-file).",
        next_step=f"on each host: shoal serve --expert-class {config.expert_class} --hidden-dim "
        f"{config.hid_dim} --num-experts {config.layers_per_gpu} --listen HOST:PORT",
    )
