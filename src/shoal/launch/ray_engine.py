"""`shoal run --engine ray`: workers as actors on a Ray cluster that runs already.

Each worker is a station of its own, on the machine that its Ray node is; what the head does with stations is
the same as over ssh. Ray itself is spoken to by a child process (`ray_head`, `ray_bridge`).
"""

from __future__ import annotations

import importlib.util
import os
import select
import signal
import sys
from dataclasses import dataclass
from functools import partial

import msgspec

from shoal.core.errors import UsageError
from shoal.launch.channel import AGENT, Engine, Station
from shoal.launch.elastic import START_TIMEOUT_S, launch
from shoal.launch.endings import Outcome
from shoal.launch.output import Output, Terminal
from shoal.launch.ray_channel import RayChannel
from shoal.launch.ray_head import BridgeProcess
from shoal.launch.ray_reports import Place, Request
from shoal.launch.settings import LaunchSettings
from shoal.launch.signals import SignalInbox


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
