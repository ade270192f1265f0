"""A group in virtual time: its members are threads of one process that take turns.

Operations take as long as their bytes would over the links of a profile (`hub`), by the same formulas as
`Metered`: an all-reduce goes round a ring, everything else straight to its receivers. Values are those at the
time of the call. What is written into a window travels, and lies in its slot when it has come. Members that
share memory with each other are no faster for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch

from shoal.core import Deadline, TensorError, UsageError
from shoal.core.turns import Turn
from shoal.group import operations
from shoal.group.base import Done, Group, Handle, Loss, Reduction, Slot, Snapshot
from shoal.group.kernels import (
    Write,
    WritingWindow,
    check_reduction,
    check_write,
    mix_into,
    reduce_into,
    write_first,
    write_more,
)
from shoal.group.operations import Operation
from shoal.group.simulated.hub import (
    Gathering,
    Hub,
    Pending,
    Publication,
    Ring,
    fetch,
    hold,
    publication,
    raising,
    read,
)
from shoal.topology import Weights
from shoal.transport.networks.pipes import Passage

T = TypeVar("T")
_Come: TypeAlias = tuple[Gathering[Any], Pending[Any]]


class SimulatedWindow(WritingWindow):
    """One member's: slots for its sources, and writes to others' of the same name."""

    on_write: Callable[[int, int], None]
    """Is told to whom so many bytes are written."""

    def __init__(
        self, hub: Hub, rank: int, name: str, form: tuple[int, torch.dtype], sources: Sequence[int]
    ) -> None:
        self.name = name
        self.num_elements, self.dtype = form
        self._hub = hub
        self._rank = rank
        self._slots = {source: _SimulatedSlot(source, *form) for source in sources}
        self._waiter: Turn | None = None
        self._is_open = True
        hub.windows[rank, name] = self
        hub.on_change(self._somebody_is_gone)

    def write(self, to: int, write: Write) -> Handle[None]:
        """Over when it is in the slot; at once for one that is gone."""
        self._check_open()
        check_write(write, self.name, self.num_elements, self.dtype)
        if not 0 <= to < self._hub.size:
            raise UsageError(f"There is no rank {to} to write to.", next_step="name a member.")
        self._hub.turns.current.look_up()
        if to not in self._hub.present:
            return Done(None)
        target: SimulatedWindow | None = self._hub.windows.get((to, self.name))
        if target is not None and self._rank not in target._slots:
            raise UsageError(
                f"rank {to} has no slot for rank {self._rank} in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        self.on_write(to, write.tensor.nbytes)
        handle: Pending[None] = Pending(self._hub, self._rank, f"{write.kind} to rank {to} in {self.name!r}")
        sent = dataclasses.replace(write, tensor=write.tensor.detach().clone())
        sent_s = self._hub.turns.now_s

        def arrived(now_s: float) -> None:
            there: SimulatedWindow | None = self._hub.windows.get((to, self.name))
            if there is None or to not in self._hub.present:
                handle.resolve(now_s, lambda: None)
            else:
                there._receive(self._rank, sent, handle)
                there._slots[self._rank].sent_s = sent_s

        self._hub.send(self._rank, to, write.tensor.nbytes, arrived)
        return handle

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[Slot]:
        """What comes meanwhile comes after the block."""
        self._check_open()
        if source not in self._slots:
            raise UsageError(
                f"rank {self._rank} has no slot for rank {source} in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        self._hub.turns.current.look_up()
        slot = self._slots[source]
        if slot.is_held:
            raise UsageError(
                f"rank {self._rank} waits for slot of rank {source} in window {self.name!r}, which it holds "
                "itself.",
                next_step="end the first `with` block before the second begins.",
            )
        slot.is_held = True
        try:
            yield slot
        finally:
            slot.is_held = False
            slot.settle(self._hub.turns.now_s)

    def filled(self) -> Sequence[int]:
        """At this worker's own time."""
        self._check_open()
        self._hub.turns.current.poll(lambda: bool(self._filled()), f"writes into window {self.name!r}")
        return self._filled()

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """In virtual time."""
        self._check_open()
        turn = self._hub.turns.current
        turn.look_up()
        filled = self._filled()
        began_s = turn.now_s
        until_s = math.inf if deadline is None else turn.now_s + deadline.remaining_s
        while not filled and turn.now_s < until_s:
            if not any(source in self._hub.present for source in self._slots):
                break
            self._waiter = turn
            turn.park(f"writes into window {self.name!r}", until_s)
            self._waiter = None
            filled = self._filled()
        for source in filled[:1]:
            waited_s = self._slots[source].sent_s - began_s
            self._hub.waited_s[self._rank][source] += max(0.0, waited_s)
        return filled

    def close(self) -> None:
        """What comes later is dropped."""
        self._is_open = False
        if self._hub.windows.get((self._rank, self.name)) is self:
            del self._hub.windows[self._rank, self.name]
        self._drop()

    def _receive(self, source: int, write: Write, handle: Pending[None]) -> None:
        slot = self._slots[source]
        slot.queue.append((write, handle))
        slot.settle(self._hub.turns.now_s)
        self._rouse()

    def _filled(self) -> list[int]:
        return [source for source, slot in sorted(self._slots.items()) if slot.num_writes]

    def _somebody_is_gone(self) -> None:
        if self._rank not in self._hub.present:
            self._drop()
        self._rouse()

    def _drop(self) -> None:
        """What has come and is not written never will be: nobody waits for it."""
        for slot in self._slots.values():
            while slot.queue:
                slot.queue.pop(0)[1].resolve(self._hub.turns.now_s, lambda: None)

    def _rouse(self) -> None:
        if self._waiter is not None:
            self._waiter.wake(self._hub.turns.now_s)

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")


