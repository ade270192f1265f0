"""A group in virtual time: its members are threads of one process that take turns.

Operations take as long as their bytes would over the links of a profile, by the same formulas as `Metered`:
an all-reduce goes round a ring, everything else straight to its receivers. When what is sent arrives, and
when a ring has reduced, are times alone, no bytes (`Links`, `Ring`): both executors of a simulated world ask
here, so that they agree.

An operation that several take part in is a `Collective`: each member arrives with what it brings, and is
through at a time that follows from when those that it needs have arrived and what lies between them. Values
are copied on arrival, as if they had been sent then. What is written into a window travels, and lies in its
slot when it has come; what a member publishes others get by a request there and a copy back. Members that
share memory with each other are no faster for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, TypeVar

import torch

from shoal.core import Address, Deadline, DeadlineExceeded, ShoalError, UsageError
from shoal.core.turns import Turn, Turns
from shoal.group import operations
from shoal.group.base import (
    Done,
    Group,
    GroupStats,
    Handle,
    Loss,
    Reduction,
    Snapshot,
    Window,
    Write,
    rank_to_blame,
)
from shoal.group.functions import share, spread_over_ranks
from shoal.group.kernels import check_reduction, check_write, copy_out, mix_into, reduce_into
from shoal.group.solo import Form, LocalWindow, Publication, check_alike, check_member, no_slot
from shoal.topology import MachineWeights, Weights
from shoal.transport import Conditions
from shoal.transport.networks.pipes import Link, Passage

T = TypeVar("T")
CallAt: TypeAlias = Callable[[float, Callable[[], None]], None]
"""Has something called at a time, in the order of times and, of equal ones, of being asked."""
Over: TypeAlias = Callable[[int, float], None]
"""Is told of a rank, and of a time."""
NOTICED_AFTER_S = 0.02
"""A process that has ended is missed so much later: what its machine says when its sockets close."""
_Arrival: TypeAlias = "tuple[Collective, PendingOperation[Any]]"
_IsThere: TypeAlias = "Callable[[Collective, PendingOperation[Any]], bool]"
_NOTHING = torch.empty(0)


class SimulatedGroup(Group):
    """One member's side; for the thread alone that the network's turns run for it."""

    def __init__(
        self, network: SimulatedNetwork, rank: int, machines: Sequence[int], patience: float = 1.0
    ) -> None:
        self.rank = rank
        self.size = network.size
        self.machine = machines[rank]
        self.machines = machines
        self.num_machines = max(machines) + 1
        self.patience = patience
        self.network = network
        self.traffic = operations.TrafficCounter(rank, network.size)
        self._has_left = False
        self._under_way: list[tuple[torch.Tensor, PendingOperation[Any]]] = []

    # --- who is there ---

    @property
    def members(self) -> Sequence[int]:
        """The ranks that are there at this moment."""
        return () if self._has_left else tuple(self.network.present)

    @property
    def lost(self) -> Mapping[int, Loss]:
        """The peers that were lost until this moment."""
        return MappingProxyType(self.network.lost)

    @property
    def stats(self) -> GroupStats:
        """Bytes by the formulas of `Metered`; a peer is waited for until it has issued its part."""
        waited_s = tuple(self.network.waited_s[self.rank])
        return GroupStats(self.traffic.sent_bytes, self.traffic.received_bytes, waited_s)

    # --- collectives ---

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Makes ordinary memory; nobody is waited for."""
        check_member(self)
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Does nothing: the memory goes with its last tensor."""

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Goes round a ring of the members."""
        check_reduction(tensor, op)
        self._begin(tensor)
        self.traffic.add(operations.all_reduce(self, tensor))
        collective, handle = self._arrive(f"all_reduce ({op}) of {_shape(tensor)}", tensor, _copy(tensor))

        def over(at_s: float) -> None:
            came_last = collective.last_of(collective.arrived_s)
            handle.resolve(at_s, lambda: _store(tensor, collective.result), came_last)

        def finish() -> None:
            if collective.result is None:
                self._reduce(collective, tensor, op)

        collective.waiting[self.rank] = over
        if collective.ring is None:
            collective.ring = self._ring(collective, self.network.present, tensor)
        self._settle(collective, handle, self.network.present, self._has_all, finish)
        collective.ring.begin(self.rank, self.network.turns.now_s)
        return handle

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Goes straight from the root."""
        self.check_rank(root)
        self._begin(tensor)
        self.traffic.add(operations.broadcast(self, tensor, root))
        kind = f"broadcast from {root} of {_shape(tensor)}"
        sent = _Message(_copy(tensor), self._others()) if self.rank == root else _Message(_NOTHING)

        def is_there(collective: Collective, handle: PendingOperation[Any]) -> bool:
            if root not in collective.arrived_s and root not in self.network.present:
                loss = self.network.lost.get(root, Loss(root, "it has left the group"))
                handle.fail(loss.error())
            return root in collective.arrived_s or handle.is_resolved

        def take(brought: Mapping[int, _Message]) -> torch.Tensor:
            return tensor if self.rank == root else _store(tensor, brought[root].values)

        return self._send(kind, tensor, sent, [root], is_there, take)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Goes straight from everybody to everybody."""
        self._begin(tensor)
        self.traffic.add(operations.all_gather(self, tensor))

        def take(brought: Mapping[int, _Message]) -> list[torch.Tensor]:
            others = [message for rank, message in brought.items() if rank != self.rank]
            self.traffic.received_bytes += sum(message.values.nbytes for message in others)
            return [brought[rank].values.clone() for rank in sorted(brought)]

        sent = _Message(_copy(tensor), self._others())
        return self._send("all_gather", None, sent, None, self._has_all, take)

    def barrier(self) -> Handle[None]:
        """Sends a word from everybody to everybody."""
        self._begin()
        sent = _Message(_NOTHING, self._others())
        return self._send("barrier", None, sent, None, self._has_all, lambda brought: None)

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Goes straight between neighbours: waits for one's own sources alone."""
        weights = spread_over_ranks(self, weights)
        weights.check(self.rank, self.size)
        result = tensor if out is None else out
        check_alike(tensor, result)
        self._begin(tensor, result)
        self.traffic.add(operations.exchange(self, tensor, weights))
        to = weights.sources if weights.destinations is None else weights.destinations
        sent = _Message(_copy(tensor), to, weights.destinations)
        sources = sorted(weights.sources)

        def is_there(collective: Collective, handle: PendingOperation[Any]) -> bool:
            missing = [rank for rank in sources if rank not in collective.brought]
            return not any(rank in self.network.present for rank in missing)

        def take(brought: Mapping[int, _Message]) -> torch.Tensor:
            rest = weights.without([rank for rank in sources if rank not in brought])
            return self._mix(brought, rest, result)

        return self._send(f"exchange of {_shape(tensor)}", result, sent, sources, is_there, take)

    def settle(self, tensor: torch.Tensor) -> None:
        """Does nothing: others have copies."""

    # --- windows, and the end ---

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
        device: torch.device | None = None,
    ) -> Window:
        """Makes a window; all have theirs when it returns, unless it has no slots."""
        check_member(self)
        for rank in sources or ():
            self.check_rank(rank)
        chosen = self._others() if sources is None else sources
        window = SimulatedWindow(self, name, (num_elements, dtype, device), chosen)
        if sources != ():  # an empty list is one member's, where others have slots: all meet
            share(self, [name, num_elements, str(dtype)])
        return window

    def progress(self) -> None:
        """Looks whether something has happened: time does all the work."""
        self.network.turns.current.poll(lambda: False, "progress")

    def leave(self) -> None:
        """Has the others go on without this worker from now on."""
        if not self._has_left:
            self.network.turns.current.look_up()
            self._has_left = True
            self.network.leave(self.rank)

    def close(self, error: BaseException | None = None) -> None:
        """Leaves; with an error the others find this worker lost, or blame whom it blames."""
        if error is None:
            self.leave()
        elif not self._has_left:
            self._has_left = True
            blamed = rank_to_blame(error, self.rank)
            because = None if blamed is None else self.network.lost.get(blamed)
            at_s = self.network.turns.clock.now_s() + NOTICED_AFTER_S
            reason = "its worker ended without leaving"
            self.network.lose(Loss(self.rank, reason, at_s=at_s, because=because))

    # --- how operations meet ---

    def _begin(self, *tensors: torch.Tensor) -> None:
        """Comes to one's own time, and after all operations on the same memory."""
        check_member(self)
        self.network.turns.current.look_up()
        self._under_way = [each for each in self._under_way if not each[1].is_taken]
        for tensor in tensors:
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            for memory, handle in list(self._under_way):
                if memory.data_ptr() < end and start < memory.data_ptr() + memory.nbytes:
                    handle.wait()

    def _arrive(self, kind: str, memory: torch.Tensor | None, brought: Any) -> _Arrival:
        collective = self.network.next_collective(self.rank)
        handle: PendingOperation[Any] = PendingOperation(self.network, self.rank, kind)
        if memory is not None:
            self._under_way.append((memory, handle))
        collective.arrive(self.rank, kind, brought)
        return collective, handle

    def _settle(
        self,
        collective: Collective,
        handle: PendingOperation[Any],
        needs: Iterable[int],
        is_there: _IsThere,
        finish: Callable[[], None],
    ) -> None:
        """Finishes once everything is there, unless `is_there` or what others have called fails it."""

        def attempt() -> bool:
            error = collective.mismatch()
            if error is not None:
                handle.fail(error)
            elif not is_there(collective, handle):
                return False
            elif not handle.is_resolved:
                finish()
            return True

        collective.settle(self.rank, needs, attempt)

    def _send(
        self,
        kind: str,
        memory: torch.Tensor | None,
        sent: _Message,
        sources: Sequence[int] | None,
        is_there: _IsThere,
        take: Callable[[Mapping[int, _Message]], T],
    ) -> Handle[T]:
        """Sends straight to others; is over when that has left, and what sources (None: all) sent has come.

        `take` makes the result of the messages of those that are there, one's own included.
        """
        collective, handle = self._arrive(kind, memory, sent)
        sent.leave(self.network, self.rank)

        def finish() -> None:
            own_s, brought = collective.arrived_s[self.rank], collective.brought
            heard = brought if sources is None else [rank for rank in sources if rank in brought]
            others = [rank for rank in heard if rank != self.rank]
            comes_s = [
                brought[rank].arrives_s(self.network, rank, self.rank, collective.arrived_s[rank])
                for rank in others
            ]
            messages = {rank: brought[rank] for rank in (*others, self.rank)}
            handle.resolve(
                max(sent.left_s(own_s), *comes_s, 0.0), partial(take, messages), collective.last_of(others)
            )

        needs = self.network.present if sources is None else sources
        self._settle(collective, handle, needs, is_there, finish)
        return handle

    def _has_all(self, collective: Collective, handle: PendingOperation[Any]) -> bool:
        """Tells whether all have come; fails the handle without a lost one, unless it should survive."""
        lost = [rank for rank in self.network.lost if rank not in collective.arrived_s]
        if lost and not self.should_survive:
            handle.fail(self.network.lost[lost[0]].error())
            return True
        return all(rank in collective.arrived_s for rank in self.network.present)

    def _ring(self, collective: Collective, ranks: Iterable[int], tensor: torch.Tensor) -> Ring:
        def over(rank: int, at_s: float) -> None:
            collective.waiting[rank](at_s)

        network = self.network
        return Ring(network.links, network.turns.call_at, sorted(ranks), tensor.nbytes, over)

    def _reduce(self, collective: Collective, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduces when all are there; where one has gone before it came, the others begin again, now."""
        ranks = sorted(collective.arrived_s)
        collective.result = torch.empty_like(collective.brought[self.rank])
        reduce_into(collective.result, [collective.brought[rank] for rank in ranks], op)
        if collective.ring is None or collective.ring.ranks != tuple(ranks):
            collective.ring = self._ring(collective, ranks, tensor)
            for rank in ranks:
                collective.ring.begin(rank, self.network.turns.now_s)

    def _mix(self, brought: Mapping[int, _Message], weights: Weights, out: torch.Tensor) -> torch.Tensor:
        own = brought[self.rank].values
        sources = [
            (brought[rank].values.view(-1), weight * brought[rank].factor_for(self.rank, rank))
            for rank, weight in weights.sources.items()
        ]
        mixed = torch.empty_like(own)
        mix_into(mixed.view(-1), own.view(-1), weights.own, sources)
        return _store(out, mixed)

    def check_rank(self, rank: int) -> None:
        """UsageError for a rank that there is not."""
        if not 0 <= rank < self.size:
            raise UsageError(
                f"There is no rank {rank} in a group of {self.size}.",
                next_step=f"name a rank from 0 to {self.size - 1}.",
            )

    def _others(self) -> list[int]:
        return [rank for rank in self.network.present if rank != self.rank]


class SimulatedWindow(LocalWindow):
    """One member's window: slots for its sources, and writes to others' windows of the same name."""

    def __init__(self, group: SimulatedGroup, name: str, form: Form, sources: Collection[int]) -> None:
        self._network = group.network
        super().__init__(group, self._network.publication(group.rank, name), form, sources)
        self._traffic = group.traffic
        self._check_rank = group.check_rank
        self._sent_s: dict[int, float] = {}
        """By source: when the last write that has come was sent."""
        self._waiter: Turn | None = None
        self._network.windows[self._rank, name] = self
        if self._slots:
            self._network.on_change(self._somebody_is_gone)

    def _begin(self) -> None:
        self._network.turns.current.look_up()

    def _write(self, to: int, write: Write) -> Handle[None]:
        """Is over when it is in the slot; at once for one that is gone."""
        self._check_open()
        check_write(write, self.name, self.num_elements, self.dtype)
        self._check_rank(to)
        self._begin()
        network, rank = self._network, self._rank
        if to not in network.present:
            return Done(None)
        target: SimulatedWindow | None = network.windows.get((to, self.name))
        if target is not None and rank not in target._slots:
            raise no_slot(to, rank, self.name)
        if to != rank:
            self._traffic.sent_bytes += write.tensor.nbytes
        handle: PendingOperation[None] = PendingOperation(
            network, rank, f"{write.kind} to rank {to} in {self.name!r}"
        )
        sent = dataclasses.replace(write, tensor=write.tensor.detach().clone())
        sent_s = network.turns.now_s

        def done() -> None:
            handle.resolve(network.turns.now_s, lambda: None)

        def arrived(now_s: float) -> None:
            there: SimulatedWindow | None = network.windows.get((to, self.name))
            if there is None or to not in network.present:
                done()
            else:
                there._receive(rank, sent, sent_s, done)

        network.send(rank, to, write.tensor.nbytes, arrived)
        return handle

    def _receive(self, source: int, write: Write, sent_s: float, done: Callable[[], None]) -> None:
        self._slots[source].offer(write, done)
        self._rouse()
        self._sent_s[source] = sent_s

    def filled(self) -> Sequence[int]:
        """Lists the filled slots at this worker's own time."""
        self._check_open()
        what = f"writes into window {self.name!r}"
        self._network.turns.current.poll(lambda: bool(self._filled()), what)
        return self._filled()

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Waits in virtual time."""
        self._check_open()
        turn = self._network.turns.current
        turn.look_up()
        filled = self._filled()
        began_s = turn.now_s
        until_s = math.inf if deadline is None else turn.now_s + deadline.remaining_s
        while not filled and turn.now_s < until_s:
            if not any(source in self._network.present for source in self._slots):
                break
            self._waiter = turn
            turn.park(f"writes into window {self.name!r}", until_s)
            self._waiter = None
            filled = self._filled()
        for source in filled[:1]:
            waited_s = self._sent_s[source] - began_s
            self._network.waited_s[self._rank][source] += max(0.0, waited_s)
        return filled

    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Copies what is there when the request comes, and brings it back over the link."""
        network, found = self._network, self._ask(peer)
        if peer == self._rank:
            return Done(found.snapshot())
        handle: PendingOperation[Snapshot | None] = PendingOperation(
            network, self._rank, f"fetch {self.name!r} of rank {peer}"
        )

        def arrived(now_s: float) -> None:
            snapshot = found.snapshot() if peer in network.present else None
            size_bytes = 0 if snapshot is None else snapshot.tensor.nbytes

            def take() -> Snapshot | None:
                self._traffic.received_bytes += size_bytes
                return snapshot

            handle.resolve(network.arrives_s(peer, self._rank, size_bytes), take)

        network.send(self._rank, peer, 0, arrived)
        return handle

    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Copies as `fetch` does, once the version is there, into a tensor."""
        network, found = self._network, self._ask(peer)
        handle: PendingOperation[int | None] = PendingOperation(
            network, self._rank, f"read {self.name!r} of rank {peer}"
        )

        def attempt() -> bool:
            is_none = peer not in network.present or (found.is_empty and version == 0)
            snapshot = None if is_none else found.snapshot(version)
            if is_none:
                handle.resolve(network.turns.now_s, lambda: None)
            elif snapshot is not None:
                size_bytes = 0 if peer == self._rank else snapshot.tensor.nbytes

                def take() -> int:
                    self._traffic.received_bytes += size_bytes
                    return copy_out(snapshot, into.detach(), self.name)

                handle.resolve(network.arrives_s(peer, self._rank, size_bytes), take)
            return handle.is_resolved

        if peer == self._rank:
            found.when(attempt)
        else:
            network.send(self._rank, peer, 0, lambda _: found.when(attempt))
        return handle

    def close(self) -> None:
        """Drops what comes later, and what was published."""
        if self._network.windows.get((self._rank, self.name)) is self:
            del self._network.windows[self._rank, self.name]
        super().close()

    def _ask(self, peer: int) -> Publication:
        self._check_usable()
        self._check_rank(peer)
        self._begin()
        return self._network.publication(peer, self.name)

    def _filled(self) -> list[int]:
        return [source for source, slot in self._slots.items() if slot.num_writes]

    def _somebody_is_gone(self) -> None:
        if self._rank not in self._network.present:
            for slot in self._slots.values():
                slot.drop()
        self._rouse()

    def _rouse(self) -> None:
        if self._waiter is not None:
            self._waiter.wake(self._network.turns.now_s)


class _Message:
    """What one member sends to others in an operation, and how it travels."""

    def __init__(
        self, values: torch.Tensor, to: Collection[int] = (), factors: Mapping[int, float] | None = None
    ) -> None:
        self.values = values
        self._to = to
        self._factors = factors
        self._passages: dict[int, Passage] = {}

    def leave(self, network: SimulatedNetwork, source: int) -> None:
        """Sends it to those that are there."""
        for rank in sorted(self._to):
            if rank in network.present and rank != source:
                self._carry(network, source, rank, network.turns.now_s)

    def left_s(self, began_s: float) -> float:
        """Tells when the last of it has left."""
        return max([began_s, *(passage.left_at_s for passage in self._passages.values())])

    def arrives_s(self, network: SimulatedNetwork, source: int, target: int, sent_s: float) -> float:
        """Tells when it arrives at a member; one that was not reckoned with is sent to after the others."""
        if target not in self._passages:
            self._carry(network, source, target, sent_s)
        return self._passages[target].arrives_at_s

    def _carry(self, network: SimulatedNetwork, source: int, target: int, now_s: float) -> None:
        self._passages[target] = network.links.carry(source, target, now_s, self.values.nbytes)

    def factor_for(self, rank: int, source: int) -> float:
        """Gives its factor on the way; UsageError where the sender does not send there."""
        if self._factors is None:
            return 1.0
        if rank not in self._factors:
            raise UsageError(
                f"rank {rank} takes rank {source} for a source, which does not send to it.",
                next_step="give weights whose sources and destinations agree.",
            )
        return self._factors[rank]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _store(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        tensor.copy_(values)
    return tensor


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"


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


class Ring:
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


class SimulatedNetwork:
    """The members of one group and the links between them; `addresses` are what a profile calls them."""

    def __init__(self, turns: Turns, conditions: Conditions, addresses: Sequence[Address]) -> None:
        self.turns = turns
        self.links = Links(conditions, addresses)
        self.size = len(addresses)
        self.present = list(range(self.size))
        self.lost: dict[int, Loss] = {}
        self.waited_s = [[0.0] * self.size for _ in range(self.size)]
        self.windows: dict[tuple[int, str], Any] = {}
        self._collectives: dict[int, Collective] = {}
        self._published: dict[tuple[int, str], Publication] = {}
        self._numbers = [0] * self.size
        self._watchers: list[Callable[[], None]] = []

    def next_collective(self, rank: int) -> Collective:
        """Finds the operation that this member comes to next."""
        number = self._numbers[rank]
        self._numbers[rank] += 1
        return self._collectives.setdefault(number, Collective(self, number))

    def forget(self, number: int) -> None:
        """Lets go of an operation to which nobody comes any more."""
        self._collectives.pop(number, None)

    def publication(self, rank: int, name: str) -> Publication:
        """Finds what a member publishes under a name, or will."""
        key = rank, name
        if key not in self._published:
            self._published[key] = Publication(rank, name)
            self.on_change(self._published[key].look)
        return self._published[key]

    def on_change(self, callback: Callable[[], None]) -> None:
        """Has it called whenever somebody is gone."""
        self._watchers.append(callback)

    def leave(self, rank: int) -> None:
        """Has a member be gone from now on."""
        if rank not in self.present:
            return
        self.present = [each for each in self.present if each != rank]
        for collective in list(self._collectives.values()):
            collective.look()
        for callback in list(self._watchers):
            callback()

    def lose(self, loss: Loss) -> None:
        """Has the others notice a loss at its time, unless that member is gone by then."""

        def notice() -> None:
            if loss.rank in self.present:
                self.lost[loss.rank] = loss
                self.leave(loss.rank)

        self.turns.call_at(loss.at_s, notice)

    def send(self, source: int, target: int, size_bytes: int, deliver: Callable[[float], None]) -> None:
        """Carries something from now on; `deliver` is called when it arrives, with that time."""
        arrives_s = self.arrives_s(source, target, size_bytes)
        self.turns.call_at(arrives_s, lambda: deliver(arrives_s))

    def arrives_s(self, source: int, target: int, size_bytes: int) -> float:
        """Sends something now, and tells when it arrives."""
        now_s = self.turns.now_s
        return now_s if source == target else self.links.carry(source, target, now_s, size_bytes).arrives_at_s


class PendingOperation(Handle[T]):
    """Is under way until `resolve`; `take` makes the result when it is first asked for after that."""

    def __init__(self, network: SimulatedNetwork, rank: int, what: str) -> None:
        self._network = network
        self._rank = rank
        self._what = what
        self._due_s = math.inf
        self._take: Callable[[], T] | None = None
        self._result: list[T] = []
        self._error: ShoalError | None = None
        self._waiter: Turn | None = None
        self._until_s = math.inf
        self._is_announced = False
        """Whether its end is something that happens, for one that only looks."""
        self._blamed: tuple[int, float] | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether its end is known."""
        return self._take is not None

    @property
    def is_taken(self) -> bool:
        """Whether somebody has the result, or the error."""
        return bool(self._result) or self._error is not None

    def resolve(self, due_s: float, take: Callable[[], T], blamed: tuple[int, float] | None = None) -> None:
        """Has it be over at `due_s`; `blamed` is who came last, and when."""
        if self._take is None:
            self._due_s, self._take, self._blamed = due_s, take, blamed
            if self._waiter is not None:
                self._waiter.wake(min(due_s, self._until_s))

    def fail(self, error: ShoalError) -> None:
        """Has it be over now, with an error for a result."""

        def take() -> NoReturn:
            raise error

        self.resolve(self._network.turns.now_s, take)

    def wait(self, deadline: Deadline | None = None) -> T:
        """Waits in virtual time."""
        if self._result:
            return self._result[0]
        if self._error is not None:
            raise self._error
        turn = self._network.turns.current
        turn.look_up()
        began_s = turn.now_s
        until_s = math.inf if deadline is None else began_s + deadline.remaining_s
        self._waiter, self._until_s = turn, until_s
        try:
            while (self._take is None or self._due_s > turn.now_s) and turn.now_s < until_s:
                turn.park(self._what, min(self._due_s, until_s))
        finally:
            self._waiter = None
        if self._take is None or self._due_s > turn.now_s:
            raise DeadlineExceeded(f"{self._what} on rank {self._rank}: the deadline has passed.")
        if self._blamed is not None:
            blamed, came_s = self._blamed
            if came_s > began_s:
                self._network.waited_s[self._rank][blamed] += came_s - began_s
            self._blamed = None
        try:
            self._result.append(self._take())
        except ShoalError as error:
            self._error = error
            raise
        return self._result[0]

    def is_done(self) -> bool:
        """Looks at this worker's own time."""
        return self.is_taken or self._network.turns.current.poll(self._is_due, self._what)

    def _is_due(self) -> bool:
        if self._take is None:
            return False
        turns = self._network.turns
        is_due = self._due_s <= turns.now_s
        if not is_due and not self._is_announced:
            self._is_announced = True
            turns.call_at(self._due_s, lambda: None)
        return is_due


class Collective:
    """One operation of all members, by its number; each says what it has called."""

    def __init__(self, network: SimulatedNetwork, number: int) -> None:
        self._network = network
        self._number = number
        self.ring: Ring | None = None
        self.waiting: dict[int, Callable[[float], None]] = {}
        """Of a ring: who is told when it is over for a rank."""
        self.result: Any = None
        self.arrived_s: dict[int, float] = {}
        self.brought: dict[int, Any] = {}
        self._kinds: dict[int, str] = {}
        self._is_mixed = False
        self._attempts: dict[int, Callable[[], bool]] = {}
        self._missing: dict[int, dict[int, None]] = {}
        self._awaiting: dict[int, list[int]] = {}
        """By who is awaited."""

    def arrive(self, rank: int, kind: str, brought: Any) -> None:
        """Notes that one member is there, with what it brings."""
        self._is_mixed = self._is_mixed or next(iter(self._kinds.values()), kind) != kind
        self._kinds[rank] = kind
        self.arrived_s[rank] = self._network.turns.now_s
        self.brought[rank] = brought

    def last_of(self, ranks: Iterable[int]) -> tuple[int, float] | None:
        """Finds who of them has arrived last, and when."""
        return max(((rank, self.arrived_s[rank]) for rank in ranks), key=lambda each: each[1], default=None)

    def mismatch(self) -> UsageError | None:
        """Says why members cannot go on: they have called different things."""
        if not self._is_mixed:
            return None
        kinds = dict(sorted(self._kinds.items()))
        first = next(iter(kinds))
        other = next(rank for rank, kind in kinds.items() if kind != kinds[first])
        return UsageError(
            f"Operation {self._number}: rank {first} has called {kinds[first]}, rank {other} {kinds[other]}.",
            next_step="issue the same operations in the same order on all members.",
        )

    def settle(self, rank: int, needs: Iterable[int], attempt: Callable[[], bool]) -> None:
        """Tries `attempt` when those that `rank` needs have arrived, or somebody goes, until it is true.

        Those that have waited for `rank` are tried too.
        """
        present = self._network.present
        missing = {each: None for each in needs if each not in self.arrived_s and each in present}
        self._attempts[rank], self._missing[rank] = attempt, missing
        for each in missing:
            self._awaiting.setdefault(each, []).append(rank)
        if self._is_mixed:
            self.look()
            return
        for waiting in self._awaiting.pop(rank, ()):
            self._missing[waiting].pop(rank, None)
            if not self._missing[waiting]:
                self._try(waiting)
        if not missing:
            self._try(rank)
        self._forget()

    def look(self) -> None:
        """Tries all that wait: somebody is gone, or has called something else."""
        for missing in self._missing.values():
            for rank in [each for each in missing if each not in self._network.present]:
                del missing[rank]
        for rank in list(self._attempts):
            self._try(rank)
        self._forget()

    def _try(self, rank: int) -> None:
        if rank in self._attempts and self._attempts[rank]():
            del self._attempts[rank]

    def _forget(self) -> None:
        if not self._attempts and all(rank in self.arrived_s for rank in self._network.present):
            self._network.forget(self._number)
