"""What the head of a run does with its agents: waits for their answers, gives them jobs, hears of workers.

Children of this process, which need no agent, are handled in the same way (`LocalEngine`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from shoal._version import __version__
from shoal.core import SYSTEM_CLOCK, Clock, board
from shoal.core.board import Pin, Sighting
from shoal.core.errors import PeerRefused, PeerUnreachable, ProtocolError, ShoalError, UsageError
from shoal.core.processes import boot_id, namespace
from shoal.core.run_options import SECRET_VARIABLE, SILENCE_S, VARIABLE, Env
from shoal.launch.output import LogFiles, Output
from shoal.launch.polling import Interest, SignalInbox, poll_once
from shoal.launch.protocol import (
    BEAT_S,
    AgentChannel,
    AgentHello,
    Beat,
    JobFailed,
    OfWorker,
    Post,
    Seen,
    TimelinePart,
    Up,
    WorkerJob,
)
from shoal.launch.settings import (
    LaunchSettings,
    Meeting,
    free_port,
    variables_of_all,
    variables_of_one,
)
from shoal.launch.timeline import Parts
from shoal.launch.worker import Worker, name_ranks
from shoal.launch.worker_process import LocalChannel, has_piped_stdin

FORWARDED = ("SHOAL_", "PYTHON", "OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_")
"""Variables of the head that begin so reach the workers of other machines; more by `-x NAME`."""
_OWN = (VARIABLE, SECRET_VARIABLE, "PYTHONHOME", "CUDA_VISIBLE_DEVICES")
"""What would be wrong there."""
_ANSWER_S = 15.0
"""A host that is tried again, or that has come by itself, has so long to answer."""


class Copies:
    """The notes of another machine's workers that a head keeps, for as long as its agent tells of them.

    By that `shoal top` on the head's machine shows all of a run. Whatever fails is passed over: it must not
    end the run.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._pins: dict[tuple[str, str, int, int], Pin] = {}

    def take(self, sightings: Sequence[Sighting], host: str) -> None:
        """Pin up all that an agent sees now on its host, and take down what it sees no more."""
        with contextlib.suppress(Exception):
            now_s, here, keeper = self._clock.wall_s(), namespace(), board.own_keeper()
            told = {one.note.who for one in sightings}
            for who in [who for who in self._pins if who not in told]:
                self._pins.pop(who).remove()
            for one in sightings:
                who = one.note.who
                if who not in self._pins:
                    self._pins[who] = board.pin(".".join(map(str, (*who, "copy"))))
                note = msgspec.structs.replace(
                    one.note,
                    host=host,
                    # clocks of machines differ: what counts is how old it was there
                    noted_s=now_s - one.age_s,
                    began_s=now_s - one.age_s - (one.note.noted_s - one.note.began_s),
                    namespace=here,
                    keeper=keeper,
                    state=one.state,
                )
                self._pins[who].write(note)

    def close(self) -> None:
        """Take them all down; idempotent."""
        for pin in self._pins.values():
            pin.remove()
        self._pins.clear()


@dataclass(eq=False)
class AgentHandle:
    """One agent as the head sees it: where it is, what it has answered, and its workers."""

    channel: AgentChannel
    slots: int
    """How many workers and servers it can take."""
    machine: str
    """Agents with the same one are on the same machine, where local ranks are counted."""
    cwd: str | None = None
    """The folder where workers start, by default the head's."""
    has_own_disks: bool = True
    """Whether files that workers write there may not be seen here."""
    hello: AgentHello | None = None
    """What it has answered."""
    shift_s: float = 0.0
    """What to add to its clock to have this machine's, but for the time that its answer took."""
    error: ShoalError | None = None
    """Why it cannot take part."""
    num_processes: int = 0
    """How many workers and servers it gets."""
    workers: list[Worker] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    heard_s: float = 0.0
    is_lost: bool = False
    has_joined: bool = False
    """Whether its machine has come by itself (`shoal run --join`)."""
    is_leaving: bool = False
    """Whether its host leaves the run: it gets no more workers."""

    @property
    def host(self) -> str:
        """The host as the user named it; empty for children of this process."""
        return self.channel.host

    @property
    def alive(self) -> list[Worker]:
        """Its workers that have not ended."""
        return [worker for worker in self.workers if worker.is_alive]

    @property
    def num_free(self) -> int:
        """How many more workers it can get; none once it is lost, or leaves."""
        return 0 if self.is_lost or self.is_leaving else self.slots - len(self.alive)

    @property
    def is_awaited(self) -> bool:
        """Whether it is a process of its own that still has something to tell of its workers."""
        return bool(self.host) and not self.is_lost and not all(worker.is_silent for worker in self.workers)


