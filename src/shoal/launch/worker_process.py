"""One worker's process on this machine, with its process group and its pipes; and a guard for all of them.

Nothing here waits, and nothing decides: what its output and its end mean is for `worker` and `failures`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Self

import msgspec

from shoal.core.errors import ShoalError, UsageError
from shoal.core.status import Status
from shoal.launch.output import Stream

READ_BYTES = 1 << 16
_MAX_LAST_BYTES = 1 << 22
"""Of output that is still in a pipe when its worker's time is over: somebody else may fill it for ever."""
_MAX_STATUS_BYTES = 4096
_MAX_STATUS_READS = 16
"""As much as a pipe holds; the rest waits for the next turn."""
_KILLED_S = 5.0
_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_SCRIPT = """
while read -r line; do groups=$line; done
for group in $groups; do kill -s KILL -- "-$group"; done
"""
_ENDING_S = 5.0


class Pipe:
    """The reading end of a worker's stdout or stderr."""

    def __init__(self, pipe: IO[bytes], stream: Stream) -> None:
        self.descriptor = pipe.fileno()
        os.set_blocking(self.descriptor, False)
        self.stream: Stream = stream
        self.is_open = True
        self._pipe = pipe

    def read(self) -> bytes:
        """Some of what is there; it closes when nothing more can come."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self.close()
        return data

    def drain(self, take: Callable[[bytes], object]) -> None:
        """Pass on what is left, and close."""
        left_bytes = _MAX_LAST_BYTES
        while self.is_open and left_bytes > 0:
            data = self.read()
            if not data:
                break
            take(data)
            left_bytes -= len(data)
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self.is_open:
            self.is_open = False
            self._pipe.close()


class Process:
    """The leader of a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], status_fd: int) -> None:
        self.pid = process.pid
        self.code: int | None = None
        """Its exit code, or minus a signal's number, once it has ended."""
        self.stop_signal: int | None = None
        """What stopped it, as long as it is stopped."""
        self.exit_descriptor = _open_pidfd(self.pid)
        self.status_descriptor = status_fd
        assert process.stdout is not None
        assert process.stderr is not None
        self.pipes = (Pipe(process.stdout, "stdout"), Pipe(process.stderr, "stderr"))
        self._process = process
        self._status = bytearray()

    @classmethod
    def start(
        cls,
        rank: int,
        command: Sequence[str],
        environment_for: Callable[[int], Mapping[str, str]],
        *,
        has_stdin: bool = False,
        cwd: str | None = None,
    ) -> Process:
        """Spawn it; its environment may name the descriptor of its pipe to the launcher."""
        try:
            status_fd, told_fd = os.pipe()
        except OSError as error:
            raise _cannot_start(rank, command[0], error) from None
        os.set_blocking(status_fd, False)
        try:
            process = subprocess.Popen(
                command,
                stdin=None if has_stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment_for(told_fd),
                pass_fds=(told_fd,),
                process_group=0,
                bufsize=0,
                cwd=cwd,
            )
        except OSError as error:
            os.close(status_fd)
            raise _cannot_start(rank, command[0], error) from None
        finally:
            os.close(told_fd)
        return cls(process, status_fd)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.code is None

    def poll(self) -> list[int | None]:
        """Look after it: by which signals it was stopped, with None where it went on; `code` has its end.

        Its children end with it.
        """
        changes: list[int | None] = []
        while self.is_alive:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                self.stop_signal = os.WSTOPSIG(status)
                changes.append(self.stop_signal)
            elif os.WIFCONTINUED(status):
                self.stop_signal = None
                changes.append(None)
            else:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
                self.stop_signal = None
                self.signal_group(signal.SIGKILL)
        return changes

    def signal_group(self, number: int) -> None:
        """Send to it and all its children, which go on for that if they are stopped."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
            os.killpg(self.pid, number)
        if self.stop_signal is not None and number != signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGCONT)

    def read_status(self) -> list[Status]:
        """What it has told since; what is not understood is passed over."""
        told: list[Status] = []
        for _ in range(_MAX_STATUS_READS):
            if self.status_descriptor < 0:
                break
            try:
                data = os.read(self.status_descriptor, _MAX_STATUS_BYTES)
            except BlockingIOError:
                break
            if not data:
                self._close_status()
            *lines, rest = bytes(self._status + data).split(b"\n")
            self._status[:] = rest[-_MAX_STATUS_BYTES:]
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):
                    told.append(msgspec.json.decode(line, type=Status))
        return told

    def wait(self) -> None:
        """Until it, which was killed, has ended; not for long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(_KILLED_S)

    def close(self) -> None:
        """Give all descriptors back; it must have ended, or been given up. Idempotent."""
        for pipe in self.pipes:
            pipe.close()
        self._close_status()
        if self.exit_descriptor >= 0:
            os.close(self.exit_descriptor)
            self.exit_descriptor = -1
        if self.is_alive:
            self._process.returncode = -signal.SIGKILL  # it cannot be waited for: no warning about that

    def _close_status(self) -> None:
        if self.status_descriptor >= 0:
            os.close(self.status_descriptor)
            self.status_descriptor = -1


def has_piped_stdin() -> bool:
    """Whether something was piped in; from a terminal nobody reads: a background group would be stopped."""
    try:
        os.fstat(0)
        return sys.__stdin__ is not None and not os.isatty(0)
    except OSError:
        return False


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


class Guard:
    """One for each launcher; a context manager, which must be told that no group is left before it closes."""

    def __enter__(self) -> Self:
        # a session of its own: Ctrl-C, a closed terminal or a kill of the launcher's group do not reach it
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            env={},
        )
        return self

    def watch(self, groups: Iterable[int]) -> None:
        """Exactly these are to be killed if the launcher dies now."""
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
            self._shell.stdin.write(" ".join(map(str, groups)).encode() + b"\n")

    def __exit__(self, *_: object) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.close()
        try:
            self._shell.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._shell.kill()
            self._shell.wait()


def groups_of(processes: Iterable[Process]) -> list[int]:
    """The process groups that are left of them."""
    return [process.pid for process in processes if process.is_alive]
