"""What `shoal bench experts` is told: the document's presets, and flags that override them one by one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from shoal.bench.machine import gpus, torch_build
from shoal.bench.open_files import ensure_open_files
from shoal.core import UsageError
from shoal.core.placement import num_cores

HOST = "127.0.0.1"
ECHO = "bench.echo"
"""The method that sends back what it is sent."""
MAX_LOOPS = 8
"""Network loop threads that a preset asks for at most: beyond it they take the cores from each other."""
PROCESSES_A_CORE = 4
_BATCHES_AT_ONCE = 4  # that the server computes together, where neither preset nor flag says how many samples
_DRIVER_ANSWER_S = 10.0
_FILES_A_CLIENT = 5  # a connection, and the loop of a thread
_OTHER_FILES = 256  # CUDA's own are about a hundred


class Preset(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the document's table."""

    num_experts: int = 16
    num_clients: int = 128
    batch_size: int = 2048
    max_batch_size: int | None = None
    """None: four batches."""
    num_handlers: int | None = None
    """None: half as many as clients."""
    backward: bool = True
    expert_class: str = "ffn"
    should_raise_file_limit: bool = False


_SMALL = Preset(num_experts=1, num_clients=512, batch_size=1, max_batch_size=8192)
PRESETS: dict[str, Preset] = {
    "default": Preset(),
    "ffn_forward_backward": Preset(),
    "ffn_forward": Preset(backward=False),
    "ffn_small_batch": Preset(num_experts=4, batch_size=32, max_batch_size=8192, backward=False),
    "ffn_small_batch_512clients": _SMALL,
    "ffn_small_batch_512clients_32handlers": msgspec.structs.replace(_SMALL, num_handlers=32),
    "ffn_massive": Preset(
        num_clients=512, batch_size=512, max_batch_size=8192, backward=False, should_raise_file_limit=True
    ),
    "minimalistic": Preset(num_experts=1, num_clients=1, num_handlers=1),
    "nop": Preset(backward=False, expert_class="nop"),
}


class ExpertsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One server, its clients, and what they ask for."""

    preset: str = "default"
    num_experts: int
    num_clients: int
    client_processes: int
    """That the clients are spread over, each with a connection and a thread of its own."""
    num_batches_per_client: int = 16
    batch_size: int
    max_batch_size: int
    """Samples that the server computes at once."""
    num_handlers: int
    """Network loop threads of the server."""
    hidden_dim: int = 1024
    expert_class: str
    backward: bool
    """Whether each batch that went forward goes backward too, and teaches its expert."""
    device: str
    precision: str = "fp32"

    @property
    def num_samples(self) -> int:
        """That all clients send."""
        return self.num_clients * self.num_batches_per_client * self.batch_size

    @property
    def num_calls(self) -> int:
        """That all clients make, forward and backward apart."""
        return self.num_clients * self.num_batches_per_client * (2 if self.backward else 1)

    @property
    def num_files(self) -> int:
        """Descriptors that one process may need."""
        clients_a_process = -(-self.num_clients // self.client_processes)
        return max(2 * self.num_clients, _FILES_A_CLIENT * clients_a_process) + _OTHER_FILES

    def __post_init__(self) -> None:
        check_batches(self.batch_size, self.max_batch_size)
        check_clients(self.num_clients, self.client_processes, "one client")


def check_batches(batch_size: int, max_batch_size: int) -> None:
    """UsageError for those that no server takes."""
    if max_batch_size < batch_size:
        raise UsageError(
            f"No server that computes {max_batch_size} samples at once takes a batch of {batch_size}.",
            next_step=f"give --max-batch-size {batch_size} or more.",
        )


def check_clients(num_clients: int, num_processes: int, one: str) -> None:
    """UsageError for processes that have none; `one` says how a client is asked for."""
    if not 1 <= num_processes <= num_clients:
        raise UsageError(
            f"{num_clients} clients cannot be spread over {num_processes} processes.",
            next_step=f"give at least {one} for each of --client-processes.",
        )


def preset_named(name: str) -> Preset:
    """UsageError, with the nearest name, where there is no such preset; hyphens are underscores."""
    preset = PRESETS.get(name.replace("-", "_"))
    if preset is None:
        near = difflib.get_close_matches(name.replace("-", "_"), PRESETS, 1)
        raise UsageError(
            f"There is no preset '{name}'.",
            next_step=f"did you mean --preset {near[0]}?" if near else f"give one of {', '.join(PRESETS)}.",
        )
    return preset


def config_of(name: str, given: Mapping[str, Any]) -> ExpertsConfig:
    """A preset with the flags that were given on a command line, by name, in place of its own numbers.

    `--num-handlers` counts as it is given; a preset's number is a bound beside the cores.
    """
    preset = preset_named(name)
    told = {flag: value for flag, value in given.items() if flag in _FLAGS and value is not None}
    num_clients = told.get("num_clients", preset.num_clients)
    batch_size = told.get("batch_size", preset.batch_size)
    num_handlers = preset.num_handlers or max(1, num_clients // 2)
    defaults = {
        "num_experts": preset.num_experts,
        "num_clients": num_clients,
        "client_processes": min(num_clients, PROCESSES_A_CORE * num_cores()),
        "batch_size": batch_size,
        "max_batch_size": max(batch_size, preset.max_batch_size or _BATCHES_AT_ONCE * batch_size),
        "num_handlers": min(num_handlers, MAX_LOOPS, max(1, num_cores() // 2)),
        "expert_class": preset.expert_class,
        "backward": preset.backward,
    }
    told["device"] = _checked(told["device"]) if "device" in told else default_device()
    return ExpertsConfig(preset=name.replace("-", "_"), **{**defaults, **told})


def default_device() -> str:
    """'cuda' where torch is built for it and the driver tells of a GPU; torch is not imported to know."""
    has_gpu = torch_build().startswith("CUDA") and bool(gpus(_DRIVER_ANSWER_S).found)
    return "cuda" if has_gpu else "cpu"


def _checked(device: str) -> str:
    """UsageError for one that cannot be here, before processes are started."""
    kind = device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"Experts cannot be served on {device!r}.", next_step="use cpu, cuda, or cuda:1.")
    if kind == "cuda" and not torch_build().startswith("CUDA"):
        raise UsageError(
            f"There is no GPU for --device {device}.",
            cause="torch is a build without CUDA.",
            next_step="use --device cpu, or see what `shoal doctor` says.",
        )
    return device


def ensure_files(config: ExpertsConfig, *, should_raise: bool) -> str | None:
    """See that all processes may open what they need; what was changed, in words. UsageError otherwise."""
    try:
        return ensure_open_files(config.num_files, should_raise=should_raise)
    except UsageError as error:
        raise UsageError(
            error.what,
            cause="every client has a connection of its own, and the server holds them all.",
            next_step=f"{'use fewer --num-clients' if should_raise else 'add --increase-file-limit'}, or run "
            f"`ulimit -n {config.num_files}` first.",
        ) from error


_FLAGS = {field for field in ExpertsConfig.__struct_fields__ if field != "preset"}
