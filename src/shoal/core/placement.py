"""Where this process stands among its siblings, as its launcher says in environment variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.errors import UsageError
from shoal.core.ids import Address
from shoal.core.run_options import own_run_id


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank and size in the whole run and on this machine; `source` names the launcher that said so."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    source: str = "alone"
    rendezvous: Address | None = None
    """Where the workers of several machines meet."""
    machine: int | None = None
    """The number of this machine, where the launcher gives one."""

    def __post_init__(self) -> None:
        for name, rank, size in (("", self.rank, self.size), ("local ", self.local_rank, self.local_size)):
            if size < 1 or not 0 <= rank < size:
                raise UsageError(
                    f"{name}rank {rank} of {size} is impossible.",
                    cause=f"the variables set by {self.source} disagree.",
                    next_step="start the program through its launcher again, or unset those variables.",
                )
        if self.local_size > self.size:
            raise UsageError(
                f"{self.local_size} workers on this machine of {self.size} in all are impossible.",
                cause=f"the variables set by {self.source} disagree.",
                next_step="start the program through its launcher again, or unset those variables.",
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Placement:
        """Read the variables of `shoal run`, torchrun, Open MPI, other MPIs or Slurm; alone without any.

        They are read in this order: `mpirun torchrun` and `srun torchrun` set both, and the innermost
        launcher is the one that placed this process. What a program sets itself, RANK and WORLD_SIZE for
        another library say, does not change its place in a `shoal run`.
        """
        environ = os.environ if environ is None else environ
        for dialect in _DIALECTS if own_run_id(environ) else _DIALECTS[1:]:
            if dialect.rank in environ and (dialect.marker is None or dialect.marker in environ):
                return dialect.read(environ)
        return cls()


@dataclass(frozen=True, slots=True)
class _Dialect:
    """The names that one launcher uses; the first of `local_size` that is set counts."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: tuple[str, ...]
    marker: str | None = None
    machine: str | None = None
    prefix: str = ""
    """Of the two variables that say where to meet."""

    def read(self, environ: Mapping[str, str]) -> Placement:
        rank, size = self._number(environ, self.rank), self._number(environ, self.size)
        local_size_name = next((name for name in self.local_size if name in environ), None)
        has_local_rank = self.local_rank in environ
        # torchrun's minimum is RANK and WORLD_SIZE; scripts that set only these run one worker a machine
        local_rank = self._number(environ, self.local_rank) if has_local_rank else 0
        local_size = self._count_here(environ, local_size_name) if local_size_name else local_rank + 1
        machine = environ.get(self.machine, "") if self.machine else ""
        return Placement(
            rank,
            size,
            local_rank,
            local_size,
            self.source,
            _rendezvous(environ, self.prefix) or (_slurm_rendezvous(environ) if self.marker else None),
            int(machine) if machine.isdecimal() else None,
        )

    def _number(self, environ: Mapping[str, str], name: str) -> int:
        text = environ.get(name)
        if text is None:
            raise UsageError(
                f"{self.rank} is set but {name} is not.",
                cause=f"the variables of {self.source} are incomplete.",
                next_step=f"set {name} too, or unset {self.rank} to run alone.",
            )
        if re.fullmatch(r"\s*\d+\s*", text) is None:
            raise self._no_number(name, text)
        return int(text)

    def _count_here(self, environ: Mapping[str, str], name: str) -> int:
        """The number of workers on this machine, of one number for all machines or a list of Slurm's."""
        counts = _expand_counts(environ[name])
        if not counts:
            raise self._no_number(name, environ[name])
        if counts.count(counts[0]) == len(counts):
            return counts[0]
        node = environ.get("SLURM_NODEID", "")
        if not node.isdecimal() or int(node) >= len(counts):
            raise UsageError(
                f"{name}={environ[name]} has no number for this machine, SLURM_NODEID={node!r}.",
                cause=f"the variables of {self.source} are incomplete.",
                next_step="start the program with srun again.",
            )
        return counts[int(node)]

    def _no_number(self, name: str, text: str) -> UsageError:
        return UsageError(
            f"{name}={text!r} is not a number.",
            next_step=f"start through {self.source}, or unset {name}.",
        )


def _expand_counts(text: str) -> list[int]:
    """Slurm's lists of counts, one a machine: '4(x2),3' is 4, 4, 3; a plain number is itself; else empty."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d{1,6})\))?\s*", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _rendezvous(environ: Mapping[str, str], prefix: str) -> Address | None:
    host, port = environ.get(f"{prefix}MASTER_ADDR"), environ.get(f"{prefix}MASTER_PORT")
    if not host or not port:
        return None
    if not port.isdecimal():
        raise UsageError(f"{prefix}MASTER_PORT={port!r} is not a number.", next_step="set it to a free port.")
    return Address(host, int(port))


def _slurm_rendezvous(environ: Mapping[str, str]) -> Address | None:
    """The first machine of the step, which has its first task, and a port that follows from its number.

    What is set of MASTER_ADDR and MASTER_PORT counts.
    """
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    host = environ.get("MASTER_ADDR") or _first_node(nodes) or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")
    if not host or not job.isdecimal() or not step.isdecimal():
        return None
    port = environ.get("MASTER_PORT", "")
    derived = _FIRST_PORT + (_STEPS_PER_JOB * int(job) + int(step)) % _NUM_PORTS
    return Address(host, int(port) if port.isdecimal() else derived)


def _first_node(nodes: str) -> str | None:
    """The first of Slurm's list of names: 'gpu[03-05,9]-ib,login1' begins with gpu03-ib."""
    match = re.match(r"([^\[\],\s]+)(?:\[(\d+)[^\]]*\]([^\[\],\s]*))?", nodes.strip())
    return match[1] + (match[2] or "") + (match[3] or "") if match else None


_FIRST_PORT, _NUM_PORTS = 15_000, 15_000  # below those that systems hand out by themselves
_STEPS_PER_JOB = 16

_DIALECTS = (
    _Dialect(
        "shoal run",
        "SHOAL_RANK",
        "SHOAL_WORLD_SIZE",
        "SHOAL_LOCAL_RANK",
        ("SHOAL_LOCAL_WORLD_SIZE",),
        machine="SHOAL_MACHINE",
        prefix="SHOAL_",
    ),
    _Dialect("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE",), machine="GROUP_RANK"),
    _Dialect(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Dialect("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    _Dialect(
        "Slurm",
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        # without a step this is the batch script itself, which is no worker
        marker="SLURM_STEP_ID",
        machine="SLURM_NODEID",
    ),
)

TORCHRUN_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
)
"""By which a program that torchrun has started knows its place."""


def torchrun_attempt(environ: Mapping[str, str]) -> str:
    """Gives what tells the restarts of a torchrun apart; empty where each has a MASTER_PORT of its own.

    Nodes count their own restarts: one that comes later has another count than those that it meets. Where
    torchrun's agents hold one store for all restarts, torch itself tells them apart by that count.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "false":
        return ""
    return environ.get("TORCHELASTIC_RESTART_COUNT", "")


PLACING_VARIABLES = (
    *TORCHRUN_VARIABLES,
    *(
        name
        for one in _DIALECTS[2:]
        for name in (one.rank, one.size, one.local_rank, *one.local_size, one.machine)
        if name is not None
    ),
)
"""By which libraries find out that a launcher, other than `shoal run`, has started several processes."""


def num_cores() -> int:
    """Those that this process may be scheduled on; a container's share of them may be smaller."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
