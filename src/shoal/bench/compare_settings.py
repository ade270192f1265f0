"""What `shoal compare` compares and under which conditions; what is equal for all stands here once.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from shoal.bench.accuracy_contenders import Contender, strategy_contenders
from shoal.bench.contenders import needs_servers, sends_by_itself
from shoal.core import UsageError
from shoal.data.splits import IID, check_split
from shoal.simulate.world import World
from shoal.strategies.registry import all_strategies
from shoal.transport.network.distributions import Delay

Executor = Literal["auto", "exact", "stacked"]
ALL = "all"
SHORT_ROUNDS: dict[str, dict[str, Any]] = {
    name: {"local_steps": 8} for name in ("diloco", "noloco", "sparse-loco")
}
"""What `all` changes: of a contest's few steps, rounds as long as these strategies' own would leave one."""
WORKERS_PER_MACHINE = 4
"""In a contest of twice as many or more, so that `hierarchical` has machines to go between."""
TUNING_SEED = 1_000_003
"""Added to the contest's first seed: nobody is tuned on what it is judged by."""
_KINDS = {
    "constant": ("value",),
    "exponential": ("mean",),
    "normal": ("mean", "deviation"),
    "pareto": ("floor", "shape"),
}


class CompareConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The contest: who takes part, in which world, at what, and when it is over."""

    task: str = "digits"
    contenders: tuple[Contender, ...]
    world: World
    num_servers: int = 1
    """Beside the workers, for strategies that need them."""
    split: str = IID
    seeds: tuple[int, ...] = (0,)
    """Of initial weights, division of the data, batches, and the world's chances."""
    steps: int
    """Of each worker: after them a run is over, whoever reached what."""
    eval_every: int
    batch_size: int
    momentum: float = 0.9
    learning_rates: tuple[float, ...]
    """Each contender tries each of them, and competes with its best; a single one is not tuned."""
    target: float
    """What seconds, bytes and steps are counted to; in terms of the task's score."""
    executor: Executor = "auto"
    is_real: bool = False
    """Whether the contest's runs are real processes; tuning is in virtual time all the same."""
    data_dir: str | None = None
    notes: tuple[str, ...] = ()
    """Sentences for the reader: who was left out, what was assumed."""

    def __post_init__(self) -> None:
        if not self.contenders or not self.seeds or not self.learning_rates:
            raise UsageError(
                "Without a strategy, a seed and a learning rate nothing is compared.",
                next_step="say --strategies all.",
            )
        if min(self.steps, self.eval_every, self.batch_size, self.num_servers) < 1:
            raise UsageError(
                "Without steps, examples or servers nothing is trained.", next_step="give 1 or more."
            )
        wrong = [rate for rate in self.learning_rates if not 0 < rate < math.inf]
        if wrong:
            raise UsageError(f"{wrong[0]} is no learning rate.", next_step="give numbers above 0.")
        if min(self.seeds) < 0:
            raise UsageError(f"{min(self.seeds)} is no seed.", next_step="give --seed 0 or more.")
        if not 0 < self.target < math.inf:
            raise UsageError(f"{self.target} is no target.", next_step="give a number above 0.")
        if not 0 <= self.momentum <= 1:
            raise UsageError(f"{self.momentum} is no momentum.", next_step="give a number from 0 to 1.")
        check_split(self.split)
        if self.is_real:
            self._check_real()

    def _check_real(self) -> None:
        if self.world.faults is not None:
            raise UsageError(
                "Faults happen in virtual time alone.", next_step="leave --real or --faults out."
            )
        served = [each.name for each in self.contenders if needs_servers(each.strategy)]
        if served and self.world.between == "machines":
            raise UsageError(
                f"{', '.join(served)}: servers beside real processes have no machine of their own.",
                next_step="leave them out of --strategies, or leave --real or --between machines out.",
            )

    @property
    def tuning_seed(self) -> int:
        """None of the contest's."""
        return self.seeds[0] + TUNING_SEED

    @property
    def is_tuned(self) -> bool:
        """Whether each contender chooses its rate."""
        return len(self.learning_rates) > 1

    def world_of(self, contender: Contender, seed: int) -> World:
        """The contest's, with servers where the strategy needs some, and chances of that seed."""
        num_servers = self.num_servers if needs_servers(contender.strategy) else 0
        return msgspec.structs.replace(self.world, num_servers=num_servers, seed=seed)


