"""`shoal run --engine ray`: workers as actors on a Ray cluster that runs already.

Each worker has an agent of its own, on the machine that its Ray node is; what the head does with agents is
the same as over ssh. Ray itself is spoken to by a child process (`ray_bridge`), one for each start.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import PeerRefused, PeerUnreachable, ShoalError, UsageError
from shoal.launch.endings import Outcome
from shoal.launch.head import AgentHandle, Engine
from shoal.launch.launcher import START_TIMEOUT_S, launch, writes_to
from shoal.launch.output import Output, Terminal
from shoal.launch.polling import SignalInbox, poll_once
from shoal.launch.protocol import AGENT, AgentChannel, ChildProcess, Decoder, MessageStream, Up
from shoal.launch.ray_bridge import ActorPlace, ActorRequest, BridgeReport
from shoal.launch.settings import LaunchSettings

_ENDING_S = 10.0
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
    request = ActorRequest(
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
    """Has other actors started for each start, by another process that speaks with Ray."""

    def __init__(self, request: ActorRequest, output: Output) -> None:
        self._request = request
        self._output = output

    def open(self, min_processes: int, max_processes: int, *, is_restart: bool) -> list[AgentHandle]:
        """Return an agent for each actor; ShoalError where the cluster has no room for as many as are needed.

        When a signal comes before that, there is a single one that has not answered yet.
        """
        request = msgspec.structs.replace(self._request, num_workers=max_processes, min_workers=min_processes)
        numbers: list[int] = []
        with SignalInbox() as inbox:
            bridge = BridgeProcess(request)
            places: list[ActorPlace] | None = None
            try:
                while places is None and not numbers:
                    places = bridge.poll_places(inbox, self._say)
                    numbers = [number for number in inbox.take() if number != signal.SIGTSTP]
            except BaseException:
                bridge.close()
                raise
        for number in numbers:
            signal.raise_signal(number)  # for the inbox of the caller
        places = places or [ActorPlace("", "", "the Ray cluster", sys.executable, [])]
        num_open = len(places)

        def close() -> None:
            nonlocal num_open
            num_open -= 1
            if num_open == 0:
                bridge.close()

        return [
            AgentHandle(
                RayChannel(_name(place), bridge.ends[i], partial(bridge.why_lost, i), close),
                slots=1,
                machine=place.node,
                python=place.python,
                address=place.address,
            )
            for i, place in enumerate(places)
        ]

    def _say(self, text: str) -> None:
        """Say it at once: nobody writes out what is queued before the workers run."""
        self._output.say(text)
        poll_once(writes_to(self._output), 0.0)


def _name(place: ActorPlace) -> str:
    return f"{place.host} (Ray node {place.node[:8]} at {place.address})" if place.node else place.host


class BridgeProcess:
    """The head's side of the process that speaks with Ray, for one start."""

    def __init__(self, request: ActorRequest) -> None:
        self._request = request
        self._began_s = SYSTEM_CLOCK.now_s()
        self._is_connected = False
        self._why_lost: dict[int, str] = {}
        pairs = [socket.socketpair() for _ in range(request.num_workers)]
        self.ends = [ours for ours, _ in pairs]
        """The ways to the actors."""
        theirs = [end.fileno() for _, end in pairs]
        command = [sys.executable, "-P", "-c", _BRIDGE, *map(str, theirs)]
        self._child = ChildProcess(command, pass_fds=theirs)
        for _, end in pairs:
            end.close()
        source, sink = self._child.stdout.fileno(), self._child.stdin.fileno()
        self._stream: MessageStream[BridgeReport] = MessageStream(source, sink, Decoder(BridgeReport))
        self._stream.send(request)

    def poll_places(self, inbox: SignalInbox, say: Callable[[str], None]) -> list[ActorPlace] | None:
        """Wait shortly; return where the agents are, once all of them run. ShoalError when none does."""
        poll_once([inbox.interest, *self._stream.interests()])
        has_ended = self._child.exit_code() is not None
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
        limit_s = self._request.start_timeout_s
        if not self._is_connected and SYSTEM_CLOCK.now_s() - self._began_s > limit_s:
            raise PeerUnreachable(
                f"The Ray cluster {self._request.address} has not answered within {limit_s:g} s.",
                next_step="look at `ray status`, or give more time by --start-timeout.",
            )
        return None

    def why_lost(self, index: int) -> str:
        """Return what Ray says of an actor that has gone."""
        self._take_reports()
        if index in self._why_lost or self._child.exit_code() is None:
            return self._why_lost.get(index, "")
        return f"the process that speaks with Ray {self._describe_end()}"

    def close(self) -> None:
        """Have the agents end their workers, and the Ray job end; idempotent."""
        if not self._is_connected:
            self._child.kill()
        for end in self.ends:
            end.close()
        self._stream.stop_writing()
        self._child.close(_ENDING_S)

    def _take_reports(self) -> list[BridgeReport]:
        self._stream.read()
        reports = self._stream.take()
        self._why_lost |= {report.lost: report.what for report in reports if report.lost is not None}
        return reports

    def _describe_end(self) -> str:
        lines = self._child.complaint().splitlines()
        return f"ended with exit code {self._child.exit_code()}{f': {lines[-1]}' if lines else ''}"


class RayChannel(MessageStream[Up], AgentChannel):
    """The head's end of the way to the agent of one Ray actor, over a socket to the bridge."""

    def __init__(
        self, host: str, end: socket.socket, why_lost: Callable[[], str], on_close: Callable[[], None]
    ) -> None:
        self.host = host
        self._end = end
        self._why_lost = why_lost
        self._on_close = on_close
        self._is_closed = False
        super().__init__(end.fileno(), end.fileno(), Decoder(Up, expects_magic=True))

    def explain(self) -> ShoalError:
        """Say it as the bridge says it."""
        return PeerRefused(
            f"The worker's actor on {self.host} is lost: {self._why_lost() or 'it does not answer'}.",
            peer=self.host,
            next_step="`ray status` shows which nodes there are.",
        )

    def close(self) -> None:
        """Close the socket, by which the bridge has the agent end; idempotent."""
        self.is_open = False
        self.stop_writing()
        if not self._is_closed:
            self._is_closed = True
            self._end.close()
            self._on_close()
