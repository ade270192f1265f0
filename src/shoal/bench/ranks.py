"""Where the workers of a benchmark run that are not its children: ranks of a launcher, or hosts of -H.

A launcher is torchrun, mpirun, srun or `shoal run`; -H starts ranks over ssh. `HostFlags` are the flags.

All of them run the same command. Rank 0 runs the scenario and gives orders through a group of all ranks,
which measures nothing; the others follow, and rank 0 itself works too. `python -m shoal.bench.ranks` is what
`OnHosts` starts on other machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from shoal.bench.frame import Receive, Version, make_scenario, tell_rows
from shoal.bench.workers import BenchPlace, Helper, Workers, WorkerSettings, open_worker
from shoal.core import BenchmarkError, PeerLost, UsageError
from shoal.core.placement import Placement
from shoal.core.run_options import (
    Hostfile,
    NetworkInterface,
    RemoteCwd,
    RemotePython,
    RunOptions,
    SshOption,
    SshPort,
    SshUser,
    flag,
)
from shoal.doctor.machine import Watch, describe_machine

if TYPE_CHECKING:
    from shoal.group.base import Group
    from shoal.launch import LaunchSettings
    from shoal.launch.head import Engine
    from shoal.launch.output import Stream

VARIABLE = "SHOAL_BENCH"
"""What `OnHosts` tells the ranks that it starts: the arguments of one start, as JSON."""
_MARK = b"\x1eSHOAL-BENCH "
"""Before each line in which rank 0 tells the head something, among all that it prints."""
_PIECE_BYTES = 1 << 15
"""Of a message on one line: a launcher cuts longer lines."""
_PATIENCE = 12.0
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
_OPEN, _ASK, _CLOSE, _END = "open", "ask", "close", "end"
"""What rank 0 tells the others, of which only _ASK holds an order of the scenario."""


class HostFlags(msgspec.Struct, frozen=True, kw_only=True):
    """The machines for workers that the command line names, or a launcher has chosen."""

    hosts: Annotated[
        str | None, flag("Machines for the workers, reached by ssh.", "-H", "--hosts", metavar="HOST:N,…")
    ] = None
    hostfile: Hostfile = None
    ssh_port: SshPort = None
    ssh_user: SshUser = None
    ssh_option: SshOption = None
    remote_python: RemotePython = None
    remote_cwd: RemoteCwd = None
    network_interface: NetworkInterface = None

    @property
    def are_named(self) -> bool:
        """Whether hosts were named."""
        return self.hosts is not None or self.hostfile is not None

    @property
    def launched_size(self) -> int | None:
        """How many processes a launcher has started of this one's kind; None when it is alone."""
        size = Placement.from_environment().size
        return size if size > 1 else None

    def num_workers(self, asked: int | None, default: int) -> int:
        """Take as many as asked for, as a launcher has started, as the hosts have slots, or the default."""
        launched = self.launched_size
        if launched is not None and asked not in (None, launched):
            raise UsageError(
                f"--np {asked} is not the {launched} processes that the launcher has started.",
                next_step="leave --np out.",
            )
        if asked is not None or launched is not None:
            return asked or launched or default
        hosts = self._open()
        return default if hosts is None else int(hosts.num_slots)

    def workers_here(self, num_workers: int) -> int:
        """Count those of the workers that are on this machine, where no hosts are named."""
        return num_workers if self.launched_size is None else Placement.from_environment().local_size

    @property
    def workers_per_machine(self) -> int | None:
        """How many workers a machine has where there are several; None on this one alone."""
        if self.launched_size is not None:
            placed = Placement.from_environment()
            return placed.local_size if placed.local_size < placed.size else None
        hosts = self._open()
        return None if hosts is None or not hosts.is_elsewhere else int(hosts.slots_of_first)

    def starter(self, num_workers: int) -> OnHosts | None:
        """Say how to start the workers on the hosts that were named; None where they run here."""
        hosts = self._open()
        if hosts is None or not hosts.is_elsewhere:
            return None
        if self.launched_size is not None:
            raise UsageError(
                "A launcher has started this, and -H starts it again.", next_step="leave -H out."
            )
        from shoal.launch import LaunchSettings, command_of

        hosts.check(num_workers, 0)
        options = RunOptions(network_interface=self.network_interface)
        command = command_of(["shoal.bench.ranks"], is_module=True)
        return OnHosts(hosts, LaunchSettings(command, num_workers, options))

    def _open(self) -> Any:
        if not self.are_named:
            return None
        from shoal.launch.hosts import SshSettings, open_hosts

        ssh = SshSettings(
            self.ssh_port, self.ssh_user, tuple(self.ssh_option or ()), self.remote_python, self.remote_cwd
        )
        return open_hosts(self.hosts, self.hostfile, ssh)


