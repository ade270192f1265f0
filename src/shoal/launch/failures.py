"""What follows from the end of a worker.

- A worker that is lost (killed by a signal, gone with its machine, cut off from the others) takes the run
  with it, unless all that live on have told that they survive a loss. A parameter server takes it along
  whatever they told, and is itself no worker that lives on or has finished.
- A worker that fails by an error of its own takes the run with it in any case, unless failures are allowed.
- A worker that ends with exit code 0 before its work was done is told of. It ends the run if others fail for
  it, or if it was gone without a word and they went on: `os._exit` in the middle of training is an error.
- Where workers fail one after the other until none is left, the first of them is the cause.
- A failure that only says that a peer is lost is not the cause: that one is looked for, for a moment.
- The traceback of the cause is shown whole, and once if several fail alike; failures that follow from it are
  a line each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from shoal.launch.output import Output
from shoal.launch.settings import LaunchSettings
from shoal.launch.worker import (
    ENDING_HOLD_S,
    Death,
    Ending,
    ShownTracebacks,
    Worker,
    describe,
    first_cause,
    is_consequence,
    is_echo,
    name_ranks,
    name_signal,
    shorten,
    summarise,
)

SETTLE_S = 2.0
"""A worker that others have lost is seen ending within this time."""
MAX_LOOK_S = 1.0
"""More time than this between two looks was spent stopped with the workers, and nobody waited."""


class Failures:
    """The failures of one start, and what follows from them."""

    def __init__(self, settings: LaunchSettings, workers: Sequence[Worker], output: Output) -> None:
        self.deaths: list[Death] = []
        """All workers that failed of themselves."""
        self.traceback: list[bytes] = []
        """The traceback of the cause."""
        self.shown = ShownTracebacks()
        self._quitters: list[Death] = []
        """Those that ended with exit code 0 before their work was done."""
        self._named: list[Death] = []
        """Those of them that have been told of."""
        self.fatal: list[Death] = []
        """Those without which the run cannot go on."""
        self._workers = workers
        self._num_servers = settings.options.num_servers
        self._allows_failures = settings.allows_failures
        self._is_elastic = settings.elastic.is_live
        self._output = output
        self._settle_until_s = 0.0

    def conclude(self, worker: Worker, now_s: float, ending: Ending | None) -> None:
        """Take the end of a worker into account; all that it wrote has been read."""
        worker.is_done = True
        death = worker.death()
        if death in self.deaths:
            return
        has_failed = death.code != 0
        if ending is not None and death.at_s >= ending.at_s:
            # what happens to a worker that is being ended says nothing, but that it had lost a peer
            has_failed = death.code > 0 and death.is_consequence and ending.cause is not None
            worker.tracebacks.release()
        elif ending is not None and not death.error and -death.code in worker.signals:
            # it was ended in the middle of a traceback, which says nothing
            has_failed = False
            worker.tracebacks.release()
        if not has_failed:
            if ending is None and death.manner:
                self._quitters.append(death)
            worker.show_held()
            return
        self.deaths.append(death)
        is_bearable = (death.is_loss and not death.has_lost_server) or self._allows_failures
        if ending is None and not self.fatal and is_bearable and self._can_do_without(worker):
            self._go_on_without(worker, death, now_s)
        elif ending is None:
            self._settle_until_s = self._settle_until_s or now_s + SETTLE_S
            self.fatal.append(death)

    def find_cause(self, now_s: float, *, is_uncertain: bool = False) -> Death | None:
        """Return the failure that ends the run, once it is known; its traceback is shown."""
        self._judge_quitters(now_s)
        if not self.fatal or any(not worker.is_alive and not worker.is_done for worker in self._workers):
            return None
        cause = first_cause(self.fatal)
        quitter = self._quitter_behind()
        if quitter is not None:
            cause = quitter
            self.deaths.insert(0, quitter)
        elif cause.is_consequence:
            stopped = [worker for worker in self._workers if worker.stop_signal is not None]
            if stopped:
                return self.give_up(min(stopped, key=lambda worker: worker.stopped_s), now_s)
            is_settling = is_uncertain or now_s < self._settle_until_s or self._is_cause_ending(now_s)
            if is_settling and any(worker.is_alive for worker in self._workers):
                return None
        is_bearable = cause.is_loss or self._allows_failures
        if is_bearable and cause.rank >= self._num_servers and all(one.code for one in self._trainers()):
            cause = first_cause(self.deaths)
        self.traceback = self._show(self._workers[cause.rank], cause, now_s)
        self._output.say(describe(cause))
        return cause

    def give_up(self, worker: Worker, now_s: float) -> Death:
        """End the run because this worker is stopped."""
        cause = worker.give_up(now_s)
        self.deaths.append(cause)
        self._output.say(describe(cause))
        return cause

    def sum_up(self, ending: Ending | None) -> None:
        """Say what happened to the others."""
        if ending is None and self.deaths:
            ranks = sorted(death.rank for death in self.deaths)
            self._output.say(f"finished without {name_ranks(ranks, self.deaths[0].word)}")
        elif ending is not None and ending.cause is not None:
            for line in summarise(self.deaths, ending.cause):
                self._output.say(line)

    def _judge_quitters(self, now_s: float) -> None:
        """Tell of those that ended with exit code 0 too early, once it is clear that others have not.

        All may end so at the same step, which is how some programs end. Where others have failed, they say
        themselves whom they have lost.
        """
        if self.fatal:
            return
        for death in self._quitters:
            worker = self._workers[death.rank]
            if death in self._named or worker not in self._trainers():
                continue
            others = [other for other in self._trainers() if other is not worker]
            going = [other for other in others if math.isinf(other.left_s) and not other.is_ending]
            if going and now_s < death.at_s + SETTLE_S:
                continue
            if not going and not all(other.is_done for other in others):
                continue
            later = [other for other in others if other.left_s > death.at_s]
            is_missed = any(other.is_alive or not other.death().manner for other in later)
            is_error = death.manner == "abrupt"
            is_outlived = worker.told.phase == "training" and worker.told.survives_loss
            if not is_missed or (is_error and not is_outlived):
                continue
            self._named.append(death)
            if is_error:
                self.deaths.append(death)
            if is_error and not self._allows_failures:
                self.fatal.append(death)
            else:
                self._output.say(f"{death}; {self._who_goes_on()}")

    def _quitter_behind(self) -> Death | None:
        """Return who ended with exit code 0 and was lost by all that have failed since."""
        if not all(death.is_consequence for death in self.fatal):
            return None
        lost = [rank for death in self.fatal for rank in death.lost_ranks]
        behind = [death for death in self._quitters if not lost or death.rank in lost]
        return min(behind, key=lambda death: death.at_s, default=None)

    def _is_cause_ending(self, now_s: float) -> bool:
        """Whether a worker is about to end that did not fail because it has lost another one."""
        ending = [worker for worker in self._workers if worker.is_ending]
        is_open = any(not is_consequence(worker.tracebacks.error) for worker in ending)
        return is_open and now_s < self._settle_until_s + ENDING_HOLD_S

    def _can_do_without(self, worker: Worker) -> bool:
        others = [other for other in self._trainers() if other is not worker]
        if self._is_elastic:
            return worker.rank >= self._num_servers and any(other.code in (None, 0) for other in others)
        if any(other.is_alive for other in others):
            living = [other for other in self._workers if other.is_alive]
            return worker.rank >= self._num_servers and all(other.told.survives_loss for other in living)
        return any(other.code == 0 and other.told.survives_loss for other in others)

    def _trainers(self) -> Sequence[Worker]:
        """Return the workers without the parameter servers, whose ranks are the first."""
        return self._workers[self._num_servers :]

    def _show(self, worker: Worker, death: Death, now_s: float) -> list[bytes]:
        """Show its traceback, unless one like it has been shown, and return it."""
        printed = worker.tracebacks.error
        # children print it of a worker that was killed, and are killed over it
        is_foreign = death.code < 0 and not death.error and (not printed or is_echo(printed))
        if is_foreign or (death.error and self.shown.is_known(death.rank, worker.tracebacks.lines, now_s)):
            worker.tracebacks.release()
        worker.show_held()
        return worker.tracebacks.lines if death.error else []

    def _go_on_without(self, worker: Worker, death: Death, now_s: float) -> None:
        if death.is_consequence:
            worker.tracebacks.release()
        self._show(worker, death, now_s)
        why = f" ({shorten(death.error)})" if death.is_consequence else ""
        self._output.say(f"{death}{why}; {self._who_goes_on()}")

    def _who_goes_on(self) -> str:
        num_living = sum(other.is_alive for other in self._trainers())
        follows = f"the other {num_living} go on without it" if num_living > 1 else "the last one goes on"
        return follows if num_living else "the others had finished"


class Stops:
    """Workers that are stopped for long, which is longer than `limit_s`: who is named, and who is given up.

    One is given up when nobody else is left to wait for, or when somebody who cannot do without it has waited
    for too long. Who has told nothing may wait for ever: a program under a debugger is let alone.
    """

    def __init__(self, workers: Sequence[Worker], limit_s: float, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._limit_s = limit_s
        self._say = say
        self._looked_s = 0.0
        self._waited_s: dict[tuple[int, float], float] = {}
        """For how long each stop has kept somebody waiting who cannot do without the stopped one."""

    def look(self, now_s: float) -> None:
        """Take note of who is stopped, and name those who are for long; again and again."""
        stopped = self._stopped()
        going = [worker for worker in self._workers if worker.is_alive and worker.stop_signal is None]
        is_awaited = any(worker.told.survives_loss is False for worker in going)
        step_s = min(now_s - self._looked_s, MAX_LOOK_S) if is_awaited else 0.0
        self._waited_s = {_key(worker): self._waited_s.get(_key(worker), 0.0) + step_s for worker in stopped}
        for worker in stopped:
            if self._looked_s - worker.stopped_s <= self._limit_s < now_s - worker.stopped_s:
                by, where = name_signal(worker.stop_signal or 0), f" on {worker.host}" if worker.host else ""
                since = f"{worker.word} {worker.rank} has been stopped by {by} for {self._limit_s:g} s"
                self._say(f"{since}; `kill -CONT {worker.pid}`{where} lets it go on")
        self._looked_s = now_s

    def in_the_way(self) -> Worker | None:
        """Return who keeps others waiting for too long, the first of several."""
        limit_s = self._limit_s + SETTLE_S  # those who notice it themselves may say so first
        late = [worker for worker in self._stopped() if self._waited_s.get(_key(worker), 0.0) > limit_s]
        return min(late, key=lambda worker: worker.stopped_s, default=None)

    def left_over(self, now_s: float) -> list[Worker]:
        """Return those that are stopped for long when all others have ended."""
        alive = [worker for worker in self._workers if worker.is_alive]
        lost = [worker for worker in self._stopped() if now_s - worker.stopped_s > self._limit_s]
        return lost if len(lost) == len(alive) < len(self._workers) else []

    def _stopped(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.stop_signal is not None]


def _key(worker: Worker) -> tuple[int, float]:
    return worker.rank, worker.stopped_s
