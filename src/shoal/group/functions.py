"""What can be said with the operations of any group: functions over the interface, each written once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import msgspec
import torch

from shoal.core import Deadline
from shoal.group.base import Group, Handle, held_by_itself
from shoal.topology import MachineWeights, Weights

T = TypeVar("T")


def others(group: Group) -> list[int]:
    """Lists the members but this worker."""
    return [rank for rank in group.members if rank != group.rank]


def announce(group: Group, num_operations: int) -> None:
    """Says that this worker will issue so many all-reduces next, whatever it computes before.

    On a GPU others need not wait for it then: their streams do. Who announces and then issues something else
    is told so as ever, a call later. Other groups have no use for it.
    """
    tell = getattr(group, "announce", None)
    if tell is not None:
        tell(num_operations)


def pair_gossip(group: Group, tensor: torch.Tensor, peer: int, weight: float = 0.5) -> Handle[torch.Tensor]:
    """Takes `(1 − weight) · own + weight · peer's` in place; a collective in which each may name another."""
    return group.exchange(tensor, Weights(1 - weight, {peer: weight}))


def start_mean(group: Group, tensor: torch.Tensor) -> Handle[torch.Tensor]:
    """Starts a mean in place, over the members that are there; on one machine others' bits may differ."""
    if group.num_machines > 1:  # one worker of each sends, once, and all get equal bits
        return group.all_reduce(tensor)
    peers = others(group)
    return group.exchange(tensor, Weights.uniform(peers, peers))


def start_copy(group: Group, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
    """Copies in place from `root`; who finds it gone keeps what it has, so that its loss ends nothing."""
    if group.rank != root:
        return group.exchange(tensor, Weights(0.0, {root: 1.0}, {}))
    return group.exchange(tensor, Weights(1.0, {}, dict.fromkeys(others(group), 1.0)))


def exchange_machines(
    group: Group, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
) -> Handle[torch.Tensor]:
    """Averages inside each machine, and with other machines by `weights` over machine indices."""
    return group.exchange(tensor, MachineWeights(weights), out=out)


def spread_over_ranks(group: Group, between: Weights | MachineWeights) -> Weights:
    """Divides the weights of machines among those of their workers that are there."""
    if isinstance(between, Weights):
        return between
    weights = between.weights
    weights.check(group.machine, group.num_machines)
    factors = {group.machine: weights.own, **weights.sources}
    ranks: dict[int, list[int]] = {}
    for rank in group.members:
        ranks.setdefault(group.machines[rank], []).append(rank)
    gone = [machine for machine in weights.sources if machine not in ranks]
    factors[group.machine] += sum(factors.pop(machine) for machine in gone)
    spread = {
        rank: factor / len(ranks[machine]) for machine, factor in factors.items() for rank in ranks[machine]
    }
    return Weights(spread.pop(group.rank), spread, is_by_rule=True)


def share(group: Group, value: Any) -> list[Any]:
    """Collects everybody's small value (numbers, strings, lists, dicts), in rank order. Collective."""
    encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
    return [msgspec.msgpack.decode(part.numpy().data) for part in group.all_gather(encoded).wait()]


def next_number(group: Group, kind: str) -> int:
    """Gives a number that nothing of this kind has had in this group, the same to all members. Collective."""
    number: int = max(share(group, group.notes.get(kind, 0)))
    group.notes[kind] = number + 1
    return number


@contextlib.contextmanager
def span(group: Group, name: str) -> Iterator[None]:
    """Marks a part of the user's program in the timeline; does nothing without one."""
    if group.timeline is None:
        yield
    else:
        with group.timeline.span(name):
            yield


class Continued(Handle[T]):
    """An operation whose result is made of that of another one, when it is first asked for."""

    _result: T

    def __init__(self, first: Handle[Any], finish: Callable[[Any], T]) -> None:
        self._first: Handle[Any] | None = first
        self._finish = finish

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result, made of the other one's once that is there."""
        if self._first is not None:
            self._result = self._finish(self._first.wait(deadline))
            self._first = None
        return self._result

    def is_done(self) -> bool:
        """Tells whether the other one is over."""
        return self._first is None or self._first.is_done()


_CHOOSING, _TICKET = range(2)


class Mutex:
    """Lets one member at a time into its `with` block; one that is lost or leaves holds it no more.

    Made on all members together. Lamport's bakery algorithm ("A New Solution of Dijkstra's Concurrent
    Programming Problem", 1974): each member publishes whether it is choosing a ticket, and its ticket; who
    has the lowest one, of equal ones the lowest rank, is let in.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name
        self._memory = group.empty(2, torch.int64)
        self._window = group.window(f"mutex {name}", 2, torch.int64, sources=())
        self._window.publish(self._memory, 0)
        self._version = 0
        self._is_inside = False
        group.barrier().wait()

    def __enter__(self) -> Self:
        if self._is_inside:
            raise held_by_itself(self._group.rank, f"mutex {self._name!r}")
        self._say(_CHOOSING, 1)
        own = 1 + max([0, *(self._look(rank)[_TICKET] for rank in others(self._group))]), self._group.rank
        self._say(_TICKET, own[0])
        self._say(_CHOOSING, 0)
        for rank in others(self._group):
            self._wait_for(rank, own)
        self._is_inside = True
        return self

    def __exit__(self, *raised: object) -> None:
        self._is_inside = False
        self._say(_TICKET, 0)

    def close(self) -> None:
        """Gives the memory back; collective."""
        self._window.close()
        self._group.free(self._memory)

    def _say(self, index: int, value: int) -> None:
        self._version += 1
        with self._window.changing(self._version):
            self._memory[index] = value

    def _look(self, rank: int, version: int = 0) -> tuple[int, int, int]:
        """Reads whether a member is choosing, its ticket and the version, once it is that new."""
        into = torch.zeros(2, dtype=torch.int64)
        seen = self._window.read(rank, into, version=version).wait()
        if seen is None:
            return 0, 0, 0  # it is gone, and wants nothing
        choosing, ticket = into.tolist()
        return choosing, ticket, seen

    def _wait_for(self, rank: int, own: tuple[int, int]) -> None:
        """Waits until a member has chosen, and has no ticket that comes before this worker's."""
        choosing, ticket, version = self._look(rank)
        while choosing or (ticket and (ticket, rank) < own):
            choosing, ticket, version = self._look(rank, version + 1)
