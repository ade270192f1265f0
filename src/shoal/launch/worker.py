"""One worker as its launcher sees it, wherever its process runs: its state, and what it has written.

Nothing here waits, and nothing decides: the launcher asks, and says what is to be done.
"""

from __future__ import annotations

import math
import signal
from abc import ABC, abstractmethod

from shoal.core.status import Phase, Status
from shoal.launch.endings import Death, is_echo
from shoal.launch.lines import Lines
from shoal.launch.output import LogFiles, Output, Stream
from shoal.launch.tracebacks import ShownTracebacks, Tracebacks

_SLOW_END_S = 30.0
"""From a traceback to the end of its process: one that is older has nothing to do with it."""
_OWN_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGINT)
"""By which a process ends itself, perhaps after a traceback: Python by SIGINT, native code by the others."""


class Reader:
    """A worker's stdout or stderr on its way to log and output."""

    def __init__(self, rank: int, stream: Stream, output: Output, logs: LogFiles) -> None:
        self.is_open = True
        self.tracebacks = Tracebacks()
        self._rank, self._stream = rank, stream
        self._output, self._logs = output, logs
        self._lines = Lines()

    def feed(self, data: bytes, now_s: float) -> None:
        """Pass on what was read."""
        self._take(self._lines.feed(data), now_s)

    def tick(self, now_s: float) -> None:
        """Show a bar that moved."""
        bar = self._lines.bar(now_s)
        if bar:
            self.show(self._sift(bar, now_s))

    def show(self, lines: list[bytes]) -> None:
        """Have them shown as this stream's."""
        if lines:
            self._output.lines(self._rank, self._stream, lines)

    def close(self, now_s: float) -> None:
        """Nothing more will come; a last line without an end is passed on. Idempotent."""
        if self.is_open:
            self._take(self._lines.take_rest(), now_s)
            self.is_open = False

    def _take(self, whole: bytes, now_s: float) -> None:
        if whole:
            self._logs.write(self._rank, whole)
            self.show(self._sift(self._lines.shown(whole), now_s))

    def _sift(self, lines: list[bytes], now_s: float) -> list[bytes]:
        return self.tracebacks.sift(lines, now_s) if self._stream == "stderr" else lines


class Worker(ABC):
    """A running worker, or what is left of it."""

    host = ""
    """Where it runs, when that is not this machine."""

    def __init__(self, rank: int, output: Output, logs: LogFiles) -> None:
        self.rank = rank
        self.pid = 0
        self.code: int | None = None
        """Its exit code, or minus a signal's number, once it has ended."""
        self.ended_s = 0.0
        self.stop_signal: int | None = None
        """What stopped it, as long as it is stopped."""
        self.stopped_s = 0.0
        self.given_up: Death | None = None
        """Why it counts as ended, if that was not by its own end."""
        self.survives_loss: bool | None = None
        """What it told; None when it has told nothing."""
        self.phase: Phase | None = None
        """Where it told to be on its way; None when it has told nothing."""
        self.step: int | None = None
        """What it told last."""
        self.early_step: int | None = None
        """Where it was told to exit with code 0, inside of `attach`."""
        self._phase_s = self._early_s = 0.0
        """When it told these."""
        self.is_done = False
        """Whether the launcher has drawn its conclusions from its end."""
        self.readers = (Reader(rank, "stdout", output, logs), Reader(rank, "stderr", output, logs))
        self._signals: list[int] = []
        """What the launcher sent it."""

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.code is None

    @property
    def tracebacks(self) -> Tracebacks:
        """What is held of its stderr."""
        return self.readers[1].tracebacks

    @property
    def is_ending(self) -> bool:
        """Whether it is alive and has told that it is about to end before its work was done."""
        return self.is_alive and (self.phase == "failing" or self.early_step is not None)

    @property
    def left_s(self) -> float:
        """When it left its group in order, or ended; not yet is infinity."""
        if self.phase == "left":
            return self._phase_s
        return math.inf if self.is_alive else self.ended_s

    def hear(self, told: Status, now_s: float) -> None:
        """Take what it has told."""
        if told.survives_loss is not None:
            self.survives_loss = told.survives_loss
        if told.phase is not None:
            self.phase, self._phase_s = told.phase, now_s
        if told.step is not None:
            self.step = told.step
        if told.early_step is not None:
            self.early_step, self._early_s = told.early_step, now_s

    def was_told(self, number: int) -> bool:
        """Whether the launcher has sent it this signal."""
        return number in self._signals

    def signal_group(self, number: int) -> None:
        """Send to the worker and all its children."""
        if self.is_alive:
            self._signals.append(number)
        self._send(number)

    @abstractmethod
    def _send(self, number: int) -> None: ...

    def is_silent(self, since_s: float) -> bool:
        """Whether an ended worker's pipes have ended too, or it has ended before that."""
        return self.ended_s < since_s or not any(reader.is_open for reader in self.readers)

    def tick(self, now_s: float, shown: ShownTracebacks, *, should_hold: bool) -> None:
        """Show a bar that moved, and the traceback of a worker that goes on, unless it should be held."""
        for reader in self.readers:
            reader.tick(now_s)
        if not should_hold:
            due = self.tracebacks.release_due(now_s, is_ending=self.is_ending)
            self.readers[1].show(shown.shorten(self.rank, due, now_s))

    def show_held(self) -> None:
        """Have shown what is held of its stderr."""
        self.readers[1].show(self.tracebacks.release())

    def note_stop(self, number: int | None, now_s: float) -> None:
        """It was stopped by this signal, or, with None, goes on."""
        self.stop_signal = number
        self.stopped_s = now_s if number is not None else self.stopped_s

    def note_end(self, code: int, now_s: float) -> None:
        """Its process has ended."""
        self.code, self.ended_s, self.stop_signal = code, now_s, None

    def give_up(self, now_s: float) -> Death:
        """It is stopped, and will be killed for that."""
        assert self.stop_signal is not None
        self.given_up = Death(self.rank, -self.stop_signal, self.stopped_s, stopped_s=now_s - self.stopped_s)
        return self.given_up

    def death(self) -> Death:
        """How it ended; a Death with code 0 when it finished."""
        assert self.code is not None
        if self.given_up is not None:
            return self.given_up
        if self.code == 0 and self.early_step is not None:
            return Death(self.rank, 0, self._early_s, manner="early", step=self.early_step)
        if self.code == 0 and self.phase in ("joined", "training"):
            return Death(self.rank, 0, self.ended_s, manner="abrupt", step=self.step)
        since_s = self.tracebacks.since_s
        if since_s is None or self.ended_s > since_s + _SLOW_END_S or not self._may_have_raised():
            return Death(self.rank, self.code, self.ended_s)
        return Death(self.rank, self.code, since_s, self.tracebacks.error)

    def _may_have_raised(self) -> bool:
        """Whether a traceback can be its own: who is killed prints none, but its children may."""
        assert self.code is not None
        if self.code >= 0 or self.was_told(-self.code):
            return True
        return -self.code in _OWN_SIGNALS and not is_echo(self.tracebacks.error)

    def finish_output(self, now_s: float) -> None:
        """Pass on what is left of its output; idempotent."""
        for reader in self.readers:
            reader.close(now_s)