class Engine(ABC):
    """A source of agents."""

    can_grow: bool = False
    """Whether it can give agents to an elastic run beyond those that it was opened with."""
    answer_s: float = _ANSWER_S
    """An agent of `reopen` or `grow` has so long to answer; after that another one is tried."""

    @abstractmethod
    def open(self, min_processes: int, max_processes: int, *, is_restart: bool) -> list[AgentHandle]:
        """Return agents for so many workers and servers; UsageError says how many slots there are.

        Ranks are given in their order; those of one machine follow each other. Called again for each restart;
        what an earlier call gave has been closed. An agent that cannot be reached is one whose channel ends
        before it has said AgentHello.
        """

    def reopen(self, lost: AgentHandle) -> AgentHandle | None:
        """Return another agent on a host that was lost while an elastic run trains; None where none can be.

        It has not answered yet. Errors are those of a host that cannot be reached.
        """
        return None

    def grow(self) -> AgentHandle:
        """Return one more agent, which has not answered yet; where it `can_grow`."""
        raise UsageError("no more agents can be had here.")


class LocalEngine(Engine):
    """Children of this process, which need no agent; a restart takes no more than the first start."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def open(self, min_processes: int, max_processes: int, *, is_restart: bool) -> list[AgentHandle]:
        """Return a single handle, which has answered already."""
        if os.name != "posix":
            raise UsageError(
                "Workers are started on Linux and macOS only.", next_step="start them by torchrun or mpirun."
            )
        port = free_port("127.0.0.1")
        hello = AgentHello(__version__, "", boot_id=boot_id(), free_port=port, python=sys.executable)
        return [AgentHandle(LocalChannel(hello), self._num_slots, "", cwd=os.curdir, has_own_disks=False)]


class Gathering:
    """The agents of one start, until all have answered; a context manager, which closes all channels."""

    def __init__(self, agents: Sequence[AgentHandle]) -> None:
        self._agents = agents

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for agent in self._agents:
                agent.channel.hang_up()
                stack.callback(agent.channel.close)

    @property
    def present(self) -> list[AgentHandle]:
        """Those that have answered and can take part."""
        return [agent for agent in self._agents if agent.hello is not None]

    @property
    def absent(self) -> list[tuple[AgentHandle, ShoalError]]:
        """Those that cannot take part, and why."""
        return [(agent, agent.error) for agent in self._agents if agent.error is not None]

    def wait(self, inbox: SignalInbox, limit_s: float) -> int | None:
        """Wait until all have answered or cannot, or the time is over; return a signal that came first."""
        began_s, beat_s, waiting = SYSTEM_CLOCK.now_s(), 0.0, list(self._agents)
        while True:
            now_s = SYSTEM_CLOCK.now_s()
            waiting = [agent for agent in waiting if not hear_hello(agent, now_s, began_s, limit_s)]
            if not waiting:
                return None
            if now_s - beat_s >= BEAT_S:
                beat_s = now_s
                for agent in self.present:
                    agent.channel.send(Beat())
            poll_once([inbox.interest, *(one for agent in waiting for one in agent.channel.interests())])
            for number in inbox.take():
                return number

    def choose(self, num_processes: int, *, should_keep: bool = False) -> list[AgentHandle]:
        """Return those that get workers, filled in order; the others are closed.

        With `should_keep` all are returned, for workers that come later; those that are absent count as lost.
        """
        for agent in self.present:
            agent.num_processes = min(agent.slots, num_processes)
            num_processes -= agent.num_processes
            if agent.num_processes == 0 and not should_keep:
                agent.channel.close()
        assert num_processes == 0
        if not should_keep:
            return [agent for agent in self.present if agent.num_processes > 0]
        for agent, _ in self.absent:
            agent.is_lost = True
            agent.channel.abandon()
        return [*self.present, *(agent for agent, _ in self.absent)]

    def complaint(self) -> ShoalError:
        """Return the errors of all that are absent as one."""
        errors = [error for _, error in self.absent]
        if len(errors) == 1:
            return errors[0]
        told = "\n  ".join(f"{error.what} Try: {error.next_step}" for error in errors)
        return PeerUnreachable(
            f"{len(errors)} of {len(self._agents)} hosts cannot take part.\n  {told}",
            peer=[agent.host for agent, _ in self.absent],
        )


def hear_hello(agent: AgentHandle, now_s: float, began_s: float, limit_s: float) -> bool:
    """Say whether an agent has answered, or cannot take part: then its error says why.

    It has `limit_s` from `began_s` on.
    """
    host = agent.host
    try:
        for hello in agent.channel.take():
            if isinstance(hello, AgentHello) and hello.version == __version__:
                agent.hello = hello
                if hello.machine and not agent.has_joined:
                    agent.machine = hello.machine
                    agent.channel.host = f"{hello.host} ({hello.machine})"
                is_same_clock = bool(hello.boot_id) and hello.boot_id == boot_id()
                agent.shift_s = 0.0 if is_same_clock else now_s - hello.clock_s
            elif isinstance(hello, AgentHello):
                agent.error = PeerRefused(
                    f"{host} has Shoal {hello.version}, and this machine {__version__}.",
                    peer=host,
                    next_step="install the same version on all machines, or name its interpreter by "
                    "--remote-python.",
                )
    except ProtocolError as error:
        agent.error = PeerRefused(
            f"What answers on {host} is no agent of Shoal's: {error.what}",
            peer=host,
            cause="the login shell there prints without end, or it has another version of Shoal.",
            next_step=f"ssh {host} true should print nothing.",
        )
    has_answered = agent.hello is not None or agent.error is not None
    if not has_answered and not agent.channel.is_open:
        agent.error = agent.channel.explain()
    elif not has_answered and now_s - began_s >= limit_s:
        agent.error = PeerUnreachable(
            f"{host} has not answered within {limit_s:g} s.",
            peer=host,
            cause="the machine is down or busy, or a firewall drops what is sent to it.",
            next_step=f"ssh {host} true, or give more time by --start-timeout.",
        )
    return agent.hello is not None or agent.error is not None


class RunWorkers:
    """All workers of one start, by rank, wherever they run; used by one launcher, from its thread.

    A host is lost when the way to its agent ends, or when nothing has come from it for a while: agents beat.
    """

    _watches_idle_hosts = False
    """Whether a host is missed that has no worker."""

    def __init__(self, settings: LaunchSettings, agents: Sequence[AgentHandle], output: Output) -> None:
        self.all: list[Worker] = []
        self._settings = settings
        self._output = output
        self._agents = list(agents)
        self._parts = Parts(settings)
        self._is_held = False
        self._beat_s = 0.0

    def start(self, logs: LogFiles) -> None:
        """Give each agent its job; what was started is ended with its channel when this fails."""
        present = [agent for agent in self._agents if not agent.is_lost]
        meeting = meeting_of(present, self._settings.options.network_interface)
        self._shared, self._logs = variables_of_all(self._settings, meeting), logs
        for agent, posts in zip(present, place(present, self._settings.env), strict=True):
            agent.heard_s = SYSTEM_CLOCK.now_s()
            self._give(agent, posts)

    @property
    def shifts_s(self) -> dict[int, float]:
        """By rank, what to add to the clock of its machine to have this one's."""
        return {worker.rank: agent.shift_s for agent in self._agents for worker in agent.workers}

    def interests(self, *, is_full: bool) -> list[Interest]:
        """Say what a poll should wait for; nothing that workers write while the output is full."""
        if is_full != self._is_held:
            self._is_held = is_full
            self._beat()
        there = [agent for agent in self._agents if not agent.is_lost]
        return [one for agent in there for one in agent.channel.interests()]

    def look(self, now_s: float) -> None:
        """Take what agents tell, and give up hosts that tell nothing."""
        for agent in self._agents:
            if not agent.is_lost:
                self._hear(agent, now_s)
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._beat()

    def change(self, now_s: float) -> str:
        """Let the run grow or shrink, where it can; return why it cannot go on, or nothing."""
        return ""

    def is_uncertain(self, now_s: float) -> bool:
        """Whether a host has missed beats, so that it may soon be known as lost with its workers."""
        return any(agent.is_awaited and now_s - agent.heard_s > 2 * BEAT_S for agent in self._agents)

    def pause(self, *, is_paused: bool) -> None:
        """Have agents do without beats, since the launcher is about to be stopped, or no more."""
        self._beat(is_paused=is_paused)
        for agent in self._agents:
            agent.heard_s = SYSTEM_CLOCK.now_s()

    def close(self, now_s: float) -> None:
        """Kill who is left, and close what is kept of them here."""
        for worker in self.all:
            if worker.is_alive and not worker.is_done:
                worker.signal_group(signal.SIGKILL)
            worker.finish_output(now_s)
        for agent in self._agents:
            agent.copies.close()
            agent.channel.hang_up()
        for agent in self._agents:
            agent.channel.close()

    def _give(self, agent: AgentHandle, posts: list[Post]) -> None:
        """Have an agent start workers; ShoalError when children of this process cannot be started."""
        for post in posts:
            local_rank = int(post.variables["SHOAL_LOCAL_RANK"])
            worker = Worker(
                post.rank, agent.channel, self._output, self._logs, local_rank, self._settings.word
            )
            agent.workers.append(worker)
            self.all.append(worker)
        if not posts:
            return
        assert agent.hello is not None, "it has answered"
        first, *arguments = self._settings.command
        job = WorkerJob(
            command=[agent.hello.python if first == sys.executable else first, *arguments],
            cwd=agent.cwd or str(Path.cwd()),
            # children of this process have its environment in any case
            variables={**(forwarded(os.environ) if agent.host else {}), **self._shared},
            posts=posts,
            timeline=self._settings.options.timeline if agent.has_own_disks else None,
            has_stdin=not agent.host and has_piped_stdin(),
            patience=self._settings.options.patience,
            is_elastic=self._settings.elastic.is_live,
        )
        agent.channel.send(job)

    def _beat(self, *, is_paused: bool = False) -> None:
        for agent in self._agents:
            if not agent.is_lost:
                agent.channel.send(Beat(self._is_held, is_paused))

    def _hear(self, agent: AgentHandle, now_s: float) -> None:
        try:
            for message in agent.channel.take():
                agent.heard_s = now_s
                self._take(agent, message, now_s)
        except ProtocolError as error:
            self._lose(agent, now_s, error.what)
            return
        is_watched = self._watches_idle_hosts and bool(agent.host) and not agent.is_lost
        if not agent.is_awaited and not is_watched:
            return
        if not agent.channel.is_open:
            self._lose(agent, now_s, agent.channel.explain().what)
        elif now_s - agent.heard_s > SILENCE_S * self._settings.options.patience:
            self._lose(agent, now_s, f"nothing has come from there for {now_s - agent.heard_s:.1f} s")

    def _take(self, agent: AgentHandle, message: Up, now_s: float) -> None:
        if isinstance(message, JobFailed):
            what = f"On {agent.host}: {message.what}"
            raise PeerRefused(what, peer=agent.host, cause=message.cause, next_step=message.next_step)
        if isinstance(message, TimelinePart):
            self._parts.take(message.rank, message.data)
        elif isinstance(message, Seen):
            agent.copies.take(message.sightings, agent.host)
        elif isinstance(message, OfWorker):
            self.all[message.rank].take(message, now_s)

    def _lose(self, agent: AgentHandle, now_s: float, why: str) -> None:
        agent.is_lost = True
        agent.copies.close()
        alive = [worker.rank for worker in agent.alive]
        if alive or self._watches_idle_hosts:
            whom = f" with {name_ranks(alive, self._settings.word)}" if alive else ""
            self._output.say(f"{agent.host} is lost{whom}: {why}")
        for worker in agent.workers:
            worker.lose(now_s)
        agent.channel.abandon()


