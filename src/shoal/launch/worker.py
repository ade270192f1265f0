"""One worker process as its launcher sees it: its state, its process group, and its three pipes.

Nothing here waits, and nothing decides: the launcher asks, and says what is to be done.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from typing import IO

import msgspec

from shoal.core.errors import ShoalError, UsageError
from shoal.launch.endings import Death, is_echo
from shoal.launch.lines import Lines
from shoal.launch.output import LogFiles, Output, Stream
from shoal.launch.settings import LaunchSettings, Surroundings
from shoal.launch.tracebacks import Tracebacks

READ_BYTES = 1 << 16
_MAX_LAST_BYTES = 1 << 22
"""Of output that is still in a pipe when its worker's time is over: somebody else may fill it for ever."""
_MAX_STATUS_BYTES = 4096
_KILLED_S = 5.0
_SLOW_END_S = 30.0
"""From a traceback to the end of its process: one that is older has nothing to do with it."""
_OWN_SIGNALS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGINT)
"""By which a process ends itself, perhaps after a traceback: Python by SIGINT, native code by the others."""
_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Status(msgspec.Struct, frozen=True):
    """What a worker may tell by `core.status.tell_launcher`; anything else is passed over."""

    survives_loss: bool | None = None


class Reader:
    """The launcher's end of a worker's stdout or stderr."""

    def __init__(self, pipe: IO[bytes], rank: int, stream: Stream, output: Output, logs: LogFiles) -> None:
        self.descriptor = pipe.fileno()
        os.set_blocking(self.descriptor, False)
        self._pipe = pipe
        self.is_open = True
        self.tracebacks = Tracebacks()
        self._rank, self._stream = rank, stream
        self._output, self._logs = output, logs
        self._lines = Lines()

    def read(self, now_s: float) -> int:
        """Pass on some of what is there; how many bytes that was."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._take(self._lines.feed(data), now_s)
        else:
            self.close(now_s)
        return len(data)

    def tick(self, now_s: float, *, should_hold: bool) -> None:
        """Show a bar that moved, and the traceback of a worker that goes on, unless it should be held."""
        bar = self._lines.bar(now_s)
        if bar:
            self.show(self._sift(bar, now_s))
        if not should_hold:
            self.show(self.tracebacks.release_due(now_s))

    def show(self, lines: list[bytes]) -> None:
        """Have them shown as this stream's."""
        if lines:
            self._output.lines(self._rank, self._stream, lines)

    def close(self, now_s: float) -> None:
        """Nothing more will come; a last line without an end is passed on. Idempotent."""
        if self.is_open:
            self._take(self._lines.take_rest(), now_s)
            self.is_open = False
            self._pipe.close()

    def _take(self, whole: bytes, now_s: float) -> None:
        if whole:
            self._logs.write(self._rank, whole)
            self.show(self._sift(self._lines.shown(whole), now_s))

    def _sift(self, lines: list[bytes], now_s: float) -> list[bytes]:
        return self.tracebacks.sift(lines, now_s) if self._stream == "stderr" else lines


