"""`shoal.init()`: the group that this process's launcher has placed it in, and the end of that membership.

A program that ends well leaves the group in order. One that fails doesn't, so that the others learn of it: it
ended in an exception, or by `sys.exit` with another code than 0 (which Python tells nobody at its end, so
`sys.exit` is replaced by one that remembers it; a `SystemExit` that is raised otherwise counts as an end in
order). What it has of a timeline is written in any case, save when it is killed.

In a run with parameter servers workers see each other alone, and `everybody` holds them all. The first ranks
of `everybody` are the servers; a worker's rank there is its own plus their number. On a server the group is
one of its own. What servers do is the business of the strategy.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar

import msgspec

from shoal.core import Deadline, PeerLost, Placement, UsageError
from shoal.core.board import name_of_run
from shoal.core.elastic import Form, LeavingRun, place_in
from shoal.core.errors import PeerError
from shoal.core.identity import Identity
from shoal.core.placement import torchrun_attempt
from shoal.core.processes import own_address, started
from shoal.core.run_options import (
    SECRET_VARIABLE,
    TORCHRUN_ID_VARIABLE,
    AllReduceChoice,
    EncryptChoice,
    RunOptions,
)
from shoal.core.status import tell_launcher
from shoal.group.base import Group, GroupSettings, GroupStats
from shoal.group.elastic import ElasticGroup, LauncherLink, open_restarted
from shoal.group.host import HostGroup, open_host_group
from shoal.group.operations import GroupWrapper
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import Traced
from shoal.report.timeline import Timeline
from shoal.transport import StreamTransport
from shoal.transport.trust.membership import Membership
from shoal.transport.trust.secret import SwarmSecret

T = TypeVar("T")
_JOB_VARIABLES = (
    TORCHRUN_ID_VARIABLE,
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMIX_NAMESPACE",
    "PMI_JOBID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)
_MEETING_S = 300.0
LOOPBACK = "127.0.0.1"
_NAMES = {"Open MPI": "PMIX_NAMESPACE", "MPICH or Intel MPI": "PMI_JOBID", "Slurm": "SLURM_STEP_ID"}
"""By launcher: the variable that tells its runs apart. MASTER_PORT does too: one run at a time holds it."""


def init(
    *,
    patience: float | None = None,
    timeout_s: float | None = None,
    workers_per_machine: int | None = None,
    num_servers: int | None = None,
    backend: Literal["gloo", "nccl"] | None = None,
    allow_split: bool | None = None,
    encrypt: bool | None = None,
    all_reduce: AllReduceChoice | None = None,
) -> Group:
    """Joins the group: all workers of `shoal run`, torchrun, MPI or Slurm; a group of one when alone.

    Waits for the others. What is given here wins over what `shoal run` was asked for. So many of the first
    processes as `num_servers` says are parameter servers, and no workers. Models may lie on a GPU; a
    `backend` is for those who want torch.distributed to carry tensors instead: all of them (gloo), or those
    of GPUs (nccl). With `allow_split` each side of a network that is cut goes on, with a model of its own;
    without, the smaller side stops (`cluster.members`). `encrypt` says whether tensors go encrypted between
    machines; left out, they do unless all machines are in one private network (docs/security.md).
    `all_reduce` says how machines reduce together: around a ring, or each directly with all others. The group
    may be closed with `with`; otherwise this worker leaves it when its program ends well.
    """
    placement = Placement.from_environment()
    given = {
        "patience": patience,
        "timeout_s": timeout_s,
        "workers_per_machine": workers_per_machine,
        "num_servers": num_servers,
        "allow_split": allow_split,
        "encrypt": None if encrypt is None else "always" if encrypt else "never",
        "all_reduce": all_reduce,
    }
    given = {name: value for name, value in given.items() if value is not None}
    options = msgspec.structs.replace(RunOptions.from_environment(), **given)
    settings = GroupSettings(
        key=_key(placement, options, os.environ),
        patience=options.patience,
        timeout_s=options.timeout_s,
        workers_per_machine=options.workers_per_machine,
        network_interface=options.network_interface,
        backend=backend,
        on_split="continue" if options.allow_split else "stop",
        encrypt=options.encrypt,
        all_reduce=options.all_reduce,
    )
    servers = options.num_servers
    check_servers(servers, placement.size)
    group: Group
    if options.link_fd is not None:
        group = _open_elastic(placement, settings, options)
    else:
        opened = (
            _open_with_servers(placement, settings, servers) if servers else open_group(placement, settings)
        )
        opened.run, opened.local_rank = name_of_run(settings.key), placement.local_rank
        group = _traced(opened, options, placement.rank)
        group = group if servers else open_restarted(group, placement)
    tell_launcher(phase="joined")
    if placement.size > 1 or options.link_fd is not None:
        _exits.listen()
    atexit.register(_end, group, os.getpid(), getattr(sys, "last_value", None))
    return group


def _open_elastic(placement: Placement, settings: GroupSettings, options: RunOptions) -> ElasticGroup:
    """Joins a run whose workers come and go, or waits at its door until a strategy is attached.

    Workers that were started with the run form its first group here. One that comes later goes on with its
    program, as a group of one: it is taken in when it has a model, so that nobody waits for it until then.
    """
    assert options.link_fd is not None, "no way to the launcher"
    link = LauncherLink(options.number, options.link_fd)

    def open_generation(form: Form, group: ElasticGroup, deadline: Deadline) -> Group:
        def gather(topic: str, value: T) -> list[T]:
            return group.gather(form, topic, value, deadline)

        def gather_workers(topic: str, value: T) -> list[T]:
            return group.gather(form, f"workers {topic}", value, deadline, is_of_workers=True)

        gather("all are here", True)
        placed = place_in(form, link.number, placement.rendezvous)
        named = msgspec.structs.replace(
            settings,
            network_interface=options.network_interface or form.places[placed.rank].address or None,
            key=f"{settings.key} {form.generation}",
            on_split="ignore",  # the coordinator says who goes on
            meeting_s=max(0.1, deadline.remaining_s),
        )
        if options.num_servers:
            inner = _open_with_servers(placed, named, options.num_servers, gather, gather_workers)
        else:
            inner = open_group(placed, named, gather=gather)
        return _traced(inner, options, link.number)

    def make_transport() -> tuple[StreamTransport, str]:
        secret = SwarmSecret.parse(os.environ[SECRET_VARIABLE])
        host = LOOPBACK
        if group.num_machines > 1:
            form = group.form
            told = "" if form is None else form.places[form.rank_of(link.number)].address
            host = own_address(options.network_interface or told, placement.rendezvous)
        return StreamTransport(membership=Membership(Identity.generate(), secret)), host

    group = ElasticGroup(link, SoloGroup(settings.patience), open_generation, make_transport)
    group.rank, group.size = placement.rank, placement.size
    group.run, group.local_rank = name_of_run(settings.key), placement.local_rank
    try:
        if not options.is_joining:
            group.regroup(0, is_fresh=True)
    except LeavingRun as leaving:
        print(f"This worker has nothing to do: {leaving.what}.", file=sys.stderr, flush=True)
        tell_launcher(phase="left")
        raise SystemExit(0) from None
    return group


def _traced(group: Group, options: RunOptions, number: int) -> Group:
    if options.timeline is None:
        return group
    traced = Traced(group, Timeline(Path(f"{options.timeline}.{number}"), number))
    _write_when_terminated(traced.timeline)
    return traced


def open_group(
    placement: Placement,
    settings: GroupSettings,
    name: str = "",
    *,
    gather: Callable[[str, Any], list[Any]] | None = None,
) -> Group:
    """Opens the group of all that are placed so: alone, on one machine, or on several; collective.

    `name` tells groups of the same run apart that are opened side by side. Where workers can `gather` what
    they know of each other, they need no other place to meet.
    """
    if placement.size == 1 and settings.backend is None:
        return SoloGroup(settings.patience)
    if placement.size == placement.local_size and settings.backend is None:
        per_machine = settings.workers_per_machine or placement.size
        # without a place to meet, a machine that is split is one that only counts as several
        if per_machine >= placement.size or placement.rendezvous is None:
            return open_host_group(placement, settings)
    from shoal.group.cluster import open_cluster_group
    from shoal.group.cluster.rendezvous import GatheredRendezvous, Rendezvous, WorkerAddress

    deadline = Deadline.after(settings.meeting_s or settings.timeout_s or _MEETING_S)
    rendezvous: Rendezvous
    if gather is None:
        rendezvous = Rendezvous.open(placement, deadline, name)
    else:
        rendezvous = GatheredRendezvous(gather, placement.rank, placement.size)
    own = WorkerAddress.here(placement, settings.network_interface, settings.workers_per_machine)
    addresses = rendezvous.meet(own, deadline)
    if settings.backend is None and all(address.machine == own.machine for address in addresses):
        # the launcher has not said that all are here
        rank, size = placement.rank, placement.size
        return open_host_group(Placement(rank, size, rank, size, placement.source), settings)
    return open_cluster_group(placement, settings, addresses, rendezvous)


def _open_with_servers(
    placement: Placement,
    settings: GroupSettings,
    num_servers: int,
    gather: Callable[[str, Any], list[Any]] | None = None,
    gather_workers: Callable[[str, Any], list[Any]] | None = None,
) -> Group:
    # there is one model, that of the servers: whoever does not reach them all ends anyway
    settings = msgspec.structs.replace(settings, on_split="ignore")
    everybody = open_group(placement, settings, gather=gather)
    try:
        if placement.rank < num_servers:
            workers: Group = SoloGroup(settings.patience)
        else:
            placed, named = _among_workers(placement, settings, everybody, num_servers)
            workers = open_group(placed, named, "workers", gather=gather_workers)
    except BaseException as error:
        everybody.close(error)
        if isinstance(error, PeerError) and isinstance(error.peer, int):
            error.peer += num_servers  # whoever has opened both counts everybody
        raise
    return WithServers(workers, everybody, num_servers)


def _among_workers(
    placement: Placement, settings: GroupSettings, everybody: Group, num_servers: int
) -> tuple[Placement, GroupSettings]:
    """Finds a worker's place when servers are not counted, on the machines that all have agreed on."""
    key, source = f"{settings.key} workers", placement.source
    rank, size = placement.rank - num_servers, placement.size - num_servers
    if isinstance(everybody, HostGroup):
        return Placement(rank, size, rank, size, source), msgspec.structs.replace(settings, key=key)
    from shoal.group.cluster import ClusterGroup

    assert isinstance(everybody, ClusterGroup)
    machine = everybody.machine
    # what rank 0 has told people of everybody holds among workers, too
    encrypt: EncryptChoice = "always" if everybody.mesh.is_encrypted else "never"
    here = [other for other, home in enumerate(everybody.machines[num_servers:]) if home == machine]
    placed = Placement(rank, size, here.index(rank), len(here), source, placement.rendezvous, machine)
    return placed, msgspec.structs.replace(settings, key=key, workers_per_machine=None, encrypt=encrypt)


