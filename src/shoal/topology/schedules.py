"""Time-varying topologies: at most one partner a turn, or by which ranks share a machine.

On machines of equal size, rank = machine · local_size + local rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core.errors import UsageError
from shoal.topology.graphs import CommonDraws, powers
from shoal.topology.plan import Topology, Turn, check_size, circulant_turn, matrix_turn, uniform_turn
from shoal.topology.properties import is_regular
from shoal.topology.weights import sources_from_destinations


def one_peer_exponential(size: int) -> Topology:
    """In turn t every rank sends to the one 2^t ahead and mixes half and half.

    With a power of two, a period ends in the exact average.
    """
    check_size(size)
    turns = [circulant_turn(size, [distance]) for distance in powers(2, size)]
    return Topology.cycle("one-peer-exponential", turns or [circulant_turn(size, [])])


def one_peer(graph: Topology) -> Topology:
    """Every rank sends to one of its destinations in `graph` at a time, one after another, clockwise.

    It gives itself and each rank from which it receives the same weight. On a regular graph the turns are
    such that each rank receives from exactly one, so the matrices are doubly stochastic. On an irregular one
    several may send to the same rank at once and the matrices are row-stochastic only: the ranks agree, but
    not on their average. The graph's own weights do not count.
    """
    if graph.period != 1:
        raise UsageError(
            f"the topology '{graph.name}' changes from turn to turn already.", next_step="give a static one."
        )
    clockwise = [_clockwise(graph, rank) for rank in range(graph.size)]
    name = f"one-peer:{graph.name}"
    if is_regular(graph):
        turns = [_send_turn([[peer] for peer in peers]) for peers in _permutations(clockwise)]
        return Topology.cycle(name, turns or [uniform_turn([()] * graph.size)])

    def rule(turn: int) -> Turn:
        return _send_turn([peers[turn % len(peers) :][:1] if peers else [] for peers in clockwise])

    return Topology(name, graph.size, math.lcm(*(len(peers) or 1 for peers in clockwise)), rule)


def random_matching(size: int, seed: int = 0, period: int = 256) -> Topology:
    """Random pairs mix half and half, drawn anew in each turn, from the seed and the turn alone.

    With an odd number of ranks one pauses. The draws repeat after `period` turns.
    """
    check_size(size)
    if period < 1:
        raise UsageError(f"a schedule cannot repeat after {period} turns.", next_step="give 1 or more.")

    def rule(turn: int) -> Turn:
        order = CommonDraws(f"random-matching/{size}/{seed}/{turn}").shuffled(range(size))
        partners: list[list[int]] = [[] for _ in range(size)]
        for one, other in zip(order[::2], order[1::2], strict=False):
            partners[one], partners[other] = [other], [one]
        return uniform_turn(partners)

    name = f"random-matching:{seed}" if seed else "random-matching"
    return Topology(name, size, period if size > 1 else 1, rule)


def _clockwise(graph: Topology, rank: int) -> list[int]:
    distances = sorted((peer - rank) % graph.size for peer in graph.destinations(rank))
    return [(rank + distance) % graph.size for distance in distances]


def _send_turn(destinations: Sequence[Sequence[int]]) -> Turn:
    return uniform_turn(sources_from_destinations(destinations))


def _permutations(destinations: Sequence[Sequence[int]]) -> list[list[int]]:
    """A regular graph as turns in which each rank sends to one and receives from one (König 1916).

    Each rank's order is kept where others leave it the choice.
    """
    left = [list(peers) for peers in destinations]
    turns = []
    for _ in range(len(left[0])):
        chosen = _perfect_matching(left)
        for peers, peer in zip(left, chosen, strict=True):
            peers.remove(peer)
        turns.append(chosen)
    return turns


def _perfect_matching(candidates: Sequence[Sequence[int]]) -> list[int]:
    """One candidate for each rank, no two the same, by augmenting paths."""
    chosen: list[int] = [-1] * len(candidates)
    chooser: list[int] = [-1] * len(candidates)
    for start in range(len(candidates)):
        asked_by: dict[int, int] = {}
        queue = [start]
        for rank in queue:
            found = -1
            for peer in candidates[rank]:
                if peer in asked_by:
                    continue
                asked_by[peer] = rank
                if chooser[peer] < 0:
                    found = peer
                    break
                queue.append(chooser[peer])
            if found >= 0:
                break
        while found >= 0:
            rank = asked_by[found]
            chooser[found] = rank
            chosen[rank], found = found, chosen[rank]
    return chosen


def inner_outer_ring(size: int, local_size: int) -> Topology:
    """In turn t local rank t of each machine sends to its like on the next one, the others ring inside.

    Needs at least 3 ranks on a machine. On a single machine it is a ring to the right.
    """
    return _inner_outer("inner-outer-ring", size, local_size, [1], [1])


def inner_outer_exponential(size: int, local_size: int) -> Topology:
    """As `inner_outer_ring`, with powers of two as distances between machines and inside.

    Within a period each rank sends outside over every distance. On a single machine it is the one-peer
    exponential graph.
    """
    machines = size // max(1, local_size)
    inside = list(powers(2, local_size - 1 if machines > 1 else local_size))
    return _inner_outer("inner-outer-exponential", size, local_size, list(powers(2, machines)), inside)


def machine_exponential(size: int, local_size: int = 1) -> Topology:
    """Each machine mixes its average half and half with that of the machine 2^t before it."""
    return over_machines(one_peer_exponential(_machines(size, local_size)), local_size, "machine-exponential")


def over_machines(topology: Topology, local_size: int, name: str | None = None) -> Topology:
    """A topology of machines as one of ranks: each rank gets the mix of the machines' averages."""

    def rule(turn: int) -> Turn:
        return matrix_turn(topology.matrix(turn).repeat(local_size, 0).repeat(local_size, 1) / local_size)

    return Topology(name or f"machines:{topology.name}", topology.size * local_size, topology.period, rule)


