"""The best experts of a grid that are there, by the scores that a gate gives to the coordinates of each axis.

The search goes from axis to axis and keeps the prefixes with the best sums of scores, of those that lead to
an expert. On the first axis it guesses, best scores first; further on a prefix's record tells which
coordinates come next. Samples of a batch go step by step together, and look up together what they need.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.core import Deadline, UsageError
from shoal.dht.declaring import ExpertAddress, get_experts
from shoal.dht.uids import ExpertPrefix, ExpertUid

if TYPE_CHECKING:
    from shoal.dht.node import DHT

T = TypeVar("T")
Coordinates = tuple[int, ...]
Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Beam = list[tuple[float, Coordinates]]
"""Prefixes with their sums of scores, best first."""
_NOTHING: Integers = np.empty(0, np.int64)


async def beam_search(
    dht: DHT,
    prefix: ExpertPrefix | str,
    scores: Sequence[Any],
    *,
    beam_size: int,
    k: int | None = None,
    deadline: Deadline | None = None,
) -> list[ExpertAddress]:
    """The `k` (by default `beam_size`) best experts below a prefix, usually the grid's name, best first.

    `scores` has for each axis a score for each coordinate; an expert's is their sum, and minus infinity
    leaves a coordinate out. A larger beam misses fewer of the best and asks more. Fewer experts come back
    where there are no more, or where the deadline comes first.
    """
    (found,) = await batch_beam_search(dht, prefix, [scores], beam_size=beam_size, k=k, deadline=deadline)
    return found


async def batch_beam_search(
    dht: DHT,
    prefix: ExpertPrefix | str,
    batch_scores: Sequence[Sequence[Any]],
    *,
    beam_size: int,
    k: int | None = None,
    deadline: Deadline | None = None,
) -> list[list[ExpertAddress]]:
    """`beam_search` for each of several samples, whose scores are for the same axes."""
    k = beam_size if k is None else k
    if beam_size < 1 or k < 1:
        raise UsageError(f"beam_size and k are above 0, not {beam_size} and {k}.")
    if not batch_scores:
        return []
    samples = _checked(batch_scores)
    grid = _Grid(dht, ExpertPrefix.of(prefix), [len(axis) for axis in samples[0]], deadline)
    await grid.begin()
    beams: list[Beam] = [[(0.0, grid.root)] for _ in samples]
    for axis in range(len(samples[0]) - 1):
        rankings = [
            _Ranking(beam, grid.next, scores[axis]) for beam, scores in zip(beams, samples, strict=True)
        ]
        beams = await _best_there(rankings, beam_size, grid.next, grid.look_up_prefixes)
    rankings = [_Ranking(beam, grid.next, scores[-1]) for beam, scores in zip(beams, samples, strict=True)]
    experts: dict[Coordinates, ExpertAddress | None] = {}
    winners = await _best_there(rankings, k, experts, grid.look_up_experts)
    return [[found for _, place in beam if (found := experts[place]) is not None] for beam in winners]


class _Grid:
    """What the DHT tells of a grid during one search."""

    def __init__(
        self, dht: DHT, prefix: ExpertPrefix, sizes: Sequence[int], deadline: Deadline | None
    ) -> None:
        self.root = prefix.coordinates
        self.next: dict[Coordinates, Integers | None] = {}
        """Coordinates that come next after a prefix, of those that have scores; None where nothing does."""
        self._dht = dht
        self._name = prefix.name
        self._sizes = sizes
        self._deadline = deadline

    async def begin(self) -> None:
        """Know what may come first: under a bare name, which has no record, anything."""
        if self.root:
            (self.next[self.root],) = await self.look_up_prefixes([self.root])
        else:
            self.next[self.root] = np.arange(self._sizes[0])

    async def look_up_prefixes(self, places: Sequence[Coordinates]) -> list[Integers | None]:
        found = []
        for place, coordinates in zip(places, await self._coordinates(places), strict=True):
            size = self._sizes[len(place) - len(self.root)]
            following = [each for each in coordinates or () if 0 <= each < size]
            found.append(np.array(following, np.int64) if following else None)
        return found

    async def look_up_experts(self, places: Sequence[Coordinates]) -> list[ExpertAddress | None]:
        there = list(places)
        if len(places[0]) == 1:  # a grid of one axis: nobody has told yet which of them are there
            known = await self._coordinates(places)
            there = [place for place, coordinates in zip(places, known, strict=True) if coordinates]
        if not there or self._is_late():
            return [None] * len(places)
        uids = [ExpertUid(self._name, place) for place in there]
        addresses = await get_experts(self._dht, uids, deadline=self._deadline)
        found = dict(zip(there, addresses, strict=True))
        return [found.get(place) for place in places]

    async def _coordinates(self, places: Sequence[Coordinates]) -> list[Coordinates | None]:
        if self._is_late():
            return [None] * len(places)
        names = [str(ExpertPrefix(self._name, place)) for place in places]
        return await self._dht.get_coordinates(names, deadline=self._deadline)

    def _is_late(self) -> bool:
        return self._deadline is not None and self._deadline.is_past


class _Ranking:
    """Everything that one sample's beam leads to on the next axis, the best sum of scores first."""

    def __init__(self, beam: Beam, following: dict[Coordinates, Integers | None], scores: Floats) -> None:
        self._beam = beam
        parts = [_NOTHING if (next_ := following[place]) is None else next_ for _, place in beam]
        self._coordinates = np.concatenate([_NOTHING, *parts])
        lengths = np.array([len(part) for part in parts], np.int64)
        self._origins = np.repeat(np.arange(len(beam)), lengths)
        sums = np.array([score for score, _ in beam], np.float64)[self._origins] + scores[self._coordinates]
        self._sums = sums
        order = np.argsort(-sums, kind="stable")  # equals in order of coordinates, on every machine
        self._order = order[sums[order] > -np.inf]

    def __len__(self) -> int:
        return len(self._order)

    def part(self, start: int, end: int) -> Beam:
        """Those with these ranks."""
        return [
            (float(self._sums[at]), (*self._beam[self._origins[at]][1], int(self._coordinates[at])))
            for at in self._order[start:end].tolist()
        ]


