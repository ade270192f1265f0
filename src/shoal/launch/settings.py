"""What a launch needs to know, and the variables that each worker finds in its environment."""

from __future__ import annotations

import os
import secrets
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.core.errors import UsageError
from shoal.core.placement import PLACING_VARIABLES, TORCHRUN_VARIABLES, num_cores
from shoal.core.run_options import RUN_ID_VARIABLE, SECRET_VARIABLE, Env, RunOptions
from shoal.launch.worker import WorkerWord

if TYPE_CHECKING:
    from shoal.transport import SwarmSecret

_SECRET_BYTES = 32
JOINING_VARIABLE = "SHOAL_JOINING"
"""Is set for a worker that comes to a run which is under way."""
_LOCAL_SIZE = "SHOAL_LOCAL_WORLD_SIZE"
TUNING = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.cpu.x86_non_temporal_threshold=0x100000",
            "glibc.malloc.mmap_threshold=33554432",
            "glibc.malloc.trim_threshold=1073741824",
        )
    )
}
"""Variables that tune the C library on Linux; what the user has set stays.

Copies of 1 MiB and more bypass the caches: a gradient of 16.8 MB is copied in 1.2 ms instead of 2.7. Memory
of freed gradients is used again and not given back to the system in every step, which cost the MLP of 10 M
parameters up to 9,000 page faults and 20 ms a step, with and without a strategy."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """Says what a run does when workers are lost: starts anew, so often, or goes on as they come and go."""

    max_restarts: int = 0
    min_workers: int | None = None
    """Fewer than that are not started; by default -np, so that a run does not shrink unasked."""
    max_workers: int | None = None
    """A restart takes as many as there are slots, and no more than that; by default -np."""
    is_live: bool = False
    """Whether workers come and go while the others train on, and nothing starts anew (`--elastic`).

    Then `max_restarts` workers that are lost are replaced, and the run waits when fewer than `min_workers`
    are there.
    """
    join_secret: SwarmSecret | None = None
    """By which machines join a live run by themselves; None lets only this machine's own user join."""
    join_port: int | None = None
    """The port where they do, 0 for any; None opens none before somebody on this machine asks for it."""


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """One run of one command in several workers."""

    command: tuple[str, ...]
    """The command as `command_of` gives it."""
    num_workers: int
    """Without the parameter servers, which are `options.num_servers`."""
    options: RunOptions = field(default_factory=RunOptions)
    """What workers find by `RunOptions.from_environment()`; the launcher fills in the run's id."""
    num_threads: int | None = None
    """Of each worker (OMP_NUM_THREADS); by default the variable if it is set, else its share of the cores."""
    timeout_s: float | None = None
    """The time of the whole run, restarts included."""
    log_dir: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of them, for all workers."""
    allows_failures: bool = False
    """Whether workers that can do without a lost one also go on when one fails by an error of its own."""
    elastic: Elastic = Elastic()
    restart_count: int = 0
    """The number of restarts before this start."""
    env: Env = "shoal"
    """With torchrun's variables, programs and libraries that find them share the work by themselves."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"{self.num_workers} workers do no work.", next_step="give -np 1 or more.")
        if self.num_threads is not None and self.num_threads < 1:
            raise UsageError(f"A worker cannot have {self.num_threads} threads.", next_step="give 1 or more.")
        counts = {"--num-servers": self.options.num_servers, "--max-restarts": self.elastic.max_restarts}
        for name, count in counts.items():
            if count < 0:
                raise UsageError(f"{name} {count} is impossible.", next_step="give 0 or more.")
        every = self.options.checkpoint_every
        if every is not None and (every < 1 or self.options.checkpoint is None):
            raise UsageError(
                f"--checkpoint-every {every} saves nothing.",
                next_step="give 1 or more, and --checkpoint DIR.",
            )
        for name, value in (("--timeout", self.timeout_s), ("--peer-timeout", self.options.timeout_s)):
            if value is not None and not value > 0:
                raise UsageError(f"{name} {value} leaves no time.", next_step="give more than 0 seconds.")
        if not self.options.patience > 0:
            raise UsageError(
                f"--patience {self.options.patience} would lose every peer at once.",
                next_step="give more than 0; 1 means 5 s.",
            )
        is_between = 1 <= self.min_workers <= self.num_workers <= self.max_workers
        if self.restart_count == 0 and not is_between:
            raise UsageError(
                f"{self.num_workers} workers are not between --min-np {self.min_workers} and "
                f"--max-np {self.max_workers}.",
                next_step="give -np between the two.",
            )

    @property
    def num_processes(self) -> int:
        """The number of workers and servers."""
        return self.num_workers + self.options.num_servers

    @property
    def word(self) -> WorkerWord:
        """What lines call a worker: where workers come and go, ranks change, and its number stays."""
        return "worker" if self.elastic.is_live else "rank"

    @property
    def min_workers(self) -> int:
        """The fewest workers with which it starts."""
        return self.num_workers if self.elastic.min_workers is None else self.elastic.min_workers

    @property
    def max_workers(self) -> int:
        """The most workers that a restart takes, or that an elastic run has at any time.

        Without a limit an elastic run has one for each slot of its hosts, here for each core.
        """
        if self.elastic.max_workers is not None:
            return self.elastic.max_workers
        return max(self.num_workers, num_cores()) if self.elastic.is_live else self.num_workers


