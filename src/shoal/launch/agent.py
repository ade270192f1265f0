"""`python -m shoal.launch.agent`: starts the workers of one machine for the head of a run, and tells of them.

It speaks by standard input and output (`messages`). It decides nothing, but for the end: when its input
ends, when it is told nothing for too long or gets a signal, it ends its workers and itself. Should it be
killed, its guard ends the workers.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Collection
from functools import partial
from pathlib import Path

from shoal._version import __version__
from shoal.core import SYSTEM_CLOCK, Clock, board
from shoal.core.board import Sighting, name_of_run
from shoal.core.errors import ProtocolError, ShoalError
from shoal.core.placement import num_cores
from shoal.core.processes import boot_id, own_addresses
from shoal.core.run_options import RUN_ID_VARIABLE
from shoal.launch.polling import Interest, SignalInbox
from shoal.launch.protocol import (
    BEAT_S,
    MAGIC,
    Beat,
    Decoder,
    Down,
    Ended,
    Failed,
    Hello,
    Hold,
    Job,
    Message,
    Part,
    Pause,
    Post,
    Seen,
    Signal,
    Started,
    Stopped,
    Told,
    Wrote,
    encode,
)
from shoal.launch.settings import complete, free_port
from shoal.launch.timeline import make_room, read_part
from shoal.launch.worker_process import Guard, Pipe, Process, groups_of

HEAD_SILENCE_S = 30.0
"""A head that is silent for so long, times the patience, has gone with its machine."""
GRACE_S = 3.0
"""For a worker that was asked to end because the head has gone."""
LAST_WORDS_S = 1.0
"""For the pipes of an ended worker to end: a process that left its group may hold them for ever."""
MAX_QUEUED_BYTES = 1 << 20
"""Of what workers wrote and the head has not taken: with more than that no more is read."""
TICK_S = 0.2
_READ_BYTES = 1 << 16
_LAST_FLUSH_S = 2.0


class _Charge:
    """A worker that this agent has started."""

    def __init__(self, rank: int, process: Process) -> None:
        self.rank = rank
        self.process = process
        self.ended_s: float | None = None
        self.has_been_told = False


class Agent:
    """Of one start of a run; `run` ends when nothing of it is left here."""

    def __init__(self, source: int, sink: int, clock: Clock = SYSTEM_CLOCK) -> None:
        for descriptor in (source, sink):
            os.set_blocking(descriptor, False)
        self._source, self._sink = source, sink
        self._clock = clock
        self._decoder: Decoder[Down] = Decoder(Down)
        self._queue = bytearray(MAGIC)
        self._charges: dict[int, _Charge] = {}
        self._is_ending = self._is_held = self._is_paused = False
        self._is_sink_open = True
        self._heard_s = self._beat_s = clock.now_s()
        self._patience = 1.0
        self._timeline: str | None = None
        self._run_id = ""
        self._has_seen = False

    def run(self) -> None:
        """Until the head has closed the way, or has gone."""
        with SignalInbox() as self._inbox, Guard() as self._guard:
            try:
                self._send(introduce())
                while not self._is_ending:
                    self._turn()
                self._end()
            finally:
                for charge in self._charges.values():
                    if charge.process.is_alive:
                        charge.process.signal_group(signal.SIGKILL)
                        charge.process.wait()
                    charge.process.close()
                self._guard.watch([])
                take_down()

    def _turn(self) -> None:
        self._wait()
        now_s = self._clock.now_s()
        if any(number != signal.SIGTSTP for number in self._inbox.take()):
            self._is_ending = True
        self._look(now_s)
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._send(Beat())
            self._tell_seen()
        if now_s - self._heard_s > HEAD_SILENCE_S * self._patience and not self._is_paused:
            self._is_ending = True

    def _tell_seen(self) -> None:
        """Once there was something, also that there is nothing left: the head keeps what it was told last."""
        seen = seen_here(self._run_id, self._charges)
        if seen or self._has_seen:
            self._send(Seen(seen))
        self._has_seen = bool(seen)

    def _wait(self) -> None:
        wanted: list[Interest] = [(self._inbox.descriptor, select.POLLIN, _wake)]
        if not self._is_ending:
            wanted.append((self._source, select.POLLIN, self._read))
        if self._queue and self._is_sink_open:
            wanted.append((self._sink, select.POLLOUT, self._write))
        for charge in self._charges.values():
            wanted += self._interests(charge)
        poll = select.poll()
        for descriptor, event, _ in wanted:
            poll.register(descriptor, event)
        actions = {descriptor: action for descriptor, _, action in wanted}
        for descriptor, _ in poll.poll(TICK_S * 1000):
            actions[descriptor]()

    def _interests(self, charge: _Charge) -> list[Interest]:
        process, wanted = charge.process, list[Interest]()
        if process.status_descriptor >= 0:
            wanted.append((process.status_descriptor, select.POLLIN, partial(self._read_status, charge)))
        if process.is_alive and process.exit_descriptor >= 0:
            wanted.append((process.exit_descriptor, select.POLLIN, _wake))
        if not self._is_held and len(self._queue) < MAX_QUEUED_BYTES:
            wanted += [
                (pipe.descriptor, select.POLLIN, partial(self._pass_on, charge, pipe))
                for pipe in process.pipes
                if pipe.is_open
            ]
        return wanted

    def _read(self) -> None:
        try:
            data = os.read(self._source, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._is_ending = True
            return
        self._heard_s = self._clock.now_s()
        try:
            for message in self._decoder.feed(data):
                self._obey(message)
        except ProtocolError as error:
            self._send(Failed(error.what, error.cause, error.next_step))
            self._is_ending = True

    def _obey(self, message: Down) -> None:
        match message:
            case Job():
                self._start(message)
            case Signal():
                for rank in message.ranks:
                    if rank in self._charges and self._charges[rank].process.is_alive:
                        self._charges[rank].process.signal_group(message.number)
            case Hold():
                self._is_held = message.is_held
            case Pause():
                self._is_paused = message.is_paused
            case Beat():
                pass

    def _start(self, job: Job) -> None:
        self._patience, self._timeline = job.patience, job.timeline
        self._run_id = name_of_run(job.variables.get(RUN_ID_VARIABLE, ""))
        if not Path(job.cwd).is_dir():
            self._send(
                Failed(
                    f"There is no folder {job.cwd}.",
                    "the program has not been copied there, or lies elsewhere.",
                    "copy it to the same path, or name the folder by --remote-cwd.",
                )
            )
            return
        if job.timeline is not None:
            make_room(job.timeline, [post.rank for post in job.posts])
        try:
            for post in job.posts:
                self._start_one(job, post)
        except ShoalError as error:
            self._send(Failed(error.what, error.cause, error.next_step))

    def _start_one(self, job: Job, post: Post) -> None:
        variables = {**job.variables, **post.variables}
        process = Process.start(post.rank, job.command, partial(complete, variables), cwd=job.cwd)
        self._charges[post.rank] = _Charge(post.rank, process)
        self._watch()
        self._send(Started(post.rank, process.pid))

    def _look(self, now_s: float) -> None:
        """Tell of those that were stopped, go on, or have ended."""
        for charge in self._charges.values():
            process = charge.process
            if process.is_alive:
                for number in process.poll():
                    self._send(Stopped(charge.rank, number))
                if process.code is not None:
                    charge.ended_s = now_s
                    self._watch()
            if charge.ended_s is None or charge.has_been_told:
                continue
            if any(pipe.is_open for pipe in process.pipes) and now_s - charge.ended_s < LAST_WORDS_S:
                continue
            self._tell_end(charge)

    def _tell_end(self, charge: _Charge) -> None:
        assert charge.process.code is not None
        self._read_status(charge)
        for pipe in charge.process.pipes:
            pipe.drain(partial(self._send_data, charge, pipe))
        if self._timeline is not None:
            for data in read_part(self._timeline, charge.rank):
                self._send(Part(charge.rank, data))
        self._send(Ended(charge.rank, charge.process.code))
        charge.has_been_told = True
        charge.process.close()

    def _pass_on(self, charge: _Charge, pipe: Pipe) -> None:
        data = pipe.read()
        if data:
            self._send_data(charge, pipe, data)

    def _send_data(self, charge: _Charge, pipe: Pipe, data: bytes) -> None:
        self._send(Wrote(charge.rank, pipe.stream, data))

    def _read_status(self, charge: _Charge) -> None:
        for told in charge.process.read_status():
            self._send(Told(charge.rank, told))

    def _send(self, message: Message) -> None:
        if self._is_sink_open:
            self._queue += encode(message)
            self._write()

    def _write(self) -> None:
        try:
            while self._queue:
                del self._queue[: os.write(self._sink, self._queue)]
        except BlockingIOError:
            return
        except OSError:  # nobody reads: the input will end too
            self._is_sink_open = False
            self._queue.clear()

    def _end(self) -> None:
        """Ask, wait for a moment, kill; what is told of it is told if somebody reads."""
        left = [charge.process for charge in self._charges.values() if charge.process.is_alive]
        for process in left:
            process.signal_group(signal.SIGTERM)
        end_s = self._clock.now_s() + GRACE_S
        while any(process.is_alive for process in left) and self._clock.now_s() < end_s:
            self._wait()
            self._look(self._clock.now_s())
        flush_s = self._clock.now_s() + _LAST_FLUSH_S
        while self._queue and self._is_sink_open and self._clock.now_s() < flush_s:
            self._wait()

    def _watch(self) -> None:
        self._guard.watch(groups_of(charge.process for charge in self._charges.values()))


def _wake() -> None:
    pass


def main() -> None:
    """Keep the way to the head to oneself: what anything else prints goes to stderr."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    with contextlib.suppress(KeyboardInterrupt):
        Agent(source, sink).run()


def introduce() -> Hello:
    """For the head to know whether and how this machine can take part."""
    # 'client address, port, server address, port', as sshd sets it
    words = os.environ.get("SSH_CONNECTION", "").split()
    head_address, _, reached_at, _ = words if len(words) == 4 else [""] * 4
    return Hello(
        version=__version__,
        host=socket.gethostname(),
        addresses=own_addresses(),
        num_cores=num_cores(),
        boot_id=boot_id(),
        clock_s=SYSTEM_CLOCK.now_s(),
        free_port=free_port(),
        reached_at=reached_at,
        head_address=head_address,
    )


def seen_here(run: str, ranks: Collection[int]) -> list[Sighting]:
    """What these ranks of a run have noted on this machine, as the launcher counts ranks."""
    if not run or not board.is_wanted():
        return []
    with contextlib.suppress(Exception):
        return [
            one
            for one in board.look()
            if one.note.run == run and one.note.place in ranks and one.note.keeper is None
        ]
    return []


def take_down() -> None:
    """What workers of runs that are over have left on this machine's board: those that were killed."""
    with contextlib.suppress(Exception):
        if board.is_wanted():
            board.look()


if __name__ == "__main__":
    main()
