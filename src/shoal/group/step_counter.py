"""Whether all workers end their training after the same step, so that they can share a last time.

Workers with more data than others go on, and nobody may wait for them: an operation of the whole group is
safe only when everybody has come to the end. So each worker publishes how many steps it has begun, and at its
end waits until every other one has ended too, has begun another step, or is gone.
"""

from __future__ import annotations

import torch

from shoal.core import SYSTEM_CLOCK, Deadline, DeadlineExceeded
from shoal.group.base import Group
from shoal.group.functions import next_number, others

_NO_PROGRESS_S = 10.0
"""A worker that makes no step for so long, and for as many steps as `_NO_PROGRESS_STEPS` take this one, may
wait for this worker in an operation of the user's own."""
_NO_PROGRESS_STEPS = 4.0
_PUBLISH_S = 0.02
"""With a GPU, whose steps may be short, the number of steps is published after so long at the earliest."""


class StepCounter:
    """The steps that this worker has begun, for the others to see; made on all members together.

    What is published stays as it is: only the version counts, 2 for each step and 1 for the end. It is memory
    of the CPU also where the model is on a GPU, which nobody shall wait for.
    """

    def __init__(self, group: Group, steps: int, *, is_on_device: bool = False) -> None:
        self._group = group
        self._pause_s = _PUBLISH_S if is_on_device else 0.0
        self._published_s = 0.0
        self._memory = group.empty(1)
        name = f"steps {next_number(group, 'step counters')}"
        self._window = group.window(name, 1, sources=())
        self._stepped_s = SYSTEM_CLOCK.now_s()
        self._longest_s = 0.0
        self.publish(steps)

    def publish(self, steps: int, *, is_urgent: bool = False) -> None:
        """Says how many steps this worker has begun; at once only if that is urgent: `meet` says it again."""
        now_s = SYSTEM_CLOCK.now_s()
        self._longest_s = max(self._longest_s, now_s - self._stepped_s)
        self._stepped_s = now_s
        if is_urgent or now_s - self._published_s >= self._pause_s:
            self._published_s = now_s
            self._window.publish(self._memory, 2 * steps)

    def meet(self, steps: int) -> bool:
        """At the end of training: whether another worker ends after the same step, and none goes on."""
        ended = 2 * steps + 1
        self._window.publish(self._memory, ended)
        versions = []
        for rank in others(self._group):
            version = self._wait_for(rank, ended)
            if version is not None and version != ended:
                return False
            versions.append(version)
        return ended in versions

    def close(self) -> None:
        """Takes the count back, with all others: who leaves alone lets them see that it has ended."""
        self._window.close()
        self._group.free(self._memory)

    def _wait_for(self, rank: int, ended: int) -> int | None:
        """Of a worker, once it has come so far; -1 when it makes no step, None when it is gone."""
        into = torch.empty_like(self._memory)
        before = -1
        while True:
            patience_s = max(_NO_PROGRESS_S, _NO_PROGRESS_STEPS * self._longest_s) * self._group.patience
            handle = self._window.read(rank, into, version=ended)
            try:
                return handle.wait(Deadline.after(patience_s))
            except DeadlineExceeded:
                now = self._window.read(rank, into).wait()
            if now is None or now == before:
                return None if now is None else -1
            before = now
