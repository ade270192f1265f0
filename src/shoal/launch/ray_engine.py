"""`shoal run --engine ray`: workers as actors on a Ray cluster that runs already.

Each worker is a station of its own, on the machine that its Ray node is; what the head does with stations is
the same as over ssh. Ray itself is spoken to by a child process (`ray_bridge`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import IO

import msgspec

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import PeerRefused, PeerUnreachable, ProtocolError, ShoalError, UsageError
from shoal.launch.endings import Outcome
from shoal.launch.head import Engine, Station
from shoal.launch.launcher import START_TIMEOUT_S, launch
from shoal.launch.output import Output, Terminal
from shoal.launch.polling import Interest, SignalInbox
from shoal.launch.protocol import AGENT, Channel, Decoder, Down, Up, encode
from shoal.launch.ray_bridge import Place, Report, Request
from shoal.launch.settings import LaunchSettings

_READ_BYTES = 1 << 16
_ENDING_S = 10.0
_TICK_S = 0.2
_MESSAGE_BYTES = 1 << 18

_BRIDGE = "import sys; from shoal.launch.ray_bridge import main; sys.exit(main([*map(int, sys.argv[1:])]))"
"""Not `-m`: Ray would send an actor of `__main__` along instead of having the nodes import Shoal's."""


@dataclass(frozen=True, slots=True)
class RaySettings:
    """What each worker takes of the cluster, and for how long it is waited for."""

    num_cpus: float | None = None
    """By default the worker's number of threads if that is given, else 1."""
    num_gpus: float | None = None
    """By default 1 where the cluster has one for each worker, else 0."""
    start_timeout_s: float = START_TIMEOUT_S


