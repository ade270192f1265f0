"""What the head of a run does with its agents: waits until they answer, and handles their workers."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Self

import msgspec

from shoal._version import __version__
from shoal.core import Clock, board
from shoal.core.board import Keeper, Pin, Sighting
from shoal.core.errors import PeerError, PeerRefused, PeerUnreachable, ProtocolError, ShoalError, UsageError
from shoal.core.processes import boot_id, namespace
from shoal.core.run_options import SECRET_VARIABLE, SILENCE_S, VARIABLE, Env
from shoal.launch.agent import take_down
from shoal.launch.endings import Death, name_ranks
from shoal.launch.output import LogFiles, Output
from shoal.launch.polling import Interest, SignalInbox
from shoal.launch.protocol import (
    BEAT_S,
    Beat,
    Channel,
    Ended,
    Failed,
    Hello,
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
    all_addresses,
)
from shoal.launch.settings import (
    LaunchSettings,
    Meeting,
    Surroundings,
    name_run,
    variables_of_all,
    variables_of_one,
)
from shoal.launch.timeline import Parts
from shoal.launch.worker import Reader, Worker
from shoal.launch.worker_process import Guard, Pipe, Process, groups_of, has_piped_stdin

_TICK_S = 0.2
FORWARDED = ("SHOAL_", "PYTHON", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_")
"""Variables of the head that begin so reach the workers of other machines; more by `-x NAME`."""
_OWN = (VARIABLE, SECRET_VARIABLE, "PYTHONHOME", "CUDA_VISIBLE_DEVICES")
"""What would be wrong there."""


@dataclass(frozen=True)
class Present:
    """A station whose agent has answered, and how many workers it gets."""

    station: Station
    hello: Hello
    num_processes: int = 0
    shift_s: float = 0.0
    """What to add to its clock to have this machine's, but for the time that its answer took."""

    @property
    def host(self) -> str:
        """As the user named it."""
        return self.station.channel.host


class Gathering:
    """Of one start; a context manager, which closes all channels."""

    def __init__(self, stations: Sequence[Station]) -> None:
        self._stations = stations
        self._hellos: dict[int, Hello] = {}
        self._shifts_s: dict[int, float] = {}
        self._errors: dict[int, ShoalError] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for station in self._stations:
            self._stack.callback(station.channel.close)
        return self

    def __exit__(self, *_: object) -> None:
        for station in self._stations:
            station.channel.hang_up()
        self._stack.close()

    @property
    def present(self) -> list[Present]:
        """In the order of the stations."""
        return [
            Present(self._stations[index], self._hellos[index], shift_s=self._shifts_s[index])
            for index in sorted(self._hellos)
        ]

    @property
    def absent(self) -> list[tuple[Station, ShoalError]]:
        """Who cannot take part, and why."""
        return [(self._stations[index], self._errors[index]) for index in sorted(self._errors)]

    @property
    def num_slots(self) -> int:
        """On those that have answered."""
        return sum(present.station.slots for present in self.present)

    def wait(self, inbox: SignalInbox, limit_s: float, clock: Clock) -> int | None:
        """Until all have answered or cannot, or the time is over; the number of a signal that came first."""
        end_s, beat_s = clock.now_s() + limit_s, 0.0
        while waiting := self._waiting():
            self._poll(waiting, inbox)
            signals = inbox.take()
            if signals:
                return signals[0]
            for index in waiting:
                self._hear(index, clock.now_s())
            now_s = clock.now_s()
            if now_s >= end_s:
                for index in self._waiting():
                    self._errors[index] = _silent(self._stations[index], limit_s)
            if now_s - beat_s >= BEAT_S:
                beat_s = now_s
                for index in self._hellos:
                    self._stations[index].channel.send(Beat())
        return None

    def choose(self, num_processes: int) -> list[Present]:
        """Those that get workers, filled in order; the others are closed."""
        chosen: list[Present] = []
        for present in self.present:
            count = min(present.station.slots, num_processes)
            num_processes -= count
            if count > 0:
                chosen.append(replace(present, num_processes=count))
            else:
                present.station.channel.close()
        assert num_processes == 0
        return chosen

    def complaint(self) -> ShoalError:
        """Of all that are absent, as one error."""
        errors = [error for _, error in self.absent]
        if len(errors) == 1:
            return errors[0]
        told = "\n  ".join(f"{error.what} Try: {error.next_step}" for error in errors)
        return PeerUnreachable(
            f"{len(errors)} of {len(self._stations)} hosts cannot take part.\n  {told}",
            peer=[station.channel.host for station, _ in self.absent],
        )

    def _waiting(self) -> list[int]:
        known = {**self._hellos, **self._errors}
        return [index for index in range(len(self._stations)) if index not in known]

    def _poll(self, waiting: Iterable[int], inbox: SignalInbox) -> None:
        poll = select.poll()
        poll.register(inbox.descriptor, select.POLLIN)
        interests = [one for index in waiting for one in self._stations[index].channel.interests()]
        for descriptor, event, _ in interests:
            poll.register(descriptor, event)
        actions = {descriptor: action for descriptor, _, action in interests}
        for descriptor, _ in poll.poll(_TICK_S * 1000):
            actions.get(descriptor, _wake)()

    def _hear(self, index: int, now_s: float) -> None:
        channel = self._stations[index].channel
        try:
            for message in channel.take():
                if isinstance(message, Hello):
                    self._welcome(index, message, now_s)
        except ProtocolError as error:
            self._errors[index] = PeerRefused(
                f"What answers on {channel.host} is no agent of Shoal's: {error.what}",
                peer=channel.host,
                cause="the login shell there prints without end, or it has another version of Shoal.",
                next_step=f"ssh {channel.host} true should print nothing.",
            )
        if not channel.is_open and index not in self._hellos and index not in self._errors:
            self._errors[index] = channel.explain()

    def _welcome(self, index: int, hello: Hello, now_s: float) -> None:
        if hello.version == __version__:
            self._hellos[index] = hello
            is_same_clock = bool(hello.boot_id) and hello.boot_id == boot_id()
            self._shifts_s[index] = 0.0 if is_same_clock else now_s - hello.clock_s
            return
        host = self._stations[index].channel.host
        self._errors[index] = PeerRefused(
            f"{host} has Shoal {hello.version}, and this machine {__version__}.",
            peer=host,
            next_step="install the same version on all machines, or name its interpreter by --remote-python.",
        )


