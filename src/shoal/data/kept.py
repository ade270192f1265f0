"""The loaders that were divided for a group: where they are in their data is part of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from shoal.data.course import Course
from shoal.data.parts import Part

log = logging.getLogger(__name__)


class KeptLoaders:
    """In the order in which they were divided first, which is the same on all workers and in each run."""

    def __init__(self) -> None:
        self._courses: list[ReferenceType[Course]] = []
        self._waiting: dict[int, Mapping[str, Any]] = {}

    def add(self, course: Course) -> None:
        """Another one; where a run was resumed before it was divided, it goes on from there now."""
        if any(known() is course for known in self._courses):
            return
        self._courses.append(ref(course))
        state = self._waiting.pop(len(self._courses) - 1, None)
        if state is not None:
            _load(course, state)

    @property
    def num_examples(self) -> int | None:
        """That the loops over them have got; None when no loader is there, or has been."""
        if not self._courses:
            return None
        return sum(course.num_examples for known in self._courses if (course := known()) is not None)

    def states(self) -> list[dict[str, Any] | None]:
        """Of each; None for one that is no more."""
        courses = [known() for known in self._courses]
        return [None if course is None else course.state_dict() for course in courses]

    @property
    def epochs(self) -> list[int]:
        """The epoch of each that is under way, or comes; -1 for one that is no more."""
        courses = [known() for known in self._courses]
        return [-1 if course is None else course.epoch for course in courses]

    @property
    def items_per_step(self) -> list[int]:
        """The most items of each that this worker has taken for one step, and at least a batch."""
        courses = [known() for known in self._courses]
        return [0 if course is None else course.items_per_step for course in courses]

    def mark(self) -> None:
        """Remembers that what the loops have got until now has been trained on."""
        for known in self._courses:
            if (course := known()) is not None:
                course.mark()

    def roll_back(self) -> None:
        """Gives back what the loops have got since the last mark: it has not been trained on."""
        for known in self._courses:
            if (course := known()) is not None:
                course.roll_back()

    def note_lost(
        self, number: int, place: Sequence[Any], part: tuple[int, int], num_batches: int, num_more: int = 0
    ) -> Sequence[Any]:
        """Notes the last batches that a lost worker took of a loader, and gives their items.

        It may have taken `num_more` items beyond that place. `part` is its rank and the number of workers.
        """
        course = self._courses[number]() if number < len(self._courses) else None
        if course is None:
            return ()
        return course.note_lost(place, Part(*part, course.part.remainder), num_batches, num_more)

    def lost(self) -> list[list[Any]]:
        """Gives what each lists of lost workers, as pairs of an epoch and items."""
        courses = [known() for known in self._courses]
        return [
            [] if course is None else [[epoch, list(items)] for epoch, items in course.lost_items.items()]
            for course in courses
        ]

    def add_lost(self, lost: Sequence[Sequence[Any]]) -> None:
        """Lists what another worker lists, which was there before this one."""
        for known, listed in zip(self._courses, lost, strict=False):
            if (course := known()) is not None:
                for epoch, items in listed:
                    own = course.lost_items.setdefault(epoch, [])
                    own.extend(item for item in items if item not in own)

    def move(self, rank: int, size: int, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Goes on as worker `rank` of `size`, from states that `merge` has made of all workers' states.

        Those that are divided later go on from there, too.
        """
        self._waiting = {number: state for number, state in enumerate(states) if state is not None}
        for number, known in enumerate(self._courses):
            course, state = known(), self._waiting.pop(number, None)
            if course is not None:
                course.move(Part(rank, size, course.part.remainder), state or course.state_dict())

    def place(self, rank: int, size: int) -> None:
        """Begins as worker `rank` of `size`: the group that they were divided for was another one.

        That is so when workers are lost, or come, before anybody has trained.
        """
        for known in self._courses:
            course = known()
            if course is not None and (course.part.rank, course.part.size) != (rank, size):
                course.move(Part(rank, size, course.part.remainder), course.state_dict())

    def load(self, states: Sequence[Mapping[str, Any] | None], first: Sequence[Course] = ()) -> None:
        """Go on from there, also those that come later; `first` are those that the first states are of.

        The other states are of the other loaders, in the order in which they were divided.
        """
        courses: list[Course | None] = [known() for known in self._courses]
        if first:
            rest = [course for course in courses if course is not None and course not in first]
            courses = [*first, *rest]
        self._waiting = {}
        for number, state in enumerate(states):
            if state is None:
                continue
            if number >= len(courses):
                self._waiting[number - len(courses) + len(self._courses)] = state
            elif (course := courses[number]) is not None:
                _load(course, state)


_kept: WeakKeyDictionary[object, KeptLoaders] = WeakKeyDictionary()


def innermost(group: object) -> object:
    """Finds the group inside of all wrappers; an elastic group is one, whatever it has inside."""
    while not getattr(group, "is_elastic", False) and (inner := getattr(group, "inner", None)) is not None:
        group = inner
    return group


def kept_loaders(group: object) -> KeptLoaders:
    """Those of a group; wrappers around one group share them."""
    try:
        return _kept.setdefault(innermost(group), KeptLoaders())
    except TypeError:  # what only has a rank and a size has no checkpoints either
        return KeptLoaders()


def _load(course: Course, state: Mapping[str, Any]) -> None:
    if not course.load_state_dict(state):
        log.warning(
            "A loader of other data than in the checkpoint (it had %s items) begins anew.", state["num_items"]
        )
