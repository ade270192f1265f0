"""Workers that are stopped for long: who is named, and who is given up.

One is given up when nobody else is left to wait for, or when somebody who cannot do without it has waited
for too long. Who has told nothing may wait for ever: a program under a debugger is let alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.launch.endings import name_signal
from shoal.launch.failures import SETTLE_S
from shoal.launch.worker import Worker

MAX_LOOK_S = 1.0
"""From one look to the next; what is more was spent stopped with the workers, and nobody waited."""


class Stops:
    """Of one run; stopped for longer than `limit_s` is long."""

    def __init__(self, workers: Sequence[Worker], limit_s: float, say: Callable[[str], None]) -> None:
        self._workers = workers
        self._limit_s = limit_s
        self._say = say
        self._looked_s = 0.0
        self._waited_s: dict[tuple[int, float], float] = {}
        """For how long each stop has kept somebody waiting who cannot do without the stopped one."""
        self._named: dict[tuple[int, float], None] = {}

    def look(self, now_s: float) -> None:
        """Take note of who is stopped, and name those who are for long; again and again."""
        stopped = self._stopped()
        going = [worker for worker in self._workers if worker.is_alive and worker.stop_signal is None]
        is_awaited = any(worker.survives_loss is False for worker in going)
        step_s = min(now_s - self._looked_s, MAX_LOOK_S) if is_awaited else 0.0
        self._looked_s = now_s
        self._waited_s = {_key(worker): self._waited_s.get(_key(worker), 0.0) + step_s for worker in stopped}
        for worker in stopped:
            if _key(worker) not in self._named and now_s - worker.stopped_s > self._limit_s:
                self._named[_key(worker)] = None
                self._name(worker)

    def in_the_way(self) -> Worker | None:
        """Who keeps others waiting for too long, the first of several."""
        limit_s = self._limit_s + SETTLE_S  # those who notice it themselves may say so first
        late = [worker for worker in self._stopped() if self._waited_s.get(_key(worker), 0.0) > limit_s]
        return min(late, key=lambda worker: worker.stopped_s, default=None)

    def left_over(self, now_s: float) -> list[Worker]:
        """Those that are stopped for long when all others have ended."""
        alive = [worker for worker in self._workers if worker.is_alive]
        lost = [worker for worker in self._stopped() if now_s - worker.stopped_s > self._limit_s]
        return lost if len(lost) == len(alive) < len(self._workers) else []

    def _stopped(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_alive and worker.stop_signal is not None]

    def _name(self, worker: Worker) -> None:
        assert worker.stop_signal is not None
        where = f" on {worker.host}" if worker.host else ""
        self._say(
            f"rank {worker.rank} has been stopped by {name_signal(worker.stop_signal)} for "
            f"{self._limit_s:g} s; `kill -CONT {worker.pid}`{where} lets it go on"
        )


def _key(worker: Worker) -> tuple[int, float]:
    return worker.rank, worker.stopped_s