def meeting_of(chosen: Sequence[Present], interface: str | None) -> Meeting:
    """The address and port of the machine of rank 0 that all others can reach."""
    machines = dict.fromkeys(present.station.machine for present in chosen)
    first = chosen[0]
    if interface is not None:
        for present in chosen:
            _require_interface(present, interface)
    return Meeting(_address_of(chosen, interface), first.hello.free_port, len(machines))


def _address_of(chosen: Sequence[Present], interface: str | None) -> str:
    first = chosen[0]
    if interface is not None and interface in first.hello.addresses:
        return first.hello.addresses[interface][0]
    if interface is not None:
        return interface
    if all(present.station.machine == first.station.machine for present in chosen):
        return "127.0.0.1"
    own = [address for address in all_addresses(first.hello) if _is_outward(address)]
    # by ssh this is the way to a machine that is known to work
    told = [first.station.address, first.hello.reached_at]
    told += [present.hello.head_address for present in chosen if not first.hello.reached_at]
    for address in told:
        if address and _is_outward(address) and (address in own or not own):
            return address
    return next((address for address in [*own, *told] if address), "127.0.0.1")


def _require_interface(present: Present, interface: str) -> None:
    if interface in present.hello.addresses or interface in all_addresses(present.hello):
        return
    if _is_address(interface):  # of another of the machines
        return
    names = ", ".join(present.hello.addresses)
    raise UsageError(
        f"{present.host} has no network interface {interface} with an address; it has {names}.",
        next_step="give --network-interface the name of one that all hosts have.",
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_outward(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return not found.is_loopback and not found.is_link_local


def _silent(station: Station, limit_s: float) -> PeerError:
    host = station.channel.host
    return PeerUnreachable(
        f"{host} has not answered within {limit_s:g} s.",
        peer=host,
        cause="the machine is down or busy, or a firewall drops what is sent to it.",
        next_step=f"ssh {host} true, or give more time by --start-timeout.",
    )


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


def _wake() -> None:
    pass


class Copies:
    """The notes of another machine's workers that a head keeps, for as long as its agent tells of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pins: dict[tuple[str, str, int, int], Pin] = {}
        self._keeper: Keeper | None = None

    def take(self, sightings: Sequence[Sighting], hosts: Mapping[int, str]) -> None:
        """Pin up all that an agent sees now, and take down what it sees no more.

        `hosts` are the names of machines by rank, as the user gave them.
        """
        with contextlib.suppress(Exception):
            self._take(sightings, hosts)

    def close(self) -> None:
        """Take them all down; idempotent."""
        for pin in self._pins.values():
            pin.remove()
        self._pins.clear()

    def _take(self, sightings: Sequence[Sighting], hosts: Mapping[int, str]) -> None:
        if self._keeper is None:
            self._keeper = board.own_keeper()
        now_s, here = self._clock.wall_s(), namespace()
        told = {one.note.who for one in sightings}
        for who in [who for who in self._pins if who not in told]:
            self._pins.pop(who).remove()
        for one in sightings:
            who = one.note.who
            if who not in self._pins:
                self._pins[who] = board.pin(".".join(map(str, (*who, "copy"))))
            note = msgspec.structs.replace(
                one.note,
                host=hosts.get(one.note.place, one.note.host),
                # clocks of machines differ: what counts is how old it was there
                noted_s=now_s - one.age_s,
                began_s=now_s - one.age_s - (one.note.noted_s - one.note.began_s),
                namespace=here,
                keeper=self._keeper,
                state=one.state,
            )
            self._pins[who].write(note)


@dataclass(frozen=True)
class Station:
    """A place where workers can be started."""

    channel: Channel
    slots: int
    machine: str
    """Stations with the same one are on the same machine, where local ranks are counted."""
    python: str = sys.executable
    """Takes the place of this process's own interpreter in the command."""
    cwd: str | None = None
    """By default the head's."""
    has_own_disks: bool = True
    """Whether files that workers write there may not be seen here."""
    address: str = ""
    """By which the other machines reach it, where that is known."""


class Engine(ABC):
    """Where stations come from."""

    @abstractmethod
    def open(self, min_processes: int, max_processes: int, *, is_restart: bool) -> list[Station]:
        """Stations for so many workers and servers, or a UsageError that says how many slots there are.

        Ranks are given in their order; those of one machine follow each other. Called again for each restart;
        what an earlier call gave has been closed. A station that cannot be reached is one whose channel ends
        before its agent has said Hello.
        """
