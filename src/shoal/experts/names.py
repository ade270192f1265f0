"""What experts are called, who serves which, and the best of a grid that are there.

An expert's uid is a name and a place in a grid, as `ffn.3.14`. Its own record in the DHT is a dictionary with
a subkey for each peer that serves it, which that peer alone can write; its value is where to call. Every
prefix of the uid has the next coordinate as a subkey, unsigned and of no meaning beyond its being there:
`beam_search` finds its way by them.
"""

from __future__ import annotations

import functools
import logging
import math
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from shoal.core import Address, Deadline, Peer, PeerId, UsageError
from shoal.core.ids import ID_BYTES
from shoal.dht.records import Entry, Stored, Value, Verdict, owner_of_subkey, reserved

if TYPE_CHECKING:
    from shoal.dht.node import DHT

log = logging.getLogger(__name__)

# --- what experts are called ---

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


# --- declaring and finding them in the DHT ---

_HERE = 1  # under a prefix: that something lies beyond this coordinate
_DRAWS_FOR_EACH = 10
_MAX_ADDRESSES = 8
_MAX_ADDRESS_CHARS = 300


@dataclass(frozen=True, slots=True)
class ExpertAddress:
    """Where an expert can be called."""

    uid: ExpertUid
    peers: tuple[Peer, ...]
    """At least one, those that promise to be there longest first; a peer with several addresses comes more
    than once."""
    expires_at_s: float
    """On the wall clock, of the first peer's promise."""

    @property
    def peer(self) -> Peer:
        """The one to call first."""
        return self.peers[0]


async def declare_experts(
    dht: DHT,
    uids: Iterable[ExpertUid | str],
    expires_at_s: float,
    *,
    addresses: Sequence[Address] = (),
    is_owned: bool = True,
    deadline: Deadline | None = None,
) -> dict[ExpertUid, bool]:
    """Tell the swarm that these experts can be called here; which of them can be found now.

    `addresses` are where, this peer's own when there are none. Without `is_owned` declarations are not
    signed: faster, and anybody in the swarm can replace them.
    """
    declared = list(dict.fromkeys(map(ExpertUid.of, uids)))
    entries = expert_entries(dht, declared, expires_at_s, addresses=addresses, is_owned=is_owned)
    stored = await dht.store_many(entries, deadline=deadline)
    num_own = len(declared)
    leads_on = {
        (entry.name, entry.subkey): _is_there(outcome)
        for entry, outcome in zip(entries[num_own:], stored[num_own:], strict=True)
    }
    return {
        uid: bool(outcome) and all(leads_on[step] for step in _steps(uid))
        for uid, outcome in zip(declared, stored[:num_own], strict=True)
    }


def expert_entries(
    dht: DHT,
    uids: Iterable[ExpertUid | str],
    expires_at_s: float,
    *,
    addresses: Sequence[Address] = (),
    is_owned: bool = True,
) -> list[Entry]:
    """What declaring stores: a record for each uid in order, then the prefixes', each once."""
    where = [str(address) for address in addresses or _own_addresses(dht)]
    if len(where) > _MAX_ADDRESSES:
        raise UsageError(f"An expert has at most {_MAX_ADDRESSES} addresses at one peer, not {len(where)}.")
    subkey = reserved(dht.peer_id) if is_owned else dht.peer_id.digest
    names = dict.fromkeys(map(ExpertUid.of, uids))
    entries = [Entry(str(uid), where, expires_at_s, subkey, is_owned) for uid in names]
    steps = dict.fromkeys(step for uid in names for step in _steps(uid))
    entries += [Entry(prefix, _HERE, expires_at_s, coordinate) for prefix, coordinate in steps]
    return entries


async def get_experts(
    dht: DHT,
    uids: Iterable[ExpertUid | str],
    *,
    latest: bool = False,
    deadline: Deadline | None = None,
    must_end: bool = False,
) -> list[ExpertAddress | None]:
    """Where each of these experts can be called, in their order; None for those that nobody serves.

    `latest` asks every replica, and so finds all peers that serve an expert. None also stands for what could
    not be found out, unless it `must_end`: then that is DeadlineExceeded or PeerUnreachable.
    """
    wanted = [ExpertUid.of(uid) for uid in uids]
    unique = list(dict.fromkeys(wanted))
    names = [str(uid) for uid in unique]
    found = await dht.get_many(names, latest=latest, deadline=deadline, must_end=must_end)
    addresses = {uid: _address_of(uid, value) for uid, value in zip(unique, found, strict=True)}
    return [addresses[uid] for uid in wanted]


