"""The exact executor: a thread for each worker, one at a time, in virtual time.

Programs and strategies run in it unchanged, each worker with a group of its own; up to some 128 workers. For
more, `stacked`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

from torch import nn

from shoal.core import Address, Clock, PeerLost, ShoalError
from shoal.core.elastic import LeavingRun
from shoal.core.turns import Ended, Turn, Turns
from shoal.group.base import Group
from shoal.group.conditions import Faulty
from shoal.group.opening import WithServers
from shoal.group.operations import ClockSleeper
from shoal.group.simulated import SimulatedGroup, SimulatedNetwork
from shoal.group.solo import SoloGroup
from shoal.simulate.charging import charged
from shoal.simulate.elastic import ElasticWorld
from shoal.simulate.world import StepCosts, World
from shoal.transport import Conditions

T = TypeVar("T")


class Killed(Ended):
    """A fault script has ended the worker."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How one worker or server has ended."""

    rank: int
    """Among workers, or among servers."""
    role: Literal["worker", "server"]
    value: T | None
    error: ShoalError | None
    """What ended it before its time."""
    has_left: bool = False
    """Whether it was told to leave before its time, as the script or the end of the others' work wanted."""


class Worker:
    """One worker, or server, as its program sees it."""

    def __init__(self, rank: int, group: Group, turn: Turn, clock: Clock, world: World) -> None:
        self.rank = rank
        self.group = group
        self.clock = clock
        self.scripts: list[Faulty] = []
        """Of its faults, where the world has some; begun when its groups were made. They slow its work."""
        self.elastic: ElasticWorld | None = None
        """Where workers come and go: what else the script does, to all of them."""
        self.is_joining = rank >= world.num_workers
        """Whether it has come to a world that trains, and is in no group before it has a model."""
        self._turn = turn
        self._costs = StepCosts(world, rank)
        self._forward_share = world.compute.forward_share

    def compute(self, seconds: float) -> None:
        """Let time pass for this worker: more of it while a fault slows it."""
        slowness = max((script.slowness for script in self.scripts), default=1.0)
        self._turn.spend(slowness * seconds)

    def charged(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """While the block lasts a step of the model takes the time that the world says; see `charging`."""
        return charged(model, self._costs, self._forward_share, self)

    def begin(self, seconds: float) -> None:
        """Of `charging.Payer`: at once, and so is `add`."""
        self.compute(seconds)

    def end_forward(self) -> None:
        """Of `charging.Payer`: its time has passed."""

    add = begin


class _VirtualSleeper(ClockSleeper):
    def __init__(self, turns: Turns) -> None:
        super().__init__(turns.clock)
        self._turns = turns

    def sleep(self, seconds: float) -> None:
        self._turns.current.spend(seconds)


def run_exact(
    world: World, work: Callable[[Worker], T], serve: Callable[[Worker], T] | None = None
) -> list[Outcome[T]]:
    """Run `work` in every worker, and `serve` (or `work` too) in every server, to their ends.

    Workers first, by rank. A worker that a fault has killed, or that has raised an error of Shoal's, is an
    outcome; any other exception is raised when all have ended. Where workers come and go, `rank` is a number
    that a worker keeps: those that join have the numbers after the others.
    """
    if world.is_elastic:
        return _run_elastic(world, work)
    turns = Turns()
    conditions = Conditions(world.profile, seed=world.seed)
    homes = world.addresses()
    machines = [world.machine_of(rank) for rank in range(world.num_workers)]
    servers = [Address("server", number) for number in range(world.num_servers)]
    network = SimulatedNetwork(turns, conditions, homes)
    everybody = SimulatedNetwork(turns, conditions, [*servers, *homes]) if servers else None
    all_machines = [*[world.num_machines + number for number in range(len(servers))], *machines]
    values: dict[int, T] = {}

    def live(place: int, turn: Turn) -> None:
        rank = place - world.num_servers
        scripts: list[Faulty] = []
        with contextlib.ExitStack() as stack:
            group: Group
            if rank >= 0:
                group = SimulatedGroup(network, rank, machines, world.patience)
            else:
                group = SoloGroup(world.patience)
            if world.faults is not None and rank >= 0:
                group = _faulty(world, group, turns)
                scripts.append(group)
            if everybody is not None:
                both: Group = SimulatedGroup(everybody, place, all_machines, world.patience)
                if world.faults is not None and rank >= 0:
                    both = _faulty(world, both, turns, world.num_servers)
                    scripts.append(both)
                group = WithServers(group, both, world.num_servers)
            stack.enter_context(group)
            worker = Worker(rank if rank >= 0 else place, group, turn, turns.clock, world)
            worker.scripts = scripts
            values[place] = (work if rank >= 0 or serve is None else serve)(worker)

    names = [
        *(f"server {number}" for number in range(len(servers))),
        *(f"rank {rank}" for rank in range(world.num_workers)),
    ]
    turns.run([(name, partial(live, place)) for place, name in enumerate(names)])
    outcomes = []
    for place in [*range(world.num_servers, world.size), *range(world.num_servers)]:
        is_worker = place >= world.num_servers
        error = _error_of(turns.turns[place])
        rank = place - world.num_servers if is_worker else place
        outcomes.append(Outcome(rank, "worker" if is_worker else "server", values.get(place), error))
    return outcomes


def _run_elastic(world: World, work: Callable[[Worker], T]) -> list[Outcome[T]]:
    turns = Turns()
    values: dict[int, T] = {}
    threads: dict[int, Turn] = {}

    def start(number: int) -> Turn:
        threads[number] = turns.add(f"rank {number}", partial(live, number))
        return threads[number]

    def live(number: int, turn: Turn) -> None:
        has_left = False
        try:
            with elastic.open(number) as group:
                worker = Worker(number, group, turn, turns.clock, world)
                worker.elastic = elastic
                if world.faults is not None:
                    faulty = _faulty(world, group, turns, leave=partial(elastic.leave, number))
                    faulty.restart(elastic.faults_began_s)
                    worker.group, worker.scripts = faulty, [faulty]
                values[number] = work(worker)
            has_left = True
        except BaseException as error:
            has_left = _has_left(error)
            raise
        finally:
            elastic.ended(number, has_left=has_left)

    elastic = ElasticWorld(
        world,
        turns,
        Conditions(world.profile, seed=world.seed),
        start,
        lambda turn: turn.interrupt(Killed()),
    )
    elastic.begin()
    turns.run([])
    outcomes = []
    for number in sorted(threads):
        has_left = _has_left(threads[number].error)
        error = None if has_left else _error_of(threads[number])
        outcomes.append(Outcome(number, "worker", values.get(number), error, has_left))
    return outcomes


def _has_left(error: BaseException | None) -> bool:
    """Tells whether a worker has ended because it was told to leave."""
    return isinstance(error, LeavingRun) or (isinstance(error, SystemExit) and not error.code)


def _faulty(
    world: World,
    group: Group,
    turns: Turns,
    first_rank: int = 0,
    leave: Callable[[], None] | None = None,
) -> Faulty:
    assert world.faults is not None
    return Faulty(
        group,
        world.faults,
        seed=world.seed,
        sleeper=_VirtualSleeper(turns),
        end=_kill,
        leave=leave,
        first_rank=first_rank,
        should_stretch=False,
    )


def _kill() -> None:
    raise Killed


def _error_of(turn: Turn) -> ShoalError | None:
    error = turn.error
    if isinstance(error, Killed):
        return PeerLost(f"{turn.name} was killed by the fault script.")
    if error is None or isinstance(error, ShoalError):
        return error
    raise error
