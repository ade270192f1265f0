"""Starts a run, and starts it anew when a worker or a host has failed and restarts are left.

A restart is a new start of all workers: another run id, port and `SHOAL_RESTART_COUNT`, with as many
workers as there are slots on the hosts that answer. What they resume from is the strategy's checkpoint.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import ShoalError
from shoal.launch.channel import Engine
from shoal.launch.endings import Outcome, name_signal
from shoal.launch.fleet import Fleet
from shoal.launch.gathering import Gathering, Present
from shoal.launch.launcher import Launcher, drain
from shoal.launch.output import Output, Terminal, settle_own_streams
from shoal.launch.settings import LaunchSettings
from shoal.launch.signals import SignalInbox

START_TIMEOUT_S = 30.0
"""For a host to answer."""
RESTART_TIMEOUT_S = 8.0
"""For a restart: a host that has gone should not hold the others up."""


def launch(
    settings: LaunchSettings,
    output: Output | None = None,
    engine: Engine | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Outcome:
    """Run to the end, on this machine or on an engine's stations.

    Errors are raised only for what was wrong before the first worker ran.
    """
    settle_own_streams()
    output = Terminal() if output is None else output
    return _Run(settings, output, engine, start_timeout_s).run()


class _Run:
    def __init__(
        self, settings: LaunchSettings, output: Output, engine: Engine | None, start_timeout_s: float
    ) -> None:
        self._settings = settings
        self._output = output
        self._engine = engine
        self._start_timeout_s = start_timeout_s
        self._started_s = SYSTEM_CLOCK.now_s()

    def run(self) -> Outcome:
        # for the time between starts, and until the hosts have answered
        with SignalInbox() as self._inbox:
            try:
                outcome = self._start(self._settings)
                for count in range(1, self._settings.elastic.max_restarts + 1):
                    if outcome.cause is None:
                        break
                    outcome = self._restart(count, outcome)
            finally:
                drain(self._output, self._inbox)
        return replace(outcome, elapsed_s=SYSTEM_CLOCK.now_s() - self._started_s)

    def _restart(self, count: int, earlier: Outcome) -> Outcome:
        try:
            return self._start(replace(self._settings, restart_count=count))
        except ShoalError as error:
            self._output.say(f"the run does not start anew: {error}")
            return replace(earlier, cause=None)

    def _start(self, settings: LaunchSettings) -> Outcome:
        for number in self._inbox.take():
            return self._interrupt(number)
        if self._engine is None:
            self._tell_restart(settings, "")
            return Launcher(settings, self._output).run(self._started_s)
        num_servers, is_restart = settings.options.num_servers, settings.restart_count > 0
        most = settings.max_workers if is_restart else settings.num_workers
        limit_s = min(self._start_timeout_s, RESTART_TIMEOUT_S) if is_restart else self._start_timeout_s
        stations = self._engine.open(
            settings.min_workers + num_servers, most + num_servers, is_restart=is_restart
        )
        with Gathering(stations) as gathering:
            interruption = gathering.wait(self._inbox, limit_s, SYSTEM_CLOCK)
            if interruption is not None:
                return self._interrupt(interruption)
            num_workers = min(most, gathering.num_slots - num_servers)
            if num_workers < settings.min_workers:
                raise gathering.complaint()
            for station, error in gathering.absent:
                self._output.say(f"goes on without {station.channel.host}: {error.what}")
            chosen = gathering.choose(num_workers + num_servers)
            self._tell_restart(replace(settings, num_workers=num_workers), f" on {name_hosts(chosen)}")
            return self._launch(replace(settings, num_workers=num_workers), chosen)

    def _launch(self, settings: LaunchSettings, chosen: Sequence[Present]) -> Outcome:
        fleet = Fleet(settings, chosen, self._output, SYSTEM_CLOCK)
        return Launcher(settings, self._output, SYSTEM_CLOCK, fleet).run(self._started_s)

    def _tell_restart(self, settings: LaunchSettings, where: str) -> None:
        if settings.restart_count:
            workers = f"{settings.num_workers} worker{'s' if settings.num_workers > 1 else ''}"
            limit = settings.elastic.max_restarts
            self._output.say(f"restart {settings.restart_count} of {limit} with {workers}{where}")

    def _interrupt(self, number: int) -> Outcome:
        reason = "interrupted" if number == signal.SIGINT else f"ended by {name_signal(number)}"
        self._output.say(f"{reason} before the workers had started")
        return Outcome(128 + number, reason)


def name_hosts(chosen: Sequence[Present]) -> str:
    """'a', 'a, b and c'."""
    names = list(dict.fromkeys(present.host for present in chosen))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
