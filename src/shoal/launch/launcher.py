"""Runs workers until they have finished, ends them together when they cannot, and starts them anew.

One poll in the caller's thread waits for all there is: output of workers, what they tell, their ends,
signals, and room for what is to be written. Ending is a signal that asks, a few seconds, and SIGKILL to the
whole process group. What follows from the end of a worker is `failures`' to say; on which machines workers
run is known to the `head`.

A restart is a new start of all workers: another run id, port and `SHOAL_RESTART_COUNT`, with as many
workers as there are slots on the hosts that answer. What they resume from is the strategy's checkpoint.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import ShoalError
from shoal.core.run_options import SILENCE_S
from shoal.launch import timeline
from shoal.launch.failures import Failures, Stops
from shoal.launch.head import AgentHandle, Engine, Gathering, LocalEngine, RunWorkers
from shoal.launch.live import LiveRun
from shoal.launch.output import LogFiles, Output, Terminal, settle_own_streams
from shoal.launch.polling import SignalInbox, poll_once
from shoal.launch.settings import LaunchSettings
from shoal.launch.worker import TIMED_OUT, Death, Ending, Outcome, describe, name_ranks, name_signal
from shoal.report.units import counted

GRACE_S = 3.0
"""A worker that was asked to end has so long for it."""
GIVE_UP_S = 5.0
"""A process that has not ended by SIGKILL in this time hangs in the kernel."""
SAME_SIGNAL_S = 0.3
"""A second signal within it is the first, sent to the process and to its group."""
START_TIMEOUT_S = 30.0
"""A host has so long to answer."""
RESTART_TIMEOUT_S = 8.0
"""In a restart it has less: a host that has gone should not hold the others up."""


def launch(
    settings: LaunchSettings,
    output: Output | None = None,
    engine: Engine | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Outcome:
    """Run to the end, on this machine or on an engine's.

    Errors are raised only for what was wrong before the first worker ran.
    """
    settle_own_streams()
    output = Terminal() if output is None else output
    most = settings.max_workers + settings.options.num_servers
    num_slots = most if settings.elastic.is_live else settings.num_processes
    return _RestartingRun(settings, output, engine or LocalEngine(num_slots), start_timeout_s).run()


class _RestartingRun:
    """A run with all its restarts, with as many workers as there are slots on the hosts that answer."""

    def __init__(
        self, settings: LaunchSettings, output: Output, engine: Engine, start_timeout_s: float
    ) -> None:
        self._settings = settings
        self._output = output
        self._engine = engine
        self._start_timeout_s = start_timeout_s
        self._started_s = SYSTEM_CLOCK.now_s()

    def run(self) -> Outcome:
        with SignalInbox() as self._inbox:
            try:
                outcome = self._start(self._settings)
                for count in range(1, self._settings.elastic.max_restarts + 1):
                    if outcome.cause is None or self._settings.elastic.is_live:
                        break
                    try:
                        outcome = self._start(replace(self._settings, restart_count=count))
                    except ShoalError as error:
                        self._output.say(f"the run does not start anew: {error}")
                        outcome = replace(outcome, cause=None)
            finally:
                drain(self._output, self._inbox)
        return replace(outcome, elapsed_s=SYSTEM_CLOCK.now_s() - self._started_s)

    def _start(self, settings: LaunchSettings) -> Outcome:
        for number in self._inbox.take():
            return self._interrupt(number)
        num_servers, is_restart = settings.options.num_servers, settings.restart_count > 0
        most, limit_s = settings.num_workers, self._start_timeout_s
        if is_restart:
            most, limit_s = settings.max_workers, min(limit_s, RESTART_TIMEOUT_S)
        least = settings.min_workers
        agents = self._engine.open(least + num_servers, most + num_servers, is_restart=is_restart)
        with Gathering(agents) as gathering:
            interruption = gathering.wait(self._inbox, limit_s)
            if interruption is not None:
                return self._interrupt(interruption)
            num_workers = min(most, sum(agent.slots for agent in gathering.present) - num_servers)
            if num_workers < least:
                raise gathering.complaint()
            for agent, error in gathering.absent:
                self._output.say(f"goes on without {agent.host}: {error.what}")
            num_wanted, settings = settings.num_workers, replace(settings, num_workers=num_workers)
            is_live = settings.elastic.is_live
            chosen = gathering.choose(num_workers + num_servers, should_keep=is_live)
            if is_restart:
                self._tell_restart(settings, chosen)
            run = RunWorkers(settings, chosen, self._output)
            if is_live:
                run = LiveRun(settings, chosen, self._output, self._engine, num_wanted)
            return Launcher(settings, self._output, run, self._inbox).run(self._started_s)

    def _tell_restart(self, settings: LaunchSettings, chosen: Sequence[AgentHandle]) -> None:
        *others, last = dict.fromkeys(agent.host for agent in chosen)
        names = f"{', '.join(others)} and {last}" if others else last
        which = f"restart {settings.restart_count} of {settings.elastic.max_restarts}"
        workers = counted(settings.num_workers, "worker")
        self._output.say(f"{which} with {workers}{f' on {names}' if names else ''}")

    def _interrupt(self, number: int) -> Outcome:
        reason = _reason_of(number)
        self._output.say(f"{reason} before the workers had started")
        return Outcome(128 + number, reason)


class Launcher:
    """One start of all workers, by agents that have answered."""

    def __init__(
        self,
        settings: LaunchSettings,
        output: Output,
        run: RunWorkers,
        inbox: SignalInbox,
    ) -> None:
        self._settings = settings
        self._output = output
        self._inbox = inbox
        self._run = run
        self._workers = self._run.all
        self._failures = Failures(settings, self._workers, output)
        self._stops = Stops(self._workers, SILENCE_S * settings.options.patience, output.say)
        self._ending: Ending | None = None
        self._signals_left: list[int] = []
        self._next_signal_s = 0.0

    def run(self, started_s: float) -> Outcome:
        """Start the workers and see them through; the time that they are given counts from `started_s`."""
        self._started_s, settings, say = started_s, self._settings, self._output.say
        timeline.clear(settings)
        is_restart = settings.restart_count > 0
        with LogFiles(settings.log_dir, settings.num_processes, say, should_append=is_restart) as logs:
            try:
                self._run.start(logs)
                while not all(worker.is_done for worker in self._workers):
                    self._turn()
                outcome = self._outcome()
                timeline.collect(settings, outcome, say, self._run.shifts_s, len(self._workers))
                drain(self._output, self._inbox)
            finally:
                self._run.close(SYSTEM_CLOCK.now_s())
        return outcome

    def _turn(self) -> None:
        wanted = self._run.interests(is_full=self._output.is_full)
        poll_once([self._inbox.interest, *self._output.interests(), *wanted])
        for number in self._inbox.take():
            if number == signal.SIGTSTP:
                self._pause()
            else:
                self._interrupt(number, SYSTEM_CLOCK.now_s())
        now_s = SYSTEM_CLOCK.now_s()
        self._look_at_ends(now_s)
        if self._ending is None:
            reason = self._run.change(now_s)
            if reason:
                self._output.say(f"the run ends: {reason}")
                self._end(Ending(now_s, reason, 1))
        if self._ending is None:
            self._look_at_stops(now_s)
            self._look_at_limits(now_s)
        elif now_s >= self._next_signal_s:
            self._go_further(now_s)
        should_hold = self._ending is not None or bool(self._failures.fatal)
        for worker in self._workers:
            if not worker.is_done:
                worker.tick(now_s, self._failures.shown, should_hold=should_hold)

    def _look_at_ends(self, now_s: float) -> None:
        self._run.look(now_s)
        ended = [worker for worker in self._workers if not worker.is_alive and not worker.is_done]
        for worker in sorted(ended, key=lambda worker: worker.death().at_s):
            if worker.is_silent:
                self._failures.conclude(worker, now_s, self._ending)
        if self._ending is not None:
            return
        cause = self._failures.find_cause(now_s, is_uncertain=self._run.is_uncertain(now_s))
        if cause is not None:
            self._end_because_of(cause, now_s)

    def _look_at_stops(self, now_s: float) -> None:
        """Give up who is stopped for too long."""
        self._stops.look(now_s)
        for worker in self._stops.left_over(now_s):
            worker.give_up(now_s)
            worker.signal_group(signal.SIGKILL)
        culprit = self._stops.in_the_way()
        if culprit is not None:
            self._end_because_of(self._failures.give_up(culprit, now_s), now_s)

    def _look_at_limits(self, now_s: float) -> None:
        limit_s = self._settings.timeout_s
        ranks = [worker.rank for worker in self._workers if worker.is_alive]
        if limit_s is not None and now_s - self._started_s > limit_s and ranks:
            reason = (
                f"{name_ranks(ranks, self._settings.word)} had not finished after {limit_s:g} s (--timeout)"
            )
            self._output.say(reason)
            self._end(Ending(now_s, reason, TIMED_OUT))
        elif self._output.is_broken:
            self._end(Ending(now_s, "the reader of the output has gone", 128 + signal.SIGPIPE))

    def _interrupt(self, number: int, now_s: float) -> None:
        if self._ending is not None:
            if now_s - self._ending.at_s > SAME_SIGNAL_S:
                self._signals_left, self._next_signal_s = [signal.SIGKILL], now_s
            return
        reason = _reason_of(number)
        self._output.say(f"{reason}; the workers are being ended")
        asking = [signal.SIGINT, signal.SIGTERM] if number == signal.SIGINT else [signal.SIGTERM]
        self._end(Ending(now_s, reason, 128 + number), asking)

    def _pause(self) -> None:
        """Stop with all workers until somebody lets this process go on; the pause counts for nothing."""
        if self._ending is not None:
            return
        began_s = SYSTEM_CLOCK.now_s()
        going = [worker for worker in self._workers if worker.is_alive and worker.stop_signal is None]
        for worker in going:
            worker.signal_group(signal.SIGSTOP)
        self._run.pause(is_paused=True)
        self._inbox.stop_here()
        self._run.pause(is_paused=False)
        for worker in going:
            worker.signal_group(signal.SIGCONT)
        self._started_s += SYSTEM_CLOCK.now_s() - began_s

    def _end_because_of(self, cause: Death, now_s: float) -> None:
        self._end(Ending(now_s, describe(cause), cause.exit_code, cause))

    def _end(self, ending: Ending, asking: Iterable[int] = (signal.SIGTERM,)) -> None:
        self._ending, self._signals_left = ending, [*asking, signal.SIGKILL]
        self._go_further(ending.at_s)

    def _go_further(self, now_s: float) -> None:
        """Send the next signal to all that have not ended; give up those that the last one did not end."""
        assert self._ending is not None
        alive = [worker for worker in self._workers if worker.is_alive]
        if self._signals_left:
            number = self._signals_left.pop(0)
            self._next_signal_s = now_s + (GRACE_S if self._signals_left else GIVE_UP_S)
            if number == signal.SIGKILL and alive and now_s - self._ending.at_s >= GRACE_S:
                who = name_ranks([worker.rank for worker in alive], self._settings.word)
                self._output.say(
                    f"SIGTERM has not ended {who}, which may hang in native code; SIGKILL follows"
                )
            for worker in alive:
                worker.signal_group(number)
            return
        for worker in alive:
            where = f" on {worker.host}" if worker.host else ""
            who = f"{worker.word} {worker.rank}, process {worker.pid}{where},"
            self._output.say(f"{who} does not end by SIGKILL: it hangs in the kernel and is left behind")
            worker.is_done = True

    def _outcome(self) -> Outcome:
        ending, deaths = self._ending, tuple(self._failures.deaths)
        self._failures.sum_up(ending)
        if ending is None:
            return Outcome(0, deaths=deaths)
        trace = b"\n".join(self._failures.traceback).decode(errors="replace")
        return Outcome(ending.exit_code, ending.reason, deaths, trace, cause=ending.cause)


def _reason_of(number: int) -> str:
    return "interrupted" if number == signal.SIGINT else f"ended by {name_signal(number)}"


def drain(output: Output, inbox: SignalInbox) -> None:
    """Write out what is queued; a reader that takes nothing is waited for until a signal comes."""
    while wanted := output.interests():
        poll_once([inbox.interest, *wanted])
        for number in inbox.take():
            if number != signal.SIGTSTP:
                return
            inbox.stop_here()
