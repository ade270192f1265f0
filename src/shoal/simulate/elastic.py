"""A simulated world whose workers come and go: its coordinator, and each worker's way to it.

The coordinator, the elastic group and the session are those of real runs (`core.elastic`, `group.elastic`,
`strategies.elastic`). Here messages between a worker and the coordinator take a fixed time, each generation
has a network of its own over the same links, and a fault script says who joins, leaves or is killed when.

As in a real run the coordinator numbers servers first. A script speaks of workers alone: its `rank:0` is the
one with the first number after the servers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from shoal.core import Address, Deadline
from shoal.core.elastic import Coordinator, CoordinatorLink, DownMessage, Form, UpMessage
from shoal.core.turns import Turn, Turns
from shoal.group.base import Group, Loss
from shoal.group.elastic import ElasticGroup
from shoal.group.opening import WithServers
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import check_script
from shoal.simulate.group import NOTICED_AFTER_S, SimulatedGroup, SimulatedNetwork
from shoal.simulate.world import World
from shoal.transport import Conditions
from shoal.transport.network.faults import Event, JoinWorld, Kill, LeaveWorld, Schedule

MESSAGE_S = 0.001
"""So long a message between a worker and the coordinator takes."""
_LOOK_EVERY_S = 0.1
"""While a generation ends or forms, the coordinator looks this often for workers that are silent."""
_LONGEST_CHANGE_S = 600.0
"""A change that takes longer is stuck: nobody looks any more, and the world says who waits for what."""


class SimulatedLink(CoordinatorLink):
    """A simulated worker's way to the coordinator; messages take `MESSAGE_S` each way."""

    def __init__(self, number: int, turns: Turns, deliver: Callable[[int, UpMessage], None]) -> None:
        super().__init__(number, _SharedClock(turns))
        self._turns = turns
        self._deliver = deliver
        self._inbox: deque[DownMessage] = deque()
        self._waiter: Turn | None = None
        self._is_answering = False

    def stepped(self, steps: int) -> None:
        """Takes note of a step, and of what has come until its end."""
        self._turns.current.look_up()
        super().stepped(steps)

    def send(self, message: UpMessage) -> None:
        """Gives the coordinator a message at this worker's own time."""
        if not self._is_answering:  # what the link answers by itself goes in the turn of another
            self._turns.current.look_up()
        self._turns.call_at(self._turns.now_s + MESSAGE_S, partial(self._deliver, self.number, message))

    def take(self, message: DownMessage) -> None:
        """Takes what the coordinator has sent; as a call of the turns."""
        self._is_answering = True
        try:
            is_handled = self.handle(message)
        finally:
            self._is_answering = False
        if not is_handled:
            self._inbox.append(message)
        if self._waiter is not None:
            self._waiter.wake(self._turns.now_s)

    def receive(self, deadline: Deadline | None = None) -> DownMessage | None:
        """Waits for the next message; None at the deadline."""
        until_s = math.inf if deadline is None else deadline.at_s
        self._wait(lambda: bool(self._inbox), "word of the coordinator", until_s)
        return self._inbox.popleft() if self._inbox else None

    def wait_until_due(self) -> None:
        """Waits for the message that says so."""
        self._wait(lambda: self.due_step is not None, "the step after which all stop", math.inf)

    def _wait(self, is_there: Callable[[], bool], what: str, until_s: float) -> None:
        self._waiter = turn = self._turns.current
        turn.look_up()
        try:
            while not is_there() and turn.now_s < until_s:
                turn.park(what, until_s)
        finally:
            self._waiter = None