class LaunchedWorkers:
    """The ranks of a group as workers, as rank 0 sees them."""

    def __init__(self, control: Group, settings: WorkerSettings) -> None:
        self._control = control
        self._settings = settings
        self._worker = RankWorker(control)
        self._loss: PeerLost | None = None
        self.is_running = False

    def ask(self, order: str, *, among: int | None = None, **details: Any) -> list[Any]:
        """The answers by rank; BenchmarkError names the rank that failed, and all begin anew.

        Once a rank is lost every order fails.
        """
        if not self.is_running:
            self._start()
        return self._tell(_ASK, {"order": order, "details": details}, among)

    def start_helper(self, helper: Helper) -> None:
        """Nothing: whoever needs it says that it is not there."""

    def close(self) -> None:
        """Let the workers close what they have opened."""
        if self.is_running:
            self._tell(_CLOSE, {})
            self.is_running = False

    def _start(self) -> None:
        control, settings = self._control, self._settings
        if settings.size != control.size:
            raise BenchmarkError(
                f"{settings.size} workers are to be measured, and the launcher has started {control.size}.",
                next_step=f"say --np {control.size}, or let it start {settings.size}.",
            )
        details = {
            "function": settings.function,
            "key": f"bench-{secrets.token_hex(8)}",
            "arguments": settings.arguments,
        }
        self._tell(_OPEN, details)
        self.is_running = True

    def _tell(self, kind: str, details: dict[str, Any], among: int | None = None) -> list[Any]:
        among = among or self._control.size
        message = {"kind": kind, "among": among, "details": details}
        try:
            if self._loss is not None:
                raise self._loss
            _share(self._control, message)
            outcome = self._worker.follow(message)
            with _waiting_quietly():
                outcomes = _share(self._control, outcome)
        except PeerLost as error:
            self._loss, self.is_running = error, False
            raise BenchmarkError(error.what, cause=error.cause, next_step=error.next_step) from error
        failed = [rank for rank, outcome in enumerate(outcomes) if "failure" in outcome]
        if failed:
            self.is_running = False
            # who has missed another is not the one to name
            rank = min(failed, key=lambda rank: outcomes[rank]["is_consequence"])
            raise BenchmarkError(
                f"rank {rank} of {self._control.size} failed: {outcomes[rank]['failure']}",
                cause=outcomes[rank]["trace"],
            )
        return [outcome["answer"] for outcome in outcomes[:among]]


