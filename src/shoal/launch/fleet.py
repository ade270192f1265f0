"""Workers on several machines, each machine with an agent that starts them there and tells of them.

The launcher handles them as it handles its own children. A host is lost when the way to its agent ends, or
when nothing has come from it for a while: agents beat.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core import Clock
from shoal.core.errors import PeerRefused, ProtocolError
from shoal.core.run_options import SECRET_VARIABLE, SILENCE_S, VARIABLE, Env
from shoal.launch.channel import Channel, Interest
from shoal.launch.crew import Crew
from shoal.launch.endings import Death, name_ranks
from shoal.launch.gathering import Present, meeting_of
from shoal.launch.messages import (
    BEAT_S,
    Beat,
    Ended,
    Failed,
    Hold,
    Job,
    Part,
    Pause,
    Post,
    Seen,
    Signal,
    Started,
    Stopped,
    Told,
    Up,
    Wrote,
)
from shoal.launch.notes import Copies
from shoal.launch.output import LogFiles, Output
from shoal.launch.settings import LaunchSettings, name_run, variables_of_all, variables_of_one
from shoal.launch.timeline import Parts
from shoal.launch.worker import Worker

FORWARDED = ("SHOAL_", "PYTHON", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_")
"""Variables of the head that begin so reach the workers of other machines; more by `-x NAME`."""
_OWN = (VARIABLE, SECRET_VARIABLE, "PYTHONHOME", "CUDA_VISIBLE_DEVICES")
"""What would be wrong there."""


class RemoteWorker(Worker):
    """A child of an agent."""

    def __init__(self, rank: int, present: Present, output: Output, logs: LogFiles) -> None:
        super().__init__(rank, output, logs)
        self.host = present.host
        self._channel = present.station.channel

    def lose(self, now_s: float) -> None:
        """Its machine has gone, or nobody there tells of it any more."""
        self.given_up = Death(self.rank, 1, now_s, host=self.host)
        self.note_end(1, now_s)
        self.finish_output(now_s)

    def _send(self, number: int) -> None:
        self._channel.send(Signal([self.rank], number))


@dataclass
class _Link:
    present: Present
    notes: Copies
    workers: list[RemoteWorker] = field(default_factory=list)
    heard_s: float = 0.0
    is_lost: bool = False

    @property
    def is_awaited(self) -> bool:
        """Whether it still has something to tell."""
        return not self.is_lost and any(worker.is_alive for worker in self.workers)


class Fleet(Crew):
    """The workers of all agents; their channels are somebody else's to close."""

    def __init__(
        self, settings: LaunchSettings, chosen: Sequence[Present], output: Output, clock: Clock
    ) -> None:
        self.workers = []
        self._settings = settings
        self._output = output
        self._clock = clock
        self._links = [_Link(present, Copies(clock)) for present in chosen]
        self._silence_s = SILENCE_S * settings.options.patience
        self._parts = Parts(settings)
        self._is_held = False
        self._beat_s = 0.0

    def start(self, logs: LogFiles) -> None:
        """Give each agent its job."""
        chosen = [link.present for link in self._links]
        meeting = meeting_of(chosen, self._settings.options.network_interface)
        shared = variables_of_all(self._settings, name_run(self._settings), meeting)
        shared = {**forwarded(os.environ), **shared}
        posts = place(chosen, self._settings.env)
        for link, own in zip(self._links, posts, strict=True):
            link.workers = [RemoteWorker(post.rank, link.present, self._output, logs) for post in own]
            link.heard_s = self._clock.now_s()
            self.workers += link.workers
        self.shifts_s = {worker.rank: link.present.shift_s for link in self._links for worker in link.workers}
        for link, own in zip(self._links, posts, strict=True):
            link.present.station.channel.send(self._job(link.present, shared, own))

    def interests(self, *, is_full: bool) -> list[Interest]:
        """Of all channels; agents are told to hold what workers write while the output is full."""
        if is_full != self._is_held:
            self._is_held = is_full
            self._tell_all(Hold(is_full))
        return [one for link in self._links if not link.is_lost for one in _channel(link).interests()]

    def look(self, now_s: float) -> None:
        """Take what agents tell, and give up hosts that tell nothing."""
        for link in self._links:
            if not link.is_lost:
                self._hear(link, now_s)
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._tell_all(Beat())

    def read_status(self) -> None:
        """What agents have told has been taken."""

    def is_uncertain(self, now_s: float) -> bool:
        """Whether a host has missed beats, so that it may soon be known as lost."""
        return any(link.is_awaited and now_s - link.heard_s > 2 * BEAT_S for link in self._links)

    def pause(self, *, is_paused: bool) -> None:
        """Agents do without beats until this process goes on."""
        self._tell_all(Pause(is_paused))
        for link in self._links:
            link.heard_s = self._clock.now_s()

    def close(self, now_s: float) -> None:
        """Agents end with their channels, and what is left of their workers with them."""
        for worker in self.workers:
            if worker.is_alive:
                worker.signal_group(signal.SIGKILL)
            worker.finish_output(now_s)
        self._parts.close()
        for link in self._links:
            link.notes.close()

    def _job(self, present: Present, shared: Mapping[str, str], posts: list[Post]) -> Job:
        station = present.station
        first, *arguments = self._settings.command
        return Job(
            command=[station.python if first == sys.executable else first, *arguments],
            cwd=station.cwd or str(Path.cwd()),
            variables=dict(shared),
            posts=posts,
            timeline=self._settings.options.timeline if station.has_own_disks else None,
            patience=self._settings.options.patience,
        )

    def _tell_all(self, message: Hold | Beat | Pause) -> None:
        for link in self._links:
            if not link.is_lost:
                _channel(link).send(message)

    def _hear(self, link: _Link, now_s: float) -> None:
        channel = _channel(link)
        try:
            for message in channel.take():
                link.heard_s = now_s
                if isinstance(message, Failed):
                    raise _refused(link.present.host, message)
                self._take(link, message, now_s)
        except ProtocolError as error:
            self._lose(link, now_s, error.what)
            return
        if not link.is_awaited:
            return
        if not channel.is_open:
            self._lose(link, now_s, channel.explain().what)
        elif now_s - link.heard_s > self._silence_s:
            self._lose(link, now_s, f"nothing has come from there for {now_s - link.heard_s:.1f} s")

    def _take(self, link: _Link, message: Up, now_s: float) -> None:
        if isinstance(message, Part) and self._settings.options.timeline is not None:
            self._parts.take(message.rank, message.data)
        if isinstance(message, Seen):
            link.notes.take(message.sightings, {worker.rank: worker.host for worker in self.workers})
        if not isinstance(message, Started | Wrote | Told | Stopped | Ended):
            return
        worker = self.workers[message.rank]
        if not worker.is_alive:
            return
        match message:
            case Started():
                worker.pid = message.pid
            case Wrote():
                worker.readers[0 if message.stream == "stdout" else 1].feed(message.data, now_s)
            case Told():
                worker.hear(message.status, now_s)
            case Stopped():
                worker.note_stop(message.signal, now_s)
            case Ended():
                worker.note_end(message.code, now_s)
                worker.finish_output(now_s)

    def _lose(self, link: _Link, now_s: float, why: str) -> None:
        link.is_lost = True
        link.notes.close()
        alive = [worker for worker in link.workers if worker.is_alive]
        if alive:
            ranks = name_ranks([worker.rank for worker in alive])
            self._output.say(f"{link.present.host} is lost with {ranks}: {why}")
        for worker in alive:
            worker.lose(now_s)
        _channel(link).abandon()


def _refused(host: str, message: Failed) -> PeerRefused:
    what = f"On {host}: {message.what}"
    return PeerRefused(what, peer=host, cause=message.cause, next_step=message.next_step)


def _channel(link: _Link) -> Channel:
    return link.present.station.channel


def place(chosen: Sequence[Present], env: Env = "shoal") -> list[list[Post]]:
    """Who gets which ranks: in order, and counted anew on each machine."""
    sizes: dict[str, int] = {}
    for present in chosen:
        sizes[present.station.machine] = sizes.get(present.station.machine, 0) + present.num_processes
    machines = list(sizes)
    placed = dict.fromkeys(machines, 0)
    posts: list[list[Post]] = []
    rank = 0
    for present in chosen:
        machine, own = present.station.machine, list[Post]()
        for _ in range(present.num_processes):
            index = machines.index(machine)
            variables = variables_of_one(env, rank, placed[machine], sizes[machine], index)
            own.append(Post(rank, variables))
            placed[machine] += 1
            rank += 1
        posts.append(own)
    return posts


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """What the workers of other machines get of this environment."""
    return {name: value for name, value in environ.items() if name.startswith(FORWARDED) and name not in _OWN}