def read_config(config: Mapping[str, Any]) -> CompareConfig:
    """As a report holds it."""
    return msgspec.convert(dict(config), CompareConfig, str_keys=True)


def left_out() -> list[str]:
    """Strategies that `all` does not mean: what they send passes their group by."""
    return [info.name for info in all_strategies() if info.has_own_channel]


def compared(texts: Sequence[str], common: Mapping[str, Any]) -> tuple[Contender, ...]:
    """Strategies with options of their own, as 'neighbor topology=ring'; `all` stands for every one.

    UsageError for one whose bytes a simulated network cannot carry.
    """
    named = [text for text in texts if text != ALL]
    if ALL in texts:
        everybody = [info.name for info in all_strategies() if not info.has_own_channel]
        named = [*everybody, *(text for text in named if text not in everybody)]
    contenders = strategy_contenders(named, common)
    for contender in contenders:
        if sends_by_itself(contender.strategy):
            raise UsageError(
                f"{contender.strategy} cannot be compared: what it sends passes its group by, so that "
                "neither a profile nor a virtual clock reaches it.",
                next_step="leave it out; `shoal bench training` measures it on real machines.",
            )
    shortened = shortened_in(texts, common)
    return tuple(
        msgspec.structs.replace(each, options={**each.options, **shortened.get(each.name, {})})
        for each in contenders
    )


def shortened_in(texts: Sequence[str], common: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By strategy, the options that `all` changes; none of what was named or set by itself."""
    if ALL not in texts:
        return {}
    return {
        name: {option: value for option, value in changes.items() if option not in common}
        for name, changes in SHORT_ROUNDS.items()
        if name not in texts
    }


def notes_of(texts: Sequence[str], common: Mapping[str, Any]) -> list[str]:
    """What `all` leaves out and changes, in sentences; nothing where each was named."""
    if ALL not in texts:
        return []
    why = "what they send passes their group by: it can neither be counted nor put into virtual time"
    notes = [f"'all' leaves out {' and '.join(left_out())}: {why}."]
    for name, changes in shortened_in(texts, common).items():
        given = ", ".join(f"{option}={value}" for option, value in changes.items())
        if given:
            notes.append(f"'all' gives {name} {given}: rounds as long as its own would leave too few.")
    return notes


def without_servers(
    contenders: Sequence[Contender], texts: Sequence[str]
) -> tuple[tuple[Contender, ...], list[str]]:
    """Those that can train while workers come and go, and what to say of those that `all` meant besides.

    UsageError for a strategy with servers that was named.
    """
    served = [each for each in contenders if needs_servers(each.strategy)]
    named = [each.name for each in served if ALL not in texts or each.name in texts]
    if named:
        raise UsageError(
            f"{named[0]} cannot be compared while workers come and go: a world with parameter servers does "
            "not grow or shrink yet.",
            next_step=f"leave {named[0]} out, or --elastic and what lets workers join or leave.",
        )
    names = " and ".join(each.name for each in served)
    notes = [f"'all' leaves out {names}: worlds with servers do not grow or shrink yet."] if served else []
    return tuple(each for each in contenders if each not in served), notes


def compute_of(text: str) -> Delay:
    """What a step costs, in milliseconds: '10', 'exponential:10', 'normal:10:2', 'pareto:5:2'."""
    kind, *words = text.split(":")
    try:
        numbers = [*map(float, words or [kind])]
        value = {"kind": kind, **dict(zip(_KINDS[kind], numbers, strict=True))} if words else numbers[0]
        read: Delay = msgspec.convert(value, Delay)
    except (KeyError, ValueError, msgspec.ValidationError):
        known = ", ".join(":".join([kind, *names]) for kind, names in _KINDS.items())
        raise UsageError(
            f"--compute-ms {text} is no cost of a step.",
            next_step=f"give milliseconds, or a distribution: {known}.",
        ) from None
    return read


def stragglers_of(texts: Sequence[str]) -> dict[int, float]:
    """By rank, how many times as long its steps take: 'RANK:FACTOR' each."""
    factors = {}
    for text in texts:
        rank, _, factor = text.partition(":")
        try:
            factors[int(rank)] = float(factor)
        except ValueError:
            raise UsageError(
                f"--stragglers {text} names no worker and factor.", next_step="say --stragglers 1:10."
            ) from None
        if not 0 < factors[int(rank)] < math.inf:
            raise UsageError(f"--stragglers {text} is no factor.", next_step="give a number above 0.")
    return factors
