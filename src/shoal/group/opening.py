"""`shoal.init()`: the group that this process's launcher has placed it in."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from shoal.core import Placement, UsageError
from shoal.core.run_options import RunOptions
from shoal.group.base import Group
from shoal.group.host import open_host_group
from shoal.group.settings import GroupSettings
from shoal.group.solo import SoloGroup
from shoal.group.timeline import Timeline
from shoal.group.traced import Traced

_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)


def init(
    *,
    patience: float | None = None,
    timeout_s: float | None = None,
    workers_per_machine: int | None = None,
) -> Group:
    """Join the group: all workers of `shoal run`, torchrun, MPI or Slurm; a group of one when alone.

    Waits for the others. What is given here wins over what `shoal run` was asked for. The group may be
    closed with `with`; otherwise this worker leaves it when its program ends well.
    """
    placement = Placement.from_environment()
    options = RunOptions.from_environment()
    settings = GroupSettings(
        key=_key(placement, options, os.environ),
        patience=options.patience if patience is None else patience,
        timeout_s=options.timeout_s if timeout_s is None else timeout_s,
        workers_per_machine=workers_per_machine or options.workers_per_machine,
    )
    group: Group
    if placement.size == 1:
        group = SoloGroup()
    elif placement.size == placement.local_size:
        group = open_host_group(placement, settings)
    else:
        raise UsageError(
            f"{placement.source} has placed {placement.local_size} of {placement.size} workers here.",
            cause="a group over several machines does not exist yet.",
            next_step="run all workers on one machine, with LOCAL_WORLD_SIZE equal to WORLD_SIZE.",
        )
    if options.timeline is not None:
        group = Traced(group, Timeline(Path(f"{options.timeline}.{group.rank}"), group.rank))
    atexit.register(_end, group)
    return group


def _end(group: Group) -> None:
    """At the end of the program: a worker that failed does not leave in order, the others shall know."""
    if not hasattr(sys, "last_value"):
        group.close()


def _key(placement: Placement, options: RunOptions, environ: Mapping[str, str]) -> str:
    """A name that the workers of one run share, and no other run on this machine has."""
    if options.run_id:
        return options.run_id
    job = [f"{name}={environ[name]}" for name in _JOB_VARIABLES if name in environ]
    # the launcher's process tells runs apart that were started alike; a job's own name is enough
    has_name = any(name in environ for name in ("PMIX_NAMESPACE", "PMI_JOBID", "SLURM_STEP_ID"))
    parent = "" if has_name else f"{os.getppid()} {_started(os.getppid())}"
    return " ".join([placement.source, *job, parent])


def _started(pid: int) -> str:
    """When a process began, so that a number that is used again names another run."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""