def place(agents: Sequence[AgentHandle], env: Env = "shoal") -> list[list[Post]]:
    """Say which agent gets which ranks: in order, and counted anew on each machine."""
    sizes, placed = Counter[str](), Counter[str]()
    for agent in agents:
        sizes[agent.machine] += agent.num_processes
    machines = list(sizes)
    posts: list[list[Post]] = []
    for agent in agents:
        machine, own = agent.machine, list[Post]()
        for _ in range(agent.num_processes):
            rank, local_rank, number = placed.total(), placed[machine], machines.index(machine)
            own.append(Post(rank, variables_of_one(env, rank, local_rank, sizes[machine], number)))
            placed[machine] += 1
        posts.append(own)
    return posts


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what the workers of other machines get of this environment."""
    return {name: value for name, value in environ.items() if name.startswith(FORWARDED) and name not in _OWN}


def meeting_of(agents: Sequence[AgentHandle], interface: str | None) -> Meeting:
    """Return the address and port of the machine of rank 0 that all others can reach."""
    first, num_machines = agents[0], len({agent.machine for agent in agents})
    assert first.hello is not None
    if interface is not None and first.host:
        for agent in agents:
            found = {} if agent.hello is None else agent.hello.addresses
            # an address may be that of any machine
            if interface not in found and _parse_address(interface) is None:
                raise UsageError(
                    f"{agent.host} has no network interface {interface} with an address; "
                    f"it has {', '.join(found)}.",
                    next_step="give --network-interface the name of one that all hosts have.",
                )
        address = next(iter(first.hello.addresses.get(interface, ())), interface)
    else:
        address = "127.0.0.1" if num_machines == 1 else outward_address(first, agents)
    return Meeting(address, first.hello.free_port, num_machines)


def outward_address(agent: AgentHandle, agents: Sequence[AgentHandle]) -> str:
    """Return the address by which the machines of the others reach that of an agent."""
    hello = agent.hello
    assert hello is not None
    own = [address for found in hello.addresses.values() for address in found if is_outward(address)]
    # by ssh this is the way to a machine that is known to work
    told = [hello.reached_at]
    told += [other.hello.head_address for other in agents if other.hello and not hello.reached_at]
    for address in told:
        if address and is_outward(address) and (address in own or not own):
            return address
    return next((address for address in [*own, *told] if address), "127.0.0.1")


def _parse_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_outward(address: str) -> bool:
    """Whether other machines may reach something by that address."""
    found = _parse_address(address.partition("%")[0])
    return found is None or not (found.is_loopback or found.is_link_local)
