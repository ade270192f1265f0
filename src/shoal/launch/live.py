"""The part of a launcher that lets workers come and go while a run trains (`shoal run --elastic`).

It holds the coordinator of the run (`core.elastic`), passes on what workers and coordinator say to each
other, starts workers and lets them leave, and answers `shoal scale` on a socket of this machine that has no
file. Other machines may join by themselves (`joining`).
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.core import SYSTEM_CLOCK
from shoal.core.board import name_of_run
from shoal.core.elastic import Coordinator, DownMessage, MessageReader, UpMessage, encode_message
from shoal.core.errors import ProtocolError, ShoalError, UsageError
from shoal.core.processes import is_own_user, own_socket_address
from shoal.core.rates import FailureBackoff
from shoal.core.run_options import RUN_ID_VARIABLE, SILENCE_S
from shoal.launch.head import AgentHandle, Engine, RunWorkers, hear_hello, is_outward, outward_address
from shoal.launch.output import LogFiles, Output
from shoal.launch.polling import Interest
from shoal.launch.protocol import Beat, HostLeaves, JobFailed, LinkData, Post, Up
from shoal.launch.settings import JOINING_VARIABLE, LaunchSettings, variables_of_one
from shoal.launch.worker import Worker, name_ranks
from shoal.report.units import counted

if TYPE_CHECKING:
    from shoal.launch.joining import JoinPort

_FIRST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0
"""A lost host is tried to be reached again after so long, doubled after each time in vain."""
SHORT_S = 120.0
"""A run with fewer workers than --min-np waits so long for more."""
_ANSWER_S = 10.0
_REQUEST_S = 0.2
"""Who connects has its request ready; the launcher waits for nobody."""
_MAX_REQUEST_BYTES = 1 << 12


class LauncherRequest(msgspec.Struct, frozen=True):
    """What `shoal scale` and `shoal run --join` ask of a launcher on their machine."""

    size: int | None = None
    """The number of workers that the run should have; None asks where a machine joins."""


class LauncherAnswer(msgspec.Struct, frozen=True):
    """What the launcher answers."""

    is_done: bool
    what: str
    address: str = ""
    """Where a machine joins."""
    secret: str = ""
    """By which it does, where the user has given none."""


class LiveRun(RunWorkers):
    """A run whose workers come and go, as its launcher sees it; from the launcher's thread.

    A host that is lost is tried to be reached again by the engine, which may also give more agents.
    """

    _watches_idle_hosts = True

    def __init__(
        self,
        settings: LaunchSettings,
        agents: Sequence[AgentHandle],
        output: Output,
        engine: Engine,
        num_wanted: int,
    ) -> None:
        super().__init__(settings, agents, output)
        self._say = output.say
        self._engine = engine
        self._num_wanted = num_wanted
        """How many workers the user has asked for last: a host that comes back gets the missing ones."""
        self._num_servers = settings.options.num_servers
        """They have the first numbers, and are there from the beginning to the end."""
        self._to_open: list[AgentHandle | None] = [agent for agent in agents if agent.is_lost]
        """The lost agents in the places of which others are wanted; None for one more than there were."""
        self._coming: dict[AgentHandle, tuple[AgentHandle | None, float]] = {}
        """Agents that have not answered yet: in the place of which lost one, and since when."""
        self._backoff = FailureBackoff(_FIRST_RETRY_S, _LONGEST_RETRY_S)
        """By machine: when a lost one is tried again."""
        self._machine_numbers: dict[str, int] = {}
        self._said: list[LinkData] = []
        """What workers have said to the coordinator."""
        self._coordinator = Coordinator(send=self._send, expel=self._expel, min_workers=settings.min_workers)
        self._readers: dict[int, MessageReader[UpMessage]] = {}
        self._ended: dict[int, None] = {}
        self._retired: dict[int, None] = {}
        self._num_replaced = 0
        self._short_s: float | None = None
        """Since when workers are missing."""
        self._listener: socket.socket | None = None
        self._port: JoinPort | None = None
        self._address = ""

    def start(self, logs: LogFiles) -> None:
        """Start the first workers, and answer requests from now on."""
        super().start(logs)
        self._name = name_of_run(self._shared[RUN_ID_VARIABLE])
        self._coordinator.addresses = self._addresses
        for agent in self._agents:
            for worker in agent.workers:
                is_server = worker.rank < self._num_servers
                self._coordinator.add(worker.rank, self._machine_of(agent), is_server=is_server)
        elastic = self._settings.elastic
        if elastic.join_secret is not None or elastic.join_port is not None:
            self._open_port()
        # without it nobody can scale the run, which trains all the same
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(_address_of(self._name))
            listener.listen(8)
            listener.setblocking(False)
            stack.pop_all()
            self._listener = listener
            self._say(f"`shoal scale {self._name} N` changes the number of workers of this run")

    def close(self, now_s: float) -> None:
        """Kill who is left, and answer no more requests."""
        for agent in self._coming:
            agent.channel.abandon()
        super().close(now_s)
        for one in (self._listener, self._port):
            if one is not None:
                one.close()
        if self._listener is not None and (address := _address_of(self._name))[0] != "\0":
            Path(address).unlink(missing_ok=True)

    def interests(self, *, is_full: bool) -> list[Interest]:
        """Say what a poll should wait for."""
        wanted = super().interests(is_full=is_full)
        wanted += [one for agent in self._coming for one in agent.channel.interests()]
        if self._listener is not None:
            wanted.append((self._listener.fileno(), select.POLLIN, self._accept))
        return wanted

    def change(self, now_s: float) -> str:
        """Let the run grow or shrink, where it can; return why it cannot go on, or nothing."""
        self._look_for_agents(now_s)
        said, self._said = self._said, []
        for one in said:
            reader = self._readers.setdefault(one.rank, MessageReader(UpMessage))
            try:
                for message in reader.feed(one.data):
                    self._coordinator.take(one.rank, message)
            except ProtocolError as error:
                self._coordinator.give_up(one.rank, error.what)
        self._look_at_leaving_hosts()
        self._look_at_workers(now_s)
        self._coordinator.advance(now_s)
        return self._look_at_shortage(now_s)

    def scale(self, size: int) -> str:
        """Start workers, or let the newest leave, until there are so many; return what will happen."""
        most = self._settings.elastic.max_workers
        if size < self._settings.min_workers or (most is not None and size > most):
            raise UsageError(
                f"{size} workers are not between --min-np {self._settings.min_workers} and "
                f"--max-np {self._settings.max_workers} of this run."
            )
        going = self._going
        kept = self._leaving_by_request[: max(0, size - len(going))]
        num_more = size - len(going) - len(kept)
        num_free = sum(agent.num_free for agent in self._agents)
        num_agents = max(0, num_more - num_free)
        if num_agents and not self._engine.can_grow:
            raise UsageError(f"The hosts of this run have {num_free} free slots, and {num_more} are needed.")
        self._num_wanted = size
        self._coordinator.keep(kept)
        self._retired = {number: None for number in self._retired if number not in kept}
        for _ in range(num_more - num_agents):
            self._start_worker()
        # those under way count
        self._to_open = [lost for lost in self._to_open if lost is not None]
        self._to_open += [None] * (num_agents - len(self._to_open) - len(self._coming))
        leaving = [worker.rank for worker in going[size:]]
        self._retire(leaving)
        if leaving:
            return f"{len(leaving)} of {len(going)} workers will leave"
        staying = [f"{counted(len(kept), 'worker')} that had to leave will stay"] if kept else []
        joining = (
            [f"{counted(num_more, 'worker')} will join the {len(going)} that are there"]
            if num_more > 0
            else []
        )
        return ", ".join(staying + joining) or f"there are {size} workers"

    # Hosts that come, come back, are lost, and leave.

    def _take(self, agent: AgentHandle, message: Up, now_s: float) -> None:
        has_begun = any(worker.told.phase for worker in self.all)
        if isinstance(message, LinkData):
            self._said.append(message)
        elif isinstance(message, HostLeaves):
            agent.is_leaving = True
        elif isinstance(message, JobFailed) and has_begun:
            who = name_ranks(message.ranks, self._settings.word)
            self._say(f"cannot start {who}. On {agent.host}: {message.what}")
            for rank in message.ranks:
                self.all[rank].lose(now_s)
        else:
            super()._take(agent, message, now_s)

    def _lose(self, agent: AgentHandle, now_s: float, why: str) -> None:
        super()._lose(agent, now_s, why)
        if not agent.has_joined:
            self._open_later(agent, now_s)

    def _open_later(self, lost: AgentHandle | None, now_s: float) -> None:
        self._to_open.append(lost)
        self._backoff.failed(_paused_name(lost), now_s)

    def _look_for_agents(self, now_s: float) -> None:
        """Open those that are wanted, and take in those that have answered."""
        for lost in self._to_open.copy():
            if self._backoff.is_paused(_paused_name(lost), now_s):
                continue
            self._to_open.remove(lost)
            try:
                agent = self._engine.grow() if lost is None else self._engine.reopen(lost)
            except ShoalError as error:
                self._say(error.what if lost is None else f"{lost.host} is not tried again: {error.what}")
                continue
            if agent is not None:
                self._coming[agent] = (lost, now_s)
        for agent in self._port.take() if self._port is not None else ():
            self._coming[agent] = (None, now_s)
        for agent, (lost, since_s) in list(self._coming.items()):
            if hear_hello(agent, now_s, since_s, self._engine.answer_s):
                del self._coming[agent]
                self._welcome(agent, lost, now_s)

    def _welcome(self, agent: AgentHandle, lost: AgentHandle | None, now_s: float) -> None:
        """Start workers on an agent that has answered; try again where one cannot take part."""
        if agent.error is not None:
            agent.channel.abandon()
            if agent.has_joined:
                self._say(f"{agent.host} cannot join: {agent.error.what}")
            else:
                self._open_later(lost, now_s)
            return
        is_back = lost is not None and lost.machine == agent.machine
        joined = "is back" if is_back else f"has joined with {counted(agent.slots, 'slot')}"
        self._say(f"{agent.host} {joined}")
        self._backoff.answered(_paused_name(lost))
        self._backoff.answered(agent.machine)
        # of several agents of its machine the workers may be alive
        places = [place for place, other in enumerate(self._agents) if other.is_lost]
        place = next((place for place in places if self._agents[place].machine == agent.machine), None)
        if place is None:
            self._agents.append(agent)
        else:
            self._agents[place] = agent
        agent.heard_s = SYSTEM_CLOCK.now_s()
        agent.channel.send(Beat(self._is_held))
        self._coordinator.addresses = self._addresses
        if agent.has_joined:
            most = self._settings.elastic.max_workers
            num_more = agent.num_free if most is None else min(agent.num_free, most - len(self._going))
            self._num_wanted = max(self._num_wanted, len(self._going) + num_more)
        num_missing = self._num_wanted - len(self._going)
        started = [self._start_worker(agent) for _ in range(min(num_missing, agent.num_free))]
        numbers = [str(worker.rank) for worker in started if worker is not None]
        if numbers:
            what = "worker" if len(numbers) == 1 else "workers"
            self._say(f"{what} {', '.join(numbers)} will join on {agent.host}")

    def _look_at_leaving_hosts(self) -> None:
        for agent in self._agents:
            if not agent.is_leaving or agent.is_lost:
                continue
            staying = [worker.rank for worker in agent.alive if worker.rank not in self._retired]
            if staying:
                self._say(f"{agent.host} leaves the run, and its workers with it")
                self._num_wanted = max(1, self._num_wanted - len(staying))
                self._retire(staying)
            elif not agent.alive and all(worker.is_silent for worker in agent.workers):
                self._say(f"{agent.host} has left")
                agent.is_lost = True
                agent.copies.close()
                agent.channel.close()

    def _machine_of(self, agent: AgentHandle) -> int:
        """Return the number of an agent's machine, which stays the same."""
        for other in (*self._agents, agent):
            self._machine_numbers.setdefault(other.machine, len(self._machine_numbers))
        return self._machine_numbers[agent.machine]

    @property
    def _addresses(self) -> dict[int, str]:
        """By number of the machine: the address by which the others reach it, where that is known."""
        there = [agent for agent in self._agents if agent.hello is not None and not agent.is_lost]
        if len({agent.machine for agent in there}) < 2:
            return {}
        found = {self._machine_of(agent): outward_address(agent, there) for agent in there}
        return {machine: address for machine, address in found.items() if is_outward(address)}

    def _open_port(self) -> None:
        """Let other machines join."""
        from shoal.launch.joining import JoinPort  # the transport takes a moment to import

        elastic = self._settings.elastic
        port = JoinPort(elastic.join_secret, elastic.join_port or 0)
        self._address, self._port = str(port.open()), port
        if elastic.join_secret is None:
            self._say(f"`shoal run --join {self._name}` on this machine joins this run")
        else:
            number = self._address.rpartition(":")[2]
            self._say(f"`shoal run --join HOST:{number} --secret-file FILE` joins this run, with this HOST")

    # Workers that come and go.

    @property
    def _going(self) -> list[Worker]:
        """The workers that are there, and are not to leave."""
        workers = self.all[self._num_servers :]
        return [worker for worker in workers if worker.is_alive and worker.rank not in self._retired]

    @property
    def _leaving_by_request(self) -> list[int]:
        """The numbers of those that are to leave and may stay yet; not those whose host leaves."""
        hosts = [agent for agent in self._agents if agent.is_leaving]
        with_host = [worker.rank for agent in hosts for worker in agent.workers]
        return [number for number in self._coordinator.leaving if number not in with_host]

    def _start_worker(self, where: AgentHandle | None = None) -> Worker | None:
        """Start one more worker, by default on the agent with the most free slots; None without a slot."""
        agents = self._agents if where is None else [where]
        agent = max(agents, key=lambda agent: agent.num_free, default=None)
        if agent is None or agent.num_free <= 0:
            return None
        number, machine = len(self.all), self._machine_of(agent)
        here = [worker for other in self._agents if other.machine == agent.machine for worker in other.alive]
        taken = [worker.local_rank for worker in here]
        local_rank = next(rank for rank in range(len(taken) + 1) if rank not in taken)
        rank = sum(worker.is_alive for worker in self.all)
        own = variables_of_one(self._settings.env, rank, local_rank, max(local_rank, len(here)) + 1, machine)
        own |= {"SHOAL_WORLD_SIZE": str(max(rank, local_rank, len(here)) + 1), JOINING_VARIABLE: "1"}
        self._logs.add(number)
        try:
            self._give(agent, [Post(number, own)])
        except ShoalError as error:  # of a child of this process
            self._say(error.what)
            self.all[number].lose(SYSTEM_CLOCK.now_s())
            return None
        self._coordinator.add(number, machine)
        return self.all[number]

    def _retire(self, numbers: Sequence[int]) -> None:
        self._retired |= dict.fromkeys(numbers)
        self._coordinator.retire(numbers)

    def _look_at_workers(self, now_s: float) -> None:
        limit_s = SILENCE_S * self._settings.options.patience
        for worker in self.all:
            if worker.rank in self._ended:
                continue
            if worker.told.phase == "left" or not worker.is_alive:
                self._ended[worker.rank] = None
                has_left = worker.told.phase == "left"
                self._coordinator.end(worker.rank, has_left=has_left)
                if not has_left and worker.code != 0 and worker.rank >= self._num_servers:
                    self._replace()
            elif worker.stop_signal is not None and now_s - worker.stopped_s > limit_s:
                self._coordinator.give_up(worker.rank, f"it has been stopped for {limit_s:g} s")

    def _replace(self) -> None:
        """Start another worker for one that was lost, as long as restarts are left."""
        if self._num_replaced < self._settings.elastic.max_restarts:
            worker = self._start_worker()
            if worker is not None:
                self._num_replaced += 1
                self._say(f"worker {worker.rank} is started in its place")

    def _look_at_shortage(self, now_s: float) -> str:
        if not self._coordinator.has_state and self._settings.options.checkpoint is None:
            return "all workers that had the model are lost"
        num_short = self._coordinator.num_short
        if not num_short:
            self._short_s = None
            return ""
        if self._short_s is None:
            self._short_s = now_s
            more = "worker is" if num_short == 1 else "workers are"
            self._say(
                f"the run waits: {num_short} more {more} needed (--min-np {self._settings.min_workers}); "
                f"`shoal scale {self._name} {self._settings.min_workers}` starts them"
            )
        if now_s - self._short_s > SHORT_S:
            return f"fewer than --min-np {self._settings.min_workers} workers were left for {SHORT_S:g} s"
        return ""

    def _send(self, number: int, message: DownMessage) -> None:
        worker = self.all[number]
        if worker.is_alive:
            worker.answer(encode_message(message))

    def _expel(self, number: int, reason: str) -> None:
        self._ended[number] = None
        worker = self.all[number]
        if worker.is_alive:
            self._say(f"worker {number} is ended: {reason}")
            worker.signal_group(signal.SIGKILL)
            self._replace()

    # Requests of `shoal scale`.

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(OSError):
            request, _ = self._listener.accept()
            with request:
                request.settimeout(_REQUEST_S)
                if is_own_user(request):
                    answer = self._answer(request.recv(_MAX_REQUEST_BYTES))
                    request.sendall(msgspec.json.encode(answer))

    def _answer(self, request: bytes) -> LauncherAnswer:
        try:
            asked = msgspec.json.decode(request, type=LauncherRequest)
            if asked.size is None:
                return self._tell_address()
            answer = LauncherAnswer(True, self.scale(asked.size))
        except (ShoalError, msgspec.DecodeError) as error:
            return LauncherAnswer(False, error.what if isinstance(error, ShoalError) else str(error))
        self._say(f"shoal scale {asked.size}: {answer.what}")
        return answer

    def _tell_address(self) -> LauncherAnswer:
        if self._port is None:
            self._open_port()
        assert self._port is not None
        return LauncherAnswer(True, "", self._address.replace("0.0.0.0", "127.0.0.1"), self._port.secret_text)


def _paused_name(lost: AgentHandle | None) -> str:
    """Return what is left out for a while when a try fails; the empty name stands for machines to come."""
    return "" if lost is None else lost.machine


def _address_of(run: str) -> str:
    """Return where the launcher of a run on this machine answers this user."""
    return own_socket_address(f"scale {run}")


def ask_launcher(run: str, size: int | None = None) -> LauncherAnswer:
    """Ask the launcher of a run on this machine for so many workers, or where a machine joins the run.

    UsageError when there is no such launcher.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.settimeout(_ANSWER_S)
        try:
            launcher.connect(_address_of(run))
            launcher.sendall(msgspec.json.encode(LauncherRequest(size)))
            return msgspec.json.decode(launcher.recv(_MAX_REQUEST_BYTES), type=LauncherAnswer)
        except (OSError, msgspec.DecodeError):
            raise UsageError(
                f"No launcher of a run {run} that can be scaled answers on this machine.",
                cause="the run is over, was started on another machine, or without --elastic.",
                next_step="`shoal top` shows the runs of this machine.",
            ) from None
