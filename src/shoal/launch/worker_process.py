"""The workers that are children of this process, for an agent or for the head itself.

Each is a process with a process group and pipes of its own; a guard ends them all should this process be
killed. What their output and their ends mean is for `worker` and `failures`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Self

import msgspec

from shoal.core import SYSTEM_CLOCK, Clock, board
from shoal.core.errors import ShoalError, UsageError
from shoal.core.status import Status
from shoal.launch.output import Stream
from shoal.launch.polling import Interest
from shoal.launch.protocol import (
    AgentChannel,
    AgentHello,
    Down,
    Exited,
    Hold,
    Signal,
    Started,
    Stopped,
    TimelinePart,
    Up,
    WorkerEnded,
    WorkerJob,
    WorkerTold,
    Wrote,
)
from shoal.launch.settings import complete
from shoal.launch.timeline import make_room, read_part

LAST_WORDS_S = 1.0
"""The pipes of an ended worker have so long to end: a process that left its group may hold them for ever."""
READ_BYTES = 1 << 16
_MAX_LAST_BYTES = 1 << 22
"""No more output than this is read when a worker's time is over: somebody else may write for ever."""
_MAX_STATUS_BYTES = 4096
_MAX_STATUS_READS = 16
"""As much as a pipe holds; the rest waits for the next turn."""
_KILLED_S = 5.0
"""Workers that were killed are waited for so long: they may hang in the kernel."""
_SHORTAGES = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
_SCRIPT = """
while read -r line; do groups=$line; done
for group in $groups; do kill -s KILL -- "-$group"; done
"""
_ENDING_S = 5.0


class LocalChannel(AgentChannel):
    """The way to workers that are children of this process: starts them, and tells what becomes of them.

    The head of a run has one for workers of its own, and each agent one for those that it tells of. Nothing
    here waits but `close`, and nothing decides.
    """

    host = ""

    def __init__(self, hello: AgentHello, clock: Clock = SYSTEM_CLOCK) -> None:
        self.is_open = True
        self._clock = clock
        self._came: list[Up] = [hello]
        self._processes: dict[int, WorkerProcess] = {}
        self._guard: Guard | None = None
        self._timeline: str | None = None
        self._is_held = False

    @property
    def ranks(self) -> Collection[int]:
        """The ranks of the workers that have been started."""
        return self._processes.keys()

    @property
    def has_living(self) -> bool:
        """Whether a worker has not ended."""
        return any(process.is_alive for process in self._processes.values())

    def send(self, message: Down) -> None:
        """Do what the head says, at once; ShoalError when a job cannot be started."""
        match message:
            case WorkerJob():
                self._start(message)
            case Signal():
                self.signal_all(message.number, message.ranks)
            case Hold():
                self._is_held = message.is_held

    def take(self) -> list[Up]:
        """Return what has become of the workers since."""
        self._look(self._clock.now_s())
        came, self._came = self._came, []
        return came

    def explain(self) -> ShoalError:
        """Say that it has been closed: it does not end of itself."""
        return ShoalError("The workers of this machine have been ended.")

    def close(self) -> None:
        """Kill what is left of the workers; idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        self.signal_all(signal.SIGKILL)
        end_s = self._clock.now_s() + _KILLED_S
        for process in self._processes.values():
            process.wait(max(0.0, end_s - self._clock.now_s()))
            process.close()
        if self._guard is not None:
            self._guard.watch([])
            self._guard.__exit__()
        take_down()

    def signal_all(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to the process groups of these ranks, by default all, that have not ended."""
        for process in self._processes.values():
            if process.is_alive and (ranks is None or process.rank in ranks):
                process.signal_group(number)

    def interests(self, *, is_full: bool = False) -> list[Interest]:
        """Say what a poll should wait for; what workers write is left in their pipes while `is_full`."""
        wanted: list[Interest] = []
        for process in self._processes.values():
            if process.status_descriptor >= 0:
                wanted.append((process.status_descriptor, select.POLLIN, partial(self._read_status, process)))
            if process.is_alive and process.exit_descriptor >= 0:
                wanted.append((process.exit_descriptor, select.POLLIN, None))
            if not self._is_held and not is_full:
                wanted += [
                    (pipe.descriptor, select.POLLIN, partial(self._pass_on, process, pipe))
                    for pipe in process.pipes
                    if pipe.is_open
                ]
        return wanted

    def _look(self, now_s: float) -> None:
        """Tell of those that were stopped, go on, or have ended."""
        for process in self._processes.values():
            if process.is_alive:
                for number in process.poll():
                    self._came.append(Stopped(process.rank, number))
                if process.code is not None:
                    process.ended_s = now_s
                    self._came.append(Exited(process.rank, process.code))
                    self._watch()
        ended = [one for one in self._processes.values() if not one.is_alive and not one.is_over]
        silent = [one for one in ended if not one.has_open_pipes or now_s - one.ended_s >= LAST_WORDS_S]
        if silent:
            for process in self._processes.values():  # a last word about survival may still be on its way
                self._read_status(process)
        for process in silent:
            self._tell_end(process)

    def _start(self, job: WorkerJob) -> None:
        self._guard = Guard()
        self._guard.__enter__()
        self._timeline = job.timeline
        if not Path(job.cwd).is_dir():
            raise UsageError(
                f"There is no folder {job.cwd}.",
                cause="the program has not been copied there, or lies elsewhere.",
                next_step="copy it to the same path, or name the folder by --remote-cwd.",
            )
        if job.timeline is not None:
            make_room(job.timeline, [post.rank for post in job.posts])
        for post in job.posts:
            process = WorkerProcess.start(
                post.rank,
                job.command,
                partial(complete, {**job.variables, **post.variables}),
                has_stdin=job.has_stdin and post is job.posts[0],
                cwd=job.cwd,
            )
            self._processes[post.rank] = process
            self._watch()
            self._came.append(Started(post.rank, process.pid))

    def _tell_end(self, process: WorkerProcess) -> None:
        assert process.code is not None
        for pipe in process.pipes:
            for data in pipe.drain():
                self._came.append(Wrote(process.rank, pipe.stream, data))
        if self._timeline is not None:
            for data in read_part(self._timeline, process.rank):
                self._came.append(TimelinePart(process.rank, data))
        self._came.append(WorkerEnded(process.rank, process.code))
        process.is_over = True
        process.close()

    def _pass_on(self, process: WorkerProcess, pipe: OutputPipe) -> None:
        data = pipe.read()
        if data:
            self._came.append(Wrote(process.rank, pipe.stream, data))

    def _read_status(self, process: WorkerProcess) -> None:
        for status in process.read_status():
            self._came.append(WorkerTold(process.rank, status))

    def _watch(self) -> None:
        assert self._guard is not None
        self._guard.watch(process.pid for process in self._processes.values() if process.is_alive)


