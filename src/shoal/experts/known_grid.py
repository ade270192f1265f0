"""What the DHT has told of a grid, place by place, with the time of asking.

One missing answer is no absence: it may be the network's fault. Not for several threads at once; who looks
things up is the directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from shoal.experts.names import ExpertAddress
from shoal.experts.routing import GridTables, Place

T = TypeVar("T")
Coordinates = tuple[int, ...]

_ASK_AGAIN_S = 1.0
_DOUBT_S = 5.0  # how old news of an expert may be that could not be called: another peer may serve it now
_MAX_ABSENT = 256  # places without anything that are asked for again at a time
_MAX_UNUSED = 64  # prefixes that nobody uses, of which the same is true


class Known(Generic[T]):
    """What was told of one place; None is its absence."""

    __slots__ = ("asked_at_s", "has_missed", "value")

    def __init__(self, value: T | None, asked_at_s: float) -> None:
        self.value = value
        self.asked_at_s = asked_at_s
        self.has_missed = False


class KnownGrid:
    """Prefixes with the coordinates that they lead to, and experts; times are of one monotonic clock."""

    def __init__(self, root: Place, grid: Sequence[int], refresh_s: float) -> None:
        self._root = root
        self._grid = grid
        self._refresh_s = refresh_s
        self._prefixes: dict[Place, Known[Coordinates]] = {}
        self._experts: dict[Place, Known[ExpertAddress]] = {}
        self._doubted: dict[Place, None] = {}
        """Experts that could not be called."""
        self._tables: GridTables | None = None
        self.forget_all()

    @property
    def tables(self) -> GridTables:
        """To be searched; new ones when more is known."""
        if self._tables is None:
            prefixes = {place: known.value for place, known in self._prefixes.items()}
            experts = {place: known.value for place, known in self._experts.items()}
            self._tables = GridTables(self._root, self._grid, prefixes, experts)
        return self._tables

    def expert(self, place: Place) -> ExpertAddress | None:
        """Who serves the expert, as far as is known."""
        known = self._experts.get(place)
        return None if known is None else known.value

    def note_prefixes(self, told: dict[Place, Coordinates | None], now_s: float) -> None:
        """Remember which coordinates come next; those outside of the grid do not count.

        One holder of a record may not have all of it: what is known to be there stays, until its own record
        says otherwise.
        """
        merged: dict[Place, Coordinates | None] = {}
        for place, coordinates in told.items():
            found = self._inside(place, coordinates)
            known = self._prefixes.get(place)
            kept = [
                each
                for each in (known and known.value) or ()
                if each not in found and self._is_there((*place, each))
            ]
            merged[place] = (*found, *kept) or None
        self._note(self._prefixes, merged, now_s)

    def new_below(self, told: dict[Place, Coordinates | None]) -> list[Place]:
        """Places behind coordinates that these prefixes have not had before."""
        new: list[Place] = []
        for place, coordinates in told.items():
            known = self._prefixes.get(place)
            before = frozenset((known and known.value) or ())
            new += [(*place, each) for each in self._inside(place, coordinates) if each not in before]
        return new

    def _is_there(self, place: Place) -> bool:
        is_expert = len(place) == len(self._root) + len(self._grid)
        known = self._experts.get(place) if is_expert else self._prefixes.get(place)
        return known is not None and known.value is not None

    def _inside(self, place: Place, coordinates: Coordinates | None) -> Coordinates:
        size = self._grid[len(place) - len(self._root)]
        return tuple(each for each in coordinates or () if 0 <= each < size)

    def note_experts(self, told: dict[Place, ExpertAddress | None], now_s: float) -> None:
        """Remember who serves which expert."""
        self._note(self._experts, told, now_s)

    def _note(self, table: dict[Place, Known[T]], told: dict[Place, T | None], now_s: float) -> None:
        for place, value in told.items():
            known = table.get(place)
            if known is None:
                table[place] = Known(value, now_s)
                self._tables = None
            elif value is None and known.value is not None and not known.has_missed:
                known.has_missed = True
                known.asked_at_s = now_s - self._refresh_s + _ASK_AGAIN_S
            else:
                if known.value != value:
                    known.value = value
                    self._tables = None
                known.asked_at_s, known.has_missed = now_s, False

    def doubt(self, place: Place, now_s: float) -> None:
        """An expert could not be called: have it looked up now, and often until it can."""
        known = self._experts.get(place)
        if known is not None:
            known.asked_at_s = min(known.asked_at_s, now_s - self._refresh_s)
            self._doubted[place] = None

    def trust(self, place: Place) -> None:
        """An expert was called."""
        self._doubted.pop(place, None)

    def forget_absence(self, before_s: float) -> bool:
        """Forget absences that were found before then; whether there were any."""
        num_dropped = _drop(self._prefixes, lambda known: known.value is None and known.asked_at_s < before_s)
        num_dropped += _drop(self._experts, lambda known: known.value is None and known.asked_at_s < before_s)
        if num_dropped:
            self._tables = None
        return num_dropped > 0

    def forget_all(self) -> None:
        """Begin anew."""
        self._prefixes.clear()
        self._experts.clear()
        self._doubted.clear()
        if not self._root:  # a bare name has no record: anything may come first
            self._prefixes[()] = Known(tuple(range(self._grid[0])), float("inf"))
        self._tables = None

    def stale(self, used: Iterable[Place], now_s: float) -> tuple[list[Place], list[Place]]:
        """Prefixes and experts to look up again: of the experts in use or in doubt, absences, and some more.

        There may be new experts below a prefix that is not in use: those asked for longest ago come along.
        """
        old_s = now_s - self._refresh_s
        experts = list(used)
        prefixes = dict.fromkeys(
            place[:length] for place in experts for length in range(len(self._root), len(place))
        )
        doubted = _older(self._experts, self._doubted, now_s - min(self._refresh_s, _DOUBT_S))
        stale = dict.fromkeys(_older(self._experts, experts, old_s) + doubted + _absent(self._experts, old_s))
        stale_prefixes = dict.fromkeys(
            _older(self._prefixes, prefixes, old_s)
            + _absent(self._prefixes, old_s)
            + _oldest(self._prefixes, old_s)
        )
        return list(stale_prefixes), list(stale)


def _drop(table: dict[Place, Known[T]], is_dropped: Callable[[Known[T]], bool]) -> int:
    places = [place for place, known in table.items() if is_dropped(known)]
    for place in places:
        del table[place]
    return len(places)


def _older(table: dict[Place, Known[T]], places: Iterable[Place], than_s: float) -> list[Place]:
    return [place for place in places if place in table and table[place].asked_at_s <= than_s]


def _absent(table: dict[Place, Known[T]], before_s: float) -> list[Place]:
    places = [place for place, known in table.items() if known.value is None]
    return _older(table, places, before_s)[:_MAX_ABSENT]


def _oldest(table: dict[Place, Known[T]], before_s: float) -> list[Place]:
    places = [place for place in _older(table, table, before_s) if table[place].value is not None]
    return sorted(places, key=lambda place: table[place].asked_at_s)[:_MAX_UNUSED]
