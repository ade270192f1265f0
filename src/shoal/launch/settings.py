"""What a launch needs to know, and the variables that each worker finds in its environment."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shoal.core.errors import UsageError
from shoal.core.placement import num_cores
from shoal.core.run_options import RunOptions


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """One run of one command in several workers."""

    command: tuple[str, ...]
    """As `program.command_of` gives it."""
    num_workers: int
    options: RunOptions = field(default_factory=RunOptions)
    """What workers find by `RunOptions.from_environment()`; the launcher fills in the run's id."""
    num_threads: int | None = None
    """Of each worker (OMP_NUM_THREADS); by default the variable if it is set, else its share of the cores."""
    timeout_s: float | None = None
    """Of the whole run."""
    log_dir: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of them, for all workers."""

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"{self.num_workers} workers do no work.", next_step="give -np 1 or more.")
        if self.num_threads is not None and self.num_threads < 1:
            raise UsageError(f"A worker cannot have {self.num_threads} threads.", next_step="give 1 or more.")
        for name, value in (("--timeout", self.timeout_s), ("--peer-timeout", self.options.timeout_s)):
            if value is not None and not value > 0:
                raise UsageError(f"{name} {value} leaves no time.", next_step="give more than 0 seconds.")
        if not self.options.patience > 0:
            raise UsageError(
                f"--patience {self.options.patience} would lose every peer at once.",
                next_step="give more than 0; 1 means 5 s.",
            )


class Surroundings:
    """The environment of each worker of one run."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self.run_id = settings.options.run_id or uuid.uuid4().hex[:12]
        threads = settings.num_threads or max(1, num_cores() // settings.num_workers)
        self._shared = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "WORLD_SIZE": str(settings.num_workers),
            "LOCAL_WORLD_SIZE": str(settings.num_workers),
            "ROLE_WORLD_SIZE": str(settings.num_workers),
            "ROLE_NAME": "default",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }
        for name, value in TUNING.items():
            self._shared.setdefault(name, value)
        if settings.num_threads is not None or "OMP_NUM_THREADS" not in os.environ:
            self._shared["OMP_NUM_THREADS"] = str(threads)
        # under torchrun it says that the launcher holds the store at MASTER_PORT; here rank 0 does
        self._shared.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        self._shared.update(settings.variables)

    def of(self, rank: int, status_fd: int) -> dict[str, str]:
        """Of one worker, which will find this pipe to the launcher."""
        options = msgspec.structs.replace(
            self._settings.options,
            run_id=self.run_id,
            status_fd=status_fd,
            status_inode=os.fstat(status_fd).st_ino,
        )
        ranks = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        return {**self._shared, **ranks, **options.to_environment()}


TUNING = {
    "GLIBC_TUNABLES": ":".join(
        (
            "glibc.cpu.x86_non_temporal_threshold=0x100000",
            "glibc.malloc.mmap_threshold=33554432",
            "glibc.malloc.trim_threshold=1073741824",
        )
    )
}
"""Of the C library on Linux; what the user has set stays.

Copies of 1 MiB and more bypass the caches: a gradient of 16.8 MB is copied in 1.2 ms instead of 2.7. Memory
of freed gradients is used again and not given back to the system in every step, which cost the MLP of 10 M
parameters up to 9,000 page faults and 20 ms a step, with and without a strategy."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
