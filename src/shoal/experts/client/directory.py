"""The experts of one grid and where to call them: what the DHT has told, remembered and kept fresh.

A search asks the DHT only for what it needs and does not know; what has grown old is looked up again in the
background, while searches go on with what is known. Experts and peers that failed are left out for a while.

The search is a beam search for a whole batch at once, over tables and tensors (`GridTables`). It finds what
`dht.beam` does, which goes sample by sample and asks the DHT as it goes; here the DHT is asked between two
searches, and in training it seldom is.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import torch

from shoal.core import SYSTEM_CLOCK, Clock, Deadline, DeadlineExceeded, UsageError
from shoal.core.rates import FailureBackoff
from shoal.experts.names import ExpertAddress, ExpertPrefix, ExpertUid, get_experts

if TYPE_CHECKING:
    from shoal.experts.client.client import ExpertClient

T = TypeVar("T")


_LOOK_UP_S = 30.0
_LOOK_AGAIN_S = 1.0  # between two rounds in the background; also before an absence is doubted
_FORGET_AFTER = 5  # what is so many times older than it should be is not to be relied upon


class Directory:
    """For any thread but the client's loop. A copy of it, with its mixture, is the same one."""

    def __init__(
        self,
        client: ExpertClient,
        prefix: ExpertPrefix | str,
        grid: Sequence[int],
        *,
        refresh_s: float = 30.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.client = client
        self.prefix = ExpertPrefix.of(prefix)
        self.grid = tuple(grid)
        self._refresh_s = refresh_s
        self._clock = clock
        self._lock = threading.Lock()
        self._known = GridCache(self.prefix.coordinates, self.grid, refresh_s)
        self._backoff = FailureBackoff()
        self._open: _Open | None = None
        self._refresh_at_s = 0.0
        self._searched_at_s = clock.now_s()

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def find(
        self,
        scores: torch.Tensor,
        *,
        beam_size: int,
        k: int,
        k_min: int = 1,
        deadline: Deadline | None = None,
    ) -> Routes:
        """The `k` best experts of each sample, by scores [batch, sum(grid)] on the CPU.

        Those that failed lately come last, and only where a sample has fewer than `k_min` others. When some
        sample has fewer than that at all, places where there was nothing are looked at once more. At the
        deadline it makes do with what is known.
        """
        if not bool((scores < torch.inf).all()):
            raise UsageError(
                f"The gate of the experts {self.prefix} has given a score of NaN or infinity.",
                cause="its input is not finite, or its training has diverged.",
                next_step="look at the input; lower the learning rate, or clip gradients.",
            )
        self._forget_old()
        axes = torch.split(scores.detach().to(torch.float32), list(self.grid), dim=1)
        search = _Search(axes, beam_size, k, k_min)
        limit_s = _LOOK_UP_S if deadline is None else min(_LOOK_UP_S, deadline.remaining_s)
        deadline = Deadline.after(limit_s, self._clock)
        routes = self._found(search, deadline)
        if bool((routes.num_routes < k_min).any()) and self._has_forgotten_absence():
            routes = self._found(search, deadline)
        self._keep_fresh(routes.experts)
        return routes

    def failed(self, expert: ExpertAddress, *, is_peer_lost: bool) -> None:
        """Leave an expert out for a while, and see who serves it now; its peers too when they are lost."""
        now_s = self._clock.now_s()
        with self._lock:
            self._backoff.failed(expert.uid, now_s)
            if is_peer_lost:
                for peer in expert.peers:
                    self._backoff.failed(peer.id, now_s)
            self._known.doubt(expert.uid.coordinates, now_s)

    def answered(self, expert: ExpertAddress, peer_id: object) -> None:
        """All is well with an expert and the peer that answered."""
        with self._lock:
            self._backoff.answered(expert.uid)
            self._backoff.answered(peer_id)
            self._known.trust(expert.uid.coordinates)

    def is_on_trial(self, expert: ExpertAddress) -> bool:
        """Whether it has not answered since it failed, so that nobody should rely on it."""
        with self._lock:
            return self._backoff.has_failed(expert.uid) or all(
                self._backoff.has_failed(peer.id) for peer in expert.peers
            )

    def _found(self, search: _Search, deadline: Deadline) -> Routes:
        reach: int | None = 1
        depth = 0
        while True:
            with self._lock:
                tables = self._known.tables
                open_tables = self._without_paused(tables)
            found = search.over(tables, open_tables, reach)
            if isinstance(found, torch.Tensor):
                return tables.routes(found)
            is_further = reach is not None and len(found[0]) == depth
            reach = 2 * reach if is_further and reach is not None else 1
            depth = len(found[0])
            with contextlib.suppress(DeadlineExceeded):
                self.client.run(self._learn(found, deadline), deadline)
            if deadline.is_past:
                reach = None

    def _without_paused(self, tables: GridTables) -> GridTables:
        now_s = self._clock.now_s()
        if not self._backoff.has_any(now_s):
            return tables
        known = self._open
        num_changes = self._backoff.num_changes
        if known and known.of is tables and known.num_changes == num_changes and now_s < known.until_s:
            return known.tables
        marks = [
            self._backoff.is_paused(expert.uid, now_s)
            or all(self._backoff.is_paused(peer.id, now_s) for peer in expert.peers)
            for expert in tables.experts
        ]
        without = tables.without(torch.tensor(marks)) if any(marks) else tables
        self._open = _Open(without, tables, num_changes, self._backoff.next_end_s(now_s))
        return without

    def _forget_old(self) -> None:
        """After a time without searches nothing was kept fresh."""
        now_s = self._clock.now_s()
        with self._lock:
            if now_s - self._searched_at_s > _FORGET_AFTER * self._refresh_s:
                self._known.forget_all()
            self._searched_at_s = now_s

    def _has_forgotten_absence(self) -> bool:
        with self._lock:
            return self._known.forget_absence(self._clock.now_s() - _LOOK_AGAIN_S)

    def _keep_fresh(self, used: Iterable[ExpertAddress]) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            if now_s < self._refresh_at_s:
                return
            self._refresh_at_s = now_s + _LOOK_AGAIN_S
            prefixes, experts = self._known.stale((expert.uid.coordinates for expert in used), now_s)
            if not prefixes and not experts:
                return
            self._refresh_at_s = now_s + 2 * _LOOK_UP_S  # or when it has ended
        self.client.run(self._start_refresh(prefixes, experts))

    # --- on the client's loop ---

    async def _start_refresh(self, prefixes: list[Place], experts: list[Place]) -> None:
        self.client.dht.start_soon(self._refresh(prefixes, experts), f"refresh of {self.prefix}")

    async def _refresh(self, prefixes: list[Place], experts: list[Place]) -> None:
        deadline = Deadline.after(_LOOK_UP_S, self._clock)
        try:
            for places in _by_length(prefixes):
                await self._refresh_prefixes(places, deadline)
            if experts:
                await self._learn_experts(experts, deadline, is_refresh=True)
        finally:
            self._refresh_at_s = self._clock.now_s() + _LOOK_AGAIN_S

    async def _learn(self, places: list[Place], deadline: Deadline) -> None:
        """Look up places of one length, those of experts or of prefixes."""
        if len(places[0]) == len(self.prefix.coordinates) + len(self.grid):
            await self._learn_experts(places, deadline)
        else:
            await self._learn_prefixes(places, deadline)

    async def _refresh_prefixes(self, places: list[Place], deadline: Deadline) -> None:
        """Learn first what lies behind their new coordinates, so that no search has to ask for it."""
        told = await self._coordinates(places, deadline)
        with self._lock:
            new = self._known.new_below(told)
        if new and not deadline.is_past:
            await self._learn(new, deadline)
        if not deadline.is_past:
            with self._lock:
                self._known.note_prefixes(told, self._clock.now_s())

    async def _learn_prefixes(self, places: list[Place], deadline: Deadline) -> None:
        told = await self._coordinates(places, deadline)
        if not deadline.is_past:
            with self._lock:
                self._known.note_prefixes(told, self._clock.now_s())

    async def _learn_experts(
        self, places: list[Place], deadline: Deadline, *, is_refresh: bool = False
    ) -> None:
        there = places
        if len(places[0]) == 1:  # a grid of one axis: many places, of which nobody has told which are taken
            told = await self._coordinates(places, deadline)
            there = [place for place in places if told[place]]
        uids = [ExpertUid(self.prefix.name, place) for place in there]
        # what this peer remembers itself is no news of an expert that has moved
        addresses = await get_experts(self.client.dht, uids, latest=is_refresh, deadline=deadline)
        if deadline.is_past:
            return
        found: dict[Place, ExpertAddress | None] = dict.fromkeys(places)
        found.update(zip(there, addresses, strict=True))
        with self._lock:
            for place, address in found.items():
                if address is not None and _has_new_peer(address, self._known.expert(place)):
                    self._backoff.answered(address.uid)  # worth a call
            self._known.note_experts(found, self._clock.now_s())

    async def _coordinates(self, places: list[Place], deadline: Deadline) -> dict[Place, Coordinates | None]:
        names = [str(ExpertPrefix(self.prefix.name, place)) for place in places]
        told = await self.client.dht.get_coordinates(names, deadline=deadline)
        return dict(zip(places, told, strict=True))


@dataclass(frozen=True, slots=True)
class _Open:
    """Tables without those that are paused; good until somebody else is."""

    tables: GridTables
    of: GridTables
    num_changes: int
    until_s: float


class _Search:
    """What a batch looks for."""

    def __init__(self, axes: Sequence[torch.Tensor], beam_size: int, k: int, k_min: int) -> None:
        self._axes = axes
        self._beam_size = beam_size
        self._k = k
        self._k_min = k_min

    def over(
        self, tables: GridTables, open_tables: GridTables, reach: int | None
    ) -> torch.Tensor | list[Place]:
        """As `GridTables.search`, of those that are open; all for samples that get fewer than `k_min`."""
        found = open_tables.search(self._axes, beam_size=self._beam_size, k=self._k, reach=reach)
        if open_tables is tables or not isinstance(found, torch.Tensor):
            return found
        is_short = (found >= 0).sum(1) < self._k_min
        if not bool(is_short.any()):
            return found
        axes = [axis[is_short] for axis in self._axes]
        with_all = tables.search(axes, beam_size=self._beam_size, k=self._k, reach=reach)
        if isinstance(with_all, torch.Tensor):
            found[is_short] = with_all
            return found
        return with_all


def _by_length(places: Iterable[Place]) -> list[list[Place]]:
    groups: dict[int, list[Place]] = {}
    for place in places:
        groups.setdefault(len(place), []).append(place)
    return list(groups.values())


def _has_new_peer(address: ExpertAddress, before: ExpertAddress | None) -> bool:
    known = () if before is None else tuple(peer.id for peer in before.peers)
    return any(peer.id not in known for peer in address.peers)


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


class GridCache:
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
        """Forgets everything, as if nobody had told anything yet."""
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
