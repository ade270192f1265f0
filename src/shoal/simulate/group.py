"""A group in virtual time: its members are threads of one process that take turns.

Operations take as long as their bytes would over the links of a profile, by the same formulas as `Metered`:
an all-reduce goes round a ring, everything else straight to its receivers. When what is sent arrives, and
when a ring has reduced, are times alone, no bytes (`Links`, `RingAllReduce`): both executors of a simulated
world ask here, so that they agree.

An operation that several take part in is a `Collective`: each member arrives with what it brings, and is
through at a time that follows from when those that it needs have arrived and what lies between them. Values
are copied on arrival, as if they had been sent then. What is written into a window travels, and lies in its
slot when it has come; what a member publishes others get by a request there and a copy back. Members that
share memory with each other are no faster for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch

from shoal.core import Address, Deadline, DeadlineExceeded, ShoalError, UsageError
from shoal.core.turns import Turn, Turns
from shoal.group import operations
from shoal.group.base import (
    Done,
    GroupStats,
    Handle,
    Loss,
    Reduction,
    Snapshot,
    Window,
    WindowForm,
    Write,
    check_rank,
    rank_to_blame,
)
from shoal.group.functions import others, share
from shoal.group.kernels import CopiedSnapshot, check_reduction, copy_out, mix_into, reduce_into
from shoal.group.operations import OperationPlan, TrafficCounter
from shoal.group.solo import LocalGroup, LocalWindow
from shoal.topology import MachineWeights, Weights
from shoal.transport import Conditions
from shoal.transport.network.links import Link, Passage

T = TypeVar("T")
CallAt: TypeAlias = Callable[[float, Callable[[], None]], None]
"""Has something called at a time, in the order of times and, of equal ones, of being asked."""
Over: TypeAlias = Callable[[int, float], None]
"""Is told of a rank, and of a time."""
NOTICED_AFTER_S = 0.02
"""A process that has ended is missed so much later: what its machine says when its sockets close."""
_Arrival: TypeAlias = "tuple[Collective, PendingOperation[Any]]"
_NOTHING = torch.empty(0)


class SimulatedGroup(LocalGroup):
    """One member's side; for the thread alone that the network's turns run for it."""

    def __init__(
        self, network: SimulatedNetwork, rank: int, machines: Sequence[int], patience: float = 1.0
    ) -> None:
        super().__init__(rank, machines, patience)
        self._network = network
        self._counter = TrafficCounter(rank, self.size)
        self._num_issued = 0
        self._under_way: list[tuple[torch.Tensor, PendingOperation[Any]]] = []

    @property
    def members(self) -> Sequence[int]:
        """The ranks that are there at this moment."""
        return () if self._has_left else tuple(self._network.present)

    @property
    def lost(self) -> Mapping[int, Loss]:
        """The peers that were lost until this moment."""
        return MappingProxyType(self._network.lost)

    @property
    def stats(self) -> GroupStats:
        """Bytes by the formulas of `Metered`; a peer is waited for until it has issued its part."""
        return self._counter.stats(tuple(self._network.waited_s[self.rank]))

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Goes round a ring of the members, which each of them begins when it comes."""
        check_reduction(tensor, op)
        self._begin(tensor)
        network, plan = self._network, operations.all_reduce(self, tensor)
        kind = f"all_reduce ({op}) of {_shape(tensor)}"
        collective, handle = self._arrive(plan, kind, _Message(_copy(tensor)), to=())

        def over(at_s: float) -> None:
            came_last = collective.last_of(collective.arrived_s)
            handle.resolve(at_s, lambda: _store(tensor, collective.result), came_last)

        def reduce() -> None:
            if collective.result is None:
                values = {rank: collective.brought[rank].values for rank in sorted(collective.brought)}
                collective.result = torch.empty_like(values[self.rank])
                reduce_into(collective.result, list(values.values()), op)
                if collective.ring is None or collective.ring.ranks != tuple(values):
                    # one has gone before it came: the others begin again, now
                    collective.ring = self._ring(collective, list(values), tensor.nbytes)
                    for rank in values:
                        collective.ring.begin(rank, network.turns.now_s)

        collective.waiting[self.rank] = over
        if collective.ring is None:
            collective.ring = self._ring(collective, network.present, tensor.nbytes)
        collective.settle(self, plan, handle, None, reduce)
        collective.ring.begin(self.rank, network.turns.now_s)
        return handle

    def _ring(self, collective: Collective, ranks: Sequence[int], size_bytes: int) -> RingAllReduce:
        network = self._network
        return RingAllReduce(network.links, network.turns.call_at, ranks, size_bytes, collective.over)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Goes straight from the root."""
        check_rank(root, self.size)
        self._begin(tensor)
        is_root = self.rank == root
        sent = _Message(_copy(tensor) if is_root else _NOTHING)

        def take(brought: Mapping[int, _Message]) -> torch.Tensor:
            return tensor if is_root else _store(tensor, brought[root].values)

        plan = operations.broadcast(self, tensor, root)
        return self._send(plan, f"broadcast from {root} of {_shape(tensor)}", sent, take, [root])

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Goes straight from everybody to everybody."""
        self._begin(tensor)

        def take(brought: Mapping[int, _Message]) -> list[torch.Tensor]:
            given = {rank: brought[rank].values.clone() for rank in sorted(brought)}
            self._counter.moved({}, {rank: part.nbytes for rank, part in given.items()})
            return list(given.values())

        plan = operations.all_gather(self, tensor)
        return self._send(plan, "all_gather", _Message(_copy(tensor)), take)

    def barrier(self) -> Handle[None]:
        """Sends a word from everybody to everybody."""
        self._begin()
        return self._send(operations.barrier(self), "barrier", _Message(_NOTHING), lambda brought: None)

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Goes straight between neighbours: waits for one's own sources alone."""
        chosen, result = self._prepare_exchange(tensor, weights, out)
        self._begin(tensor, result)

        def take(brought: Mapping[int, _Message]) -> torch.Tensor:
            rest = chosen.without([rank for rank in chosen.sources if rank not in brought])
            own = brought[self.rank].values
            mixed = torch.empty_like(own)
            sources = [
                (brought[rank].values.view(-1), weight * brought[rank].factor_for(self.rank, rank))
                for rank, weight in rest.sources.items()
            ]
            mix_into(mixed.view(-1), own.view(-1), rest.own, sources)
            return _store(result, mixed)

        plan = operations.exchange(self, tensor, chosen, out=result)
        sent = _Message(_copy(tensor), chosen.destinations)
        return self._send(plan, f"exchange of {_shape(tensor)}", sent, take, sorted(chosen.sources))

    def _make_window(self, form: WindowForm, sources: Collection[int] | None) -> Window:
        """Makes a window; all have theirs when it returns, unless it has no slots."""
        self._check_member()
        for rank in sources or ():
            check_rank(rank, self.size)
        window = SimulatedWindow(self, form, others(self) if sources is None else sources)
        if self.size > 1 and sources != ():  # an empty list is one member's: others have slots
            share(self, [form.name, form.num_elements, str(form.dtype)])
        return window

    def progress(self) -> None:
        """Looks whether something has happened: time does all the work."""
        self._network.turns.current.poll(lambda: False, "progress")

    def leave(self) -> None:
        """Has the others go on without this worker from now on."""
        if not self._has_left:
            self._network.turns.current.look_up()
            self._has_left = True
            self._network.leave(self.rank)

    def close(self, error: BaseException | None = None) -> None:
        """Leaves; with an error the others find this worker lost, or blame whom it blames."""
        if error is None:
            self.leave()
        elif not self._has_left:
            self._has_left = True
            blamed = rank_to_blame(error, self.rank)
            network = self._network
            loss = Loss(
                self.rank,
                "its worker ended without leaving",
                at_s=network.turns.clock.now_s() + NOTICED_AFTER_S,
                because=None if blamed is None else network.lost.get(blamed),
            )

            def notice() -> None:
                network.lost[self.rank] = loss
                network.leave(self.rank)

            network.turns.call_at(loss.at_s, notice)

    # --- how operations meet ---

    def _begin(self, *tensors: torch.Tensor) -> None:
        """Comes to one's own time, and after all operations on the same memory."""
        self._check_member()
        self._network.turns.current.look_up()
        self._under_way = [each for each in self._under_way if not each[1].is_taken]
        for tensor in tensors:
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            for memory, handle in list(self._under_way):
                if memory.data_ptr() < end and start < memory.data_ptr() + memory.nbytes:
                    handle.wait()

    def _send(
        self,
        plan: OperationPlan,
        kind: str,
        sent: _Message,
        take: Callable[[Mapping[int, _Message]], T],
        sources: Sequence[int] | None = None,
    ) -> Handle[T]:
        """Sends straight to others; is over when that has left, and what sources (None: all) sent has come.

        `take` makes the result of the messages of those that are there, one's own included.
        """
        collective, handle = self._arrive(plan, kind, sent, sorted(plan.sends))
        arrived_s, brought = collective.arrived_s, collective.brought

        def finish() -> None:
            heard = brought if sources is None else [rank for rank in sources if rank in brought]
            peers = [rank for rank in heard if rank != self.rank]
            left_s = [passage.left_at_s for passage in sent.passages.values()]
            comes_s = [self._arrives_s(brought[rank], rank, arrived_s[rank]) for rank in peers]
            messages = {rank: brought[rank] for rank in (*peers, self.rank)}
            due_s = max(arrived_s[self.rank], *left_s, *comes_s, 0.0)
            handle.resolve(due_s, partial(take, messages), collective.last_of(peers))

        collective.settle(self, plan, handle, sources, finish)
        return handle

    def _arrive(self, plan: OperationPlan, kind: str, sent: _Message, to: Iterable[int]) -> _Arrival:
        """Comes to the next operation with a message, which leaves for others now."""
        network = self._network
        self._counter.moved(plan.sends, plan.receives)
        number = self._num_issued
        self._num_issued += 1
        collective = network.collectives.setdefault(number, Collective(network, number))
        handle = PendingOperation[Any](network, self.rank, kind)
        if plan.tensor is not None:
            self._under_way.append((plan.tensor, handle))
        collective.arrive(self.rank, kind, sent)
        for rank in to:
            sent.passages[rank] = network.links.carry(
                self.rank, rank, network.turns.now_s, sent.values.nbytes
            )
        return collective, handle

    def _arrives_s(self, message: _Message, source: int, sent_s: float) -> float:
        """Tells when a message arrives here; one that was not reckoned with is sent to after the others."""
        if self.rank not in message.passages:
            passage = self._network.links.carry(source, self.rank, sent_s, message.values.nbytes)
            message.passages[self.rank] = passage
        return message.passages[self.rank].arrives_at_s