@dataclass(frozen=True, slots=True)
class Meeting:
    """The place where the workers of a start find each other."""

    address: str
    """The address of the machine of rank 0."""
    port: int
    num_machines: int = 1


def variables_of_all(settings: LaunchSettings, meeting: Meeting) -> dict[str, str]:
    """Return the variables that all workers of a start have in common, wherever they run.

    The id of the run is another one for each start.
    """
    size, restart_count = str(settings.num_processes), str(settings.restart_count)
    run_id = settings.options.run_id or uuid.uuid4().hex[:12]
    if settings.options.run_id and settings.restart_count:
        run_id = f"{run_id}-{restart_count}"
    variables = {
        "PYTHONUNBUFFERED": "1",
        "SHOAL_WORLD_SIZE": size,
        "SHOAL_NUM_MACHINES": str(meeting.num_machines),
        "SHOAL_MASTER_ADDR": meeting.address,
        "SHOAL_MASTER_PORT": str(meeting.port),
        RUN_ID_VARIABLE: run_id,
        "SHOAL_RESTART_COUNT": restart_count,
        **msgspec.structs.replace(settings.options, run_id=run_id).to_environment(),
    }
    if settings.env == "torchrun":
        variables |= {
            "WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "ROLE_NAME": "default",
            "GROUP_WORLD_SIZE": str(meeting.num_machines),
            "MASTER_ADDR": meeting.address,
            "MASTER_PORT": str(meeting.port),
            "TORCHELASTIC_RUN_ID": run_id,
            "TORCHELASTIC_RESTART_COUNT": restart_count,
            "TORCHELASTIC_MAX_RESTARTS": str(settings.elastic.max_restarts),
        }
    variables[SECRET_VARIABLE] = secrets.token_hex(_SECRET_BYTES)
    if settings.num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(settings.num_threads)
    return {**variables, **settings.variables}


def variables_of_one(
    env: Env, rank: int, local_rank: int, local_size: int, machine: int = 0
) -> dict[str, str]:
    """Return the variables that are a worker's own."""
    own = {
        "SHOAL_RANK": str(rank),
        "SHOAL_LOCAL_RANK": str(local_rank),
        _LOCAL_SIZE: str(local_size),
        "SHOAL_MACHINE": str(machine),
    }
    if env == "torchrun":
        own |= {
            **dict.fromkeys(("RANK", "ROLE_RANK"), str(rank)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_size),
            "GROUP_RANK": str(machine),
        }
    return own


def complete(
    variables: Mapping[str, str], status_fd: int, link_fd: int | None = None, number: int = 0
) -> dict[str, str]:
    """Return the whole environment of a worker that this process starts, with its ways to the launcher.

    What another launcher has said to this process is not true of the worker, and is left out.
    """
    foreign = TORCHRUN_VARIABLES if "RANK" in variables else PLACING_VARIABLES
    inherited = {name: value for name, value in os.environ.items() if name not in foreign}
    threads = max(1, num_cores() // int(variables[_LOCAL_SIZE]))
    whole = {**TUNING, "OMP_NUM_THREADS": str(threads), **inherited, **variables}
    options = msgspec.structs.replace(
        RunOptions.from_environment(whole),
        status_fd=status_fd,
        status_inode=os.fstat(status_fd).st_ino,
        link_fd=link_fd,
        number=number,
        is_joining=JOINING_VARIABLE in variables,
    )
    return {**whole, **options.to_environment()}


def free_port(address: str = "") -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
