"""Checks for a strategy of your own: `check_strategy(MyStrategy)` tries out what every strategy promises.

Without a group it runs in virtual time, with a thread for each worker, and takes some seconds. With one, all
its members call it, and it tries there what needs no lost worker: `shoal run -np 2 check.py` with
`check_strategy(MyStrategy, group=shoal.init())`. `run_workers` runs a training of your own in the same
way, to compare with the formula.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from shoal.core.errors import PeerLost, ShoalError, UsageError
from shoal.group import Group, GroupWrapper, SoloGroup, share
from shoal.simulate.exact import Killed, SimulatedOutcome, SimulatedWorker, run_exact
from shoal.simulate.world import World
from shoal.strategies import BUILT_IN, Strategy, StrategyOptions, describe_options, load_class
from shoal.strategies.options import read_options

T = TypeVar("T")

_STEP_S = 0.01
"""Virtual seconds of one step: a lost worker is noticed within the steps that follow."""
_FEW_STEPS = 2
"""Steps from one round to the next, where the strategy's default would need a long run."""
_LEARNED = 0.8
"""The loss must fall below this share of what it was."""
_EQUAL = 1e-5
"""Values that differ by no more than this, relative to the largest, are equal: machines round differently."""
_NUM_SAVING = 3
"""Workers that save a checkpoint, from which fewer go on."""
_ORDER = (
    "all workers must issue the same operations in the same order. Look for an average, an exchange or "
    "another collective operation behind a condition that differs among workers: the rank, the loss, "
    "`session.is_skipped`, or whether there is a partner. Who has none, or skips a step, takes part, too."
)
_KEPT = (
    "what later steps need must be in public attributes (no underscore in front) that are numbers, texts, "
    "Flat vectors or torch generators, or have a state_dict. Make vectors in `start`, all others in "
    "`__init__`, and not again in `start`. Plain tensors and dictionaries are not kept."
)
_DIRECTION = "look for the sign and the size of what is added to the parameters; try a smaller outer step."


def run_workers(work: Callable[[Group], T], num_workers: int) -> list[T]:
    """Runs `work(group)` for several workers in virtual time, in this process; gives its results by rank.

    A group is made for each worker, in a thread of its own. An exception of a worker is raised here: the
    first that is no PeerLost, which others raise when one has failed.
    """
    outcomes = run_exact(World(num_workers=num_workers), lambda worker: work(worker.group))
    for error in sorted(filter(None, (outcome.error for outcome in outcomes)), key=_is_of_another):
        raise error
    return [cast(T, outcome.value) for outcome in outcomes]


def _is_of_another(error: BaseException) -> bool:
    """Tells whether a worker has failed because another one has."""
    return isinstance(error, PeerLost)


class StrategyCheckFailed(AssertionError):
    """Says what a strategy should have done, what it did, and where to look."""

    def __init__(self, strategy: str, *, expected: str, happened: str, hint: str) -> None:
        self.expected, self.happened, self.hint = expected, happened, hint
        super().__init__(
            f"{strategy} does not keep a promise.\n"
            f"  Expected: {expected}\n  Happened: {happened}\n  Hint: {hint}"
        )


def check_strategy(
    kind: type[Strategy], *, group: Group | None = None, device: str = "cpu", **options: Any
) -> list[str]:
    """Tries out what every strategy promises, and lists the promises that were tried, one sentence each.

    `options` are the strategy's; without `local_steps` it is 2, or 1 where that is the default. The
    model is on `device`. An exception of the strategy's own comes through as it is. With a group it is
    collective, and the group can be used afterwards. StrategyCheckFailed for a promise that is not kept.
    """
    _check_class(kind)
    known = BUILT_IN.get(kind.name)
    traits = known if known is not None and load_class(known) is kind else kind
    if getattr(traits, "needs_servers", False) or getattr(traits, "has_own_channel", False):
        raise UsageError(
            f"{kind.name} cannot be checked: it needs servers, or sends past its group.",
            next_step="test it with `shoal run`.",
        )
    is_exact = not getattr(traits, "is_asynchronous", False)
    trial = partial(_Trial, kind, options, device=device, is_exact=is_exact)
    kept = [_OPTIONS]
    with _undisturbed(device), tempfile.TemporaryDirectory() as folder:
        trial = partial(trial, memory={"folder": folder})
        if group is None or group.size == 1:
            _ALONE.act(trial(group or SoloGroup()))
            kept.append(_ALONE.promise)
        for check in (*_IN_A_GROUP, *_IN_VIRTUAL_TIME) if group is None else _IN_A_GROUP * (group.size > 1):
            if group is not None:
                check.act(trial(group))
            for size in check.sizes if group is None else ():
                _in_virtual_time(check, size, trial)
            kept.append(check.promise)
    return kept


