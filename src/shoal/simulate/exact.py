"""The exact executor: a thread for each worker, one at a time, in virtual time, with the real strategies.

`Trainer` is one worker's training, whatever group it is in, virtual or real. `charged` tells whoever lets
time pass what each step of a model costs, as the model runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import SGD

from shoal.core import Address, Clock, PeerLost, ShoalError
from shoal.core.elastic import LeavingRun
from shoal.core.turns import Ended, Turn, Turns
from shoal.dht import Swarm
from shoal.group import Group
from shoal.group.elastic import elastic_of
from shoal.group.opening import WithServers
from shoal.group.operations import ClockSleeper
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import Faulty, Metered
from shoal.simulate.elastic import ElasticWorld
from shoal.simulate.group import SimulatedGroup, SimulatedNetwork
from shoal.simulate.job import ModelSnapshot, WorkerLog
from shoal.simulate.tasks import TrainingTask
from shoal.simulate.world import StepCosts, World
from shoal.strategies import Strategy, make_strategy
from shoal.strategies.parameter_server import ParameterServer
from shoal.strategies.staleness import Staleness
from shoal.transport import Conditions


class Payer(Protocol):
    """Lets the time of a step pass."""

    def begin(self, seconds: float) -> None:
        """Forward begins, and is to take so long."""

    def end_forward(self) -> None:
        """Forward has been computed."""

    def add(self, seconds: float) -> None:
        """A gradient has come, and so much of backward is over."""


@contextlib.contextmanager
def charged(model: nn.Module, costs: StepCosts, forward_share: float, payer: Payer) -> Iterator[None]:
    """While the block lasts a training step of the model takes what `costs` say.

    Its forward takes its share, its backward the rest as gradients come, by the size of each. Begin it before
    the strategy is attached, so that a gradient's time has passed when it is shared.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_elements = max(1, sum(parameter.numel() for parameter in trained))
    backward_s = 0.0

    def is_training(module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled()

    def before_forward(module: nn.Module, args: Any) -> None:
        nonlocal backward_s
        if is_training(module):
            step_s = costs.next_s()
            backward_s = (1 - forward_share) * step_s
            payer.begin(forward_share * step_s)

    def after_forward(module: nn.Module, args: Any, outputs: Any) -> None:
        if is_training(module):
            payer.end_forward()

    def after_gradient(parameter: torch.Tensor) -> None:
        payer.add(backward_s * parameter.numel() / num_elements)

    hooks: list[Any] = [
        model.register_forward_pre_hook(before_forward),
        model.register_forward_hook(after_forward),
    ]
    hooks += [each.register_post_accumulate_grad_hook(after_gradient) for each in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


Charged = Callable[[nn.Module], contextlib.AbstractContextManager[object]]
"""Makes what a step of the model costs count; entered before a strategy is attached."""
_ONE_SIDED = ("fetch", "read")
"""Operations whose bytes only the receiver counts."""


def _nothing() -> None:
    pass


class LastRound:
    """Remembers the parameters of a model as they were when its strategy's last round ended.

    Between two rounds workers go their own ways, and how far they lie apart then says little of how well
    they agree.
    """

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy = strategy
        self._model = model
        self._rounds = strategy.rounds
        self._step = strategy.steps
        self._kept = self._copies()

    def stepped(self) -> None:
        """Takes note of a step; copies the parameters if a round has just ended and another is not next."""
        strategy = self._strategy
        if strategy.rounds != self._rounds:
            self._rounds, self._step = strategy.rounds, strategy.steps
            if strategy.options.local_steps > 1:
                self._kept = self._copies()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The copies, which nothing changes; empty where the model's own are still those."""
        return [] if self._step == self._strategy.steps else self._kept

    def _copies(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self._model.parameters()]


@dataclass
class SwarmPeer:
    """A worker's place in a swarm, which it has instead of a group."""

    swarm: Swarm
    num_sent_bytes: Callable[[], int]
    slowness: Callable[[], float]
    """How many times as long its work takes now."""
    begin: Callable[[], None]
    """Waits until all that are there at the start can begin their first step."""
    steps: dict[int, int]
    """The steps of all workers that were ever there, by rank: who joins takes up the others' count."""
    should_leave: bool = False
    """Whether it is to leave in order, before its next step."""


class Trainer:
    """A worker of a job; `log` has all that is known of it, also when it ends in the middle."""

    def __init__(self, task: TrainingTask, rank: int) -> None:
        self.log = WorkerLog(rank=rank, snapshots=[], waited_s=[], is_joining=rank >= task.job.num_workers)
        self._task = task

    def train(
        self,
        group: Group,
        clock: Clock,
        charged: Charged,
        begin: Callable[[], None] = _nothing,
        peer: SwarmPeer | None = None,
    ) -> None:
        """All steps of the job; an error of Shoal's ends them, and the others find this worker lost.

        Collective: they begin together, but for one that joins. `begin` is called right before the first
        step. With `peer` it trains in a swarm, and the group is its own alone.
        """
        metered = Metered(group, clock)
        try:
            self._train(metered, clock, charged, begin, peer)
        except ShoalError as error:
            self.log.ended = first_line(error)
            group.close(error)
        except SystemExit:
            self.log.ended = "it has left."
            raise
        finally:
            if not self.log.is_done(self._task.job.steps):
                self.log.ended_at_s = clock.now_s()

    def _train(
        self,
        group: Metered,
        clock: Clock,
        charged: Charged,
        begin: Callable[[], None],
        peer: SwarmPeer | None,
    ) -> None:
        job, log = self._task.job, self.log
        model, optimizer = beginner(self._task)
        batches = self._task.batches(log.rank)
        strategy = make_strategy(group if peer is None else peer.swarm, job.strategy, **job.options)
        with charged(model), strategy.attach(model, optimizer, stays=True):
            if not log.is_joining:
                group.barrier().wait()
            group.reset()
            waited_before_s = list(group.stats.waited_s)
            last_round = LastRound(strategy, model)
            num_before = max(peer.steps.values(), default=0) if peer is not None and log.is_joining else 0
            num_sent_before = 0 if peer is None else peer.num_sent_bytes()

            def look(step: int) -> None:
                num_bytes = None if peer is None else peer.num_sent_bytes() - num_sent_before
                self._look(model, last_round, step, group, clock, num_bytes)

            look(num_before + strategy.steps)
            begin()
            # where workers come and go a step may have to be done again, or others have done some before
            while (step := num_before + strategy.steps) < job.steps:
                if peer is not None and peer.should_leave:
                    log.ended = "it has left."
                    break
                inputs, labels = next(batches)
                optimizer.zero_grad()
                self._task.loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                last_round.stepped()
                step = num_before + strategy.steps
                if peer is not None:
                    peer.steps[log.rank] = step
                is_due = step % job.eval_every == 0 or step == job.steps
                if is_due and step > log.snapshots[-1].step:
                    if elastic_of(group) is None:  # ranks are others in each generation
                        pairs = zip(group.stats.waited_s, waited_before_s, strict=True)
                        log.waited_s = [now_s - before_s for now_s, before_s in pairs]
                    log.staleness = staleness_of(strategy)
                    look(step)

    def _look(
        self,
        model: nn.Module,
        last_round: LastRound,
        step: int,
        group: Metered,
        clock: Clock,
        num_sent_bytes: int | None,
    ) -> None:
        traffic = group.totals()
        one_sided = [traffic[name].received_bytes for name in _ONE_SIDED if name in traffic]
        snapshot = ModelSnapshot(
            step=step,
            at_s=clock.now_s(),
            sent_bytes=(
                sum(each.sent_bytes for each in traffic.values())
                if num_sent_bytes is None
                else num_sent_bytes
            ),
            received_bytes=sum(one_sided),
            tensors=[tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())],
            at_round=last_round.parameters,
        )
        self.log.snapshots.append(snapshot)


def first_line(error: ShoalError) -> str:
    """What happened, without why and what next."""
    return str(error).splitlines()[0]


def serve(task: TrainingTask, group: Group) -> dict[int, int]:
    """What a parameter server does until all workers are done with it; how far behind their pushes were."""
    strategy = make_strategy(group, task.job.strategy, **task.job.options)
    assert isinstance(strategy, ParameterServer)
    strategy.serve(*beginner(task))
    return staleness_of(strategy)


def beginner(task: TrainingTask) -> tuple[nn.Module, SGD]:
    """A model that has learned nothing, and its optimizer."""
    model = task.model()
    return model, SGD(model.parameters(), lr=task.job.learning_rate, momentum=task.job.momentum)


def staleness_of(strategy: Strategy) -> dict[int, int]:
    """Rounds by how far behind the models were that this member has mixed; empty where it counts none."""
    counted = getattr(strategy, "staleness", None)
    return counted.counts if isinstance(counted, Staleness) else {}


def load_tensors(model: nn.Module, tensors: list[torch.Tensor]) -> None:
    """What a snapshot has, into a model."""
    with torch.no_grad():
        for mine, given in zip((*model.parameters(), *model.buffers()), tensors, strict=True):
            mine.copy_(given)


T = TypeVar("T")


class Killed(Ended):
    """A fault script has ended the worker."""


@dataclass(frozen=True, slots=True)
class SimulatedOutcome(Generic[T]):
    """How one worker or server has ended."""

    rank: int
    """Its rank among workers, or among servers."""
    role: Literal["worker", "server"]
    value: T | None
    error: ShoalError | None
    """What ended it before its time."""
    has_left: bool = False
    """Whether it was told to leave before its time, as the script or the end of the others' work wanted."""


class SimulatedWorker:
    """One worker, or server, as its program sees it."""

    def __init__(self, rank: int, group: Group, turn: Turn, clock: Clock, world: World) -> None:
        self.rank = rank
        self.group = group
        self.clock = clock
        self.scripts: list[Faulty] = []
        """Of its faults, where the world has some; begun when its groups were made. They slow its work."""
        self.elastic: ElasticWorld | None = None
        """Where workers come and go: what else the script does, to all of them."""
        self.peer: SwarmPeer | None = None
        """Where workers train in a swarm: its place there."""
        self.is_joining = rank >= world.num_workers
        """Whether it has come to a world that trains, and is in no group before it has a model."""
        self._turn = turn
        self._costs = StepCosts(world, rank)
        self._forward_share = world.compute.forward_share

    def compute(self, seconds: float) -> None:
        """Let time pass for this worker: more of it while a fault slows it."""
        if self.peer is None:
            slowness = max((script.slowness for script in self.scripts), default=1.0)
            self._turn.spend(slowness * seconds)
        else:
            self._turn.spend(self.peer.slowness() * seconds)
            self._turn.look_up()  # its strategy also reads what has happened meanwhile without a call

    def charged(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """While the block lasts a step of the model takes the time that the world says; see `charging`."""
        return charged(model, self._costs, self._forward_share, self)

    def begin(self, seconds: float) -> None:
        """Pays at once, as `Payer` says, and so does `add`."""
        self.compute(seconds)

    def end_forward(self) -> None:
        """Says, as `Payer` does, that its time has passed."""

    add = begin


class _VirtualSleeper(ClockSleeper):
    def __init__(self, turns: Turns) -> None:
        super().__init__(turns.clock)
        self._turns = turns

    def sleep(self, seconds: float) -> None:
        self._turns.current.spend(seconds)


def run_exact(
    world: World, work: Callable[[SimulatedWorker], T], serve: Callable[[SimulatedWorker], T] | None = None
) -> list[SimulatedOutcome[T]]:
    """Run `work` in every worker, and `serve` (or `work` too) in every server, to their ends.

    Workers first, by rank. A worker that a fault has killed, or that has raised an error of Shoal's, is an
    outcome; any other exception is raised when all have ended. Where workers come and go, `rank` is a number
    that a worker keeps: those that join have the numbers after the others.
    """
    if world.is_elastic:
        return _run_elastic(world, work, serve or work)
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
            worker = SimulatedWorker(rank if rank >= 0 else place, group, turn, turns.clock, world)
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
        error = error_of(turns.turns[place])
        rank = place - world.num_servers if is_worker else place
        outcomes.append(SimulatedOutcome(rank, "worker" if is_worker else "server", values.get(place), error))
    return outcomes


def _run_elastic(
    world: World, work: Callable[[SimulatedWorker], T], serve: Callable[[SimulatedWorker], T]
) -> list[SimulatedOutcome[T]]:
    turns, num_servers = Turns(), world.num_servers
    values: dict[int, T] = {}
    threads: dict[int, Turn] = {}

    def start(number: int) -> Turn:
        name = f"server {number}" if number < num_servers else f"rank {number - num_servers}"
        threads[number] = turns.add(name, partial(live, number))
        return threads[number]

    def live(number: int, turn: Turn) -> None:
        has_left, is_server = False, number < num_servers
        try:
            with elastic.open(number) as group:
                rank = number if is_server else number - num_servers
                worker = SimulatedWorker(rank, group, turn, turns.clock, world)
                worker.elastic = elastic
                if world.faults is not None and not is_server:
                    leave = partial(elastic.leave, number)
                    faulty = _faulty(world, group, turns, num_servers, leave)
                    faulty.restart(elastic.faults_began_s)
                    worker.group, worker.scripts = faulty, [faulty]
                values[number] = (serve if is_server else work)(worker)
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
    for number in [*sorted(number for number in threads if number >= num_servers), *range(num_servers)]:
        value, has_left = values.get(number), _has_left(threads[number].error)
        error = None if has_left else error_of(threads[number])
        if number < num_servers:
            outcomes.append(SimulatedOutcome(number, "server", value, error))
        else:
            outcomes.append(SimulatedOutcome(number - num_servers, "worker", value, error, has_left))
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


def error_of(turn: Turn) -> ShoalError | None:
    """Gives what ended a thread before its time; what is no error of Shoal's is raised."""
    error = turn.error
    if isinstance(error, Killed):
        return PeerLost(f"{turn.name} was killed by the fault script.")
    if error is None or isinstance(error, ShoalError):
        return error
    raise error
