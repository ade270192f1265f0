"""The workers of a run as its launcher handles them, and those that are children of this process.

Workers on other machines are a `fleet`.
"""

from __future__ import annotations

import os
import select
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from shoal.core import Clock
from shoal.core.errors import UsageError
from shoal.launch.channel import Interest
from shoal.launch.guard import Guard
from shoal.launch.notes import take_down
from shoal.launch.output import LogFiles, Output
from shoal.launch.process import Pipe, Process, has_piped_stdin
from shoal.launch.settings import LaunchSettings, Surroundings
from shoal.launch.worker import Reader, Worker


class Crew(ABC):
    """All workers of one run, by rank; used by one launcher, from its thread."""

    workers: list[Worker]
    shifts_s: Mapping[int, float] = MappingProxyType({})
    """By rank, what to add to the clock of its machine to have this one's."""

    @abstractmethod
    def start(self, logs: LogFiles) -> None:
        """Start them all; what was started is ended by `close` when this fails."""

    @abstractmethod
    def interests(self, *, is_full: bool) -> list[Interest]:
        """What the launcher's poll should wait for; nothing that workers write while the output is full."""

    @abstractmethod
    def look(self, now_s: float) -> None:
        """Take note of workers that were stopped, go on or have ended."""

    @abstractmethod
    def read_status(self) -> None:
        """Take what workers have told."""

    def is_uncertain(self, now_s: float) -> bool:
        """Whether the end of more workers may soon be known."""
        return False

    def pause(self, *, is_paused: bool) -> None:  # noqa: B027
        """The launcher is about to be stopped, or goes on."""

    @abstractmethod
    def close(self, now_s: float) -> None:
        """Nothing of them is left running."""


class LocalWorker(Worker):
    """A child of this process."""

    def __init__(self, rank: int, process: Process, output: Output, logs: LogFiles) -> None:
        super().__init__(rank, output, logs)
        self.process = process
        self.pid = process.pid

    def poll(self, now_s: float) -> bool:
        """Look after its process; True when it has just ended."""
        if not self.is_alive:
            return False
        for number in self.process.poll():
            self.note_stop(number, now_s)
        if self.process.code is not None:
            self.note_end(self.process.code, now_s)
        return not self.is_alive

    def read(self, pipe: Pipe, reader: Reader, now_s: float) -> None:
        """Pass on some of what it wrote."""
        data = pipe.read()
        if data:
            reader.feed(data, now_s)
        elif not pipe.is_open:
            reader.close(now_s)

    def read_status(self, clock: Clock) -> None:
        """Take what it has told."""
        for told in self.process.read_status():
            self.hear(told, clock.now_s())

    def finish_output(self, now_s: float) -> None:
        """Pass on what is left in its pipes, and close them."""
        for pipe, reader in zip(self.process.pipes, self.readers, strict=True):
            pipe.drain(partial(reader.feed, now_s=now_s))
        super().finish_output(now_s)

    def _send(self, number: int) -> None:
        self.process.signal_group(number)


class LocalCrew(Crew):
    """Workers on this machine; a guard ends them should this process be killed."""

    def __init__(self, settings: LaunchSettings, output: Output, clock: Clock) -> None:
        self.workers = []
        self._settings = settings
        self._output = output
        self._clock = clock
        self._guard: Guard | None = None

    @property
    def _locals(self) -> Sequence[LocalWorker]:
        return [worker for worker in self.workers if isinstance(worker, LocalWorker)]

    def start(self, logs: LogFiles) -> None:
        """One after the other; rank 0 reads what was piped in."""
        if os.name != "posix":
            raise UsageError(
                "Workers are started on Linux and macOS only.", next_step="start them by torchrun or mpirun."
            )
        self._guard = Guard()
        self._guard.__enter__()
        surroundings = Surroundings(self._settings)
        has_stdin = has_piped_stdin()
        for rank in range(self._settings.num_processes):
            process = Process.start(
                rank,
                self._settings.command,
                partial(surroundings.of, rank),
                has_stdin=has_stdin and rank == 0,
            )
            self.workers.append(LocalWorker(rank, process, self._output, logs))
            self._watch()

    def interests(self, *, is_full: bool) -> list[Interest]:
        """Output of workers, what they tell, and their ends."""
        wanted: list[Interest] = []
        for worker in self._locals:
            process = worker.process
            if process.status_descriptor >= 0:
                wanted.append(
                    (process.status_descriptor, select.POLLIN, partial(worker.read_status, self._clock))
                )
            if worker.is_alive and process.exit_descriptor >= 0:
                wanted.append((process.exit_descriptor, select.POLLIN, _wake))
            if not is_full:
                wanted += [
                    (pipe.descriptor, select.POLLIN, partial(self._read, worker, pipe, reader))
                    for pipe, reader in zip(process.pipes, worker.readers, strict=True)
                    if pipe.is_open
                ]
        return wanted

    def look(self, now_s: float) -> None:
        """Ask the kernel."""
        if [worker for worker in self._locals if worker.poll(now_s)]:
            self._watch()

    def read_status(self) -> None:
        """From all pipes."""
        for worker in self._locals:
            worker.read_status(self._clock)

    def close(self, now_s: float) -> None:
        """Kill who is left: that happens by an error of the launcher itself."""
        for worker in self._locals:
            if worker.is_alive and not worker.is_done:
                worker.signal_group(signal.SIGKILL)
                worker.process.wait()
        for worker in self._locals:
            worker.finish_output(now_s)
            worker.process.close()
        if self._guard is not None:
            self._guard.watch([])
            self._guard.__exit__()
            self._guard = None
        take_down()

    def _read(self, worker: LocalWorker, pipe: Pipe, reader: Reader) -> None:
        worker.read(pipe, reader, self._clock.now_s())

    def _watch(self) -> None:
        assert self._guard is not None
        self._guard.watch(groups_of(worker.process for worker in self._locals))


def groups_of(processes: Iterable[Process]) -> list[int]:
    """The process groups that are left of them."""
    return [process.pid for process in processes if process.is_alive]


def _wake() -> None:
    pass