@dataclass(frozen=True)
class _Trial:
    """One worker's side of a check: the strategy that is tried, and the group."""

    kind: type[Strategy]
    options: dict[str, Any]
    group: Group
    tick: Callable[[], None] = lambda: None
    """Lets the time of one step pass."""
    device: str = "cpu"
    is_exact: bool = True
    """Whether the same steps give the same bits, because workers wait for each other."""
    memory: dict[str, Any] = field(default_factory=dict)
    """What groups of one check leave for those that come after them; `folder` is one for checkpoints."""

    @property
    def period(self) -> int:
        """The steps from one round to the next."""
        given = self.options.get("local_steps")
        return min(_FEW_STEPS, self.kind.Options().local_steps) if given is None else int(given)

    def make(self, group: Group | None = None) -> Strategy:
        """Makes the strategy of this worker."""
        return self.kind(group or self.group, **{**self.options, "local_steps": self.period})

    def fail(self, expected: str, happened: str, hint: str) -> NoReturn:
        """Raises the error for a promise that is not kept."""
        raise StrategyCheckFailed(self.kind.name, expected=expected, happened=happened, hint=hint)

    def new(self, seed: int = 5) -> tuple[_Net, SGD]:
        """Makes a model and its optimizer."""
        torch.manual_seed(seed)
        model = _Net().to(self.device)
        return model, SGD(model.parameters(), lr=0.1, momentum=0.5)

    def train(self, model: nn.Module, optimizer: Optimizer, begin: int, end: int) -> None:
        """Does these steps of a plain loop."""
        for step in range(begin, end):
            optimizer.zero_grad()
            _loss(model, self.group.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            self.tick()

    def gather(self, when: str, value: Any) -> list[Any]:
        """Collects everybody's value, and sees that all are here. Collective."""
        rows = share(self.group, [when, value])
        if any(not isinstance(row, list) or row[:1] != [when] for row in rows):
            self.fail("all workers issue the same operations", f"they are at different ones {when}", _ORDER)
        return [row[1] for row in rows]


@dataclass(frozen=True)
class _Check:
    """A promise, and what every worker does to try it out."""

    promise: str
    act: Callable[[_Trial], Any]
    sizes: Sequence[int] = (3,)
    """Groups that it is tried in, in virtual time."""
    judge: Callable[[Sequence[SimulatedOutcome[Any]], _Trial], None] | None = None
    """Looks at what the workers have returned."""
    may_fail: bool = False
    """Whether an error of a worker may be right, and is left to `judge`."""


def _in_virtual_time(check: _Check, size: int, trial: Callable[..., _Trial]) -> None:
    """Runs a check with so many workers."""

    def work(worker: SimulatedWorker) -> Any:
        return check.act(trial(worker.group, partial(worker.compute, _STEP_S)))

    alone, promise = trial(SoloGroup()), f"{check.promise} ({size} workers)"
    try:
        outcomes = run_exact(World(num_workers=size), work)
    except ShoalError as error:  # nobody can go on
        alone.fail(promise, error.what, _ORDER)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    errors.sort(key=_is_of_another)
    if errors and not check.may_fail:
        alone.fail(promise, f"{type(errors[0]).__name__}: {errors[0]}", _ORDER)
    if check.judge is not None:
        check.judge(outcomes, alone)


@contextlib.contextmanager
def _undisturbed(device: str) -> Iterator[None]:
    """Keeps torch's random numbers, and leaves out log lines of what goes wrong on purpose."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with torch.random.fork_rng(devices=[] if device == "cpu" else None):
            yield
    finally:
        logging.disable(disabled)


# --- what is trained ---


class _Net(nn.Module):
    """Parameters of two dtypes, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes in single precision."""
        return self.body(x) * self.scale.float()  # type: ignore[no-any-return]


def _loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    """Computes the error on a batch, whose inputs lie elsewhere for each worker."""
    drawn = torch.randn(16, 4, generator=torch.Generator().manual_seed(1000 * step + rank)) + 0.3 * rank
    x = drawn.to(next(model.parameters()).device)
    return nn.functional.mse_loss(model(x), torch.stack([x[:, 0] - x[:, 1], x[:, 2]], dim=1))


def _score(model: nn.Module) -> float:
    """Computes the error on data that are nobody's, without a trace in the model."""
    with torch.no_grad():
        return float(_loss(copy.deepcopy(model), 0, 999))


def _vector(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().double().flatten() for each in model.parameters()]).cpu()