class RankWorker:
    """What one rank has opened, and how it answers."""

    def __init__(self, control: Group) -> None:
        self._control = control
        self._stack = contextlib.ExitStack()
        self._worker: Any = None

    def follow(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what is ordered; what was opened is abandoned after a failure, so that nobody waits for it."""
        if self._control.rank >= message["among"]:
            return {"answer": None}
        try:
            return {"answer": self._do(message["kind"], message["details"])}
        except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 reports it
            from shoal.launch.worker import is_consequence

            text, trace = f"{type(error).__name__}: {error}", traceback.format_exc(limit=-3)
            with contextlib.suppress(Exception):
                self._stack.__exit__(type(error), error, error.__traceback__)
            self._stack = contextlib.ExitStack()
            return {"failure": text, "trace": trace, "is_consequence": is_consequence(text)}

    def _do(self, kind: str, details: dict[str, Any]) -> Any:
        if kind == _ASK:
            return getattr(self._worker, details["order"])(**details["details"])
        self._stack.close()
        if kind == _OPEN:
            self._open(**details)
        return None

    def _open(self, function: str, key: str, arguments: dict[str, Any]) -> None:
        control = self._control
        place = BenchPlace(control.rank, control.size, key, machines=tuple(control.machines))
        self._worker = open_worker(function, place, arguments, self._stack)


class Ranks:
    """What one of the ranks does, for as long as the block lasts; `is_first` gives the orders."""

    def __init__(self, control: Group) -> None:
        self._control = control

    @property
    def is_first(self) -> bool:
        """Whether this is the one that measures and reports."""
        return self._control.rank == 0

    def follow(self) -> None:
        """What all but the first do, until there are no more orders."""
        worker = RankWorker(self._control)
        with _waiting_quietly():
            message = _share(self._control, None)[0]
        while message["kind"] != _END:
            outcome = worker.follow(message)
            with _waiting_quietly():
                _share(self._control, outcome)
                message = _share(self._control, None)[0]

    def start(self, arguments: dict[str, Any], version: Version, receive: Receive) -> None:
        """One start of a scenario, by the first: how `run_benchmark` runs it here."""
        scenario = make_scenario(arguments["benchmark"], arguments["config"], arguments["seed"])
        vars(scenario)["open_workers"] = self._open_workers
        tell_rows(scenario, receive)

    def end(self) -> None:
        """Let the others end, those who are still there."""
        with contextlib.suppress(PeerLost):
            _share(self._control, {"kind": _END})

    @contextlib.contextmanager
    def _open_workers(self, settings: WorkerSettings) -> Iterator[Workers]:
        workers = LaunchedWorkers(self._control, settings)
        yield workers
        workers.close()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other ranks; the first lets them go at the end."""
    from shoal.group import init

    # whoever computes for long in one native call is silent, and these ranks only wait for orders
    with init(patience=_PATIENCE) as control:
        ranks = Ranks(control)
        yield ranks
        if ranks.is_first:
            ranks.end()


@contextlib.contextmanager
def _waiting_quietly() -> Iterator[None]:
    """That ranks wait for orders, and for those who follow them, is no news."""
    log = logging.getLogger("shoal.group")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def in_lines(message: dict[str, Any]) -> bytes:
    """A message as lines that a launcher does not cut, each after an end of whatever was printed before."""
    encoded = msgspec.json.encode(message)
    pieces = [encoded[at : at + _PIECE_BYTES] for at in range(0, len(encoded), _PIECE_BYTES)]
    left = range(len(pieces) - 1, -1, -1)
    return b"".join(b"\n%s%d %s\n" % (_MARK, more, piece) for more, piece in zip(left, pieces, strict=True))


class Told:
    """Messages put together from the lines of a rank; the last of all says how many there were."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._begun = b""
        self._count = 0
        self.is_whole = False

    def take(self, line: bytes) -> bool:
        """Whether the line is part of a message."""
        if not line.startswith(_MARK):
            return not line
        more, _, piece = line.removeprefix(_MARK).partition(b" ")
        self._begun += piece
        if more == b"0":
            message, self._begun = msgspec.json.decode(self._begun), b""
            if "count" in message:
                self.is_whole = message["count"] == self._count
            else:
                self._count += 1
                self._receive(message)
        return True


class OnHosts:
    """Starts of a scenario on other machines: how `run_benchmark` runs it there."""

    def __init__(self, engine: Engine, settings: LaunchSettings) -> None:
        self._engine = engine
        self._settings = settings

    def __call__(self, arguments: dict[str, Any], version: Version, receive: Receive) -> None:
        """Run the ranks to their end, and pass on what the first one tells."""
        from shoal.launch import OutputListener, launch

        heard = Told(receive)

        def take(rank: int, stream: Stream, line: bytes) -> None:
            if rank or stream != "stdout" or not heard.take(line):
                sys.stderr.write(f"[{rank}] {line.decode(errors='backslashreplace')}\n")

        told = {VARIABLE: msgspec.json.encode(arguments).decode()}
        variables = {**self._settings.variables, **told}
        settings = dataclasses.replace(self._settings, variables=variables)
        output = OutputListener(take, lambda text: receive({"progress": text}))
        outcome = launch(settings, output, self._engine)
        if outcome.exit_code in _INTERRUPTED and outcome.cause is None:
            raise KeyboardInterrupt
        if outcome.exit_code:
            raise BenchmarkError(f"The workers ended with {outcome.exit_code}: {outcome.reason}.")
        if not heard.is_whole:
            raise BenchmarkError("Rank 0 ended before it had told everything, or not all of it came.")


def main() -> None:
    """What a rank does that `OnHosts` has started."""
    arguments = msgspec.json.decode(os.environ[VARIABLE])
    with joined() as ranks:
        if not ranks.is_first:
            ranks.follow()
            return

        count = 0

        def tell(message: dict[str, Any]) -> None:
            nonlocal count
            count += 1
            _write(message)

        watch = Watch()
        machine = describe_machine()  # takes a moment, in which stolen time shows
        tell({"machine": {**machine, "before": watch.look()}})
        ranks.start(arguments, Version(), tell)
        tell({"machine": {"after": watch.look()}})
        _write({"count": count})


def _write(message: dict[str, Any]) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(in_lines(message))
    sys.stdout.buffer.flush()


def _share(group: Group, value: Any) -> list[Any]:
    """Everybody's; imported late, as all that needs torch here is."""
    from shoal.group import share

    return share(group, value)


if __name__ == "__main__":
    main()
