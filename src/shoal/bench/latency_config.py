"""What `shoal bench latency` is told, and what follows from it: layers, pings, memory, hours of waiting.

Nothing here imports torch: the command line reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from shoal.bench.experts import check_batches, check_clients, default_device
from shoal.bench.machine import gpus, memory, torch_build
from shoal.bench.open_files import ensure_open_files
from shoal.core import Address, UsageError
from shoal.core.placement import num_cores

Method = Literal["fast", "slow", "ours"]
Passes = Literal["forward", "forward+backward"]
METHODS: tuple[Method, ...] = ("fast", "slow", "ours")
DEFAULT_STAGES = 2
"""Devices of a machine without GPUs: processes and stages that share its cores."""
BACKWARD_COST, RECOMPUTED_COST = 2.0, 3.0
"""Of a backward in virtual time, in forwards: by itself, and where the server computes forward again."""
_SEQUENCE = 512
_INNER_DIM = 2048  # of a transformer's feed-forward
_FLOAT_BYTES = 4
_TRAINED = 4  # parameters, gradients and Adam's two moments
_FILES_A_CLIENT = 2
_OTHER_FILES = 256
_DRIVER_ANSWER_S = 10.0
_CORES_A_CLIENT_PROCESS = 4


class LatencyConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model of blocks in a row, who computes them, and what is measured at which pings."""

    block_type: Literal["ffn", "transformer"] = "ffn"
    device: str = "cpu"
    gpus: tuple[int, ...] = (0, 1)
    """One device each, with `layers_per_gpu` blocks; one GPU may be several of them. On a CPU: stages."""
    hid_dim: int = 1024
    layers_per_gpu: int = 56
    batch_size: int = 4
    batches_for_latency: int = 5
    """Measured ones; one more goes first and does not count."""
    batches_for_throughput: int = 10
    """Of a run: one after another where one batch is under way at a time; of each client otherwise, and, in
    `fast` on a CPU, of each batch that is under way."""
    throughput_runs: int = 5
    linspace_points: int = 10
    max_ping_s: float = 0.2
    jobs: int = 64
    """Clients that ask at once."""
    client_processes: int = 1
    hosts: tuple[str, ...] = ()
    """Servers that run already; none: the benchmark starts one for each device."""
    secret_file: str | None = None
    max_batch_size: int = 2048
    """Samples that a server computes at once."""
    passes: tuple[Passes, ...] = ("forward",)
    methods: tuple[Method, ...] = METHODS
    is_virtual: bool = False
    compute_ms: float = 10.0
    """Of one batch in one block, forward, in virtual time."""

    def __post_init__(self) -> None:
        if self.hosts and not self.is_virtual and len(self.hosts) != len(self.gpus):
            raise UsageError(
                f"{len(self.hosts)} hosts serve another number of layers than {len(self.gpus)} devices hold.",
                cause="all methods compute the same model: --layers-per-gpu for each device, and each host.",
                next_step="give as many --gpus as --hosts, or leave --gpus out.",
            )
        check_batches(self.batch_size, self.max_batch_size)
        check_clients(self.jobs, self.client_processes, "one of --jobs")

    @property
    def num_layers(self) -> int:
        """Blocks of the whole model."""
        return self.layers_per_gpu * len(self.gpus)

    @property
    def pings_s(self) -> list[float]:
        """Mean delays, from none to the longest, each once."""
        last = max(1, self.linspace_points - 1)
        return list(dict.fromkeys(self.max_ping_s * index / last for index in range(self.linspace_points)))

    @property
    def expert_class(self) -> str:
        """What a block is called among experts."""
        return f"lah-{self.block_type}"

    @property
    def parameter_bytes(self) -> int:
        """Of the whole model, norms and biases left out."""
        dim = self.hid_dim
        weights = 24 * dim * dim if self.block_type == "ffn" else 4 * dim * dim + 2 * _INNER_DIM * dim
        return _FLOAT_BYTES * weights * self.num_layers

    @property
    def needed_bytes(self) -> int:
        """What the model takes, with all that trains it where that is measured."""
        return self.parameter_bytes * (_TRAINED if "forward+backward" in self.passes else 1)

    @property
    def batch_bytes(self) -> int:
        """Between two blocks."""
        length = _SEQUENCE if self.block_type == "transformer" else 1
        return _FLOAT_BYTES * self.batch_size * length * self.hid_dim

    @property
    def waiting_s(self) -> float:
        """What the delays of `slow`, or of `ours`, add up to, one batch after another."""
        num_batches = self.batches_for_latency + 1 + self.throughput_runs * self.batches_for_throughput + 1
        num_calls = sum(1 if passes == "forward" else 2 for passes in self.passes)
        return sum(self.pings_s) * num_batches * num_calls * self.num_layers

    @property
    def num_files(self) -> int:
        """Descriptors that one process may need."""
        return _FILES_A_CLIENT * self.jobs * len(self.gpus) + _OTHER_FILES

    def calls(self, passes: Passes) -> int:
        """Waits of one batch."""
        return self.num_layers * (1 if passes == "forward" else 2)