async def _best_there(
    rankings: Sequence[_Ranking],
    num_wanted: int,
    known: dict[Coordinates, T | None],
    look_up: Callable[[Sequence[Coordinates]], Awaitable[list[T | None]]],
) -> list[Beam]:
    """The first of each ranking that are there, as many as are wanted.

    They are looked up in rounds, for all rankings together; each round goes as far down as all those before
    it, so that a grid with few experts takes few rounds. What was found is left in `known`.
    """
    beams: list[Beam] = [[] for _ in rankings]
    start, end = 0, num_wanted
    while unfinished := [
        (ranking, beam)
        for ranking, beam in zip(rankings, beams, strict=True)
        if len(beam) < num_wanted and start < len(ranking)
    ]:
        parts = [ranking.part(start, end) for ranking, _ in unfinished]
        unknown = list(dict.fromkeys(place for part in parts for _, place in part if place not in known))
        if unknown:
            known.update(zip(unknown, await look_up(unknown), strict=True))
        for (_, beam), part in zip(unfinished, parts, strict=True):
            there = [entry for entry in part if known[entry[1]] is not None]
            beam.extend(there[: num_wanted - len(beam)])
        start, end = end, 2 * end
    return beams


def _checked(batch_scores: Sequence[Sequence[Any]]) -> list[list[Floats]]:
    samples = [[np.asarray(axis, np.float64) for axis in scores] for scores in batch_scores]
    shape = [axis.shape for axis in samples[0]]
    if not shape or any(len(axis) != 1 or axis[0] == 0 for axis in shape):
        raise UsageError(
            f"Scores of the shapes {shape} are for no grid of experts.",
            next_step="give a list with one row of scores for each axis.",
        )
    for scores in samples:
        if [axis.shape for axis in scores] != shape:
            raise UsageError("The samples of a batch have scores for grids of different sizes.")
        if any(not (axis < np.inf).all() for axis in scores):
            raise UsageError(
                "A gate has given a score of NaN or infinity.",
                cause="its training has diverged.",
                next_step="lower its learning rate, or clip its gradients.",
            )
    return samples
