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
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path

import msgspec

from shoal.core import SYSTEM_CLOCK, board
from shoal.core.errors import ShoalError, UsageError
from shoal.core.status import Status
from shoal.launch.output import Stream
from shoal.launch.polling import ByteStream, Interest
from shoal.launch.protocol import (
    AgentChannel,
    AgentHello,
    Beat,
    Down,
    Exited,
    LinkData,
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
            case LinkData():
                process = self._processes.get(message.rank)
                if process is not None and process.link is not None:
                    process.link.write(message.data)
            case Beat():
                self._is_held = message.is_held

    def take(self) -> list[Up]:
        """Return what has become of the workers since."""
        self._look(SYSTEM_CLOCK.now_s())
        came = self._came.copy()
        self._came.clear()
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
            self._guard.close()
        take_down()

    def signal_all(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to the process groups of these ranks, by default all, that have not ended."""
        for process in self._processes.values():
            if process.is_alive and (ranks is None or process.rank in ranks):
                process.signal_group(number)

    def interests(self, *, is_full: bool = False) -> list[Interest]:
        """Say what a poll should wait for; what workers write is left in their pipes while `is_full`."""
        is_held = is_full or self._is_held
        return [one for process in self._open for one in process.interests(is_held=is_held)]

    @property
    def _open(self) -> list[WorkerProcess]:
        """The processes of which not all has been told."""
        return [process for process in self._processes.values() if not process.is_over]

    def _look(self, now_s: float) -> None:
        """Tell of those that were stopped, go on, or have ended."""
        num_living = sum(process.is_alive for process in self._open)
        for process in self._open:
            process.look(now_s)
        if sum(process.is_alive for process in self._open) < num_living:
            self._watch()
        silent = [process for process in self._open if process.is_silent(now_s)]
        for process in self._open if silent else ():  # a last word about survival may still be on its way
            process.read_status()
        for process in silent:
            process.tell_end(self._timeline)

    def _start(self, job: WorkerJob) -> None:
        self._guard = self._guard or Guard()
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
            process = self._processes[post.rank] = WorkerProcess(job, post, self._came.append)
            self._watch()
            self._came.append(Started(post.rank, process.pid))

    def _watch(self) -> None:
        assert self._guard is not None
        self._guard.watch(process.pid for process in self._processes.values() if process.is_alive)


class WorkerProcess:
    """A worker of this machine, the leader of a process group of its own; `tell` takes what becomes of it."""

    def __init__(self, job: WorkerJob, post: Post, tell: Callable[[Up], None]) -> None:
        self.rank = post.rank
        self.code: int | None = None
        """Its exit code, or minus a signal's number, once it has ended."""
        self.is_over = False
        """Whether all has been told of it."""
        self.link: ByteStream | None = None
        """Its way to the coordinator of an elastic run."""
        self._tell = tell
        self._stop_signal: int | None = None
        self._ended_s = 0.0
        self._status_rest = b""
        self._opened = contextlib.ExitStack()
        with contextlib.ExitStack() as theirs:

            def make_pipe() -> tuple[ByteStream, int]:
                reader, writer = os.pipe()
                theirs.callback(os.close, writer)
                self._opened.callback(os.close, reader)
                return ByteStream(reader), writer

            try:
                link_fd: int | None = None
                if job.is_elastic:
                    here, there = socket.socketpair()
                    theirs.callback(there.close)
                    self._opened.callback(here.close)
                    self.link, link_fd = ByteStream(here.fileno()), there.fileno()
                self._status, told_fd = make_pipe()
                (out, stdout), (err, stderr) = make_pipe(), make_pipe()
                self._outputs: dict[Stream, ByteStream] = {"stdout": out, "stderr": err}
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
        self._exit_fd = -1
        if sys.platform == "linux":
            with contextlib.suppress(OSError):  # old kernels, and sandboxes that do not know it
                self._exit_fd = os.pidfd_open(self.pid)
                self._opened.callback(os.close, self._exit_fd)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.code is None

    def interests(self, *, is_held: bool) -> list[Interest]:
        """Say what a poll should wait for; what it writes is left in its pipes while it is held."""
        wanted = self._status.events(self.read_status)
        if self.link is not None:
            wanted += self.link.events(self._read_link)
        if self.is_alive and self._exit_fd >= 0:
            wanted.append((self._exit_fd, select.POLLIN, None))
        for stream, pipe in self._outputs.items() if not is_held else ():
            wanted += pipe.events(partial(self._pass_on, stream))
        return wanted

    def look(self, now_s: float) -> None:
        """Tell whether it was stopped, went on, or has ended, by which its children end."""
        while self.is_alive:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                self._stop_signal = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else None
                self._tell(Stopped(self.rank, self._stop_signal))
            else:
                self.code = self._process.returncode = os.waitstatus_to_exitcode(status)
                self._ended_s, self._stop_signal = now_s, None
                self.signal_group(signal.SIGKILL)
                self._tell(Exited(self.rank, self.code))

    def is_silent(self, now_s: float) -> bool:
        """Whether it has ended, and no more of what it wrote is waited for."""
        may_write = any(pipe.is_open for pipe in self._outputs.values())
        return not self.is_alive and (not may_write or now_s - self._ended_s >= LAST_WORDS_S)

    def signal_group(self, number: int) -> None:
        """Send to it and all its children, which go on for that if they are stopped."""
        is_stopped = self._stop_signal is not None and number != signal.SIGKILL
        for each in (number, signal.SIGCONT) if is_stopped else (number,):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: only zombies are left
                os.killpg(self.pid, each)

    def read_status(self) -> None:
        """Tell what it has told since; what is not understood is passed over."""
        *lines, rest = (self._status_rest + self._status.read()).split(b"\n")
        self._status_rest = rest[-_MAX_STATUS_BYTES:]
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                self._tell(WorkerTold(self.rank, msgspec.json.decode(line, type=Status)))

    def tell_end(self, timeline: str | None) -> None:
        """Tell what is left to tell of it, and close."""
        assert self.code is not None
        for stream, pipe in self._outputs.items():
            left_bytes = _MAX_LAST_BYTES
            while left_bytes > 0 and (data := pipe.read()):
                self._tell(Wrote(self.rank, stream, data))
                left_bytes -= len(data)
        for data in read_part(timeline, self.rank) if timeline is not None else ():
            self._tell(TimelinePart(self.rank, data))
        self._tell(WorkerEnded(self.rank, self.code))
        self.close()

    def wait(self, limit_s: float) -> None:
        """Wait until it, which was killed, has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.code = self._process.wait(limit_s)

    def close(self) -> None:
        """Give all descriptors back; it must have ended, or been given up. Idempotent."""
        self.is_over = True
        self._opened.close()
        if self.is_alive:
            self._process.returncode = -signal.SIGKILL  # it cannot be waited for: no warning about that

    def _pass_on(self, stream: Stream) -> None:
        if data := self._outputs[stream].read():
            self._tell(Wrote(self.rank, stream, data))

    def _read_link(self) -> None:
        if self.link is not None and (data := self.link.read()):
            self._tell(LinkData(self.rank, data))


class Guard:
    """Ends the workers of a process that was itself killed; told of no group at last, it ends none.

    A process that gets SIGKILL can clean up nothing, and PR_SET_PDEATHSIG would have to be asked for between
    fork and exec, is Linux's alone, and forgets the children of workers. So a shell waits at the other end of
    a pipe: it is told the process groups there are, and kills those that are left when the pipe ends.
    """

    def __init__(self) -> None:
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

    def watch(self, groups: Iterable[int]) -> None:
        """Have exactly these groups killed if this process dies now."""
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard
            self._shell.stdin.write(" ".join(map(str, groups)).encode() + b"\n")

    def close(self) -> None:
        """End the shell, which kills the groups that it was told of last."""
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


def _cannot_start(rank: int, program: str, error: OSError) -> ShoalError:
    if error.errno not in _SHORTAGES:
        return UsageError(f"{program} cannot be run: {error.strerror}.", next_step="check its path and mode.")
    return ShoalError(
        f"Worker {rank} could not be started: {error.strerror}.",
        cause="this user has too many processes or open files, or the memory is full.",
        next_step="give a smaller -np, or raise the limits that `ulimit -a` shows.",
    )