def _bits(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies all that training changes."""
    entries = optimizer.state_dict()["state"].values()
    state = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers(), *state)]


def _are_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def _common(strategy: Strategy) -> dict[str, Any]:
    """Copies what `common_state` names, as checkpoints hold it; what they cannot hold is not in it."""
    state = strategy.state_dict()
    state.update(state.pop("kept", {}))
    return {name: state[name] for name in strategy.common_state if name in state}


def _distance(left: Any, right: Any) -> float:
    """Computes the largest difference of values, of a tensor's relative to its largest one; inf if unlike."""
    if isinstance(left, Mapping) and isinstance(right, Mapping) and left.keys() == right.keys():
        return max((_distance(left[name], right[name]) for name in left), default=0.0)
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return max(map(_distance, left, right), default=0.0)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.shape == right.shape:
        if not left.numel():
            return 0.0
        left, right = left.double().cpu(), right.double().cpu()
        return float((left - right).abs().max()) / max(1.0, float(right.abs().max()))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) / max(1.0, abs(right))
    return 0.0 if left is right or left == right else torch.inf


class _Ledger(GroupWrapper):
    """Knows which memory of the group was taken and not given back."""

    def __init__(self, inner: Group) -> None:
        super().__init__(inner)
        self.held: list[torch.Tensor] = []

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Notes what is taken."""
        self.held.append(self.inner.empty(num_elements, dtype, device=device))
        return self.held[-1]

    def free(self, tensor: torch.Tensor) -> None:
        """Notes what is given back."""
        self.held = [each for each in self.held if each is not tensor]
        self.inner.free(tensor)


# --- the promises ---

_OPTIONS = "Its class has a name, and options that can be given as text."


def _check_class(kind: type[Strategy]) -> None:
    def fail(expected: str, happened: str, hint: str) -> NoReturn:
        name = getattr(kind, "name", getattr(kind, "__name__", kind))
        raise StrategyCheckFailed(str(name), expected=expected, happened=happened, hint=hint)

    if not isinstance(kind, type) or not issubclass(kind, Strategy):
        fail("a class that inherits from shoal.Strategy", f"it is {kind!r}", "give the class itself.")
    if not isinstance(getattr(kind, "name", None), str):
        fail("a class attribute `name`", "there is none", 'write name = "mine"; checkpoints hold it.')
    if not issubclass(kind.Options, StrategyOptions):
        fail("`Options` inherits from shoal.strategies.StrategyOptions", "it does not", "let it do so.")
    try:
        described = describe_options(kind.Options)
    except TypeError as error:
        fail("a default for every option", str(error), "give each field of `Options` a default.")
    for option in described:
        where, text = f"the option `{option.name}`", str(option.default)
        if not option.description:
            hint = 'write it as rate: Annotated[float, Meta(description="…")] = 0.9.'
            fail(f"a description of {where}", "there is none", hint)
        try:
            value: Any = getattr(read_options(kind.Options, {option.name: text}, kind.name), option.name)
        except UsageError as error:
            value = error.what
        if option.default is not None and value != option.default:
            hint = "use int, float, bool, str or Literal: the command line and reports give text."
            fail(f"text is read as a value of {where}", f"{text!r} was read as {value!r}", hint)


def _alone(trial: _Trial) -> None:
    (plain, plain_optimizer), (model, optimizer) = trial.new(), trial.new()
    before, num_steps = _score(model), 8 * trial.period
    trial.train(plain, plain_optimizer, 0, num_steps)
    with trial.make().attach(model, optimizer, stays=True):
        trial.train(model, optimizer, 0, num_steps)
    is_plain = _are_equal(_bits(model, optimizer), _bits(plain, plain_optimizer))
    if not is_plain and not trial.kind.works_alone:
        trial.fail(
            "in a group of one it is plain training, bit for bit",
            "the parameters differ from those of plain training",
            "leave model and optimizer alone in `attach` and `__init__`; or say works_alone = True.",
        )
    if not _score(model) < _LEARNED * before:
        happened = f"the loss was {before:.3g}, and is {_score(model):.3g} after {num_steps} steps"
        trial.fail("training lowers the loss in a group of one (works_alone)", happened, _DIRECTION)


def _trains(trial: _Trial) -> None:
    group, num_steps = trial.group, 12 * trial.period
    model, optimizer = trial.new(5 + group.rank)
    parameters = list(model.parameters())
    first = group.all_gather(_vector(model)).wait()[0]
    strategy = trial.make()
    with strategy.attach(model, optimizer, stays=True):
        if not all(trial.gather("at the start", torch.equal(_vector(model), first))):
            trial.fail(
                "after `attach` all workers have the parameters of rank 0",
                "they differ",
                "`start` may not change parameters; a `begin` of your own must call `session.start_equal`.",
            )
        before, stats = _score(model), group.stats
        trial.train(model, optimizer, 0, num_steps)
        strategy.settle()
        traffic = (
            group.stats.sent_bytes + group.stats.received_bytes - stats.sent_bytes - stats.received_bytes
        )
        is_replaced = any(a is not b for a, b in zip(parameters, model.parameters(), strict=True))
        counts = [strategy.steps, strategy.rounds]
        told = trial.gather("after training", [before, _score(model), counts, traffic, is_replaced])
    befores, afters, all_counts, traffics, all_replaced = zip(*told, strict=True)
    if any(all_replaced):
        hint = "write values in place: `session.parameters.copy_(…)`."
        trial.fail("the model keeps its parameter objects", "a parameter was replaced", hint)
    if not any(traffics):
        trial.fail(
            "workers share something, and its bytes are counted",
            f"nobody has sent anything in {num_steps} steps",
            "look whether your methods have the names that are called (after_step, before_step), and whether "
            "`session.is_round` is ever true where you ask for it.",
        )
    if any(each != [num_steps, num_steps // trial.period] for each in all_counts):
        happened = f"[steps, rounds] of the workers are {list(all_counts)} after {num_steps} steps"
        trial.fail("all steps and rounds are counted", happened, "leave `steps` and `rounds` to the session.")
    if not sum(afters) < _LEARNED * sum(befores):
        start, end = sum(befores) / group.size, sum(afters) / group.size
        happened = f"the workers' mean loss was {start:.3g}, and is {end:.3g} after {num_steps} steps"
        trial.fail("training lowers the loss", happened, _DIRECTION)


def _ends_equal(trial: _Trial) -> None:
    for num_steps in (3 * trial.period, 3 * trial.period + 1):
        model, optimizer = trial.new()
        strategy = trial.make()
        with strategy.attach(model, optimizer, stays=True):
            trial.train(model, optimizer, 0, num_steps)
            trial.gather("after training", None)
        vectors = trial.group.all_gather(_vector(model)).wait()
        distance = max(float((each - vectors[0]).abs().max()) for each in vectors)
        if strategy.has_last_round and distance > 1e-5:
            trial.fail(
                "with has_last_round all models are equal after the end of training",
                f"after {num_steps} steps parameters differ by up to {distance:.2g}",
                "did the last round write its result into session.parameters? `last_round` must make them "
                "equal, as `session.average_parameters()` does."
                if num_steps % trial.period or not strategy.is_equal_after_round
                else "did the round write its result into session.parameters, as in "
                "`session.parameters.copy_(mean)`? If a round leaves models different on purpose, say "
                "is_equal_after_round = False: this training ended with a round, and got no last one.",
            )


def _gives_back(trial: _Trial) -> None:
    ledger = _Ledger(trial.group)
    strategy = trial.make(ledger)
    for turn in range(2):  # a second model after the first
        model, optimizer = trial.new(5 + turn)
        with strategy.attach(model, optimizer, stays=True):
            trial.train(model, optimizer, 0, 2 * trial.period)
        if ledger.held:
            trial.fail(
                "memory of the group is given back at the end",
                f"{len(ledger.held)} tensors of `group.empty` were not given back",
                "take memory by `session.empty`, `session.hold_parameters` or `session.window`, which give "
                "it back; what you took from the group yourself, free in `finish`.",
            )


def _skips(trial: _Trial) -> None:
    # all of the first round, too, as a GradScaler does that seeks its scale: the optimizer has no state then
    skipped, num_steps = {*range(trial.period), 2 * trial.period - 1}, 4 * trial.period
    model, optimizer = trial.new()
    scaler = torch.amp.GradScaler(trial.device, init_scale=8.0)
    strategy = trial.make()
    with strategy.attach(model, optimizer, stays=True):
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = _loss(model, trial.group.rank, step)
            factor = torch.inf if step in skipped and not trial.group.rank else 1.0
            scaler.scale(loss * factor).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
            trial.tick()
        strategy.settle()
        is_finite = bool(_vector(model).isfinite().all())
        told = trial.gather("after a skipped step", [strategy.steps, strategy.rounds, is_finite])
    if any(each != [num_steps, num_steps // trial.period, True] for each in told):
        trial.fail(
            "a step that GradScaler skips on rank 0 counts, with its round, and spoils no parameter",
            f"[steps, rounds, all finite] of the workers are {told} after {num_steps} steps",
            "let `skip_step` take part in the round; where `session.is_skipped`, gradients may be infinite.",
        )


def _resumes(trial: _Trial) -> None:
    middle, end = 2 * trial.period + (trial.period > 1), 5 * trial.period

    def train(folder: str, *, should_save: bool = False, should_load: bool = False) -> list[torch.Tensor]:
        model, optimizer = trial.new()
        strategy = trial.make()
        if should_load:
            strategy.load(folder)
        with strategy.attach(model, optimizer, stays=True):
            trial.train(model, optimizer, strategy.steps, middle)
            if should_save:
                strategy.save(folder)
            trial.train(model, optimizer, middle, end)
            strategy.settle()
            return _bits(model, optimizer)

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory()) if trial.group.rank == 0 else ""
        folder = trial.gather("before a checkpoint", folder)[0]
        plain, saved = train(folder), train(folder, should_save=True)
        is_same = all(trial.gather("after a checkpoint", _are_equal(plain, saved)))
        resumed = train(folder, should_load=True)
        is_resumed = all(trial.gather("after resuming", _are_equal(saved, resumed)))
    happened = f"with a checkpoint at step {middle} of {end} parameters, buffers or optimizers differ"
    if trial.is_exact and not is_same:
        hint = "`settle_round`, `before_saving` and `state_dict` may finish what is under way, no more."
        trial.fail("to save a checkpoint changes nothing", happened, hint)
    if trial.is_exact and not is_resumed:
        trial.fail("a resumed run ends as the uninterrupted one does, bit for bit", happened, _KEPT)


def _leaves(trial: _Trial) -> list[Any] | None:
    """Rank 0 leaves while rank 1 waits for it in a round, which the others reach only after that."""
    leaving = 2 * trial.period + 1
    # a mean of all parameters removes in one round what the leave has left different, and does no harm
    compared = (leaving // trial.period + 2) * trial.period
    model, optimizer = trial.new()
    strategy = trial.make()
    with strategy.attach(model, optimizer):
        trial.train(model, optimizer, 0, leaving)
        for _ in range({0: 2, 1: 0}.get(trial.group.rank, 4)):
            trial.tick()
        if trial.group.rank == 0:
            return None
        trial.train(model, optimizer, leaving, compared)
        strategy.settle()
        found = [_vector(model), _common(strategy)] if strategy.is_equal_after_round else []
        trial.train(model, optimizer, compared, 6 * trial.period)
    return found


def _judge_leave(outcomes: Sequence[SimulatedOutcome[Any]], trial: _Trial) -> None:
    first, *others = (outcome.value for outcome in outcomes[1:])
    distance = max(_distance(other, first) for other in others)
    if not distance <= _EQUAL:
        trial.fail(
            "with is_equal_after_round the workers that stay are equal again a round after one has left, in "
            "their models and in what common_state names",
            f"they differ by up to {distance:.2g}",
            "call `session.average(vector)` without peers: it is the same for all. With peers, and in "
            "`session.exchange`, the weight of a worker that leaves goes to one's own values.",
        )


def _changes_size(trial: _Trial) -> list[Any]:
    middle, end = 2 * trial.period + (trial.period > 1), 4 * trial.period
    model, optimizer = trial.new()
    strategy = trial.make()
    if trial.group.size < _NUM_SAVING:
        strategy.load(trial.memory["folder"])
    with strategy.attach(model, optimizer, stays=True):
        if trial.group.size == _NUM_SAVING:
            trial.train(model, optimizer, 0, middle)
            strategy.save(trial.memory["folder"])
        found = _common(strategy)
        missing = [name for name in strategy.common_state if hasattr(strategy, name) and name not in found]
        if missing:
            happened = f"they do not hold {missing[0]}"
            trial.fail("checkpoints hold what common_state names", happened, _KEPT)
        step = strategy.steps
        if trial.group.size < _NUM_SAVING:
            trial.train(model, optimizer, step, end)
            strategy.settle()
        return [found, step, bool(_vector(model).isfinite().all())]


def _judge_size(outcomes: Sequence[SimulatedOutcome[Any]], trial: _Trial) -> None:
    states, steps, are_finite = zip(*(outcome.value for outcome in outcomes), strict=True)
    distance = max(_distance(state, states[0]) for state in states)
    if not distance <= _EQUAL:
        trial.fail(
            "what common_state names is equal on all workers",
            f"with {len(states)} workers it differs by up to {distance:.2g}",
            "name only what all workers compute from equal values: from `session.average(vector)` without "
            "peers, for example, and not from `session.parameters` before the round.",
        )
    saved = trial.memory.setdefault("saved", [states[0], steps[0]])
    distance = _distance(states[0], saved[0])
    if not distance <= _EQUAL or any(step != saved[1] for step in steps) or not all(are_finite):
        trial.fail(
            "another number of workers goes on from the checkpoint, with what common_state names",
            f"after step {saved[1]} they are at steps {list(steps)}, their common state differs by "
            f"{distance:.2g} from what was saved, and [all finite] is {list(are_finite)}",
            _KEPT,
        )


def _is_lost(trial: _Trial) -> None:
    model, optimizer = trial.new()
    with trial.make().attach(model, optimizer, stays=True):
        trial.train(model, optimizer, 0, 2 * trial.period)
        if trial.group.rank == trial.group.size - 1:
            raise Killed
        trial.train(model, optimizer, 2 * trial.period, 6 * trial.period + 4)


def _judge_loss(outcomes: Sequence[SimulatedOutcome[None]], trial: _Trial) -> None:
    *others, lost = outcomes
    for other in others:
        error, is_survived = other.error, trial.kind.survives_loss
        happened = f"rank {other.rank} " + (
            "trained on" if error is None else f"ended with {type(error).__name__}: {error}"
        )
        if is_survived and error is not None:
            trial.fail(
                "with survives_loss the others train on when a worker is lost",
                happened,
                "use `session.average` and `session.exchange`, which go on without it; or say "
                "survives_loss = False.",
            )
        if not is_survived and (not isinstance(error, PeerLost) or f"rank {lost.rank}" not in error.what):
            trial.fail(
                f"without survives_loss the others end with PeerLost, which names rank {lost.rank}",
                happened,
                "call `session.check_lost_peers()` in `before_step`; or, if the algorithm is right without "
                "the lost worker, say survives_loss = True.",
            )


_ALONE = _Check("In a group of one it trains as plain PyTorch does, unless it works_alone.", _alone)
_IN_A_GROUP = (
    _Check("Workers start equal, share something, and learn.", _trains, (2, 3)),
    _Check("With has_last_round all models are equal at the end.", _ends_equal),
    _Check("Memory of the group is given back, and a second model can follow.", _gives_back),
    _Check("A step that is skipped on one worker stops nobody.", _skips),
    _Check("A run that resumes from a checkpoint ends as an uninterrupted one.", _resumes),
)
_IN_VIRTUAL_TIME = (
    _Check("Workers go on when one has no more data and leaves.", _leaves, judge=_judge_leave),
    _Check("A lost worker is survived, or named by PeerLost.", _is_lost, judge=_judge_loss, may_fail=True),
    _Check(
        "Another number of workers goes on from a checkpoint, with what common_state names.",
        _changes_size,
        (_NUM_SAVING, _NUM_SAVING - 1),
        judge=_judge_size,
    ),
)