def _inner_outer(
    name: str, size: int, local_size: int, outside: Sequence[int], inside: Sequence[int]
) -> Topology:
    check_size(size)
    if size == 1:
        return Topology.static(name, uniform_turn([()]))
    machines = _machines(size, local_size)
    if local_size < 3:
        raise UsageError(
            f"'{name}' needs at least 3 ranks on each machine, not {local_size}.",
            cause="one of them goes outside each turn, and the others exchange inside.",
            next_step="start more ranks on a machine, or take 'one-peer-exponential'.",
        )
    if machines == 1:
        hops = [[[(rank + step) % size] for rank in range(size)] for step in inside]
        return Topology.cycle(name, [uniform_turn(sources_from_destinations(hop)) for hop in hops])
    num_shifts = math.gcd(local_size, len(outside))
    num_turns = math.lcm(local_size, len(outside))

    def rule(turn: int) -> Turn:
        # without the shift a local rank would meet only some distances where the two counts share a factor
        shift = turn // num_turns % num_shifts
        hop = outside[(turn + shift) % len(outside)] * local_size
        step = inside[turn % len(inside)]
        outsider = turn % local_size
        insiders = [(outsider + place) % local_size for place in range(1, local_size)]
        destinations: list[list[int]] = [[] for _ in range(size)]
        for first in range(0, size, local_size):
            destinations[first + outsider] = [(first + outsider + hop) % size]
            for place, local_rank in enumerate(insiders):
                destinations[first + local_rank] = [first + insiders[(place + step) % len(insiders)]]
        return uniform_turn(sources_from_destinations(destinations))

    return Topology(name, size, math.lcm(num_turns * num_shifts, len(inside)), rule)


def _machines(size: int, local_size: int) -> int:
    check_size(size)
    if local_size < 1 or size % local_size:
        raise UsageError(
            f"{size} ranks do not fill machines of {local_size} each.",
            next_step="start the same number of ranks on every machine, and give it as local_size.",
        )
    return size // local_size