class _SimulatedSlot(Slot):
    def __init__(self, source: int, num_elements: int, dtype: torch.dtype) -> None:
        self.source = source
        self.tensor = torch.zeros(num_elements, dtype=dtype)
        self.is_held = False
        self.sent_s = 0.0
        self.queue: list[tuple[Write, Pending[None]]] = []
        """What has come and cannot be written yet."""
        self.clear()

    def clear(self) -> None:
        """The memory is left as it is."""
        self.num_writes, self.mass, self.note = 0, 0.0, b""

    def settle(self, now_s: float) -> None:
        """Write what can be written, in the order in which it came."""
        while self.queue and not self.is_held:
            write, handle = self.queue[0]
            if write.kind == "send" and self.num_writes:
                return
            self.queue.pop(0)
            has_more = write.kind == "accumulate" and self.num_writes > 0
            (write_more if has_more else write_first)(self.tensor, write)
            self.mass = write.mass + (self.mass if has_more else 0.0)
            self.note = write.note
            self.num_writes += 1
            handle.resolve(now_s, lambda: None)


class SimulatedGroup(Group):
    """One member's side; for the thread alone that the hub's turns run for it."""

    def __init__(self, hub: Hub, rank: int, machines: Sequence[int], patience: float = 1.0) -> None:
        self.rank = rank
        self.size = hub.size
        self.machine = machines[rank]
        self.num_machines = max(machines) + 1
        self.patience = patience
        self._hub = hub
        self._machines = machines
        self._has_left = False
        self._under_way: list[tuple[torch.Tensor, Pending[Any]]] = []
        self._sent_bytes = 0
        self._received_bytes = 0

    # --- who is there ---

    @property
    def members(self) -> Sequence[int]:
        """As of now."""
        return () if self._has_left else tuple(self._hub.present)

    @property
    def lost(self) -> Mapping[int, Loss]:
        """As of now."""
        return MappingProxyType(self._hub.lost)

    @property
    def waited_s(self) -> Sequence[float]:
        """Until a peer has issued its part; what its bytes take after that is nobody's."""
        return tuple(self._hub.waited_s[self.rank])

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """By the formulas of `Metered`."""
        return self._sent_bytes, self._received_bytes

    def machine_of(self, rank: int) -> int:
        """As the world has placed it."""
        self._check_rank(rank)
        return self._machines[rank]

    # --- collectives ---

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Ordinary memory; nobody is waited for."""
        self._check_member()
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Nothing: the memory goes with its last tensor."""

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Round a ring of the members."""
        check_reduction(tensor, op)
        self._begin(tensor)
        self._count(operations.all_reduce(self, tensor))
        gathering, handle = self._come(f"all_reduce ({op}) of {_shape(tensor)}", tensor, _copy(tensor))

        gathering.waiting[self.rank] = partial(self._reduced, gathering, handle, tensor)
        if gathering.ring is None:
            gathering.ring = self._ring(gathering, self._hub.present, tensor)

        def attempt() -> bool:
            if not self._is_settled(gathering, handle):
                return False
            if gathering.result is None and not handle.is_resolved:
                self._reduce(gathering, tensor, op)
            return True

        gathering.settle(self.rank, self._hub.present, attempt)
        gathering.ring.begin(self.rank, self._hub.turns.now_s)
        return handle

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Straight from the root."""
        self._check_rank(root)
        self._begin(tensor)
        self._count(operations.broadcast(self, tensor, root))
        brought = _Sent(_copy(tensor)) if self.rank == root else None
        gathering, handle = self._come(f"broadcast from {root} of {_shape(tensor)}", tensor, brought)
        if brought is not None:
            self._carry(brought, self._others())
            handle.resolve(brought.left_s(self._hub.turns.now_s), lambda: tensor)

        def attempt() -> bool:
            if self._is_mismatched(gathering, handle) or handle.is_resolved:
                return True
            if root not in gathering.arrived_s and root not in self._hub.present:
                loss = self._hub.lost.get(root, Loss(root, "it has left the group"))
                handle.resolve(self._hub.turns.now_s, raising(loss.error()))
            elif root in gathering.arrived_s:
                sent: _Sent = gathering.brought[root]
                came_s = sent.arrives_s(self, root, gathering.arrived_s[root])
                due_s = max(gathering.arrived_s[self.rank], came_s)
                handle.resolve(due_s, partial(_store, tensor, sent.values), gathering.last_of([root]))
            return handle.is_resolved

        gathering.settle(self.rank, [root], attempt)
        return handle

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Straight from everybody to everybody."""
        self._begin(tensor)
        self._count(operations.all_gather(self, tensor))
        sent = _Sent(_copy(tensor))
        gathering, handle = self._come("all_gather", None, sent)
        self._carry(sent, self._others())

        def take() -> list[torch.Tensor]:
            ranks = sorted(gathering.brought)
            self._received_bytes += sum(
                gathering.brought[rank].values.nbytes for rank in ranks if rank != self.rank
            )
            return [gathering.brought[rank].values.clone() for rank in ranks]

        return self._meet(gathering, handle, take)

    def barrier(self) -> Handle[None]:
        """A word from everybody to everybody."""
        self._begin()
        sent = _Sent(torch.empty(0))
        gathering, handle = self._come("barrier", None, sent)
        self._carry(sent, self._others())
        return self._meet(gathering, handle, lambda: None)

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Straight between neighbours: waits for one's own sources alone."""
        weights.check(self.rank, self.size)
        result = tensor if out is None else out
        if tensor.shape != result.shape or tensor.dtype != result.dtype:
            raise TensorError(f"An exchange of {_shape(tensor)} does not fit into {_shape(result)}.")
        self._begin(tensor, result)
        self._count(operations.exchange(self, tensor, weights))
        sent = _Sent(_copy(tensor), weights.destinations)
        gathering, handle = self._come(f"exchange of {_shape(tensor)}", result, sent)
        self._carry(sent, weights.sources if weights.destinations is None else weights.destinations)

        def attempt() -> bool:
            if self._is_mismatched(gathering, handle):
                return True
            if any(rank not in gathering.brought and rank in self._hub.present for rank in weights.sources):
                return False
            there = [rank for rank in sorted(weights.sources) if rank in gathering.brought]
            rest = weights.without([rank for rank in weights.sources if rank not in there])
            arrivals_s = [
                gathering.brought[rank].arrives_s(self, rank, gathering.arrived_s[rank]) for rank in there
            ]
            due_s = max(sent.left_s(gathering.arrived_s[self.rank]), *arrivals_s, 0.0)
            take = partial(self._mix, gathering, rest, result)
            handle.resolve(due_s, take, gathering.last_of(there))
            return True

        gathering.settle(self.rank, weights.sources, attempt)
        return handle

    def settle(self, tensor: torch.Tensor) -> None:
        """Nothing: others have copies."""

    # --- one-sided ---

    def publish(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """Others fetch what it is when they ask."""
        self._check_member()
        self._hub.turns.current.look_up()
        publication(self._hub, self.rank, name).publish(tensor, version)

    def reclaim(self, name: str, version: int) -> None:
        """Nobody reads the memory itself, but its time is over all the same."""
        self._publication(name).reclaim(name, version)

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """A copy of what is there when the request comes."""
        self._check_member()
        self._check_rank(peer)

        def received(size_bytes: int) -> None:
            self._received_bytes += size_bytes

        return fetch(self._hub, self.rank, peer, name, received)

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """Readers wait until the block has ended."""
        self._check_member()
        self._hub.turns.current.look_up()
        with self._publication(name).changing(name, version):
            yield

    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """A copy, sent once the version is there."""
        self._check_member()
        self._check_rank(peer)

        def received(size_bytes: int) -> None:
            self._received_bytes += size_bytes

        return read(self._hub, self.rank, peer, (name, version, into.detach()), received)

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
    ) -> SimulatedWindow:
        """All have theirs when it returns."""
        self._check_member()
        for rank in sources or ():
            self._check_rank(rank)
        chosen = self._others() if sources is None else sorted(sources)
        window = SimulatedWindow(self._hub, self.rank, name, (num_elements, dtype), chosen)
        window.on_write = self._wrote
        self.share([name, num_elements, str(dtype)])
        return window

    @contextlib.contextmanager
    def mutex(self, name: str, owner: int) -> Iterator[None]:
        """Asked for at its owner, first come first served."""
        self._check_member()
        self._check_rank(owner)
        with hold(self._hub, self.rank, owner, name):
            yield

    # --- its life ---

    def progress(self) -> None:
        """Time does it."""
        self._hub.turns.current.poll(_never, "progress")

    def leave(self) -> None:
        """Others go on without this one from now on."""
        if not self._has_left:
            self._hub.turns.current.look_up()
            self._has_left = True
            self._hub.leave(self.rank)

    def close(self) -> None:
        """Leave."""
        self.leave()

    def abandon(self) -> None:
        """The others find this one lost."""
        if not self._has_left:
            self._has_left = True
            self._hub.lose(self.rank, "its worker ended without leaving", self._hub.turns.clock.now_s())

    # --- how operations meet ---

    def _begin(self, *tensors: torch.Tensor) -> None:
        """Come to one's own time, and after all operations on the same memory."""
        self._check_member()
        self._hub.turns.current.look_up()
        self._under_way = [each for each in self._under_way if not each[1].is_taken]
        for tensor in tensors:
            start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            for memory, handle in list(self._under_way):
                if memory.data_ptr() < end and start < memory.data_ptr() + memory.nbytes:
                    handle.wait()

    def _come(self, kind: str, memory: torch.Tensor | None, brought: Any) -> _Come:
        gathering = self._hub.next_gathering(self.rank)
        handle: Pending[Any] = Pending(self._hub, self.rank, kind)
        if memory is not None:
            self._under_way.append((memory, handle))
        gathering.arrive(self.rank, kind, brought)
        return gathering, handle

    def _ring(self, gathering: Gathering[Any], ranks: Iterable[int], tensor: torch.Tensor) -> Ring:
        def over(rank: int, at_s: float) -> None:
            gathering.waiting[rank](at_s)

        hub = self._hub
        return Ring(hub.links, hub.turns.call_at, sorted(ranks), tensor.nbytes, over)

    def _reduce(self, gathering: Gathering[Any], tensor: torch.Tensor, op: Reduction) -> None:
        """All are there; where one has gone before it came, the others begin again, now."""
        ranks = sorted(gathering.arrived_s)
        gathering.result = torch.empty_like(gathering.brought[self.rank])
        reduce_into(gathering.result, [gathering.brought[rank] for rank in ranks], op)
        if gathering.ring is None or gathering.ring.ranks != tuple(ranks):
            gathering.ring = self._ring(gathering, ranks, tensor)
            for rank in ranks:
                gathering.ring.begin(rank, self._hub.turns.now_s)

    def _reduced(
        self, gathering: Gathering[Any], handle: Pending[Any], tensor: torch.Tensor, at_s: float
    ) -> None:
        take = partial(_take_sum, gathering, tensor)
        handle.resolve(at_s, take, gathering.last_of(gathering.arrived_s))

    def _meet(self, gathering: Gathering[Any], handle: Pending[T], take: Callable[[], T]) -> Handle[T]:
        """Over when what everybody has sent has come."""

        def attempt() -> bool:
            if not self._is_settled(gathering, handle):
                return False
            if not handle.is_resolved:
                arrived_s = gathering.arrived_s
                comes_s = [
                    sent.arrives_s(self, rank, arrived_s[rank])
                    for rank, sent in gathering.brought.items()
                    if rank != self.rank
                ]
                own: _Sent = gathering.brought[self.rank]
                due_s = max(own.left_s(arrived_s[self.rank]), *comes_s, 0.0)
                handle.resolve(due_s, take, gathering.last_of(arrived_s))
            return True

        gathering.settle(self.rank, self._hub.present, attempt)
        return handle

    def _is_settled(self, gathering: Gathering[Any], handle: Pending[Any]) -> bool:
        """Whether nobody is waited for any more; the handle may have an error then."""
        if self._is_mismatched(gathering, handle):
            return True
        lost = [rank for rank in self._hub.lost if rank not in gathering.arrived_s]
        if lost and not self.should_survive:
            handle.resolve(self._hub.turns.now_s, raising(self._hub.lost[lost[0]].error()))
            return True
        return all(rank in gathering.arrived_s for rank in self._hub.present)

    def _is_mismatched(self, gathering: Gathering[Any], handle: Pending[Any]) -> bool:
        error = gathering.mismatch()
        if error is not None:
            handle.resolve(self._hub.turns.now_s, raising(error))
        return error is not None

    def _carry(self, sent: _Sent, destinations: Collection[int]) -> None:
        now_s = self._hub.turns.now_s
        for rank in sorted(destinations):
            if rank in self._hub.present and rank != self.rank:
                sent.passages[rank] = self._hub.links.carry(self.rank, rank, now_s, sent.values.nbytes)

    def _mix(self, gathering: Gathering[Any], weights: Weights, out: torch.Tensor) -> torch.Tensor:
        sources = []
        for rank, weight in weights.sources.items():
            sent: _Sent = gathering.brought[rank]
            sources.append((sent.values.view(-1), weight * sent.factor_for(self.rank, rank)))
        own: _Sent = gathering.brought[self.rank]
        with torch.no_grad():
            mixed = torch.empty_like(own.values)
            mix_into(mixed.view(-1), own.values.view(-1), weights.own, sources)
            out.copy_(mixed)
        return out

    # --- small things ---

    def _count(self, operation: Operation) -> None:
        self._sent_bytes += operation.sent_bytes
        self._received_bytes += operation.received_bytes

    def _wrote(self, to: int, size_bytes: int) -> None:
        if to != self.rank:
            self._sent_bytes += size_bytes

    def _publication(self, name: str) -> Publication:
        return publication(self._hub, self.rank, name)

    def _others(self) -> list[int]:
        return [rank for rank in self._hub.present if rank != self.rank]

    def _check_member(self) -> None:
        if self._has_left:
            raise UsageError(
                f"rank {self.rank} has left the group and takes part in nothing more.",
                next_step="make it the last thing to leave or to close.",
            )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(
                f"There is no rank {rank} in a group of {self.size}.",
                next_step=f"name a rank from 0 to {self.size - 1}.",
            )


class _Sent:
    """What one member has sent to others in an operation, and how it travels."""

    def __init__(self, values: torch.Tensor, destinations: Mapping[int, float] | None = None) -> None:
        self.values = values
        self.passages: dict[int, Passage] = {}
        self._factors = destinations

    def left_s(self, began_s: float) -> float:
        """When the last of it has left."""
        return max(began_s, *(passage.left_at_s for passage in self.passages.values()), began_s)

    def arrives_s(self, group: SimulatedGroup, source: int, sent_s: float) -> float:
        """At a member; one that was not reckoned with is sent to after the others."""
        if group.rank not in self.passages:
            links = group._hub.links
            self.passages[group.rank] = links.carry(source, group.rank, sent_s, self.values.nbytes)
        return self.passages[group.rank].arrives_at_s

    def factor_for(self, rank: int, source: int) -> float:
        """By which it is multiplied on the way; UsageError where the sender does not send there."""
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


def _take_sum(gathering: Gathering[Any], tensor: torch.Tensor) -> torch.Tensor:
    return _store(tensor, gathering.result)


def _never() -> bool:
    return False


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {list(tensor.shape)}"