def config_of(given: dict[str, Any]) -> LatencyConfig:
    """The configuration of the flags that were given; UsageError for what cannot be on this machine."""
    told = {name: value for name, value in given.items() if value is not None}
    is_virtual = told.get("is_virtual", False)
    told["hosts"] = tuple(str(Address.parse(host)) for host in told.get("hosts", ()))
    told.setdefault("device", "cpu" if is_virtual else default_device())
    _check_device(told["device"])
    if not told.get("gpus"):
        told["gpus"] = _all_devices(told["device"], len(told["hosts"]))
    jobs = told.get("jobs", LatencyConfig().jobs)
    told.setdefault("client_processes", max(1, min(jobs, num_cores() // _CORES_A_CLIENT_PROCESS)))
    told.setdefault("max_batch_size", _share_of_device(jobs, told))
    return LatencyConfig(**told)


def check_machine(config: LatencyConfig, *, should_raise_limit: bool) -> str | None:
    """UsageError for a model that does not fit, or too few open files; what was changed, in words."""
    available_bytes = memory().available_bytes
    if config.device == "cpu" and available_bytes is not None and config.needed_bytes > available_bytes:
        raise UsageError(
            f"{config.num_layers} blocks need {config.needed_bytes / 1e9:.1f} GB, and "
            f"{available_bytes / 1e9:.1f} GB are free.",
            next_step="lower --layers-per-gpu or --hid-dim, or simulate it: --virtual.",
        )
    try:
        return ensure_open_files(config.num_files, should_raise=should_raise_limit)
    except UsageError as error:
        raise UsageError(
            error.what,
            cause="every client has a connection to every server.",
            next_step=f"{'use fewer --jobs' if should_raise_limit else 'add --increase-file-limit'}, or run "
            f"`ulimit -n {config.num_files}` first.",
        ) from error


def _share_of_device(jobs: int, told: dict[str, Any]) -> int:
    """Half of what comes to one device: were all clients computed together, they would stay together, and
    all devices but one would wait.
    """
    batch_size = told.get("batch_size", LatencyConfig().batch_size)
    return int(batch_size * max(1, jobs // (2 * len(told["gpus"]))))


def _all_devices(device: str, num_hosts: int) -> tuple[int, ...]:
    if device == "cpu":
        return tuple(range(num_hosts or DEFAULT_STAGES))
    num_gpus = max(1, len(gpus(_DRIVER_ANSWER_S).found))
    return tuple(number % num_gpus for number in range(num_hosts or num_gpus))


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise UsageError(
            f"There is no device {device!r}.",
            next_step="use cpu or cuda, and say which GPUs with --gpus 0 1 2 3.",
        )
    if device == "cuda" and not torch_build().startswith("CUDA"):
        raise UsageError(
            "There is no GPU for --device cuda.",
            cause="torch is a build without CUDA.",
            next_step="use --device cpu, or see what `shoal doctor` says.",
        )


def parsed_methods(names: Sequence[str]) -> tuple[Method, ...]:
    """In the order in which they are measured; UsageError for one that there is not."""
    unknown = [name for name in names if name not in METHODS]
    if unknown or not names:
        raise UsageError(
            f"There is no method {unknown[0]!r}." if unknown else "No method is measured.",
            next_step=f"give some of {','.join(METHODS)}.",
        )
    return tuple(method for method in METHODS if method in names)
