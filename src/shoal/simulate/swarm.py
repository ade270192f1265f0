"""A simulated world whose workers train in a swarm: each is a peer of a DHT and a member of a run, as in a
real one, over links in memory.

The training loops are threads that take turns, and all peers live on one loop that is driven by the turns'
clock (`core.turns.LoopInTurns`). Links, lines and what a fault script does to them are those of the network
(`Conditions`); here workers are killed, join and leave.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from shoal.core import Address, UsageError
from shoal.core.identity import Identity
from shoal.core.turns import LoopInTurns, Turn, Turns
from shoal.dht import DHT, Swarm
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import check_script
from shoal.simulate.exact import Killed, SimulatedOutcome, SimulatedWorker, SwarmPeer, error_of
from shoal.simulate.world import World
from shoal.transport import Conditions, Endpoint, MemoryNetwork
from shoal.transport.network.faults import Event, Fault, JoinWorld, Kill, LeaveWorld, Schedule
from shoal.transport.network.memory import MemoryHost

T = TypeVar("T")


def run_swarm(world: World, work: Callable[[SimulatedWorker], T]) -> list[SimulatedOutcome[T]]:
    """Runs `work` in every worker to its end, by rank; those that join have the numbers after the others.

    Outcomes are those of `run_exact`.
    """
    check_faults(world)
    turns = Turns()
    swarm = SimulatedSwarm(world, turns)
    values: dict[int, T] = {}

    def live(rank: int, turn: Turn) -> None:
        try:
            with swarm.peer(rank) as peer, SoloGroup(world.patience) as group:
                worker = SimulatedWorker(rank, group, turn, turns.clock, world)
                worker.peer = peer
                values[rank] = work(worker)
        finally:
            swarm.ended(rank)

    try:
        swarm.begin(lambda rank: turns.add(f"rank {rank}", partial(live, rank)))
        turns.run([])
    finally:
        swarm.close()
    return [
        SimulatedOutcome(rank, "worker", values.get(rank), error_of(turn), swarm.has_left(rank))
        for rank, turn in sorted(swarm.workers.items())
    ]


def check_faults(world: World) -> None:
    """UsageError for a script with faults that a world of a swarm does not have."""
    if world.faults is None:
        return
    num_workers = world.num_workers + world.num_joining
    check_script(world.faults, num_workers, world.machine_of(num_workers - 1) + 1)
    kind, other = ("rank", "machine") if world.between == "workers" else ("machine", "rank")
    for index, fault in enumerate(world.faults.fault):
        if fault.at_step is not None or fault.for_steps is not None:
            raise UsageError(
                f"Fault {index} cannot happen to a swarm at a step.",
                cause="each member is at a step of its own.",
                next_step="say when in seconds (at_s, for_s).",
            )
        names = [name for group in fault.groups() for name in group]
        names += [world.faults.peers[name] for name in names if name in world.faults.peers]
        is_of_workers = isinstance(fault, Kill | JoinWorld | LeaveWorld)
        if not is_of_workers and any(name.startswith(f"{other}:") for name in names):
            raise UsageError(
                f"Fault {index} is not of the ends of this world's links.",
                next_step=f"name them there: {kind}:0, {kind}:1, …",
            )


class SimulatedSwarm:
    """The network of a world's peers, who is there, and what the fault script does to workers."""

    def __init__(self, world: World, turns: Turns) -> None:
        self.workers: dict[int, Turn] = {}
        """All that were ever there, by rank."""
        self._world = world
        self._turns = turns
        self._loop = LoopInTurns(turns)
        self._conditions = Conditions(world.profile, world.faults, seed=world.seed, is_world=True)
        self._network = MemoryNetwork(self._conditions, world.seed)
        self._start: Callable[[int], Turn] | None = None
        self._peers: dict[int, SwarmPeer] = {}
        """Those that have not ended."""
        self._addresses: dict[int, Address] = {}
        """Where those are that others can join by, the first to come first."""
        self._left: dict[int, None] = {}
        self._steps: dict[int, int] = {}
        self._num_awaited = world.num_workers
        self._waiting: list[Turn] = []

    def begin(self, start: Callable[[int], Turn]) -> None:
        """Starts all workers of the beginning."""
        self._start = start
        for rank in range(self._world.num_workers):
            self.workers[rank] = start(rank)

    def close(self) -> None:
        """Ends what is left on the loop, once all workers are over."""
        self._loop.close()

    # --- a worker's own ---

    @contextlib.contextmanager
    def peer(self, rank: int) -> Iterator[SwarmPeer]:
        """Opens a worker's way into the swarm, in its thread."""
        host: MemoryHost = self._loop.run(self._host(rank))
        peer = SwarmPeer(
            swarm=Swarm(self._opened(rank, host), self._loop),
            num_sent_bytes=lambda: host.num_sent_bytes,
            slowness=lambda: self._conditions.slowness(host.address),
            begin=self._await_start,
            steps=self._steps,
        )
        self._peers[rank] = peer
        with peer.swarm:
            yield peer

    async def _host(self, rank: int) -> MemoryHost:
        return self._network.host(f"rank{rank}", known_as=self._world.address_of(rank))

    @contextlib.asynccontextmanager
    async def _opened(self, rank: int, host: MemoryHost) -> AsyncIterator[DHT]:
        seed = hashlib.sha256(f"{self._world.seed} {rank}".encode()).digest()
        identity = Identity.from_seed(seed)
        join = list(self._addresses.values())
        async with Endpoint(network=host, peer_id=identity.peer_id) as endpoint:
            self._addresses[rank] = await endpoint.listen(Address(host.name, 0))
            async with DHT(join=join, identity=identity, endpoint=endpoint) as dht:
                yield dht

    def _await_start(self) -> None:
        """Waits until all workers of the beginning are there; then the script's time begins."""
        self._num_awaited -= 1
        if self._num_awaited > 0:
            turn = self._turns.current
            self._waiting.append(turn)
            turn.park("the others to begin")
            return
        for turn in self._waiting:
            turn.wake(self._turns.now_s)
        self._waiting.clear()
        self._begin_script()

    def ended(self, rank: int) -> None:
        """Takes note of the end of a worker's thread."""
        self._addresses.pop(rank, None)
        self._peers.pop(rank, None)

    def has_left(self, rank: int) -> bool:
        """Tells whether a worker has left before its time, as the script wanted."""
        return rank in self._left

    # --- the script ---

    def _begin_script(self) -> None:
        world, began_s = self._world, self._turns.current.now_s
        if world.faults is None:
            return
        self._loop.call(self._conditions.begin_script)
        schedule, rank = Schedule(world.faults, world.seed), world.num_workers
        joining: dict[int, range] = {}
        for fault in world.faults.fault:
            if isinstance(fault, JoinWorld):
                joining[id(fault)] = range(rank, rank + (fault.count or 1))
                rank += fault.count or 1
        for event in schedule.events:
            if isinstance(event.fault, JoinWorld | LeaveWorld | Kill):
                ranks = joining.get(id(event.fault)) or self._concerned(event, schedule)
                self._turns.call_at(began_s + event.began_s, partial(self._happen, event.fault, ranks))

    def _concerned(self, event: Event, schedule: Schedule) -> list[int]:
        world = self._world
        return [
            rank
            for rank in range(world.num_workers + world.num_joining)
            if event.concerns(
                (
                    *schedule.names_of(Address("rank", rank), None),
                    *schedule.names_of(Address("machine", world.machine_of(rank)), None),
                )
            )
        ]

    def _happen(self, fault: Fault, ranks: Sequence[int]) -> None:
        for rank in ranks:
            if isinstance(fault, JoinWorld):
                if self._peers and self._start is not None:  # otherwise the run is over
                    self.workers[rank] = self._start(rank)
            elif rank in self._peers:
                if isinstance(fault, LeaveWorld):
                    self._peers[rank].should_leave = True
                    self._left[rank] = None
                else:
                    self._addresses.pop(rank, None)
                    self._loop.call(self._network.hosts[f"rank{rank}"].kill)
                    self.workers[rank].interrupt(Killed())
