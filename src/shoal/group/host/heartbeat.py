"""The heartbeat of workers of one machine: each beats, off the data path, and watches the others.

Lost means silent, not slow. A process that has ended without leaving is lost at once (its pidfd says so); one
that neither beats nor uses the processor for five seconds, times the patience, is lost too, and finds the
verdict when it wakes up. For silence the lowest rank that is there decides, so that all agree on the last
operation in which the silent one took part.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Sequence

from shoal.core import LoopThread
from shoal.core.fork import close_in_children, keep_in_children
from shoal.core.processes import stat_fields
from shoal.group.base import GroupSettings, Loss
from shoal.group.host.memory import BEAT, LEFT, NOT_YET, VERDICT, ControlPage, WakePipes, culprit_of

log = logging.getLogger(__name__)
_BEAT_S = 0.2
_BUSY_S = 0.05


class ProcessWatch:
    """Beats for this worker and watches the other processes, on a loop thread of its own."""

    def __init__(
        self, rank: int, pids: Sequence[int], control: ControlPage, pipes: WakePipes, settings: GroupSettings
    ) -> None:
        self.lost: dict[int, Loss] = {}
        self.on_loss: Callable[[int], None] | None = None
        """Called with a rank once it is judged or has left, in the watching thread."""
        self.on_beat: Callable[[], None] | None = None
        """Called with every beat, likewise."""
        self.left_at_s: dict[int, float] = {}
        """When those were seen to have left that have, by the monotonic clock."""
        self._rank = rank
        self.pids = list(pids)
        self._control = control
        self._pipes = pipes
        self._silence_s = settings.silence_s
        self._name = settings.name_of
        self._present = [other for other in range(len(pids)) if other != rank]
        self._beats = dict.fromkeys(self._present, 0)
        self._cpu_s: dict[int, float] = {}
        """What those that do not beat had used of the processor when they stopped beating."""
        self._silent_s = dict.fromkeys(self._present, 0.0)
        self._pidfds: dict[int, int] = {}
        self._loop = LoopThread("shoal-watch", asyncio.new_event_loop)
        self._is_open = False

    def open(self) -> None:
        """Starts the thread that beats and watches the others."""
        self._control.set(BEAT, time.monotonic_ns())
        if sys.platform == "linux":
            for rank in self._present:
                # one that has ended before this has no descriptor, and its silence will tell
                with contextlib.suppress(OSError):
                    self._pidfds[rank] = os.pidfd_open(self.pids[rank])
                    close_in_children(self._pidfds[rank])
        self._loop.__enter__()
        self._is_open = True
        self._loop.submit(self._watch())

    def close(self) -> None:
        """Stops beating; the worker has left."""
        if not self._is_open:
            return
        self._is_open = False
        self._loop.__exit__(None, None, None)
        for descriptor in self._pidfds.values():
            keep_in_children(descriptor)
            os.close(descriptor)
        self._pidfds.clear()

    def last_beat_s(self, rank: int) -> float:
        """Computes the seconds since a rank's last beat."""
        return (time.monotonic_ns() - self._control.get(rank, BEAT)) / 1e9

    def loss(self, rank: int) -> Loss:
        """Says why a rank is gone, and because of whom, if its last beat tells."""
        if rank in self.lost:
            return self.lost[rank]
        loss = Loss(rank, self._reason(rank), at_s=time.monotonic())
        culprit = culprit_of(self._control.get(rank, BEAT))
        if culprit is None:
            return loss
        if culprit == self._name(self._rank):
            own = Loss(culprit, f"it was silent, and rank {self._name(rank)} went on without it")
            return dataclasses.replace(loss, kind="verdict", because=own)
        ranks = {self._name(other): other for other in range(len(self.pids))}
        reason = self._reason(ranks[culprit]) if culprit in ranks else f"rank {self._name(rank)} has lost it"
        return dataclasses.replace(loss, because=Loss(culprit, reason))

    def _reason(self, rank: int) -> str:
        if rank in self.lost:
            return self.lost[rank].reason
        if self._control.get(rank, LEFT) != NOT_YET:
            return "it left in the middle of an operation"
        if self._control.get(rank, BEAT) < 0:
            return "it failed"
        if not self._is_process_there(rank):
            return f"its process {self.pids[rank]} ended"
        silent_s = max(self._silence_s, self._silent_s.get(rank, 0.0))
        fields = stat_fields(self.pids[rank])
        stopped = ", its process is stopped (SIGSTOP)" if fields and fields[0] in ("T", "t") else ""
        return f"silent for {silent_s:.1f} s{stopped}"

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for rank, descriptor in self._pidfds.items():
            loop.add_reader(descriptor, self._ended, rank)
        looked_s = time.monotonic()
        while True:  # the last one too: somebody may be about to judge it
            self._control.set(BEAT, time.monotonic_ns())
            await asyncio.sleep(_BEAT_S)
            now_s = time.monotonic()
            try:
                # a pause of this worker itself (suspended, stopped, starved) is nobody else's silence
                self._look(min(now_s - looked_s, 2 * _BEAT_S))
            except Exception:
                log.exception(
                    "rank %d could not look after the others, and goes on beating", self._name(self._rank)
                )
            looked_s = now_s

    def _look(self, passed_s: float) -> None:
        if self.on_beat is not None:
            self.on_beat()
        for rank in tuple(self._present):
            if self._control.get(rank, LEFT) != NOT_YET or not self._is_process_there(rank):
                self._ended(rank)
            elif self._control.get(rank, BEAT) < 0 or self._control.get(rank, VERDICT) != NOT_YET:
                self._lose(rank)
            else:
                self._listen(rank, passed_s)

    def _listen(self, rank: int, passed_s: float) -> None:
        beat = self._control.get(rank, BEAT)
        if beat != self._beats[rank]:
            self._beats[rank] = beat
            self._silent_s[rank] = 0.0
            self._cpu_s.pop(rank, None)
            return
        silent_s = self._silent_s[rank] = self._silent_s[rank] + passed_s
        if silent_s < 2 * _BEAT_S:
            return
        used_s = _cpu_s(self.pids[rank])
        if used_s > self._cpu_s.setdefault(rank, used_s) + _BUSY_S:
            # a thread that keeps the interpreter's lock for long is busy, not silent
            self._cpu_s[rank] = used_s
            self._silent_s[rank] = 0.0
        elif silent_s > self._silence_s:
            beating = [other for other in self._present if self._silent_s[other] <= self._silence_s / 2]
            if self._rank == min([self._rank, *beating]):
                self._lose(rank, after=self._control.last_given(rank))

    def _ended(self, rank: int) -> None:
        """Goes on without a rank that has left, or whose process has ended."""
        if rank not in self._present:
            return
        if self._control.get(rank, LEFT) != NOT_YET:
            self.left_at_s[rank] = time.monotonic()
            self._forget(rank)
        else:  # it writes no more: all who look see the same number
            self._lose(rank, after=self._control.last_given(rank))

    def _lose(self, rank: int, *, after: int | None = None) -> None:
        """Goes on without a rank, and judges it where nobody has: it takes part in nothing `after` that."""
        loss = self.lost[rank] = self.loss(rank)
        if after is not None:
            self._control.judge(rank, after)  # now that whoever sees the verdict finds the reason
        self._forget(rank)
        log.warning("rank %d is lost: %s", self._name(rank), loss.reason)

    def _forget(self, rank: int) -> None:
        if self.on_loss is not None:
            self.on_loss(rank)
        self._present.remove(rank)
        if rank in self._pidfds:
            asyncio.get_running_loop().remove_reader(self._pidfds[rank])
        self._pipes.wake_self()

    def _is_process_there(self, rank: int) -> bool:
        if rank in self._pidfds:
            poll = select.poll()
            poll.register(self._pidfds[rank], select.POLLIN)
            return not poll.poll(0)
        try:
            os.kill(self.pids[rank], 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True


def _cpu_s(pid: int) -> float:
    fields = stat_fields(pid)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if len(fields) > 12 else 0.0