class _SharedClock:
    """The time of all, which a link reads in anybody's turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def now_s(self) -> float:
        return self._turns.now_s

    def wall_s(self) -> float:
        return self._turns.clock.wall_s()


class ElasticWorld:
    """The coordinator of a world, and what a fault script does to the numbers of its workers.

    `start` begins a server or worker with this number, `end` kills one. Those that are there at the start are
    added by `open`.
    """

    def __init__(
        self,
        world: World,
        turns: Turns,
        conditions: Conditions,
        start: Callable[[int], Turn],
        end: Callable[[Turn], None],
    ) -> None:
        self.faults_began_s = 0.0
        """When the script's time began."""
        self._world = world
        self._turns = turns
        self._conditions = conditions
        self._start = start
        self._end = end
        self._coordinator = Coordinator(send=self._send, expel=self._expel)
        self._links: dict[int, SimulatedLink] = {}
        self._workers: dict[int, Turn] = {}
        """Those that have not ended."""
        self._retired: dict[int, None] = {}
        self._latest: tuple[Form, SimulatedNetwork, SimulatedNetwork] | None = None
        """The last generation, the network of all its members, and that of its workers alone."""
        self._num_starts = 0
        """Of the script's time."""
        self._changing_s: float | None = None
        """Since when another generation is to form."""
        self._will_look = False
        if world.faults is not None:
            num_workers = world.num_workers + world.num_joining
            check_script(world.faults, num_workers, world.machine_of(num_workers - 1) + 1)

    def begin(self) -> None:
        """Starts all servers, and the workers of the beginning."""
        for number in range(self._world.size):
            self._add(number)
        for number in range(self._world.size):
            self._workers[number] = self._start(number)
        self.restart()

    def open(self, number: int) -> ElasticGroup:
        """Opens a worker's group, in its thread; one that joins is in no generation yet."""
        self._links[number] = link = SimulatedLink(number, self._turns, self._take)
        group = ElasticGroup(link, SoloGroup(self._world.patience), self._open_generation)
        if number < self._world.size:
            group.regroup(0, is_fresh=True)
        return group

    def leave(self, number: int) -> None:
        """Lets a worker leave when the next generation forms."""
        if number in self._workers and number not in self._retired:
            self._retired[number] = None
            self._coordinator.retire([number])
            self._advance()

    def ended(self, number: int, *, has_left: bool) -> None:
        """Takes note of the end of a worker's thread."""
        self._workers.pop(number, None)

        def learn() -> None:
            self._coordinator.end(number, has_left=has_left)
            self._advance()

        self._turns.call_at(self._turns.now_s + MESSAGE_S, learn)
        self._lose(number, "its worker ended without leaving")

    # The script.

    def hold(self) -> None:
        """Has nothing of the script happen until `restart`."""
        self._num_starts += 1

    def restart(self) -> None:
        """Has the script begin now: its times count from here."""
        self.hold()
        self.faults_began_s = self._turns.clock.now_s()
        if self._world.faults is None:
            return
        script, number = self._world.faults, self._world.size
        schedule, joining = Schedule(script, self._world.seed), {}
        for fault in script.fault:
            if isinstance(fault, JoinWorld):
                joining[id(fault)] = range(number, number + (fault.count or 1))
                number += fault.count or 1
        for event in schedule.events:
            if event.began_s < math.inf and isinstance(event.fault, JoinWorld | LeaveWorld | Kill):
                numbers = joining.get(id(event.fault)) or self._concerned(event, schedule)
                act = partial(self._happen, event, numbers, self._num_starts)
                self._turns.call_at(self.faults_began_s + event.began_s, act)

    def _concerned(self, event: Event, schedule: Schedule) -> list[int]:
        world = self._world
        return [
            world.num_servers + rank
            for rank in range(world.num_workers + world.num_joining)
            if event.concerns(
                (
                    *schedule.names_of(Address("rank", rank), None),
                    *schedule.names_of(Address("machine", world.machine_of(rank)), None),
                )
            )
        ]

    def _happen(self, event: Event, numbers: Sequence[int], start: int) -> None:
        if start != self._num_starts:
            return
        for number in numbers:
            if isinstance(event.fault, JoinWorld):
                self._join(number)
            elif isinstance(event.fault, LeaveWorld):
                self.leave(number)
            elif number in self._workers:
                self._end(self._workers[number])

    def _join(self, number: int) -> None:
        if self._workers:  # otherwise the run is over
            self._add(number)
            self._workers[number] = self._start(number)

    # The coordinator.

    def _add(self, number: int) -> None:
        world = self._world
        rank = number - world.num_servers
        # no worker is on a server's machine
        machine = world.machine_of(rank) if rank >= 0 else world.num_workers + world.num_joining + number
        self._coordinator.add(number, machine, is_server=rank < 0)

    def _take(self, number: int, message: UpMessage) -> None:
        self._coordinator.take(number, message)
        self._advance()

    def _send(self, number: int, message: DownMessage) -> None:
        def arrive() -> None:
            if number in self._workers:
                self._links[number].take(message)

        self._turns.call_at(self._turns.now_s + MESSAGE_S, arrive)

    def _expel(self, number: int, reason: str) -> None:
        if number in self._workers:
            self._end(self._workers[number])

    def _advance(self) -> None:
        now_s = self._turns.now_s
        self._coordinator.advance(now_s)
        if not self._coordinator.is_changing or not self._workers:
            self._changing_s = None
            return
        if self._changing_s is None:
            self._changing_s = now_s
        if not self._will_look and now_s - self._changing_s < _LONGEST_CHANGE_S:
            self._will_look = True
            self._turns.call_at(now_s + _LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        self._will_look = False
        self._advance()

    # Generations.

    def _open_generation(self, form: Form, group: ElasticGroup, deadline: Deadline) -> Group:
        number, num_servers = group.link.number, self._world.num_servers
        everybody, workers = self._networks_of(form)
        try:
            group.gather(form, "all are here", True, deadline)
        except BaseException:
            self._lose(number, "it was not there when the group formed")
            raise
        machines = list(dict.fromkeys(place.machine for place in form.places))
        dense = [machines.index(place.machine) for place in form.places]
        rank, patience = form.rank_of(number), self._world.patience
        both = SimulatedGroup(everybody, rank, dense, patience)
        if not num_servers:
            return both
        inner: Group = SoloGroup(patience)
        if rank >= num_servers:
            homes = [machine - num_servers for machine in dense[num_servers:]]
            inner = SimulatedGroup(workers, rank - num_servers, homes, patience)
        return WithServers(inner, both, num_servers)

    def _networks_of(self, form: Form) -> tuple[SimulatedNetwork, SimulatedNetwork]:
        if self._latest is None or self._latest[0].generation != form.generation:
            num_servers, numbers = self._world.num_servers, [place.number for place in form.places]
            servers = [Address("server", number) for number in numbers[:num_servers]]
            homes = [self._world.address_of(number - num_servers) for number in numbers[num_servers:]]
            everybody = workers = SimulatedNetwork(self._turns, self._conditions, [*servers, *homes])
            if servers:
                workers = SimulatedNetwork(self._turns, self._conditions, homes)
            self._latest = form, everybody, workers
        return self._latest[1:]

    def _lose(self, number: int, reason: str) -> None:
        """Has the others of the latest generation miss one that is in it, or was to come."""
        if self._latest is None:
            return
        form, everybody, workers = self._latest
        numbers, num_servers = [place.number for place in form.places], self._world.num_servers
        if number not in numbers:
            return
        rank = numbers.index(number)
        self._lose_from(everybody, rank, reason)
        if rank >= num_servers > 0:
            self._lose_from(workers, rank - num_servers, reason)

    def _lose_from(self, network: SimulatedNetwork, rank: int, reason: str) -> None:
        if rank not in network.present:
            return
        loss = Loss(rank, reason, at_s=self._turns.now_s + NOTICED_AFTER_S)

        def notice() -> None:
            if rank in network.present:
                network.lost[rank] = loss
                network.leave(rank)

        self._turns.call_at(loss.at_s, notice)
