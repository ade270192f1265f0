"""A group in virtual time: its members are threads of one process that take turns.

Operations take as long as their bytes would over the links of a profile (`network`), by the same formulas as
`Metered`: an all-reduce goes round a ring, everything else straight to its receivers. Values are those at the
time of the call. What is written into a window travels, and lies in its slot when it has come; what a member
publishes others get by a request there and a copy back. Members that share memory with each other are no
faster for it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch

from shoal.core import Deadline, UsageError
from shoal.core.turns import Turn
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
from shoal.group.simulated.network import (
    NOTICED_AFTER_S,
    Collective,
    PendingOperation,
    Ring,
    SimulatedNetwork,
)
from shoal.group.solo import Form, LocalWindow, Publication, check_alike, check_member, no_slot
from shoal.topology import MachineWeights, Weights
from shoal.transport.networks.pipes import Passage

T = TypeVar("T")
_Arrival: TypeAlias = tuple[Collective, PendingOperation[Any]]


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
        collective, handle = self._come(f"all_reduce ({op}) of {_shape(tensor)}", tensor, _copy(tensor))

        collective.waiting[self.rank] = partial(self._reduced, collective, handle, tensor)
        if collective.ring is None:
            collective.ring = self._ring(collective, self.network.present, tensor)

        def attempt() -> bool:
            if not self._is_settled(collective, handle):
                return False
            if collective.result is None and not handle.is_resolved:
                self._reduce(collective, tensor, op)
            return True

        collective.settle(self.rank, self.network.present, attempt)
        collective.ring.begin(self.rank, self.network.turns.now_s)
        return handle

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Goes straight from the root."""
        self.check_rank(root)
        self._begin(tensor)
        self.traffic.add(operations.broadcast(self, tensor, root))
        brought = _Sent(_copy(tensor)) if self.rank == root else None
        collective, handle = self._come(f"broadcast from {root} of {_shape(tensor)}", tensor, brought)
        if brought is not None:
            self._carry(brought, self._others())
            handle.resolve(brought.left_s(self.network.turns.now_s), lambda: tensor)

        def attempt() -> bool:
            if self._is_mismatched(collective, handle) or handle.is_resolved:
                return True
            if root not in collective.arrived_s and root not in self.network.present:
                loss = self.network.lost.get(root, Loss(root, "it has left the group"))
                handle.fail(loss.error())
            elif root in collective.arrived_s:
                sent: _Sent = collective.brought[root]
                came_s = sent.arrives_s(self, root, collective.arrived_s[root])
                due_s = max(collective.arrived_s[self.rank], came_s)
                handle.resolve(due_s, partial(_store, tensor, sent.values), collective.last_of([root]))
            return handle.is_resolved

        collective.settle(self.rank, [root], attempt)
        return handle

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Goes straight from everybody to everybody."""
        self._begin(tensor)
        self.traffic.add(operations.all_gather(self, tensor))
        sent = _Sent(_copy(tensor))
        collective, handle = self._come("all_gather", None, sent)
        self._carry(sent, self._others())

        def take() -> list[torch.Tensor]:
            ranks = sorted(collective.brought)
            self.traffic.received_bytes += sum(
                collective.brought[rank].values.nbytes for rank in ranks if rank != self.rank
            )
            return [collective.brought[rank].values.clone() for rank in ranks]

        return self._meet(collective, handle, take)

    def barrier(self) -> Handle[None]:
        """Sends a word from everybody to everybody."""
        self._begin()
        sent = _Sent(torch.empty(0))
        collective, handle = self._come("barrier", None, sent)
        self._carry(sent, self._others())
        return self._meet(collective, handle, lambda: None)

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
        sent = _Sent(_copy(tensor), weights.destinations)
        collective, handle = self._come(f"exchange of {_shape(tensor)}", result, sent)
        self._carry(sent, weights.sources if weights.destinations is None else weights.destinations)

        def attempt() -> bool:
            if self._is_mismatched(collective, handle):
                return True
            if any(
                rank not in collective.brought and rank in self.network.present for rank in weights.sources
            ):
                return False
            there = [rank for rank in sorted(weights.sources) if rank in collective.brought]
            rest = weights.without([rank for rank in weights.sources if rank not in there])
            arrivals_s = [
                collective.brought[rank].arrives_s(self, rank, collective.arrived_s[rank]) for rank in there
            ]
            due_s = max(sent.left_s(collective.arrived_s[self.rank]), *arrivals_s, 0.0)
            take = partial(self._mix, collective, rest, result)
            handle.resolve(due_s, take, collective.last_of(there))
            return True

        collective.settle(self.rank, weights.sources, attempt)
        return handle

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
            self.network.lose(
                Loss(
                    self.rank,
                    "its worker ended without leaving",
                    at_s=self.network.turns.clock.now_s() + NOTICED_AFTER_S,
                    because=None if blamed is None else self.network.lost.get(blamed),
                )
            )

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

    def _come(self, kind: str, memory: torch.Tensor | None, brought: Any) -> _Arrival:
        collective = self.network.next_collective(self.rank)
        handle: PendingOperation[Any] = PendingOperation(self.network, self.rank, kind)
        if memory is not None:
            self._under_way.append((memory, handle))
        collective.arrive(self.rank, kind, brought)
        return collective, handle

    def _ring(self, collective: Collective, ranks: Iterable[int], tensor: torch.Tensor) -> Ring:
        def over(rank: int, at_s: float) -> None:
            collective.waiting[rank](at_s)

        hub = self.network
        return Ring(hub.links, hub.turns.call_at, sorted(ranks), tensor.nbytes, over)

    def _reduce(self, collective: Collective, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduces when all are there; where one has gone before it came, the others begin again, now."""
        ranks = sorted(collective.arrived_s)
        collective.result = torch.empty_like(collective.brought[self.rank])
        reduce_into(collective.result, [collective.brought[rank] for rank in ranks], op)
        if collective.ring is None or collective.ring.ranks != tuple(ranks):
            collective.ring = self._ring(collective, ranks, tensor)
            for rank in ranks:
                collective.ring.begin(rank, self.network.turns.now_s)

    def _reduced(
        self, collective: Collective, handle: PendingOperation[Any], tensor: torch.Tensor, at_s: float
    ) -> None:
        take = partial(_take_sum, collective, tensor)
        handle.resolve(at_s, take, collective.last_of(collective.arrived_s))

    def _meet(self, collective: Collective, handle: PendingOperation[T], take: Callable[[], T]) -> Handle[T]:
        """Ends an operation when what everybody has sent has come."""

        def attempt() -> bool:
            if not self._is_settled(collective, handle):
                return False
            if not handle.is_resolved:
                arrived_s = collective.arrived_s
                comes_s = [
                    sent.arrives_s(self, rank, arrived_s[rank])
                    for rank, sent in collective.brought.items()
                    if rank != self.rank
                ]
                own: _Sent = collective.brought[self.rank]
                due_s = max(own.left_s(arrived_s[self.rank]), *comes_s, 0.0)
                handle.resolve(due_s, take, collective.last_of(arrived_s))
            return True

        collective.settle(self.rank, self.network.present, attempt)
        return handle

    def _is_settled(self, collective: Collective, handle: PendingOperation[Any]) -> bool:
        """Whether nobody is waited for any more; the handle may have an error then."""
        if self._is_mismatched(collective, handle):
            return True
        lost = [rank for rank in self.network.lost if rank not in collective.arrived_s]
        if lost and not self.should_survive:
            handle.fail(self.network.lost[lost[0]].error())
            return True
        return all(rank in collective.arrived_s for rank in self.network.present)

    def _is_mismatched(self, collective: Collective, handle: PendingOperation[Any]) -> bool:
        error = collective.mismatch()
        if error is not None:
            handle.fail(error)
        return error is not None

    def _carry(self, sent: _Sent, destinations: Collection[int]) -> None:
        now_s = self.network.turns.now_s
        for rank in sorted(destinations):
            if rank in self.network.present and rank != self.rank:
                sent.passages[rank] = self.network.links.carry(self.rank, rank, now_s, sent.values.nbytes)

    def _mix(self, collective: Collective, weights: Weights, out: torch.Tensor) -> torch.Tensor:
        sources = []
        for rank, weight in weights.sources.items():
            sent: _Sent = collective.brought[rank]
            sources.append((sent.values.view(-1), weight * sent.factor_for(self.rank, rank)))
        own: _Sent = collective.brought[self.rank]
        with torch.no_grad():
            mixed = torch.empty_like(own.values)
            mix_into(mixed.view(-1), own.values.view(-1), weights.own, sources)
            out.copy_(mixed)
        return out

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


class _Sent:
    """What one member has sent to others in an operation, and how it travels."""

    def __init__(self, values: torch.Tensor, destinations: Mapping[int, float] | None = None) -> None:
        self.values = values
        self.passages: dict[int, Passage] = {}
        self._factors = destinations

    def left_s(self, began_s: float) -> float:
        """Tells when the last of it has left."""
        return max(began_s, *(passage.left_at_s for passage in self.passages.values()), began_s)

    def arrives_s(self, group: SimulatedGroup, source: int, sent_s: float) -> float:
        """Tells when it arrives at a member; one that was not reckoned with is sent to after the others."""
        if group.rank not in self.passages:
            links = group.network.links
            self.passages[group.rank] = links.carry(source, group.rank, sent_s, self.values.nbytes)
        return self.passages[group.rank].arrives_at_s

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


def _take_sum(collective: Collective, tensor: torch.Tensor) -> torch.Tensor:
    return _store(tensor, collective.result)


def _never() -> bool:
    return False


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"