class Worker:
    """A running worker, or what is left of it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], status_fd: int) -> None:
        self.rank = rank
        self.pid = process.pid
        self.code: int | None = None
        """Its exit code, or minus a signal's number, once it has ended."""
        self.ended_s = 0.0
        self.stop_signal: int | None = None
        """What stopped it, as long as it is stopped."""
        self.stopped_s = 0.0
        self.given_up: Death | None = None
        """Why it was killed, if that was for being stopped."""
        self.survives_loss: bool | None = None
        """What it told; None when it has told nothing."""
        self.is_done = False
        """Whether the launcher has drawn its conclusions from its end."""
        self.exit_descriptor = _open_pidfd(self.pid)
        self.status_descriptor = status_fd
        self._process = process
        self._status = bytearray()
        self._signals: list[int] = []
        """What the launcher sent it."""
        self.readers: list[Reader] = []

    @classmethod
    def start(
        cls, rank: int, settings: LaunchSettings, surroundings: Surroundings, output: Output, logs: LogFiles
    ) -> Worker:
        """Spawn it, as the leader of a process group of its own."""
        try:
            status_fd, told_fd = os.pipe()
        except OSError as error:
            raise _cannot_start(rank, settings.command[0], error) from None
        os.set_blocking(status_fd, False)
        try:
            process = subprocess.Popen(
                settings.command,
                stdin=_stdin_of(rank),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=surroundings.of(rank, told_fd),
                pass_fds=(told_fd,),
                process_group=0,
                bufsize=0,
            )
        except OSError as error:
            os.close(status_fd)
            raise _cannot_start(rank, settings.command[0], error) from None
        finally:
            os.close(told_fd)
        worker = cls(rank, process, status_fd)
        assert process.stdout is not None
        assert process.stderr is not None
        worker.readers = [
            Reader(process.stdout, rank, "stdout", output, logs),
            Reader(process.stderr, rank, "stderr", output, logs),
        ]
        return worker

    @property
    def is_alive(self) -> bool:
        """Whether its process has not ended."""
        return self.code is None

    @property
    def tracebacks(self) -> Tracebacks:
        """What is held of its stderr."""
        return self.readers[1].tracebacks

    def poll(self, now_s: float) -> bool:
        """Look after its process; True when it has just ended, and its children with it."""
        while self.is_alive:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return False
            if os.WIFSTOPPED(status):
                self.stop_signal, self.stopped_s = os.WSTOPSIG(status), now_s
            elif os.WIFCONTINUED(status):
                self.stop_signal = None
            else:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.stop_signal, self.ended_s = None, now_s
                self.signal_group(signal.SIGKILL)
                return True
        return False

    def signal_group(self, number: int) -> None:
        """Send to the worker and all its children."""
        if self.is_alive:
            self._signals.append(number)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
            os.killpg(self.pid, number)
        if self.stop_signal is not None and number != signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGCONT)

    def read_status(self) -> None:
        """Take what it tells the launcher."""
        if self.status_descriptor < 0:
            return
        try:
            data = os.read(self.status_descriptor, _MAX_STATUS_BYTES)
        except BlockingIOError:
            return
        if not data:
            self.close_status()
            return
        *lines, rest = bytes(self._status + data).split(b"\n")
        self._status[:] = rest[-_MAX_STATUS_BYTES:]
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                said = msgspec.json.decode(line, type=Status)
                if said.survives_loss is not None:
                    self.survives_loss = said.survives_loss

    def is_silent(self, since_s: float) -> bool:
        """Whether an ended worker's pipes have ended too, or it has ended before that."""
        return self.ended_s < since_s or not any(reader.is_open for reader in self.readers)

    def show_held(self) -> None:
        """Have shown what is held of its stderr."""
        self.readers[1].show(self.tracebacks.release())

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
        since_s = self.tracebacks.since_s
        if since_s is None or self.ended_s > since_s + _SLOW_END_S or not self._may_have_raised():
            return Death(self.rank, self.code, self.ended_s)
        return Death(self.rank, self.code, since_s, self.tracebacks.error)

    def _may_have_raised(self) -> bool:
        """Whether a traceback can be its own: who is killed prints none, but its children may."""
        assert self.code is not None
        if self.code >= 0 or -self.code in self._signals:
            return True
        return -self.code in _OWN_SIGNALS and not is_echo(self.tracebacks.error)

    def finish_output(self, now_s: float) -> None:
        """Pass on what is left in its pipes, and close them."""
        for reader in self.readers:
            left_bytes = _MAX_LAST_BYTES
            while reader.is_open and left_bytes > 0:
                count = reader.read(now_s)
                if not count:
                    break
                left_bytes -= count
            reader.close(now_s)

    def wait(self) -> None:
        """Until its process, which was killed, has ended; not for long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(_KILLED_S)

    def close_status(self) -> None:
        """No more of what it tells; idempotent."""
        if self.status_descriptor >= 0:
            os.close(self.status_descriptor)
            self.status_descriptor = -1

    def close(self, now_s: float) -> None:
        """Give all descriptors back; its process must have ended, or been given up."""
        self.finish_output(now_s)
        self.close_status()
        if self.exit_descriptor >= 0:
            os.close(self.exit_descriptor)
            self.exit_descriptor = -1
        if self.is_alive:
            self._process.returncode = -signal.SIGKILL  # it cannot be waited for: no warning about that


def _stdin_of(rank: int) -> int | None:
    """Rank 0 reads what was piped in; from a terminal nobody reads: a background group would be stopped."""
    try:
        is_terminal = sys.__stdin__ is None or os.isatty(0)
        os.fstat(0)
    except OSError:
        is_terminal = True
    return None if rank == 0 and not is_terminal else subprocess.DEVNULL


def _open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 where there is no such thing."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # old kernels, and sandboxes that do not know it
            return os.pidfd_open(pid)
    return -1


def _cannot_start(rank: int, program: str, error: OSError) -> ShoalError:
    if error.errno not in _SHORTAGES:
        return UsageError(f"{program} cannot be run: {error.strerror}.", next_step="check its path and mode.")
    return ShoalError(
        f"Worker {rank} could not be started: {error.strerror}.",
        cause="this user has too many processes or open files, or the memory is full.",
        next_step="give a smaller -np, or raise the limits that `ulimit -a` shows.",
    )