@dataclass(slots=True)
class _Message:
    """What one member sends to others in an operation, and how it travels."""

    values: torch.Tensor
    factors: Mapping[int, float] | None = None
    passages: dict[int, Passage] = field(default_factory=dict)

    def factor_for(self, rank: int, source: int) -> float:
        """Gives its factor on the way; UsageError where the sender does not send there."""
        if self.factors is None:
            return 1.0
        if rank not in self.factors:
            raise UsageError(
                f"rank {rank} takes rank {source} for a source, which does not send to it.",
                next_step="give weights whose sources and destinations agree.",
            )
        return self.factors[rank]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _store(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        tensor.copy_(values)
    return tensor


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


class SimulatedNetwork:
    """What the members of one group share: the time, who is there, the links between them, their windows.

    `addresses` are what a profile calls them.
    """

    def __init__(self, turns: Turns, conditions: Conditions, addresses: Sequence[Address]) -> None:
        size = len(addresses)
        self.turns = turns
        self.present = list(range(size))
        self.lost: dict[int, Loss] = {}
        self.waited_s = [[0.0] * size for _ in range(size)]
        self.links = Links(conditions, addresses)
        self.collectives: dict[int, Collective] = {}
        """By number: those to which somebody still comes."""
        self.windows: dict[tuple[int, str], SimulatedWindow] = {}
        self._attempts: dict[tuple[int, str], list[Callable[[], bool]]] = {}
        """By a member's rank, and the name of its window: what waits for a change of it."""

    def arrives_s(self, source: int, target: int, size_bytes: int) -> float:
        """Sends something over the link, and tells when it arrives."""
        if source == target:
            return self.turns.now_s
        return self.links.carry(source, target, self.turns.now_s, size_bytes).arrives_at_s

    def when_changed(self, rank: int, name: str, attempt: Callable[[], bool]) -> None:
        """Tries now, and whenever a member's window has changed or somebody goes, until it is true."""
        if not attempt():
            self._attempts.setdefault((rank, name), []).append(attempt)

    def look(self, rank: int, name: str) -> None:
        """Tries what waits for a change of a member's window."""
        waiting = self._attempts.pop((rank, name), [])
        self._attempts[rank, name] = [attempt for attempt in waiting if not attempt()]

    def leave(self, rank: int) -> None:
        """Has a member be gone from now on, and those go on that have waited for it."""
        self.present = [each for each in self.present if each != rank]
        for (owner, _), window in list(self.windows.items()):
            if owner == rank:
                window.drop_writes()
        for key in list(self._attempts):
            self.look(*key)
        for collective in list(self.collectives.values()):
            collective.look()


class SimulatedWindow(LocalWindow):
    """One member's window, which others write to and read over the links."""

    def __init__(self, group: SimulatedGroup, form: WindowForm, sources: Collection[int]) -> None:
        self._network = network = group._network
        super().__init__(group, form, sources, network.windows.get((group.rank, form.name)))
        self._counter = group._counter
        self._sent_s: dict[int, float] = {}
        """By source: when the last write that has come was sent."""
        self._what = f"writes into window {self.name!r}"
        network.windows[group.rank, form.name] = self

    def _write(self, to: int, write: Write) -> Handle[None]:
        """Is over when it is in the slot; at once for one that is gone."""
        self._check_write(to, write)
        network, rank = self._network, self._rank
        network.turns.current.look_up()
        if to not in network.present:
            return Done(None)
        target = network.windows.get((to, self.name))
        if target is not None:
            target._slot_of(rank)
        if to != rank:
            self._counter.sent_to[to] += write.tensor.nbytes
        handle = PendingOperation[None](network, rank, f"{write.kind} to rank {to} in {self.name!r}")
        sent, sent_s = dataclasses.replace(write, tensor=write.tensor.detach().clone()), network.turns.now_s

        def done() -> None:
            handle.resolve(network.turns.now_s, lambda: None)

        def arrived() -> None:
            there = network.windows.get((to, self.name))
            if there is None or to not in network.present:
                done()
            else:
                there._sent_s[rank] = sent_s
                there._slots[rank].offer(sent, done)
                network.look(to, self.name)

        network.turns.call_at(network.arrives_s(rank, to, write.tensor.nbytes), arrived)
        return handle

    def filled(self) -> Sequence[int]:
        """Lists the sources whose slots have something in them, at this worker's time."""
        self._check_open()
        self._network.turns.current.poll(lambda: bool(self._filled()), self._what)
        return self._filled()

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Waits until something is there, or nobody is left who could write."""
        self._check_open()
        network = self._network
        network.turns.current.look_up()
        began_s = network.turns.now_s
        arrival = PendingOperation[None](network, self._rank, self._what)

        def attempt() -> bool:
            # something has come, or nobody is left to write
            if self._filled() or not any(rank in network.present for rank in self._slots):
                arrival.resolve(network.turns.now_s, lambda: None)
            return arrival.is_resolved

        if not attempt():
            network.when_changed(self._rank, self.name, attempt)
            with contextlib.suppress(DeadlineExceeded):
                arrival.wait(deadline)
            # where the deadline has come first, nobody tries it again
            arrival.resolve(began_s, lambda: None)
            network.look(self._rank, self.name)
        filled = self._filled()
        for source in filled[:1]:
            network.waited_s[self._rank][source] += max(0.0, self._sent_s[source] - began_s)
        return filled

    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Copies what is there when the request comes, and brings it back."""
        if peer == self._rank:
            return super().fetch(peer)
        return self._ask("fetch", peer, None, lambda snapshot: snapshot)

    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Copies as `fetch` does, once the version is there, into a tensor."""
        return self._ask("read", peer, version, lambda found: copy_out(found, into.detach(), self.name))

    def _ask(
        self, what: str, peer: int, version: int | None, take: Callable[[CopiedSnapshot], T]
    ) -> Handle[T | None]:
        """Asks for what a peer has published; with a version, once it is that new."""
        check_rank(peer, self._group.size)
        self._begin()
        network, rank = self._network, self._rank
        handle = PendingOperation[T | None](network, rank, f"{what} {self.name!r} of rank {peer}")

        def attempt() -> bool:
            there = network.windows.get((peer, self.name)) if peer in network.present else None
            snapshot = None if there is None else there.snapshot(version or 0)
            if snapshot is not None or version is None:
                size_bytes = 0 if snapshot is None or peer == rank else snapshot.tensor.nbytes

                def finish() -> T | None:
                    self._counter.received_from[peer] += size_bytes
                    return None if snapshot is None else take(snapshot)

                handle.resolve(network.arrives_s(peer, rank, size_bytes), finish)
            elif peer not in network.present or (
                version == 0 and (there is None or there._published is None)
            ):
                handle.resolve(network.turns.now_s, lambda: None)
            return handle.is_resolved

        when = partial(network.when_changed, peer, self.name, attempt)
        if peer == rank:
            when()
        else:
            network.turns.call_at(network.arrives_s(rank, peer, 0), when)
        return handle

    def close(self) -> None:
        """Drops what was not taken or comes later, and what was published."""
        if self._network.windows.get((self._rank, self.name)) is self:
            del self._network.windows[self._rank, self.name]
        if self._is_open:
            self._is_open = False
            self._changed()
            self.drop_writes()

    def _look_up(self) -> None:
        self._network.turns.current.look_up()

    def _changed(self) -> None:
        self._network.look(self._rank, self.name)


class PendingOperation(Handle[T]):
    """Is under way until the time that `resolve` says."""

    def __init__(self, network: SimulatedNetwork, rank: int, what: str) -> None:
        self.is_resolved = False
        """Whether its end is known."""
        self.is_taken = False
        """Whether somebody has the result, or the error."""
        self._network = network
        self._rank = rank
        self._what = what
        self._take: Callable[[], T]
        self._due_s = self._until_s = math.inf
        self._waiter: Turn | None = None
        self._is_announced = False
        """Whether its end is something that happens, for one that only looks."""
        self._blamed: tuple[int, float] | None = None

    def resolve(self, due_s: float, take: Callable[[], T], blamed: tuple[int, float] | None = None) -> None:
        """Has it be over at `due_s`; `take` makes the result when it is first asked for after that.

        `blamed` is who came last, and when.
        """
        if not self.is_resolved:
            self.is_resolved = True
            self._take, self._due_s, self._blamed = cache(take), due_s, blamed
            if self._waiter is not None:
                self._waiter.wake(min(due_s, self._until_s))

    def fail(self, error: ShoalError) -> None:
        """Has it be over now, with an error for a result."""

        def take() -> NoReturn:
            raise error

        self.resolve(self._network.turns.now_s, take)

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result when it is due; DeadlineExceeded if that is later than the deadline."""
        if not self.is_taken:
            self._come_to_end(deadline)
        self.is_taken = True
        return self._take()

    def _come_to_end(self, deadline: Deadline | None) -> None:
        turn = self._network.turns.current
        turn.look_up()
        began_s = turn.now_s
        self._until_s = math.inf if deadline is None else began_s + deadline.remaining_s
        self._waiter = turn
        try:
            while turn.now_s < min(self._due_s, self._until_s):
                turn.park(self._what, min(self._due_s, self._until_s))
        finally:
            self._waiter = None
        if turn.now_s < self._due_s:
            raise DeadlineExceeded(f"{self._what} on rank {self._rank}: the deadline has passed.")
        if self._blamed is not None:
            blamed, came_s = self._blamed
            self._network.waited_s[self._rank][blamed] += max(0.0, came_s - began_s)
            self._blamed = None

    def is_done(self) -> bool:
        """Tells whether it is due."""
        return self.is_taken or self._network.turns.current.poll(self._is_due, self._what)

    def _is_due(self) -> bool:
        is_due = self._due_s <= self._network.turns.now_s
        if self.is_resolved and not is_due and not self._is_announced:
            self._is_announced = True
            self._network.turns.call_at(self._due_s, lambda: None)
        return is_due


class Links:
    """The links between members, by rank; two members of one address reach each other at once.

    What one member sends to another comes in the order in which it was sent, as in a stream.
    """

    def __init__(self, conditions: Conditions, addresses: Sequence[Address]) -> None:
        self._conditions = conditions
        self._addresses = list(addresses)
        self._links: dict[tuple[int, int], Link | None] = {}
        self._last_s: dict[tuple[int, int], float] = {}

    def carry(self, source: int, target: int, now_s: float, size_bytes: int) -> Passage:
        """Tells when so many bytes have left the source, and when they arrive."""
        ends = source, target
        if ends not in self._links:
            here, there = self._addresses[source], self._addresses[target]
            self._links[ends] = None if here == there else self._conditions.link(here, there)
        link = self._links[ends]
        if link is None:
            return Passage(now_s, now_s)
        left_s, arrives_s, _ = link.carry_stream(now_s, size_bytes)
        self._last_s[ends] = arrives_s = max(arrives_s, self._last_s.get(ends, 0.0))
        return Passage(left_s, arrives_s)


class RingAllReduce:
    """An all-reduce on its way: 2(n − 1) hops of one part in n each, from each member to the next.

    A member sends its first hop when it begins, and the following when it has sent the one before and the
    other's has come: at that time, so that whatever else is sent over the same links finds its place between.
    `over` is told when each has the whole sum, as soon as that is known.
    """

    def __init__(
        self, links: Links, call_at: CallAt, ranks: Sequence[int], size_bytes: int, over: Over
    ) -> None:
        self.ranks = tuple(ranks)
        self._links = links
        self._call_at = call_at
        self._over = over
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self._num_hops = 2 * (len(ranks) - 1)
        self._hop_bytes = size_bytes // max(1, len(ranks))
        self._num_sent = [0] * len(ranks)
        self._left_s = [0.0] * len(ranks)
        self._comes_s: list[list[float]] = [[] for _ in ranks]
        """Of each member, when each of the hops comes that were sent to it."""

    def begin(self, rank: int, now_s: float) -> None:
        """Tells that one member is there; once is enough."""
        place = self._places[rank]
        if not self._num_hops:
            self._over(rank, now_s)
        elif not self._num_sent[place]:
            self._send(place, now_s)

    def _send(self, place: int, now_s: float) -> None:
        following = (place + 1) % len(self.ranks)
        ends = self.ranks[place], self.ranks[following]
        self._left_s[place], arrives_s, _ = self._links.carry(*ends, now_s, self._hop_bytes)
        self._num_sent[place] += 1
        coming = self._comes_s[following]
        coming.append(arrives_s)
        if len(coming) == self._num_sent[following]:
            self._go_on(following)
        if len(self._comes_s[place]) >= self._num_sent[place]:
            self._go_on(place)

    def _go_on(self, place: int) -> None:
        """Sends a member's next hop when the one before is over, whose end is known now."""
        num_sent = self._num_sent[place]
        at_s = max(self._left_s[place], self._comes_s[place][num_sent - 1])
        if num_sent == self._num_hops:
            self._over(self.ranks[place], at_s)
        else:
            self._call_at(at_s, partial(self._send, place, at_s))


class Collective:
    """One operation of all members, by its number; each says what it has called."""

    def __init__(self, network: SimulatedNetwork, number: int) -> None:
        self._network = network
        self._number = number
        self.arrived_s: dict[int, float] = {}
        self.brought: dict[int, _Message] = {}
        self.result: Any = None
        self.ring: RingAllReduce | None = None
        self.waiting: dict[int, Callable[[float], None]] = {}
        """Of a ring: who is told when it is over for a rank."""
        self._kinds: dict[int, str] = {}
        self._is_mixed = False
        self._attempts: dict[int, tuple[set[int], Callable[[], bool]]] = {}
        """By who waits: those that have not arrived, and what it tries when they have."""

    def arrive(self, rank: int, kind: str, brought: _Message) -> None:
        """Notes that one member is there, with what it brings."""
        self._is_mixed = self._is_mixed or next(iter(self._kinds.values()), kind) != kind
        self._kinds[rank] = kind
        self.arrived_s[rank] = self._network.turns.now_s
        self.brought[rank] = brought

    def over(self, rank: int, at_s: float) -> None:
        """Tells a member that the ring is over for it at that time."""
        self.waiting[rank](at_s)

    def last_of(self, ranks: Iterable[int]) -> tuple[int, float] | None:
        """Finds who of them has arrived last, and when."""
        return max(((rank, self.arrived_s[rank]) for rank in ranks), key=lambda each: each[1], default=None)

    def settle(
        self,
        group: SimulatedGroup,
        plan: OperationPlan,
        handle: PendingOperation[Any],
        sources: Sequence[int] | None,
        finish: Callable[[], None],
    ) -> None:
        """Finishes a member's part once all sources (None: all members) are there that still can come.

        Where it needs all of them it fails without one that is gone; of all members only those count as gone
        that were lost.
        """
        network, arrived_s = self._network, self.arrived_s
        awaited = network.present if sources is None else sources
        missing = {rank for rank in awaited if rank not in arrived_s and rank in network.present}

        def attempt() -> bool:
            wanted = network.lost if sources is None else sources
            gone = [rank for rank in wanted if rank not in arrived_s and rank not in network.present]
            if self._is_mixed:
                handle.fail(self._mismatch())
            elif gone and plan.needs_all and not (sources is None and group.should_survive):
                handle.fail(network.lost.get(gone[0], Loss(gone[0], "it has left the group")).error())
            elif missing:
                return False
            elif not handle.is_resolved:
                finish()
            return True

        self._attempts[group.rank] = missing, attempt
        self.look(None if self._is_mixed else group.rank)

    def look(self, came: int | None = None) -> None:
        """Has those try that have waited for one alone that came, or all: somebody is gone, or is wrong."""
        for rank, (missing, attempt) in list(self._attempts.items()):
            if came is None:
                missing.intersection_update(self._network.present)
            else:
                missing.discard(came)
            if (came is None or not missing) and attempt():
                del self._attempts[rank]
        if not self._attempts and all(rank in self.arrived_s for rank in self._network.present):
            self._network.collectives.pop(self._number, None)

    def _mismatch(self) -> UsageError:
        """Says why members cannot go on: they have called different things."""
        kinds = dict(sorted(self._kinds.items()))
        first = next(iter(kinds))
        other = next(rank for rank, kind in kinds.items() if kind != kinds[first])
        return UsageError(
            f"Operation {self._number}: rank {first} has called {kinds[first]}, rank {other} {kinds[other]}.",
            next_step="issue the same operations in the same order on all members.",
        )
