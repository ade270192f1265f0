"""`shoal run --engine ray`: workers as actors on a Ray cluster that runs already.

Each worker has an agent of its own, on the machine that its Ray node is; what the head does with agents is
the same as over ssh. Ray itself is spoken to by a child process (`ray_bridge`), one for each start. A run
whose workers come and go asks it for another actor where one is lost, or more workers are wanted: Ray starts
that wherever the cluster has room, now or later.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable

import msgspec

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import PeerRefused, PeerUnreachable, ShoalError, UsageError
from shoal.launch.head import AgentHandle, Engine
from shoal.launch.launcher import START_TIMEOUT_S, launch
from shoal.launch.output import Output, Terminal
from shoal.launch.polling import SignalInbox, poll_once
from shoal.launch.protocol import ChildProcess, Decoder, DescriptorChannel, MessageStream
from shoal.launch.ray_bridge import ActorRequest, BridgeReport
from shoal.launch.settings import LaunchSettings
from shoal.launch.worker import Outcome

_ENDING_S = 10.0
_BRIDGE = "import sys; from shoal.launch.ray_bridge import main; sys.exit(main([*map(int, sys.argv[1:])]))"
"""Not `-m`: Ray would send an actor of `__main__` along instead of having the nodes import Shoal's."""


def run_on_ray(
    settings: LaunchSettings,
    address: str | None = None,
    output: Output | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Outcome:
    """Run to the end, on the cluster at `address`, RAY_ADDRESS, or the one that this machine is a node of.

    A worker takes as many CPUs as it has threads, and a GPU where the cluster has one for each. Errors are
    raised only for what was wrong before the first worker ran.
    """
    if importlib.util.find_spec("ray") is None:
        raise UsageError("Ray is not installed.", next_step="pip install 'shoal[ray]'")
    output = Terminal() if output is None else output
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    request = ActorRequest(address, settings.num_threads or 1, start_timeout_s)
    return launch(settings, output, RayEngine(request, output), start_timeout_s)


class RayEngine(Engine):
    """Has other actors started for each start, by another process that speaks with Ray."""

    can_grow = True

    def __init__(self, request: ActorRequest, output: Output) -> None:
        self._request = request
        self._output = output
        self._bridge: BridgeProcess | None = None
        self.answer_s = request.start_timeout_s

    def open(self, min_processes: int, max_processes: int, *, is_restart: bool) -> list[AgentHandle]:
        """Return an agent for each actor; ShoalError where the cluster has no room for as many as are needed.

        When a signal comes before that, there is a single one that has not answered yet.
        """
        request = msgspec.structs.replace(self._request, num_workers=max_processes, min_workers=min_processes)
        numbers: list[int] = []
        with SignalInbox() as inbox:
            bridge = BridgeProcess(request)
            num_agents: int | None = None
            try:
                while num_agents is None and not numbers:
                    num_agents = bridge.poll_agents(inbox, self._say)
                    numbers = [number for number in inbox.take() if number != signal.SIGTSTP]
            except BaseException:
                bridge.close_ends(range(request.num_workers))
                raise
        self._bridge = bridge
        for number in numbers:
            signal.raise_signal(number)  # for the inbox of the caller
        num_agents = num_agents or 1
        bridge.close_ends(range(num_agents, request.num_workers))
        return [bridge.agent(index) for index in range(num_agents)]

    def reopen(self, lost: AgentHandle) -> AgentHandle | None:
        """Have another actor started wherever there is room: the node of the lost one may be gone."""
        return self.grow()

    def grow(self) -> AgentHandle:
        """Return the agent of another actor, which answers once the cluster has room for it."""
        assert self._bridge is not None, "open() comes first"
        return self._bridge.agent(self._bridge.ask_another())

    def _say(self, text: str) -> None:
        """Say it at once: nobody writes out what is queued before the workers run."""
        self._output.say(text)
        poll_once(self._output.interests(), 0.0)


class BridgeProcess:
    """The head's side of the process that speaks with Ray, for one start."""

    def __init__(self, request: ActorRequest) -> None:
        self._request = request
        self._began_s = SYSTEM_CLOCK.now_s()
        self._is_connected = False
        self._lost: dict[int, tuple[str, str]] = {}
        """Why these actors have gone, and where they were."""
        self._more, more = socket.socketpair()
        pairs = [socket.socketpair() for _ in range(request.num_workers)]
        self.ends = [ours for ours, _ in pairs]
        """The ways to the actors."""
        theirs = [*(end.fileno() for _, end in pairs), more.fileno()]
        command = [sys.executable, "-P", "-c", _BRIDGE, *map(str, theirs)]
        self._child = ChildProcess(command, pass_fds=theirs)
        more.close()
        for _, end in pairs:
            end.close()
        source, sink = self._child.stdout.fileno(), self._child.stdin.fileno()
        self._stream: MessageStream[BridgeReport] = MessageStream(source, sink, Decoder(BridgeReport))
        self._stream.send(request)

    def poll_agents(self, inbox: SignalInbox, say: Callable[[str], None]) -> int | None:
        """Wait shortly; return how many agents run, once all of them do. ShoalError when none does."""
        poll_once([inbox.interest, *self._stream.interests()])
        has_ended = self._child.exit_code() is not None
        for report in self._take_reports():
            self._is_connected = True
            if report.refusal is not None:
                refusal = report.refusal
                raise ShoalError(refusal.what, cause=refusal.cause, next_step=refusal.next_step)
            if report.num_agents is not None:
                return report.num_agents
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

    def ask_another(self) -> int:
        """Have one more actor started; return its index. PeerUnreachable when the process has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._more, [b"\0"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise PeerUnreachable(
                    f"The process that speaks with Ray has ended: {error.strerror or error}.",
                    next_step="start the run again.",
                ) from error
        self.ends.append(ours)
        return len(self.ends) - 1

    def agent(self, index: int) -> AgentHandle:
        """Return the agent of an actor, which has not answered yet, and then says where it is."""
        end = self.ends[index].fileno()
        close = functools.partial(self.close_ends, [index])
        explain = functools.partial(self.explain, index)
        channel = DescriptorChannel("the Ray cluster", end, end, explain, close)
        return AgentHandle(channel, 1, f"actor {index}")

    def explain(self, index: int, host: str) -> ShoalError:
        """Say what Ray says of an actor that has gone."""
        self._take_reports()
        why_lost, where = self._lost.get(index, ("it does not answer", ""))
        if index not in self._lost and self._child.exit_code() is not None:
            why_lost = f"the process that speaks with Ray {self._describe_end()}"
        return PeerRefused(
            f"The worker's actor on {where or host} is lost: {why_lost}.",
            peer=where or host,
            next_step="`ray status` shows which nodes there are.",
        )

    def close_ends(self, indices: Iterable[int]) -> None:
        """Close the ways to these actors, by which their agents end; the bridge ends with the last one."""
        for index in indices:
            self.ends[index].close()
        if all(end.fileno() < 0 for end in self.ends):
            self._more.close()
            if not self._is_connected:
                self._child.kill()
            self._stream.stop_writing()
            self._child.close(_ENDING_S)

    def _take_reports(self) -> list[BridgeReport]:
        self._stream.receive()
        reports = self._stream.take()
        self._lost.update({report.lost[0]: report.lost[1:] for report in reports if report.lost is not None})
        return reports

    def _describe_end(self) -> str:
        code, complaint = self._child.last_words()
        last = f": {complaint.splitlines()[-1]}" if complaint else ""
        return f"ended with exit code {code}{last}"
