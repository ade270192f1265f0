"""The part of a launcher that lets workers come and go while a run trains (`shoal run --elastic`).

It holds the coordinator of the run (`core.elastic`), passes on what workers and coordinator say to each
other, starts workers and lets them leave, and answers `shoal scale` on a socket of this machine that has no
file. Other machines may join by themselves (`joining`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from shoal.core.elastic import Coordinator, DownMessage, MessageReader, UpMessage, encode_message
from shoal.core.errors import ProtocolError, ShoalError, UsageError
from shoal.core.run_options import SILENCE_S
from shoal.launch.head import AgentHandle, RunWorkers
from shoal.launch.polling import Interest
from shoal.launch.settings import LaunchSettings
from shoal.launch.worker import Worker

if TYPE_CHECKING:
    from shoal.launch.joining import JoinPort

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


class LiveRun:
    """A run whose workers come and go, as its launcher sees it; from the launcher's thread."""

    def __init__(
        self, settings: LaunchSettings, run: RunWorkers, say: Callable[[str], None], num_wanted: int
    ) -> None:
        self._num_wanted = num_wanted
        """How many workers the user has asked for last: a host that comes back gets the missing ones."""
        self._settings = settings
        self._num_servers = settings.options.num_servers
        """They have the first numbers, and are there from the beginning to the end."""
        self._run = run
        self._say = say
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

    def begin(self) -> None:
        """Take note of the first workers, and answer requests from now on."""
        self._coordinator.addresses = self._run.addresses
        for number, machine in self._run.machines.items():
            self._coordinator.add(number, machine, is_server=number < self._num_servers)
        elastic = self._settings.elastic
        if elastic.join_secret is not None or elastic.join_port is not None:
            self._open_port()
        with contextlib.suppress(OSError):  # without it nobody can scale the run, which trains all the same
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(address_of(self._run.run_name))
            listener.listen(8)
            listener.setblocking(False)
            self._listener = listener
            self._say(f"`shoal scale {self._run.run_name} N` changes the number of workers of this run")

    def close(self) -> None:
        """Answer no more requests; idempotent."""
        for one in (self._listener, self._port):
            if one is not None:
                one.close()
        self._listener = self._port = None

    def interests(self) -> list[Interest]:
        """Say what the launcher's poll should wait for."""
        return [] if self._listener is None else [(self._listener.fileno(), select.POLLIN, self._accept)]

    def look(self, now_s: float) -> str:
        """Let the run change as far as it can; return why it cannot go on, or nothing."""
        said, self._run.said = self._run.said, []
        for number, data in said:
            reader = self._readers.setdefault(number, MessageReader(UpMessage))
            try:
                for message in reader.feed(data):
                    self._coordinator.take(number, message)
            except ProtocolError as error:
                self._coordinator.give_up(number, error.what)
        for agent in self._port.take() if self._port is not None else ():
            self._run.expect(agent, now_s)
        self._look_at_hosts()
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
        num_agents = max(0, num_more - self._run.num_free)
        if num_agents and not self._run.can_grow:
            raise UsageError(
                f"The hosts of this run have {self._run.num_free} free slots, and {num_more} are needed."
            )
        self._num_wanted = size
        self._coordinator.keep(kept)
        self._retired = {number: None for number in self._retired if number not in kept}
        for _ in range(num_more - num_agents):
            self._start_worker()
        self._run.grow(num_agents)
        leaving = [worker.rank for worker in going[size:]]
        self._retire(leaving)
        if leaving:
            return f"{len(leaving)} of {len(going)} workers will leave"
        staying = [f"{_count(len(kept))} that had to leave will stay"] if kept else []
        joining = [f"{_count(num_more)} will join the {len(going)} that are there"] if num_more > 0 else []
        return ", ".join(staying + joining) or f"there are {size} workers"

    @property
    def _going(self) -> list[Worker]:
        """The workers that are there, and are not to leave."""
        workers = self._run.all[self._num_servers :]
        return [worker for worker in workers if worker.is_alive and worker.rank not in self._retired]

    @property
    def _leaving_by_request(self) -> list[int]:
        """The numbers of those that are to leave and may stay yet; not those whose host leaves."""
        with_host = [worker.rank for agent in self._run.leaving for worker in agent.workers]
        return [number for number in self._coordinator.leaving if number not in with_host]

    def _start_worker(self, where: AgentHandle | None = None) -> Worker | None:
        worker = self._run.add(where)
        if worker is not None:
            self._coordinator.add(worker.rank, self._run.machines[worker.rank])
        return worker

    def _retire(self, numbers: Sequence[int]) -> None:
        self._retired |= dict.fromkeys(numbers)
        self._coordinator.retire(numbers)

    # What happens to workers.

    def _look_at_hosts(self) -> None:
        """Start workers on hosts that have come, or come back."""
        arrived, self._run.arrived = self._run.arrived, []
        for agent in arrived:
            self._coordinator.addresses = self._run.addresses
            if agent.has_joined:
                most = self._settings.elastic.max_workers
                num_more = agent.num_free if most is None else min(agent.num_free, most - len(self._going))
                self._num_wanted = max(self._num_wanted, len(self._going) + num_more)
            num_missing = self._num_wanted - len(self._going)
            started = [self._start_worker(agent) for _ in range(min(num_missing, agent.num_free))]
            numbers = [worker.rank for worker in started if worker is not None]
            if numbers:
                what = "worker" if len(numbers) == 1 else "workers"
                self._say(f"{what} {', '.join(map(str, numbers))} will join on {agent.host}")

        for agent in self._run.leaving:
            staying = [worker.rank for worker in agent.alive if worker.rank not in self._retired]
            if staying:
                self._say(f"{agent.host} leaves the run, and its workers with it")
                self._num_wanted = max(1, self._num_wanted - len(staying))
                self._retire(staying)
            elif not agent.alive and all(worker.is_silent for worker in agent.workers):
                self._say(f"{agent.host} has left")
                self._run.dismiss(agent)

    def _open_port(self) -> None:
        """Let other machines join."""
        from shoal.launch.joining import JoinPort  # the transport takes a moment to import

        elastic = self._settings.elastic
        port = JoinPort(elastic.join_secret, elastic.join_port or 0)
        self._address, self._port = str(port.open()), port
        if elastic.join_secret is None:
            self._say(f"`shoal run --join {self._run.run_name}` on this machine joins this run")
        else:
            number = self._address.rpartition(":")[2]
            self._say(f"`shoal run --join HOST:{number} --secret-file FILE` joins this run, with this HOST")

    def _look_at_workers(self, now_s: float) -> None:
        limit_s = SILENCE_S * self._settings.options.patience
        for worker in self._run.all:
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
                f"`shoal scale {self._run.run_name} {self._settings.min_workers}` starts them"
            )
        if now_s - self._short_s > SHORT_S:
            return f"fewer than --min-np {self._settings.min_workers} workers were left for {SHORT_S:g} s"
        return ""

    def _send(self, number: int, message: DownMessage) -> None:
        worker = self._run.all[number]
        if worker.is_alive:
            worker.answer(encode_message(message))

    def _expel(self, number: int, reason: str) -> None:
        self._ended[number] = None
        worker = self._run.all[number]
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
                if _is_own_user(request):
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


def _count(num_workers: int) -> str:
    return f"{num_workers} worker{'' if num_workers == 1 else 's'}"


def address_of(run: str) -> str:
    """Return the name of the socket of a run's launcher: one of this user, without a file."""
    digest = hashlib.blake2b(f"{os.getuid()} scale {run}".encode(), digest_size=16).hexdigest()
    return f"\0shoal-{digest}"


def ask_launcher(run: str, size: int | None = None) -> LauncherAnswer:
    """Ask the launcher of a run on this machine for so many workers, or where a machine joins the run.

    UsageError when there is no such launcher.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as launcher:
        launcher.settimeout(_ANSWER_S)
        try:
            launcher.connect(address_of(run))
            launcher.sendall(msgspec.json.encode(LauncherRequest(size)))
            return msgspec.json.decode(launcher.recv(_MAX_REQUEST_BYTES), type=LauncherAnswer)
        except (OSError, msgspec.DecodeError):
            raise UsageError(
                f"No launcher of a run {run} that can be scaled answers on this machine.",
                cause="the run is over, was started on another machine, or without --elastic.",
                next_step="`shoal top` shows the runs of this machine.",
            ) from None


def _is_own_user(peer: socket.socket) -> bool:
    """Whether a process of this user is at the other end, where the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
