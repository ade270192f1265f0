"""Beam search over what is known of a grid, for a whole batch at once: tables and tensors, no network.

The same search as `dht.beam`'s, which goes sample by sample and asks the DHT as it goes; here the DHT is
asked between two searches, and in training it seldom is.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shoal.dht.declaring import ExpertAddress

Place = tuple[int, ...]
"""Coordinates of an expert, or of a prefix of some."""

_ABSENT = -1
_UNKNOWN = -2


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts each sample goes to."""

    experts: tuple[ExpertAddress, ...]
    """Those that at least one sample goes to."""
    slots: torch.Tensor
    """Of each sample [batch, k], best first: numbers of experts; -1 where there are no more."""
    coordinates: torch.Tensor
    """Of each expert [experts, axes], below the grid's prefix."""

    @property
    def num_routes(self) -> torch.Tensor:
        """Experts of each sample."""
        return (self.slots >= 0).sum(1)


class GridTables:
    """What is known of a grid: `prefixes` that lead on, and to what, and `experts`; None is known absence.

    Never changed: knowing more makes new ones.
    """

    def __init__(
        self,
        root: Place,
        grid: Sequence[int],
        prefixes: Mapping[Place, Sequence[int] | None],
        experts: Mapping[Place, ExpertAddress | None],
    ) -> None:
        self._root = root
        self._grid = grid
        self._is_root_known = root in prefixes
        self.experts: list[ExpertAddress] = []
        self._levels: list[torch.Tensor] = []
        """Of each axis [places + 1, size]: the next axis' place, or the expert, behind each coordinate; the
        last row leads nowhere, so that -1 does."""
        self._places: list[list[Place]] = []
        places = [root]
        for axis, size in enumerate(grid):
            rows = torch.full((len(places) + 1, size), _ABSENT)
            reached: list[Place] = []
            for row, place in enumerate(places):
                following = prefixes.get(place) or ()
                if not following:
                    continue
                targets = []
                for coordinate in following:
                    step = (*place, coordinate)
                    if axis == len(grid) - 1:
                        targets.append(self._number_of_expert(experts, step))
                    elif step not in prefixes:
                        targets.append(_UNKNOWN)
                    elif not _leads_on(step, len(root) + len(grid), prefixes, experts):
                        targets.append(_ABSENT)
                    else:
                        targets.append(len(reached))
                        reached.append(step)
                rows[row, list(following)] = torch.tensor(targets)
            self._levels.append(rows)
            self._places.append(places)
            places = reached
        self._has_unknown = [bool((rows == _UNKNOWN).any()) for rows in self._levels]

    def _number_of_expert(self, experts: Mapping[Place, ExpertAddress | None], place: Place) -> int:
        if place not in experts:
            return _UNKNOWN
        if (expert := experts[place]) is None:
            return _ABSENT
        self.experts.append(expert)
        return len(self.experts) - 1

    def without(self, left_out: torch.Tensor) -> GridTables:
        """The same but for experts with a mark, and for prefixes that lead to no others.

        What is unknown may be there.
        """
        if not self.experts:
            return self
        tables = copy.copy(self)
        levels: list[torch.Tensor] = []
        is_out = left_out
        for targets in reversed(self._levels):
            rows = targets.masked_fill((targets >= 0) & is_out[targets.clamp(min=0)], _ABSENT)
            levels.append(rows)
            is_out = (rows == _ABSENT).all(1)
        tables._levels = levels[::-1]
        return tables

    def search(
        self, scores: Sequence[torch.Tensor], *, beam_size: int, k: int, reach: int | None = 1
    ) -> torch.Tensor | list[Place]:
        """The `k` best experts of each sample as numbers [batch, k], -1 where there are no more.

        Or, when that depends on them, the places to look up first, `reach` times as far down as a beam goes;
        without a reach what is unknown counts as absent. Scores of minus infinity leave a coordinate out.
        """
        if not self._is_root_known and reach is not None:
            return [self._root]
        batch_size = scores[0].shape[0]
        rows = torch.zeros((batch_size, 1), dtype=torch.int64)
        sums = torch.zeros((batch_size, 1))
        for axis, axis_scores in enumerate(scores):
            width = k if axis == len(scores) - 1 else beam_size
            targets = self._levels[axis][rows]
            is_out = targets == _ABSENT
            if self._has_unknown[axis] and reach is None:
                is_out |= targets == _UNKNOWN
            totals = (sums.unsqueeze(2) + axis_scores.unsqueeze(1)).masked_fill_(is_out, -torch.inf)
            totals, targets = totals.flatten(1), targets.flatten(1)
            if self._has_unknown[axis] and reach is not None:
                missing = self._missing(axis, rows, totals, targets, width, reach)
                if missing:
                    return missing
            best = totals.topk(min(width, totals.shape[1]))
            sums = best.values
            rows = targets.gather(1, best.indices).masked_fill_(sums == -torch.inf, _ABSENT)
        return rows

    def _missing(
        self,
        axis: int,
        rows: torch.Tensor,
        totals: torch.Tensor,
        targets: torch.Tensor,
        width: int,
        reach: int,
    ) -> list[Place]:
        """Unknown places of those samples whose beams would hold one."""
        best = totals.topk(min(width * reach, totals.shape[1]))
        is_unknown = (targets.gather(1, best.indices) == _UNKNOWN) & (best.values > -torch.inf)
        is_needed = is_unknown & is_unknown[:, :width].any(1, keepdim=True)
        if not bool(is_needed.any()):
            return []
        size = self._grid[axis]
        origins = rows.gather(1, best.indices // size)
        steps = torch.unique((origins * size + best.indices % size)[is_needed])
        places = self._places[axis]
        return [(*places[step // size], step % size) for step in steps.tolist()]

    def routes(self, numbers: torch.Tensor) -> Routes:
        """What a search has found, with the experts that nobody goes to left out."""
        used = torch.unique(numbers[numbers >= 0])
        slots = torch.searchsorted(used, numbers).masked_fill_(numbers < 0, -1)
        experts = tuple(self.experts[number] for number in used.tolist())
        depth = len(self._root)
        coordinates = torch.tensor(
            [expert.uid.coordinates[depth:] for expert in experts], dtype=torch.int64
        ).view(len(experts), len(self._grid))
        return Routes(experts, slots, coordinates)


def _leads_on(
    place: Place,
    depth: int,
    prefixes: Mapping[Place, Sequence[int] | None],
    experts: Mapping[Place, ExpertAddress | None],
) -> bool:
    """Whether anything beyond a prefix may be there: its record outlives the experts that it leads to."""
    for coordinate in prefixes[place] or ():
        step = (*place, coordinate)
        if len(step) == depth:
            if step not in experts or experts[step] is not None:
                return True
        elif step not in prefixes or _leads_on(step, depth, prefixes, experts):
            return True
    return False
