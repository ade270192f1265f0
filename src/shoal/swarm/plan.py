"""Who averages which part of a round: the plan, by pure functions.

Shares come from bandwidths by water-filling. With n contributors a reducer of share s sends (1 − s) of its
own values away and n − 1 copies of its average: 1 + (n − 2)·s of the whole. All finish together at time T if
1 + (n − 2)·s_i = T·b_i, and who would get a negative share reduces nothing: s_i = (T·b_i − 1) / (n − 2) over
those with T·b_i > 1, where T = (n − 2 + k) / Σ b for the k fastest. (Moshpit's and hivemind's load balancing
solve the same as a linear program.)
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from shoal.swarm.robust import capped
from shoal.swarm.wire import MAX_SAMPLES, Registration, RoundPlan, SwarmMember

SMALLEST_PART_BYTES = 16 << 10
LARGEST_PART_BYTES = 1 << 20
GROUP = 32
"""More contributors than this average in groups of at most so many, and then the groups' averages."""
SLOW_SHARE = 0.5
"""Who takes averages at less than this share of the median speed has a slow way down."""
_ALIGNMENT = 16  # elements: float32 parts begin on 64-byte boundaries


def shares(bandwidths: Sequence[float], num_contributors: int) -> list[float]:
    """Divides the work of reducing so that all lines are busy equally long; the shares sum to 1."""
    if not bandwidths:
        return []
    extra = num_contributors - 2
    fastest = sorted(range(len(bandwidths)), key=lambda place: (-bandwidths[place], place))
    if extra <= 0:  # two peers send the same whatever their shares are
        total = sum(bandwidths)
        return [bandwidth / total for bandwidth in bandwidths]
    chosen, level = fastest[:1], (extra + 1) / bandwidths[fastest[0]]
    for num in range(2, len(fastest) + 1):
        slowest = bandwidths[fastest[num - 1]]
        found = (extra + num) / sum(bandwidths[place] for place in fastest[:num])
        if found * slowest <= 1:  # it is busy with its own values longer than the others with everything
            break
        chosen, level = fastest[:num], found
    made = [0.0] * len(bandwidths)
    for place in chosen:
        made[place] = (level * bandwidths[place] - 1) / extra
    return made