class OutputPipe:
    """The reading end of a worker's stdout or stderr."""

    def __init__(self, pipe: IO[bytes], stream: Stream) -> None:
        self.descriptor = pipe.fileno()
        os.set_blocking(self.descriptor, False)
        self.stream: Stream = stream
        self.is_open = True
        self._pipe = pipe

    def read(self) -> bytes:
        """Return some of what is there; it closes when nothing more can come."""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return b""
        if not data:
            self.close()
        return data

    def drain(self) -> Iterator[bytes]:
        """Yield what is left, and close."""
        left_bytes = _MAX_LAST_BYTES
        while self.is_open and left_bytes > 0 and (data := self.read()):
            yield data
            left_bytes -= len(data)
        self.close()

    def close(self) -> None:
        """Close this end; idempotent."""
        if self.is_open:
            self.is_open = False
            self._pipe.close()


class WorkerProcess:
    """A worker of this machine, the leader of a process group of its own."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], status_fd: int) -> None:
        self.rank = rank
        self.pid = process.pid
        self.code: int | None = None
        """Its exit code, or minus a signal's number, once it has ended."""
        self.stop_signal: int | None = None
        """What stopped it, as long as it is stopped."""
        self.ended_s = 0.0
        """When its end was noticed."""
        self.is_over = False
        """Whether all has been told of it."""
        self.exit_descriptor = _open_pidfd(self.pid)
        self.status_descriptor = status_fd
        assert process.stdout is not None
        assert process.stderr is not None
        self.pipes = (OutputPipe(process.stdout, "stdout"), OutputPipe(process.stderr, "stderr"))
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
    ) -> WorkerProcess:
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
        return cls(rank, process, status_fd)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.code is None

    @property
    def has_open_pipes(self) -> bool:
        """Whether more of what it wrote may come."""
        return any(pipe.is_open for pipe in self.pipes)

    def poll(self) -> list[int | None]:
        """Return by which signals it was stopped, with None where it went on; `code` has its end.

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
        """Return what it has told since; what is not understood is passed over."""
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

    def wait(self, limit_s: float) -> None:
        """Wait until it, which was killed, has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(limit_s)

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


class Guard:
    """Ends the workers of a process that was itself killed; told of no group at last, it ends none.

    A process that gets SIGKILL can clean up nothing, and PR_SET_PDEATHSIG would have to be asked for between
    fork and exec, is Linux's alone, and forgets the children of workers. So a shell waits at the other end of
    a pipe: it is told the process groups there are, and kills those that are left when the pipe ends.
    """

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
        """Have exactly these groups killed if this process dies now."""
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


def take_down() -> None:
    """Take down what killed workers of runs that are over have left on this machine's board."""
    with contextlib.suppress(Exception):  # it must end neither an agent nor the run
        if board.is_wanted():
            board.look()


def has_piped_stdin() -> bool:
    """Whether something was piped in; from a terminal nobody reads: a background group would be stopped."""
    try:
        os.fstat(0)
        return sys.__stdin__ is not None and not os.isatty(0)
    except OSError:
        return False


def _open_pidfd(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; -1 where there is no such thing."""
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
