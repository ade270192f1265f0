"""What follows from the end of a worker.

- A worker that fails takes the run with it, unless all that live on have told that they survive a loss. A
  parameter server takes it along whatever they told, and is itself no worker that lives on or has finished.
- Where workers fail one after the other until none is left, the first of them is the cause.
- A failure that only says that a peer is lost is not the cause: that one is looked for, for a moment.
- The traceback of the cause is shown whole; failures that follow from it are a line each.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.launch.endings import Death, Ending, describe, first_cause, is_echo, name_ranks, shorten, summarise
from shoal.launch.output import Output
from shoal.launch.worker import Worker

SETTLE_S = 2.0
"""For the worker that others have lost to be seen ending."""


class Failures:
    """Of one run."""

    def __init__(self, workers: Sequence[Worker], output: Output, num_servers: int = 0) -> None:
        self.deaths: list[Death] = []
        """All workers that failed of themselves."""
        self.traceback: list[bytes] = []
        """Of the cause."""
        self._fatal: list[Death] = []
        self._workers = workers
        self._num_servers = num_servers
        self._output = output
        self._settle_until_s = 0.0
        self._shown_errors: dict[str, None] = {}

    @property
    def is_fatal(self) -> bool:
        """Whether the run cannot go on."""
        return bool(self._fatal)

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
        if not has_failed:
            worker.show_held()
            return
        self.deaths.append(death)
        if ending is None and not self._fatal and self._can_do_without(worker):
            self._go_on_without(worker, death)
        elif ending is None:
            self._settle_until_s = self._settle_until_s or now_s + SETTLE_S
            self._fatal.append(death)

    def find_cause(self, now_s: float, *, is_uncertain: bool = False) -> Death | None:
        """The failure that ends the run, once it is known; its traceback is shown."""
        if not self._fatal or any(not worker.is_alive and not worker.is_done for worker in self._workers):
            return None
        cause = first_cause(self._fatal)
        if cause.is_consequence:
            stopped = [worker for worker in self._workers if worker.stop_signal is not None]
            if stopped:
                return self.give_up(min(stopped, key=lambda worker: worker.stopped_s), now_s)
            is_settling = is_uncertain or now_s < self._settle_until_s
            if is_settling and any(worker.is_alive for worker in self._workers):
                return None
        if cause.rank >= self._num_servers and all(worker.code for worker in self._trainers()):
            cause = first_cause(self.deaths)
        self.traceback = self._show(self._workers[cause.rank], cause)
        self._output.say(describe(cause))
        return cause

    def give_up(self, worker: Worker, now_s: float) -> Death:
        """Its being stopped ends the run."""
        cause = worker.give_up(now_s)
        self.deaths.append(cause)
        self._output.say(describe(cause))
        return cause

    def sum_up(self, ending: Ending | None) -> None:
        """Say what happened to the others."""
        if ending is None and self.deaths:
            self._output.say(f"finished without {name_ranks(sorted(death.rank for death in self.deaths))}")
        elif ending is not None and ending.cause is not None:
            for line in summarise(self.deaths, ending.cause):
                self._output.say(line)

    def _can_do_without(self, worker: Worker) -> bool:
        others = [other for other in self._trainers() if other is not worker]
        if any(other.is_alive for other in others):
            living = [other for other in self._workers if other.is_alive]
            return worker.rank >= self._num_servers and all(other.survives_loss for other in living)
        return any(other.code == 0 and other.survives_loss for other in others)

    def _trainers(self) -> Sequence[Worker]:
        """Without the parameter servers, whose ranks are the first."""
        return self._workers[self._num_servers :]

    def _show(self, worker: Worker, death: Death) -> list[bytes]:
        """Its traceback, which is shown unless one like it has been."""
        printed = worker.tracebacks.error
        # children print it of a worker that was killed, and are killed over it
        is_foreign = death.code < 0 and not death.error and (not printed or is_echo(printed))
        if death.error in self._shown_errors or is_foreign:
            worker.tracebacks.release()
        worker.show_held()
        if not death.error:
            return []
        self._shown_errors[death.error] = None
        return worker.tracebacks.lines

    def _go_on_without(self, worker: Worker, death: Death) -> None:
        if death.is_consequence:
            worker.tracebacks.release()
        self._show(worker, death)
        why = f" ({shorten(death.error)})" if death.is_consequence else ""
        num_living = sum(other.is_alive for other in self._trainers())
        follows = f"the other {num_living} go on without it" if num_living > 1 else "the last one goes on"
        self._output.say(f"{death}{why}; {follows if num_living else 'the others had finished'}")
