"""How far the workers are in a loader's data, so that a resumed run sees each example of an epoch once.

An epoch is one common order of items (examples, or batches where a loader has a batch sampler of its own or
an iterable dataset). In a leg of it so many workers each take every so-many-th of the items that earlier legs
have left. A run that resumes with as many workers goes on in the leg; with another number it begins a new
one, over the items that nobody has taken. So does a run whose number of workers changes while it trains
(`move`), in the middle of an iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from shoal.data.parts import Part

T = TypeVar("T")
ALL = 2**62
"""As many items as any worker can take of a leg."""


@dataclass
class Iteration:
    """One epoch, as this worker goes through it."""

    epoch: int
    legs: list[list[int]] = field(default_factory=list)
    """How many items each rank has taken, leg by leg, of those that are over."""
    num_taken: int = 0
    """By this worker in the leg under way."""
    order: Any = None
    """What the generators were when an order began that is not drawn by seed and epoch."""
    is_over: bool = False


class Course:
    """The epochs of one loader, or of several that are one another's continuation."""

    def __init__(
        self, part: Part, num_items: int | None = None, generators: Sequence[torch.Generator] = ()
    ) -> None:
        """`generators` are the user's own, from which an order is drawn that Shoal leaves as it is."""
        self.part = part
        self.epoch = 0
        """Of the iteration that begins next."""
        self.num_examples = 0
        """That this worker's loop has got of all its epochs, as far as batches tell."""
        self._num_items = num_items
        self._generators = generators
        self._current: Iteration | None = None
        self._resumed: Iteration | None = None
        self.num_moves = 0
        """How often the workers have changed; an iteration that was under way goes on in another part."""
        self._ahead: dict[int, list[list[int]]] = {}
        """The legs of later epochs that some had begun when the workers changed last."""
        self.items_per_batch = 1
        self.order_of: Callable[[Iteration], Iterable[Any]] | None = None
        """Gives the items of an epoch in their order, where that can be known again."""
        self.lost_items: dict[int, list[Any]] = {}
        """By epoch: what lost workers had taken, and what may be missing from what was learned."""
        self._marked: tuple[Iteration, int] | None = None
        """The iteration and its number of taken items at the last `mark`, or when it began."""
        self._previous: Iteration | None = None
        """The one before the present one, if the workers were the same then."""
        self._most_items = 0
        """The most that were taken between two marks."""

    @property
    def is_resuming(self) -> bool:
        """Whether the next iteration goes on with one of an earlier run."""
        return self._resumed is not None and self._resumed.epoch == self.epoch

    @property
    def current(self) -> Iteration | None:
        """The iteration that began last."""
        return self._current

    def begin(self) -> Iteration:
        """The next epoch, or what is left of the one that an earlier run had begun."""
        self._previous = self._current
        resumed, self._resumed = self._resumed if self.is_resuming else None, None
        self._current = resumed or Iteration(self.epoch, self._ahead.get(self.epoch, []))
        self._marked = self._current, self._current.num_taken
        self.epoch += 1
        return self._current

    def mark(self) -> None:
        """Remembers that what was taken until now has been trained on."""
        if self._current is not None:
            if self._marked is not None and self._marked[0] is self._current:
                self._most_items = max(self._most_items, self._current.num_taken - self._marked[1])
            self._marked = self._current, self._current.num_taken

    @property
    def items_per_step(self) -> int:
        """The most items that were taken for one step, and at least a batch."""
        return max(self._most_items, self.items_per_batch)

    def roll_back(self) -> None:
        """Gives back what was taken since the last mark: it has not been trained on."""
        if self._marked is not None:
            iteration, num_taken = self._marked
            iteration.num_taken, iteration.is_over = num_taken, False
            self._current, self.epoch = iteration, iteration.epoch + 1

    def move(self, part: Part, state: Mapping[str, Any]) -> None:
        """Goes on as another part of the data, from a state that `merge` has made of all workers' states."""
        self.part = part
        self.num_moves += 1
        self.load_state_dict(state)
        self._marked = self._previous = None

    def note_lost(
        self, place: Sequence[Any], part: Part, num_batches: int, num_more: int = 0
    ) -> Sequence[Any]:
        """Adds the last batches that a lost worker has taken to `lost_items`, and gives their items.

        `place` is its [epoch, legs, num_taken], where it may have taken `num_more` items more; `part` is what
        part of the data it had. They may reach into the epoch before, and into the next one. Without a known
        order there are no items.
        """
        epoch, legs, num_taken = place
        if self.order_of is None or num_taken >= ALL:
            return ()
        before = self._previous is not None and self._previous.epoch == epoch - 1
        iterations = [self._previous] if before and self._previous is not None else []
        iterations += [Iteration(epoch, legs), Iteration(epoch + 1, self._ahead.get(epoch + 1, []))]
        taken = [list(self.part_of(self.order_of(each), each.legs, part)) for each in iterations]
        at = num_taken + (len(taken[0]) if before else 0)
        first, last = at - num_batches * self.items_per_batch, at + num_more
        items = [(each.epoch, item) for each, own in zip(iterations, taken, strict=True) for item in own]
        for number, item in items[max(0, first) : last]:
            self.lost_items.setdefault(number, []).append(item)
        return [item for _, item in items[max(0, first) : last]]

    @staticmethod
    def part_of(
        items: Iterable[T], legs: Sequence[Sequence[int]], part: Part, *, is_rest: bool = False
    ) -> Iterator[T]:
        """Gives one part of what the legs before have left."""
        for leg in legs:
            items = _rest(items, leg)
        return part.take(items, is_rest=is_rest or bool(legs))

    def own(self, items: Iterable[T], iteration: Iteration) -> Iterator[T]:
        """The items of this worker, without those that were taken before `iteration` began."""
        num_taken = iteration.num_taken
        own = self.part_of(items, iteration.legs, self.part, is_rest=num_taken > 0)
        return itertools.islice(own, min(num_taken, ALL), None)

    def state_dict(self) -> dict[str, Any]:
        """Of this worker; `merge` makes one for all of them."""
        current = self._current
        if current is None or current.is_over:
            current = self._resumed or Iteration(self.epoch, self._ahead.get(self.epoch, []))
        return {
            "later": [[epoch, legs] for epoch, legs in self._ahead.items()],
            "epoch": current.epoch,
            "legs": current.legs,
            "num_taken": current.num_taken,
            "order": current.order,
            "num_items": self._num_items,
            "generators": [generator.get_state() for generator in self._generators],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on from there; False, and nothing done, when it is the state of other data."""
        if state["num_items"] != self._num_items:
            return False
        legs, num_taken = [list(leg) for leg in state["legs"]], state["num_taken"]
        if num_taken is None and len(legs[-1]) == self.part.size:
            num_taken = legs.pop()[self.part.rank]
        self.epoch = state["epoch"]
        self._current = None
        self._resumed = Iteration(self.epoch, legs, num_taken or 0, state["order"])
        # earlier versions wrote the legs of one later epoch
        later = state.get("later", [[self.epoch + 1, state.get("ahead", ())]])
        self._ahead = {epoch: [list(leg) for leg in legs] for epoch, legs in later}
        for generator, known in zip(self._generators, state["generators"], strict=False):
            generator.set_state(known)
        return True


def places_of(states: Iterable[Mapping[str, Any] | None]) -> list[Any]:
    """Tells how far loaders are, by their states: the epoch, what was taken before this leg, and in it."""
    return [state and [state["epoch"], state["legs"], state["num_taken"]] for state in states]


def places_at(number: int, by_rank: Mapping[int, Sequence[Any]]) -> dict[int, Any]:
    """Picks the place of each worker's loader of this number, of those that have one."""
    known = {rank: places[number] for rank, places in by_rank.items() if number < len(places)}
    return {rank: place for rank, place in known.items() if place is not None}


def merge(
    own: Mapping[str, Any], others: Mapping[int, Sequence[Any]], size: int, lost: Collection[int] = ()
) -> dict[str, Any]:
    """One state for any number of workers, of this worker's and each rank's [epoch, legs, num_taken].

    The earliest epoch counts, and who is ahead has taken all of it, as has who has left; the lost have taken
    what the most of the others have. What was taken of the epochs after it is kept for when those begin.
    """
    epoch, legs = min((theirs[0], theirs[1]) for theirs in others.values())
    taken = {rank: theirs[2] if theirs[0] == epoch else ALL for rank, theirs in others.items()}
    most = max(theirs[2] for theirs in others.values() if theirs[0] == epoch)
    leg = [taken.get(rank, most if rank in lost else ALL) for rank in range(size)]
    order = own["order"] if own["epoch"] == epoch else None
    # all workers know the same of later epochs, since their number changed last
    later = {number: before for number, before in own.get("later", ()) if number > epoch}
    for number in range(epoch + 1, max(theirs[0] for theirs in others.values()) + 1):
        more = [0] * size
        for rank, theirs in others.items():
            more[rank] = ALL if theirs[0] > number else theirs[2] if theirs[0] == number else 0
        later[number] = [*later.get(number, ()), more]
    return {
        **own,
        "epoch": epoch,
        "legs": [*legs, leg],
        "num_taken": None,
        "order": order,
        "later": [[number, before] for number, before in later.items()],
    }


def _rest(items: Iterable[T], leg: Sequence[int]) -> Iterator[T]:
    for number, item in enumerate(items):
        turn, rank = divmod(number, len(leg))
        if turn >= leg[rank]:
            yield item
