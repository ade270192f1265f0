"""Time-varying topologies that know which ranks share a machine: rank = machine · local_size + local rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shoal.core.errors import UsageError
from shoal.topology.graphs import powers
from shoal.topology.plan import Topology, Turn, check_size, matrix_turn, uniform_turn
from shoal.topology.schedules import one_peer_exponential
from shoal.topology.sides import sources_from_destinations


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
