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
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Self

import msgspec

from shoal.core import SYSTEM_CLOCK, board
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
    LinkAnswer,
    LinkSaid,
    Post,
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
"""As much as a pipe holds."""
_MAX_LAST_BYTES = 1 << 22
"""No more output than this is read when a worker's time is over: somebody else may write for ever."""
_MAX_STATUS_BYTES = 4096
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

    def __init__(self, hello: AgentHello) -> None:
        self.is_open = True
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
            case LinkAnswer():
                process = self._processes.get(message.rank)
                if process is not None and process.link is not None:
                    process.link.send(message.data)
            case Hold():
                self._is_held = message.is_held

    def take(self) -> list[Up]:
        """Return what has become of the workers since."""
        self._look(SYSTEM_CLOCK.now_s())
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
        end_s = SYSTEM_CLOCK.now_s() + _KILLED_S
        for process in self._processes.values():
            process.wait(max(0.0, end_s - SYSTEM_CLOCK.now_s()))
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
            if process.status.is_open:
                read_status = partial(self._read_status, process)
                wanted.append((process.status.descriptor, select.POLLIN, read_status))
            if process.link is not None and process.link.is_open:
                wanted += process.link.interests(partial(self._read_link, process))
            if process.is_alive and process.exit_descriptor >= 0:
                wanted.append((process.exit_descriptor, select.POLLIN, None))
            for stream, pipe in process.outputs.items() if not self._is_held and not is_full else ():
                if pipe.is_open:
                    pass_on = partial(self._pass_on, process.rank, stream, pipe)
                    wanted.append((pipe.descriptor, select.POLLIN, pass_on))
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
        silent = [one for one in ended if not one.may_write or now_s - one.ended_s >= LAST_WORDS_S]
        if silent:
            for process in self._processes.values():  # a last word about survival may still be on its way
                self._read_status(process)
        for process in silent:
            self._tell_end(process)

    def _start(self, job: WorkerJob) -> None:
        if self._guard is None:
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
            process = self._processes[post.rank] = WorkerProcess(job, post)
            self._watch()
            self._came.append(Started(post.rank, process.pid))

    def _tell_end(self, process: WorkerProcess) -> None:
        assert process.code is not None
        for stream, pipe in process.outputs.items():
            self._came += [Wrote(process.rank, stream, data) for data in pipe.drain()]
        if self._timeline is not None:
            pieces = read_part(self._timeline, process.rank)
            self._came += [TimelinePart(process.rank, data) for data in pieces]
        self._came.append(WorkerEnded(process.rank, process.code))
        process.is_over = True
        process.close()

    def _pass_on(self, rank: int, stream: Stream, pipe: ReadEnd) -> None:
        data = pipe.read()
        if data:
            self._came.append(Wrote(rank, stream, data))

    def _read_link(self, process: WorkerProcess) -> None:
        assert process.link is not None, "no elastic run"
        data = process.link.read()
        if data:
            self._came.append(LinkSaid(process.rank, data))

    def _read_status(self, process: WorkerProcess) -> None:
        self._came += [WorkerTold(process.rank, status) for status in process.read_status()]

    def _watch(self) -> None:
        assert self._guard is not None
        self._guard.watch(process.pid for process in self._processes.values() if process.is_alive)


class ReadEnd:
    """The reading end of a pipe to which a worker writes; nothing here waits."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.is_open = True

    def read(self) -> bytes:
        """Return what is there; it closes when nothing more can come."""
        if not self.is_open:
            return b""
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return b""
        except ConnectionError:  # of a socket whose other end was killed
            data = b""
        if not data:
            self.close()
        return data

    def drain(self) -> Iterator[bytes]:
        """Yield what is left, and close."""
        left_bytes = _MAX_LAST_BYTES
        while left_bytes > 0 and (data := self.read()):
            yield data
            left_bytes -= len(data)
        self.close()

    def close(self) -> None:
        """Close this end; idempotent."""
        if self.is_open:
            self.is_open = False
            os.close(self.descriptor)


class LinkEnd(ReadEnd):
    """The launcher's end of a worker's way to the coordinator of an elastic run; nothing here waits."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._queue = bytearray()

    def send(self, data: bytes) -> None:
        """Queue bytes, and write what goes at once."""
        self._queue += data
        self._write()

    def interests(self, read: Callable[[], None]) -> list[Interest]:
        """Say what a poll should wait for."""
        wanted: list[Interest] = [(self.descriptor, select.POLLIN, read)]
        return [*wanted, (self.descriptor, select.POLLOUT, self._write)] if self._queue else wanted

    def _write(self) -> None:
        try:
            while self._queue and self.is_open:
                del self._queue[: os.write(self.descriptor, self._queue)]
        except BlockingIOError:
            return
        except OSError:  # it has ended
            self._queue.clear()


class WorkerProcess:
    """A worker of this machine, the leader of a process group of its own."""

    def __init__(self, job: WorkerJob, post: Post) -> None:
        self.rank = post.rank
        self.code: int | None = None
        """Its exit code, or minus a signal's number, once it has ended."""
        self.stop_signal: int | None = None
        """What stopped it, as long as it is stopped."""
        self.ended_s = 0.0
        """When its end was noticed."""
        self.is_over = False
        """Whether all has been told of it."""
        self._status_rest = b""
        self._opened = contextlib.ExitStack()
        with contextlib.ExitStack() as writing_ends:

            def make_pipe() -> tuple[ReadEnd, int]:
                reader, writer = os.pipe()
                writing_ends.callback(os.close, writer)
                self._opened.callback((end := ReadEnd(reader)).close)
                return end, writer

            self.link: LinkEnd | None = None
            link_fd: int | None = None
            try:
                if job.is_elastic:
                    here, there = socket.socketpair()
                    writing_ends.callback(there.close)
                    self.link = LinkEnd(here.detach())
                    self._opened.callback(self.link.close)
                    link_fd = there.fileno()
                self.status, told_fd = make_pipe()
                (out, stdout), (err, stderr) = make_pipe(), make_pipe()
                self.outputs: dict[Stream, ReadEnd] = {"stdout": out, "stderr": err}
                self._process = subprocess.Popen(
                    job.command,
                    stdin=None if job.has_stdin and post is job.posts[0] else subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=complete({**job.variables, **post.variables}, told_fd, link_fd, post.rank),
                    pass_fds=(told_fd,) if link_fd is None else (told_fd, link_fd),
                    process_group=0,
                    cwd=job.cwd,
                )
            except OSError as error:
                self._opened.close()
                raise _cannot_start(self.rank, job.command[0], error) from None
        self.pid = self._process.pid
        self.exit_descriptor = _open_pidfd(self.pid)
        if self.exit_descriptor >= 0:
            self._opened.callback(os.close, self.exit_descriptor)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.code is None

    @property
    def may_write(self) -> bool:
        """Whether more of what it wrote may come."""
        return any(pipe.is_open for pipe in self.outputs.values())

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
        *lines, rest = (self._status_rest + self.status.read()).split(b"\n")
        self._status_rest = rest[-_MAX_STATUS_BYTES:]
        told: list[Status] = []
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
        self._opened.close()
        if self.is_alive:
            self._process.returncode = -signal.SIGKILL  # it cannot be waited for: no warning about that


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