def make_plan(
    members: Sequence[SwarmMember],
    registered: Mapping[int, Registration],
    num_elements: int,
    *,
    bytes_per_element: float = 4.0,
    reduce_s: float = 30.0,
    left_out: Sequence[int] = (),
    span: tuple[int, int] | None = None,
    is_robust: bool = False,
) -> RoundPlan | None:
    """Makes the plan of a round from who has registered; None where nobody brings samples or can reduce.

    Those `left_out` neither contribute nor reduce. Of the elements those in `span` are averaged, or all. In a
    robust run shares go by bandwidth, of which nobody's counts for more than four times the median: who
    claims a fast line averages no more than that.
    """
    fitting = {
        place: registration
        for place, registration in sorted(registered.items())
        if place not in left_out
        and registration.num_elements == num_elements
        and 0 <= registration.samples <= MAX_SAMPLES
        and 0 <= registration.bandwidth < math.inf
        and 0 <= registration.taken_mbit_s < math.inf
    }
    contributors = [place for place, registration in fitting.items() if registration.samples > 0]
    # where nobody can be dialed, whoever leads reduces: the others have a way to it
    reducers = [place for place in fitting if members[place].is_reachable] or [0] * (0 in fitting)
    if not contributors or not reducers:
        return None
    first, last = span or (0, num_elements)
    num_elements = last - first
    smallest = max(_ALIGNMENT, int(SMALLEST_PART_BYTES / bytes_per_element))
    largest = max(smallest, int(LARGEST_PART_BYTES / bytes_per_element))
    bandwidths = _bandwidths([fitting[place] for place in reducers], list(fitting.values()))
    bandwidths = capped(bandwidths) if is_robust else bandwidths
    samples = tuple(fitting[place].samples for place in contributors)
    if len(contributors) > GROUP:
        num_parts = max(1, min(max(GROUP, -(-num_elements // largest)), num_elements // smallest))
        lines = dict(zip(reducers, bandwidths, strict=True))
        ends, tops, leaders = _in_groups(contributors, lines, num_elements, num_parts)
        backups = tuple(_backup(owner, part, reducers) for part, owner in enumerate(tops))
        ends = tuple(first + end for end in ends)
        return RoundPlan(tuple(contributors), samples, ends, tops, backups, reduce_s, leaders)
    wanted = shares(bandwidths, 2 if is_robust else len(contributors))
    # a reducer gets a part at least, so small models have fewer reducers
    num_reducers = max(1, min(sum(share > 0 for share in wanted), num_elements // smallest))
    best = sorted(range(len(reducers)), key=lambda place: (-wanted[place], place))[:num_reducers]
    total = sum(wanted[place] for place in best)
    bounds, owners = [0], []
    left = 1.0
    for place in sorted(best):
        begin, left = bounds[-1], left - wanted[place] / total
        end = num_elements if left < 1e-9 else round((1 - left) * num_elements / _ALIGNMENT) * _ALIGNMENT
        end = min(end, num_elements)
        num_parts = max(1, -(-(end - begin) // largest))
        for part in range(1, num_parts + 1):
            bound = end if part == num_parts else begin + (end - begin) * part // num_parts
            if bound > bounds[-1]:
                bounds.append(bound)
                owners.append(reducers[place])
    bounds[-1] = num_elements
    return RoundPlan(
        contributors=tuple(contributors),
        samples=samples,
        bounds=tuple(first + bound for bound in bounds),
        reducers=tuple(owners),
        backups=tuple(_backup(owner, part, reducers) for part, owner in enumerate(owners)),
        reduce_s=reduce_s,
    )


def _bandwidths(reducers: Sequence[Registration], all_members: Sequence[Registration]) -> list[float]:
    """Says what each reducer's line is worth; one that nobody knows counts as most others.

    All take the same averages from the same reducers: who takes them much slower than most do is held up by
    its own way down, and its line is worth no more than that.
    """
    known = [one.bandwidth for one in reducers if one.bandwidth > 0]
    usual = statistics.median_low(known) if known else 1.0
    taken = [one.taken_mbit_s for one in all_members if one.taken_mbit_s > 0]
    slow = SLOW_SHARE * statistics.median_low(taken) if taken else 0.0
    return [
        min(one.bandwidth or usual, one.taken_mbit_s if 0 < one.taken_mbit_s < slow else math.inf)
        for one in reducers
    ]


def _in_groups(
    contributors: Sequence[int], lines: Mapping[int, float], num_elements: int, num_parts: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Gives the bounds of parts, who averages each over all groups, and who does for each group.

    A member of a group sends and takes as much as in a round of the group alone. What a leader sends on is
    one part for each that it leads, and who averages over the groups sends that many parts once more.
    """
    num_groups = -(-len(contributors) // GROUP)
    bounds = [num_elements * part // num_parts // _ALIGNMENT * _ALIGNMENT for part in range(num_parts)]
    # the first in the order has to talk with everybody
    fastest = sorted(lines, key=lambda place: (-lines[place], -place))[:num_parts]
    leaders = []
    for group in range(num_groups):
        size = sum(place % num_groups == group for place in contributors)
        own = [place for place in lines if place % num_groups == group]
        leaders.append(_dealt(own, shares([lines[place] for place in own], size), num_parts))
    owners = _dealt(fastest, [lines[place] for place in fastest], num_parts)
    return (*bounds, num_elements), owners, tuple(leaders)


def _dealt(places: Sequence[int], weights: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Deals parts in proportion to weights; -1 where there is nobody."""
    if not places:
        return (-1,) * num_parts
    ends = list(itertools.accumulate(weights))
    found = [bisect.bisect(ends, ends[-1] * (part + 0.5) / num_parts) for part in range(num_parts)]
    return tuple(places[min(index, len(places) - 1)] for index in found)


def _backup(owner: int, part: int, reducers: Sequence[int]) -> int:
    """Spreads a lost reducer's parts over all others."""
    others = [place for place in reducers if place != owner]
    return others[(owner + part) % len(others)] if others else -1