class _Exits:
    """Remembers the code with which the program was told to exit."""

    code: object = None

    def listen(self) -> None:
        """Remembers exits from now on; idempotent."""
        if sys.exit != self.exit:
            self._exit, sys.exit = sys.exit, self.exit

    def exit(self, code: object = None, /) -> NoReturn:
        """Exits; in another thread than the main one that ends no program."""
        if threading.current_thread() is threading.main_thread():
            self.code = code
        self._exit(code)  # type: ignore[arg-type]


_exits = _Exits()


def has_failed(earlier_error: object) -> bool:
    """Tells whether the program ends in an exception, or by `sys.exit` with another code than 0; for its end.

    `earlier_error` is what `sys.last_value` was before: an interactive session keeps what it has shown.
    """
    return _exits.code not in (None, 0) or getattr(sys, "last_value", None) is not earlier_error


def _end(group: Group, pid: int, earlier_error: object) -> None:
    """Ends the membership when the program ends, in the process that has joined and not in its forks."""
    if os.getpid() != pid:
        return
    if has_failed(earlier_error):
        tell_launcher(phase="failing")
        error = getattr(sys, "last_value", None)
        group.close(error if isinstance(error, BaseException) else SystemExit(_exits.code))
        return
    try:
        group.close()
    except PeerLost as error:
        # Python would say this, and exit with 0 as if the work were done
        tell_launcher(phase="failing")
        print(error, file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)
    tell_launcher(phase="left")