async def sample_uids(
    dht: DHT, pattern: str | None, count: int, *, deadline: Deadline | None = None
) -> list[ExpertUid]:
    """So many uids that nobody serves yet, drawn from a pattern such as `ffn.[0:256].[0:1024]`.

    Without a pattern they are the first free ones of `expert.0`, `expert.1`, … Ten are tried for each; when
    that is not enough, fewer come back, with a warning. DeadlineExceeded when it was not found out in time
    whether one is free.
    """
    num_draws = _DRAWS_FOR_EACH * count
    if pattern is None:
        draws = [ExpertUid("expert", (index,)) for index in range(num_draws)]
    else:
        draws = UidPattern.of(pattern).sample(num_draws, dht.endpoint.network.random)
    free: list[ExpertUid] = []
    num_tried = 0
    while len(free) < count and num_tried < len(draws):
        batch = draws[num_tried : num_tried + count - len(free)]
        num_tried += len(batch)
        found = await dht.get_many([str(uid) for uid in batch], deadline=deadline, must_end=True)
        free += [uid for uid, value in zip(batch, found, strict=True) if _address_of(uid, value) is None]
    if len(free) < count:
        log.warning(
            "only %d of %d uids like %s are free: %d were tried", len(free), count, pattern, num_tried
        )
    return free


def _steps(uid: ExpertUid) -> list[tuple[str, int]]:
    """The prefixes that lead to an expert, each with the coordinate that comes next."""
    first, *others = uid.coordinates
    prefix = f"{uid.name}.{first}."
    if not others:
        return [(prefix, LONE_COORDINATE)]
    steps = []
    for coordinate in others:
        steps.append((prefix, coordinate))
        prefix = f"{prefix}{coordinate}."
    return steps


def _is_there(outcome: Stored) -> bool:
    """Whether a prefix leads on: also when another peer has said so, for longer."""
    return bool(outcome) or outcome.verdict is Verdict.NOT_NEWER


def _own_addresses(dht: DHT) -> list[Address]:
    if not dht.addresses:
        raise UsageError(
            "This peer cannot be called, so it cannot serve experts.",
            cause="it is a client of the DHT: it listens nowhere, and is registered at no relay.",
            next_step="let it listen, or call use_relays() first.",
        )
    return list(dht.addresses)


def _address_of(uid: ExpertUid, found: Value | None) -> ExpertAddress | None:
    if found is None or not isinstance(found.value, dict):
        return None
    signed: dict[PeerId, Value] = {}
    unsigned: dict[PeerId, Value] = {}
    for subkey, slot in found.value.items():
        server = owner_of_subkey(subkey)
        if server is not None and slot.owner == server:
            signed[server] = slot
        elif isinstance(subkey, bytes) and len(subkey) == ID_BYTES:
            unsigned[PeerId(subkey)] = slot
    promises = [
        (-slot.expires_at_s, server, peers)
        for server, slot in (unsigned | signed).items()  # what a peer has signed counts
        if (peers := _peers(server, slot.value))
    ]
    if not promises:
        return None
    promises.sort()
    in_order = tuple(peer for _, _, peers in promises for peer in peers)
    return ExpertAddress(uid, in_order, expires_at_s=-promises[0][0])


def _peers(server: PeerId, value: Any) -> list[Peer]:
    """Of what a stranger has written."""
    if not isinstance(value, list):
        return []
    texts = [
        text
        for text in value[:_MAX_ADDRESSES]
        if isinstance(text, str) and len(text) <= _MAX_ADDRESS_CHARS  # longer ones are not to be remembered
    ]
    return [peer for text in texts if (peer := _peer(server, text)) is not None]


@functools.lru_cache(maxsize=4096)
def _peer(server: PeerId, text: str) -> Peer | None:
    """Most experts of a search are at a few peers."""
    try:
        return Peer(Address.parse(text), server)
    except UsageError:
        return None


# --- the best experts of a grid, by the scores that a gate gives to the coordinates of each axis ---
#
# The search goes from axis to axis and keeps the prefixes with the best sums of scores, of those that lead to
# an expert. On the first axis it guesses, best scores first; further on a prefix's record tells which
# coordinates come next. Samples of a batch go step by step together, and look up together what they need.

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
        """The prefixes with these ranks, and their sums of scores."""
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
