"""Which items of a common order are one worker's: every `size`-th, beginning with the `rank`-th.

So the batches of one step, of all workers together, are the next items of the order. Pure; what the items are
is not its business.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from shoal.core import UsageError

T = TypeVar("T")
Remainder = Literal["drop", "repeat", "uneven"]
"""What becomes of items that do not go round: nobody has them; the first of all are given out again to those
that would have none; or some workers have one more than others.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """The items of worker `rank` of `size`."""

    rank: int
    size: int
    remainder: Remainder = "drop"

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise UsageError(
                f"There is no part {self.rank} of {self.size}.", next_step="give the group of this worker."
            )
        if self.remainder not in get_args(Remainder):
            raise UsageError(
                f"remainder={self.remainder!r} is unknown.",
                next_step=f"choose one of {', '.join(get_args(Remainder))}.",
            )

    def length(self, num_items: int) -> int:
        """How many of so many items are this worker's."""
        each, rest = divmod(num_items, self.size)
        has_one_more = {"drop": False, "repeat": rest > 0, "uneven": self.rank < rest}[self.remainder]
        return each + has_one_more

    def indices(self, num_items: int) -> Sequence[int]:
        """Where they are; a range unless items are repeated."""
        self.check(num_items)
        rest = num_items % self.size
        own = range(self.rank, num_items - (rest if self.remainder == "drop" else 0), self.size)
        if self.remainder == "repeat" and num_items and 0 < rest <= self.rank:
            return [*own, (self.rank - rest) % num_items]
        return own

    def take(self, items: Iterable[T], *, is_rest: bool = False) -> Iterator[T]:
        """They themselves; reads all items and, unless uneven, everybody's next before it gives its own.

        Of what `is_rest` there may be too few for everybody.
        """
        if self.remainder == "uneven":
            yield from itertools.islice(items, self.rank, None, self.size)
            return
        first: list[T] = []
        for number, turn in enumerate(_turns(items, self.size)):
            if self.remainder == "repeat":
                first = first or turn
            if len(turn) == self.size:
                yield turn[self.rank]
            elif self.remainder == "repeat":
                yield next(itertools.islice(itertools.chain(turn, itertools.cycle(first)), self.rank, None))
            elif number == 0 and not is_rest:
                self.check(len(turn))

    def check(self, num_items: int) -> None:
        """Refuse to leave everybody with nothing."""
        if self.remainder == "drop" and 0 < num_items < self.size:
            raise UsageError(
                f"{num_items} items cannot be divided among {self.size} workers.",
                cause="remainder='drop' gives all workers equally many, here none.",
                next_step="start fewer workers, or pass remainder='repeat' or remainder='uneven'.",
            )


def _turns(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """One item for each worker; the last turn may be short."""
    iterator = iter(items)
    while turn := list(itertools.islice(iterator, size)):
        yield turn