def _write_when_terminated(timeline: Timeline) -> None:
    """Writes what was done until SIGTERM, by which launchers end the others when one worker fails."""
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
    """Makes a name that the workers of one run share, and no other run on this machine has."""
    if options.run_id:
        return options.run_id
    job = [f"{name}={environ[name]}" for name in _JOB_VARIABLES if environ.get(name)]
    job.append(torchrun_attempt(environ))
    if not environ.get("MASTER_PORT") and not environ.get(_NAMES.get(placement.source, "")):
        # the launcher's process tells runs apart that were started alike
        job.append(f"{os.getppid()} {started(os.getppid())}")
    return " ".join([placement.source, *job])


class WithServers(GroupWrapper):
    """The group of workers, `inner`, for everything, and `everybody` beside it; both end together."""

    everybody: Group

    def __init__(self, inner: Group, everybody: Group, num_servers: int) -> None:
        super().__init__(inner)
        self.everybody = everybody
        self.num_servers = num_servers
        self.role = "server" if everybody.rank < num_servers else "worker"

    @property
    def stats(self) -> GroupStats:
        """Adds the bytes of both groups."""
        own, both = self.inner.stats, self.everybody.stats
        sent_to = self._in_all(own.sent_to, both.sent_to)
        received_from = self._in_all(own.received_from, both.received_from)
        sent_bytes, received_bytes = (
            own.sent_bytes + both.sent_bytes,
            own.received_bytes + both.received_bytes,
        )
        return GroupStats(sent_bytes, received_bytes, own.waited_s, sent_to, received_from)

    def _in_all(self, own: Sequence[int], both: Sequence[int]) -> tuple[int, ...]:
        """Adds bytes by rank of the workers to those by rank of everybody."""
        before = [0] * (self.everybody.rank if self.role == "server" else self.num_servers)
        return tuple(map(sum, itertools.zip_longest([*before, *own], both, fillvalue=0)))

    def progress(self) -> None:
        """Does work of both groups' operations."""
        self.inner.progress()
        self.everybody.progress()

    def leave(self) -> None:
        """Leaves both groups, that of the workers first."""
        self.inner.leave()
        self.everybody.leave()

    def close(self, error: BaseException | None = None) -> None:
        """Closes both groups, whatever happens."""
        try:
            self.inner.close(error)
        finally:
            self.everybody.close(error)


def check_servers(num_servers: int, size: int) -> None:
    """Raises UsageError when nobody would be left to work."""
    if num_servers < 0:
        raise UsageError(f"num_servers={num_servers} is negative.", next_step="give 0 or more.")
    if num_servers and num_servers >= size:
        raise UsageError(
            f"{num_servers} servers of {size} processes leave no worker.",
            cause="the world size counts servers and workers together.",
            next_step=f"start {num_servers + 1} processes or more; shoal run -np counts workers alone.",
        )
