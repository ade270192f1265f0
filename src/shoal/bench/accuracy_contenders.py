"""Who takes part in `shoal bench accuracy`: neighbour averaging with BlueFog's tricks, or any strategies.

The tricks: a smaller learning rate where warm-up begins, an average of all workers now and then, and a decay
of the learning rate after 25 instead of 30 parts in 90 of the run. Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.bench.contenders import all_options, shares_of
from shoal.core import UsageError
from shoal.topology import make_topology

ORDERS = {"atc": "adapt-then-combine", "awc": "adapt-while-combine"}
REFERENCE = "all-reduce"
WARMUP, AVERAGE, DECAY, ALL = "warm-up", "average", "decay", "all"
TRICKS = {
    WARMUP: "smaller warm-up: the learning rate begins at a tenth of where it begins otherwise",
    AVERAGE: "periodic global average: all workers' parameters are averaged every {every} steps",
    DECAY: "faster decay: the learning rate falls to a tenth every {fast} steps instead of every {slow}",
    ALL: "the three together",
}
_PARTS, _WARM_PARTS, _SLOW_PARTS, _FAST_PARTS = 90, 5, 30, 25
"""BlueFog's 90 epochs: warm-up in the first 5, decay every 30, or every 25."""

AVERAGE_EVERY = 16
"""Steps. No divisor of the usual numbers of them: a run does not end with an average by chance."""


class Contender(msgspec.Struct, frozen=True):
    """One way of training."""

    name: str
    strategy: str
    options: dict[str, Any] = {}
    base: str = ""
    """The contender that it differs from by a trick alone."""
    trick: str = ""


class TrickSettings(msgspec.Struct, frozen=True):
    """What the contenders of the experiment with tricks share; UsageError for a topology that is none."""

    steps: int
    num_workers: int
    topology: str = "one-peer-exponential"
    orders: tuple[str, ...] = tuple(ORDERS.values())
    global_average_every: int = AVERAGE_EVERY
    workers_per_machine: int | None = None

    def __post_init__(self) -> None:
        make_topology(self.topology, self.num_workers, self.workers_per_machine or self.num_workers)

    @property
    def plain(self) -> dict[str, Any]:
        """The schedule of those that use no trick."""
        return {
            "warmup_steps": math.ceil(self.steps * _WARM_PARTS / _PARTS),
            "warmup_factor": 1 / self.num_workers,
            "decay_every": math.ceil(self.steps * _SLOW_PARTS / _PARTS),
            "decay_factor": 0.1,
        }

    @property
    def tricks(self) -> dict[str, dict[str, Any]]:
        """By name: what a trick changes of it."""
        each: dict[str, dict[str, Any]] = {
            WARMUP: {"warmup_factor": 0.1 / self.num_workers},
            AVERAGE: {"global_average_every": self.global_average_every},
            DECAY: {"decay_every": math.ceil(self.steps * _FAST_PARTS / _PARTS)},
        }
        return {**each, ALL: {name: value for changes in each.values() for name, value in changes.items()}}

    def legend(self) -> list[str]:
        """A line for each trick."""
        numbers = {
            "every": self.global_average_every,
            "fast": self.tricks[DECAY]["decay_every"],
            "slow": self.plain["decay_every"],
        }
        return [f"{name}: {text.format(**numbers)}" for name, text in TRICKS.items()]


def trick_contenders(settings: TrickSettings) -> tuple[Contender, ...]:
    """The reference, and for each order one without tricks, one with each, and one with all of them."""
    contenders = [_contender(REFERENCE, REFERENCE, settings.plain)]
    for base, order in ORDERS.items():
        if order not in settings.orders:
            continue
        options = {**settings.plain, "order": order, "topology": settings.topology}
        contenders.append(_contender(base, "neighbor", options))
        for trick, changes in settings.tricks.items():
            contenders.append(
                _contender(f"{base}+{trick}", "neighbor", {**options, **changes}, base=base, trick=trick)
            )
    return tuple(contenders)


def strategy_contenders(texts: Sequence[str], common: Mapping[str, Any]) -> tuple[Contender, ...]:
    """Strategies, each a name and perhaps options of its own: 'neighbor topology=ring'.

    `common` options go to all that know them, and yield to a strategy's own; UsageError for one that nobody
    knows.
    """
    labels = {" ".join(text.split()): text.split() for text in texts}
    if not labels:
        raise UsageError(
            "There is no strategy to train with.", next_step="name one: --strategies all-reduce."
        )
    shares = shares_of([name for name, *_ in labels.values()], common)
    return tuple(
        _contender(label, name, shares[name] | _own_options(label, words))
        for label, (name, *words) in labels.items()
    )


def _own_options(label: str, words: Sequence[str]) -> dict[str, str]:
    own = {}
    for word in words:
        option, is_there, value = word.partition("=")
        if not is_there or not option:
            raise UsageError(
                f"{word!r} in {label!r} sets nothing.", next_step="say --strategies 'neighbor topology=ring'."
            )
        own[option.replace("-", "_")] = value
    return own


def _contender(
    name: str, strategy: str, options: Mapping[str, Any], base: str = "", trick: str = ""
) -> Contender:
    """With all options that the strategy has, checked."""
    return Contender(name, strategy, all_options(strategy, options), base, trick)
