"""What experts are called: a name and a place in a grid, as `ffn.3.14`; its prefixes; patterns to draw from.

Pure: who declares and finds them in the DHT is `declaring`'s and `beam`'s.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

from shoal.core import UsageError

MAX_COORDINATE = 2**31 - 1
LONE_COORDINATE = -1
"""Stands under `ffn.3.` for the expert `ffn.3` of a grid with one axis: no expert's own coordinate."""
_NAME = re.compile(r"[^.\s\x00-\x1f\x7f]+")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")
_RANGE = re.compile(r"\[(0|[1-9][0-9]{0,9}):(0|[1-9][0-9]{0,9})\]")
_MAX_PLACES = 2**62
_EXAMPLES = "write it like ffn.3.14: a name without dots, then whole numbers without leading zeros."


@dataclass(frozen=True, slots=True, order=True)
class ExpertUid:
    """One expert; its coordinates are one or more."""

    name: str
    coordinates: tuple[int, ...]

    def __post_init__(self) -> None:
        _check(self.name, self.coordinates)
        if not self.coordinates:
            raise UsageError(f"The expert {self.name!r} has no coordinates.", next_step=_EXAMPLES)

    @classmethod
    def of(cls, uid: ExpertUid | str) -> ExpertUid:
        """Read the printed form, or pass on what was read already."""
        if isinstance(uid, ExpertUid):
            return uid
        name, *numbers = uid.split(".")
        if not numbers:
            raise UsageError(f"{uid!r} is no expert's uid.", next_step=_EXAMPLES)
        return cls(name, _coordinates(numbers, uid))

    @property
    def prefixes(self) -> tuple[ExpertPrefix, ...]:
        """What it lies under: every proper prefix with a coordinate, shortest first."""
        return tuple(
            ExpertPrefix(self.name, self.coordinates[:num]) for num in range(1, len(self.coordinates))
        )

    def __str__(self) -> str:
        return _text(self.name, self.coordinates)


@dataclass(frozen=True, slots=True, order=True)
class ExpertPrefix:
    """A part of a grid: the experts whose coordinates begin like this; all of it where there are none."""

    name: str
    coordinates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self.name, self.coordinates)

    @classmethod
    def of(cls, prefix: ExpertPrefix | str) -> ExpertPrefix:
        """Read the printed form, which ends in a dot; a name alone may go without."""
        if isinstance(prefix, ExpertPrefix):
            return prefix
        name, *numbers = prefix.split(".")
        if numbers and numbers.pop():
            raise UsageError(
                f"{prefix!r} is no prefix of experts.",
                cause="a prefix ends in a dot.",
                next_step=f"write {prefix}. with a dot, or only the name {name}.",
            )
        return cls(name, _coordinates(numbers, prefix))

    def __str__(self) -> str:
        return _text(self.name, self.coordinates) + "."


@dataclass(frozen=True, slots=True)
class UidPattern:
    """Experts to choose from: a range of coordinates for each axis of a grid."""

    name: str
    axes: tuple[range, ...]

    @classmethod
    def of(cls, text: str) -> UidPattern:
        """Read `ffn.[0:256].[0:1024]`; ranges leave out their end, and an axis may be one number."""
        name, *parts = text.split(".")
        axes = tuple(_axis(part, text) for part in parts)
        _check(name, tuple(axis[-1] for axis in axes))
        if not axes or math.prod(map(len, axes)) > _MAX_PLACES:
            raise UsageError(
                f"The pattern {text!r} has {'too many' if axes else 'no'} coordinates.",
                next_step="write it like ffn.[0:256].[0:1024].",
            )
        return cls(name, axes)

    @property
    def size(self) -> int:
        """How many uids fit it."""
        return math.prod(map(len, self.axes))

    def sample(self, count: int, rng: random.Random) -> list[ExpertUid]:
        """So many different uids, each as likely as any other; all of them when there are no more."""
        return [self._at(index) for index in rng.sample(range(self.size), min(count, self.size))]

    def _at(self, index: int) -> ExpertUid:
        coordinates = []
        for axis in reversed(self.axes):
            index, place = divmod(index, len(axis))
            coordinates.append(axis[place])
        return ExpertUid(self.name, tuple(reversed(coordinates)))


def _check(name: str, coordinates: tuple[int, ...]) -> None:
    if _NAME.fullmatch(name) is None:
        raise UsageError(f"{name!r} is no name of experts.", cause="it is empty, or has dots or blanks.")
    for coordinate in coordinates:
        if type(coordinate) is not int or not 0 <= coordinate <= MAX_COORDINATE:
            raise UsageError(
                f"{coordinate!r} is no coordinate of the experts {name}.",
                cause=f"coordinates are whole numbers from 0 to {MAX_COORDINATE}.",
            )


def _coordinates(numbers: list[str], text: str) -> tuple[int, ...]:
    for number in numbers:
        if _NUMBER.fullmatch(number) is None:
            raise UsageError(f"{text!r} names no experts: {number!r} is no coordinate.", next_step=_EXAMPLES)
    return tuple(map(int, numbers))


def _axis(part: str, text: str) -> range:
    if (match := _RANGE.fullmatch(part)) is not None:
        axis = range(int(match[1]), int(match[2]))
    else:
        (number,) = _coordinates([part], text)
        axis = range(number, number + 1)
    if not axis:
        raise UsageError(
            f"The pattern {text!r} has an empty range, {part}.", cause="a range leaves out its end."
        )
    return axis


def _text(name: str, coordinates: tuple[int, ...]) -> str:
    return ".".join((name, *map(str, coordinates)))
