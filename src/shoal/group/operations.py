"""What an operation moves, by formula: who sends how many bytes to whom, seen from one worker.

The formulas are those of a network without shared memory, so that figures of one machine say what a cluster
would have to carry; `Metered` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from shoal.group.base import Group, Snapshot
from shoal.topology import Weights

Bytes = Mapping[int, int]
"""By rank."""

_NONE: Bytes = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a group's method, as one worker makes it."""

    name: str
    size_bytes: int = 0
    sends: Bytes = field(default_factory=lambda: _NONE)
    receives: Bytes = field(default_factory=lambda: _NONE)
    num_steps: int = 1
    """How many times one after the other something is sent: each waits for the one before."""
    learns: Callable[[Any], Bytes] | None = None
    """For what only the result tells: from it to what was received."""
    is_request: bool = False
    """Whether what is received is sent only when the request has arrived."""

    @property
    def sent_bytes(self) -> int:
        """To all together."""
        return sum(self.sends.values())

    @property
    def received_bytes(self) -> int:
        """From all together, as far as it is known beforehand."""
        return sum(self.receives.values())


def all_reduce(group: Group, tensor: torch.Tensor) -> Operation:
    """In a ring of the members."""
    members = list(group.members)
    if len(members) < 2 or group.rank not in members:
        return Operation("all_reduce", tensor.nbytes)
    place = members.index(group.rank)
    num_steps = 2 * (len(members) - 1)
    size_bytes = num_steps * tensor.nbytes // len(members)
    following = members[(place + 1) % len(members)]
    return Operation(
        "all_reduce",
        tensor.nbytes,
        {following: size_bytes},
        {members[place - 1]: size_bytes},
        num_steps,
    )


def broadcast(group: Group, tensor: torch.Tensor, root: int) -> Operation:
    """From the root straight to everybody."""
    if group.rank == root:
        return Operation("broadcast", tensor.nbytes, dict.fromkeys(_others(group), tensor.nbytes))
    return Operation("broadcast", tensor.nbytes, receives={root: tensor.nbytes})


def all_gather(group: Group, tensor: torch.Tensor) -> Operation:
    """From everybody straight to everybody; the others' sizes are known when they have come."""
    members = tuple(group.members)

    def learn(result: list[torch.Tensor]) -> Bytes:
        given = zip(members, result, strict=False)  # a member may have left since
        return {rank: part.nbytes for rank, part in given if rank != group.rank}

    sends = dict.fromkeys(_others(group), tensor.nbytes)
    return Operation("all_gather", tensor.nbytes, sends, learns=learn)


def exchange(group: Group, tensor: torch.Tensor, weights: Weights, name: str = "exchange") -> Operation:
    """With those that the weights name and that are there."""
    destinations = weights.sources if weights.destinations is None else weights.destinations
    return _exchange(group, tensor, name, destinations, weights.sources)


def exchange_machines(group: Group, tensor: torch.Tensor, weights: Weights) -> Operation:
    """With all workers of one's own machine and of those that the weights name."""
    machines = [group.machine, *weights.sources]
    ranks = [rank for rank in group.members if rank != group.rank and group.machine_of(rank) in machines]
    return _exchange(group, tensor, "exchange_machines", ranks, ranks)


def barrier(group: Group) -> Operation:
    """No bytes, but a word from everybody to everybody."""
    words = dict.fromkeys(_others(group), 0)
    return Operation("barrier", 0, words, words)


def fetch(group: Group, peer: int) -> Operation:
    """A request, and what the peer has published."""
    if peer == group.rank:
        return Operation("fetch")

    def learn(snapshot: Snapshot | None) -> Bytes:
        return {} if snapshot is None else {peer: snapshot.tensor.nbytes}

    return Operation("fetch", sends={peer: 0}, learns=learn, is_request=True)


def write(group: Group, name: str, to: int, tensor: torch.Tensor) -> Operation:
    """Into a window of `to`, if it is there; over when it has arrived."""
    sends = {to: tensor.nbytes} if to in _others(group) else {}
    return Operation(name, tensor.nbytes, sends, is_request=True)


def read(group: Group, peer: int, into: torch.Tensor) -> Operation:
    """A request, and a copy of what the peer has published."""
    if peer == group.rank:
        return Operation("read", into.nbytes)

    def learn(version: int | None) -> Bytes:
        return {} if version is None else {peer: into.nbytes}

    return Operation("read", into.nbytes, {peer: 0}, learns=learn, is_request=True)


def _exchange(
    group: Group, tensor: torch.Tensor, name: str, to: Iterable[int], sources: Collection[int]
) -> Operation:
    members, size_bytes = group.members, tensor.nbytes
    return Operation(
        name,
        size_bytes,
        {rank: size_bytes for rank in to if rank in members},
        {rank: size_bytes for rank in sources if rank in members},
    )


def _others(group: Group) -> list[int]:
    return [rank for rank in group.members if rank != group.rank]
