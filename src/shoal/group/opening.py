"""`shoal.init()`: the group that this process's launcher has placed it in, and the end of that membership.

A program that ends well leaves the group in order. One that fails doesn't, so that the others learn of it: it
ended in an exception, or by `sys.exit` with another code than 0 (which Python tells nobody at its end, so
`sys.exit` is replaced by one that remembers it; a `SystemExit` that is raised otherwise counts as an end in
order). What it has of a timeline is written in any case, save when it is killed.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from shoal.core import Placement, UsageError
from shoal.core.run_options import RUN_ID_VARIABLE, RunOptions
from shoal.group.base import Group
from shoal.group.host import open_host_group
from shoal.group.settings import GroupSettings
from shoal.group.solo import SoloGroup
from shoal.group.timeline import Timeline
from shoal.group.traced import Traced
from shoal.group.watch import stat_fields

_JOB_VARIABLES = (
    RUN_ID_VARIABLE,
    "TORCHELASTIC_RESTART_COUNT",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
_NAMES = {"Open MPI": "PMIX_NAMESPACE", "MPICH or Intel MPI": "PMI_JOBID", "Slurm": "SLURM_STEP_ID"}
"""By launcher: the variable that tells its runs apart. MASTER_PORT does too: one run at a time holds it."""


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
        group = SoloGroup(settings.patience)
    elif placement.size == placement.local_size:
        group = open_host_group(placement, settings)
        _exits.listen()
    else:
        raise UsageError(
            f"{placement.source} has placed {placement.local_size} of {placement.size} workers here.",
            cause="a group over several machines does not exist yet.",
            next_step="run all workers on one machine, with LOCAL_WORLD_SIZE equal to WORLD_SIZE.",
        )
    if options.timeline is not None:
        group = Traced(group, Timeline(Path(f"{options.timeline}.{group.rank}"), group.rank))
        _write_when_terminated(group.timeline)
    atexit.register(_end, group, os.getpid(), getattr(sys, "last_value", None))
    return group


class _Exits:
    """Remembers the code with which the program was told to exit."""

    def __init__(self) -> None:
        self.code: object = None
        self._exit = sys.exit

    @property
    def is_failed(self) -> bool:
        return self.code is not None and self.code != 0

    def listen(self) -> None:
        """From now on; idempotent."""
        if sys.exit != self.exit:
            self._exit, sys.exit = sys.exit, self.exit

    def exit(self, code: object = None, /) -> NoReturn:
        """Exit; in another thread than the main one that ends no program."""
        if threading.current_thread() is threading.main_thread():
            self.code = code
        self._exit(code)  # type: ignore[arg-type]


_exits = _Exits()


def _end(group: Group, pid: int, earlier_error: object) -> None:
    """At the end of the program, for the process that has joined: a forked child inherits this call."""
    if os.getpid() != pid:
        return
    if _exits.is_failed or getattr(sys, "last_value", None) is not earlier_error:
        group.abandon()
    else:
        group.close()


def _write_when_terminated(timeline: Timeline) -> None:
    """When one worker fails, launchers end the others by SIGTERM: what they did until then tells why."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    pid = os.getpid()

    def write(number: int, frame: FrameType | None) -> None:
        if os.getpid() == pid:
            timeline.close()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    signal.signal(signal.SIGTERM, write)


def _key(placement: Placement, options: RunOptions, environ: Mapping[str, str]) -> str:
    """A name that the workers of one run share, and no other run on this machine has."""
    if options.run_id:
        return options.run_id
    job = [f"{name}={environ[name]}" for name in _JOB_VARIABLES if environ.get(name)]
    if not environ.get("MASTER_PORT") and not environ.get(_NAMES.get(placement.source, "")):
        # the launcher's process tells runs apart that were started alike
        job.append(f"{os.getppid()} {_started(os.getppid())}")
    return " ".join([placement.source, *job])


def _started(pid: int) -> str:
    """When a process began, so that a number that is used again names another run."""
    fields = stat_fields(pid)
    return fields[19] if len(fields) > 19 else ""