def run_on_ray(
    settings: LaunchSettings,
    address: str | None = None,
    output: Output | None = None,
    ray_settings: RaySettings | None = None,
) -> Outcome:
    """Run to the end, on the cluster at `address`, RAY_ADDRESS, or the one that this machine is a node of.

    Errors are raised only for what was wrong before the first worker ran.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("Ray is not installed.", next_step="pip install 'shoal[ray]'")
    output = Terminal() if output is None else output
    wanted = ray_settings or RaySettings()
    request = Request(
        address=address or os.environ.get("RAY_ADDRESS") or "auto",
        agent=AGENT,
        num_workers=settings.num_processes,
        min_workers=settings.min_workers + settings.options.num_servers,
        num_cpus=wanted.num_cpus or settings.num_threads or 1,
        num_gpus=wanted.num_gpus,
        start_timeout_s=wanted.start_timeout_s,
    )
    return launch(settings, output, RayEngine(request, output), wanted.start_timeout_s)


class RayEngine(Engine):
    """Other actors, by another process that speaks with Ray, for each start."""

    def __init__(self, request: Request, output: Output) -> None:
        self._request = request
        self._output = output

    def open(self, min_processes: int, max_processes: int, *, is_restart: bool) -> list[Station]:
        """A station for each actor; ShoalError where the cluster has no room for as many as are needed.

        When a signal comes before that, there is a single one that has not answered yet.
        """
        request = msgspec.structs.replace(self._request, num_workers=max_processes, min_workers=min_processes)
        numbers: list[int] = []
        with SignalInbox() as inbox:
            bridge = BridgeProcess(request)
            places: list[Place] | None = None
            try:
                while places is None and not numbers:
                    places = bridge.poll_places(inbox.descriptor, self._say)
                    numbers = [number for number in inbox.take() if number != signal.SIGTSTP]
            except BaseException:
                bridge.close()
                raise
        for number in numbers:
            signal.raise_signal(number)  # for the inbox of the caller
        places = places or [Place("", "", "the Ray cluster", sys.executable, [])]
        num_open = len(places)

        def close() -> None:
            nonlocal num_open
            num_open -= 1
            if num_open == 0:
                bridge.close()

        return [
            Station(
                RayChannel(_name(place), bridge.ends[i], partial(bridge.why_lost, i), close),
                slots=1,
                machine=place.node,
                python=place.python,
                address=place.address,
            )
            for i, place in enumerate(places)
        ]

    def _say(self, text: str) -> None:
        """At once: nobody writes out what is queued before the workers run."""
        self._output.say(text)
        for descriptor in select.select([], self._output.pending(), [], 0)[1]:
            self._output.write(descriptor)


def _name(place: Place) -> str:
    return f"{place.host} (Ray node {place.node[:8]} at {place.address})" if place.node else place.host


class BridgeProcess:
    """The child process that speaks with Ray, for one start."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._began_s = SYSTEM_CLOCK.now_s()
        self._is_connected = False
        self._why_lost: dict[int, str] = {}
        pairs = [socket.socketpair() for _ in range(request.num_workers)]
        self.ends = [ours for ours, _ in pairs]
        """The ways to the actors."""
        theirs = [end.fileno() for _, end in pairs]
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  until it is closed
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BRIDGE, *map(str, theirs)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            pass_fds=theirs,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the head's to understand
        )
        for _, end in pairs:
            end.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)
        self._rest = b""
        with contextlib.suppress(OSError):  # it has ended already
            self._stdin.write(msgspec.json.encode(request) + b"\n")

    def poll_places(self, wake_descriptor: int, say: Callable[[str], None]) -> list[Place] | None:
        """Wait shortly; where the agents are, once all of them run. ShoalError when none does."""
        poll = select.poll()
        for descriptor in (self._stdout.fileno(), wake_descriptor):
            poll.register(descriptor, select.POLLIN)
        poll.poll(_TICK_S * 1000)
        has_ended = self._process.poll() is not None
        for report in self._take_reports():
            self._is_connected = True
            if report.is_refused:
                raise ShoalError(report.what, cause=report.cause, next_step=report.next_step)
            if report.places is not None:
                return report.places
            if report.waiting:
                say(report.waiting)
        if has_ended:
            raise ShoalError(
                f"The process that speaks with Ray {self._describe_end()}.",
                next_step="look at `ray status`, and at the versions of Ray here and there.",
            )
        if not self._is_connected and SYSTEM_CLOCK.now_s() - self._began_s > self._request.start_timeout_s:
            raise PeerUnreachable(
                f"The Ray cluster {self._request.address} has not answered within "
                f"{self._request.start_timeout_s:g} s.",
                next_step="look at `ray status`, or give more time by --start-timeout.",
            )
        return None

    def why_lost(self, index: int) -> str:
        """What Ray says of an actor that has gone."""
        self._take_reports()
        if index in self._why_lost or self._process.poll() is None:
            return self._why_lost.get(index, "")
        return f"the process that speaks with Ray {self._describe_end()}"

    def close(self) -> None:
        """The agents end their workers, the Ray job ends; idempotent."""
        if not self._is_connected:
            self._process.kill()
        for end in self.ends:
            end.close()
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stdout.close()
        self._errors.close()

    def _take_reports(self) -> list[Report]:
        try:
            data = os.read(self._stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        reports = [msgspec.json.decode(line, type=Report) for line in lines]
        self._why_lost |= {report.lost: report.what for report in reports if report.lost is not None}
        return reports

    def _describe_end(self) -> str:
        size_bytes = os.fstat(self._errors.fileno()).st_size
        end = os.pread(self._errors.fileno(), _READ_BYTES, max(0, size_bytes - _READ_BYTES))
        lines = end.decode(errors="replace").strip().splitlines()
        return f"ended with exit code {self._process.poll()}{f': {lines[-1]}' if lines else ''}"


class RayChannel(Channel):
    """Over a socket to `ray_bridge`."""

    def __init__(
        self, host: str, end: socket.socket, why_lost: Callable[[], str], on_close: Callable[[], None]
    ) -> None:
        self.host = host
        self._end = end
        self._end.setblocking(False)
        self._why_lost = why_lost
        self._on_close = on_close
        self._decoder: Decoder[Up] = Decoder(Up, expects_magic=True)
        self._queue = bytearray()
        self._came: list[Up] = []
        self._broken: ProtocolError | None = None
        self._is_open = True
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether the bridge has not closed it."""
        return self._is_open

    def interests(self) -> list[Interest]:
        """Its socket."""
        if not self._is_open:
            return []
        if self._queue:
            return [(self._end.fileno(), select.POLLIN | select.POLLOUT, self._exchange)]
        return [(self._end.fileno(), select.POLLIN, self._read)]

    def take(self) -> list[Up]:
        """Those that have been read."""
        if self._broken is not None and not self._came:
            raise self._broken
        came, self._came = self._came, []
        return came

    def send(self, message: Down) -> None:
        """Queue it, and write what goes at once."""
        if self._is_open:
            self._queue += encode(message)
            self._write()

    def explain(self) -> ShoalError:
        """As the bridge says it."""
        why = self._why_lost() or "it does not answer"
        return PeerRefused(
            f"The worker's actor on {self.host} is lost: {why}.",
            peer=self.host,
            next_step="`ray status` shows which nodes there are.",
        )

    def close(self) -> None:
        """By which the bridge has the agent end."""
        self._is_open = False
        if not self._is_closed:
            self._is_closed = True
            self._end.close()
            self._on_close()

    def _exchange(self) -> None:
        self._write()
        self._read()

    def _read(self) -> None:
        try:
            data = self._end.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            self._came += self._decoder.feed(data)
        except ProtocolError as error:
            self._broken = error
            data = b""
        self._is_open = self._is_open and bool(data)

    def _write(self) -> None:
        try:
            while self._queue:
                del self._queue[: self._end.send(self._queue)]
        except BlockingIOError:
            return
        except OSError:  # the bridge has closed it: reading tells
            self._queue.clear()
