"""Time-varying topologies in which each rank has at most one partner a turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core.errors import UsageError
from shoal.topology.checks import is_regular
from shoal.topology.draws import Draws
from shoal.topology.graphs import powers
from shoal.topology.plan import Topology, Turn, check_size, circulant_turn, uniform_turn
from shoal.topology.sides import sources_from_destinations


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
        order = Draws(f"random-matching/{size}/{seed}/{turn}").shuffled(range(size))
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
