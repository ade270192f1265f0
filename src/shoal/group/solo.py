"""Members of one process: what they share, their windows, and the group of one, which has nobody to lose.

Slots, and what is published, lie in ordinary tensors. In a plain `LocalNetwork` whatever is sent has arrived
at once, and whoever waits waits for itself; the network in virtual time adds the way between members.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from shoal.core import Deadline, DeadlineExceeded, TensorError, UsageError
from shoal.group.base import (
    Done,
    Group,
    GroupStats,
    Handle,
    Loss,
    Reduction,
    Slot,
    Snapshot,
    T,
    Window,
    Write,
)
from shoal.group.functions import share, spread_over_ranks
from shoal.group.kernels import CopiedSnapshot, MemorySlot, check_reduction, check_write, copy_out
from shoal.group.operations import TrafficCounter, others
from shoal.topology import MachineWeights, Weights

Form: TypeAlias = tuple[int, torch.dtype, torch.device | None]
"""Of a window's slots: the number of elements, their type, and where they lie."""


class LocalGroup(Group):
    """One member's side of a network; its memory is ordinary, and others have copies of it."""

    def __init__(
        self, network: LocalNetwork, rank: int, machines: Sequence[int], patience: float = 1.0
    ) -> None:
        self.rank = rank
        self.size = network.size
        self.machine = machines[rank]
        self.machines = machines
        self.num_machines = max(machines) + 1
        self.patience = patience
        self._network = network
        self._counter = TrafficCounter(rank, network.size)
        self._has_left = False

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
        waited_s = tuple(self._network.waited_s[self.rank])
        return GroupStats(self._counter.sent_bytes, self._counter.received_bytes, waited_s)

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Makes ordinary memory, which torch aligns; nobody is waited for."""
        self._check_member()
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Does nothing: the memory goes with its last tensor."""

    def settle(self, tensor: torch.Tensor) -> None:
        """Does nothing: nobody else reads it."""

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
        self._check_member()
        for rank in sources or ():
            self._check_rank(rank)
        chosen = others(self) if sources is None else sources
        window = self._network.window_type(self, name, (num_elements, dtype, device), chosen)
        if self._network.size > 1 and sources != ():  # an empty list is one member's: others have slots
            share(self, [name, num_elements, str(dtype)])
        return window

    def progress(self) -> None:
        """Does nothing: nothing is ever under way."""

    def leave(self) -> None:
        """Has the others go on without this worker from now on."""
        if not self._has_left:
            self._network.look_up()
            self._has_left = True
            self._network.leave(self.rank)

    def close(self, error: BaseException | None = None) -> None:
        """Leaves; there is nothing to give back."""
        self.leave()

    def _check_rank(self, rank: int) -> None:
        """Raises UsageError for a rank that there is not."""
        if not 0 <= rank < self.size:
            raise UsageError(
                f"There is no rank {rank} in a group of {self.size}.",
                next_step=f"name a rank from 0 to {self.size - 1}.",
            )

    def _check_member(self) -> None:
        """Raises UsageError for whoever does something after it has left."""
        if self.rank not in self.members:
            raise UsageError(
                f"rank {self.rank} has left the group and takes part in nothing more.",
                next_step="make it the last thing to leave or to close.",
            )

    def _prepare_exchange(
        self, tensor: torch.Tensor, between: Weights | MachineWeights, out: torch.Tensor | None
    ) -> tuple[Weights, torch.Tensor]:
        """Finds the weights of ranks, and where the result goes; TensorError where it does not fit there."""
        weights = spread_over_ranks(self, between)
        weights.check(self.rank, self.size)
        result = tensor if out is None else out
        if tensor.shape != result.shape or tensor.dtype != result.dtype:
            raise TensorError(
                f"An exchange of {tensor.dtype} of shape {list(tensor.shape)} does not fit into "
                f"{result.dtype} of shape {list(result.shape)}."
            )
        return weights, result


class SoloGroup(LocalGroup):
    """One worker alone; every operation is over when it returns."""

    def __init__(self, patience: float = 1.0) -> None:
        super().__init__(LocalNetwork(1), 0, (0,), patience)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Leaves the tensor as it is."""
        self._check_member()
        check_reduction(tensor, op)
        return Done(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Leaves the tensor as it is."""
        self._check_member()
        self._check_rank(root)
        return Done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Copies the tensor into a list of one."""
        self._check_member()
        return Done([tensor.detach().clone()])

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Multiplies the tensor by one's own weight."""
        self._check_member()
        weights, result = self._prepare_exchange(tensor, weights, out)
        with torch.no_grad():
            if out is not None:
                out.copy_(tensor)
            return Done(result if weights.own == 1 else result.mul_(weights.own))

    def barrier(self) -> Handle[None]:
        """Is over at once."""
        self._check_member()
        return Done(None)


class PendingOperation(Handle[T]):
    """Is under way until `resolve`, which here only this worker itself can bring about."""

    def __init__(self, what: str) -> None:
        self.is_taken = False
        """Whether somebody has the result, or the error."""
        self._what = what
        self._take: Callable[[], T] | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether its end is known."""
        return self._take is not None

    def resolve(self, due_s: float, take: Callable[[], T]) -> None:
        """Has it be over at `due_s`; `take` makes the result when it is first asked for after that."""
        if self._take is None:
            self._take = cache(take)

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result; DeadlineExceeded at once where there is none."""
        if self._take is None:
            raise DeadlineExceeded(
                f"{self._what}: nobody else is there to see to it.", next_step="do it first, then wait."
            )
        self.is_taken = True
        return self._take()

    def is_done(self) -> bool:
        """Tells whether it has its result."""
        return self._take is not None


class LocalNetwork:
    """What the members of one process share, and the way between them, which here takes no time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.present = list(range(size))
        self.lost: dict[int, Loss] = {}
        self.waited_s = [[0.0] * size for _ in range(size)]
        self.windows: dict[tuple[int, str], LocalWindow] = {}
        self.window_type: type[LocalWindow] = LocalWindow
        self._readers: dict[tuple[int, str], list[Callable[[], bool]]] = {}

    @property
    def now_s(self) -> float:
        """The time of all members."""
        return 0.0

    def look_up(self) -> None:
        """Comes to the time of the worker that calls."""

    def pending(self, rank: int, what: str) -> PendingOperation[Any]:
        """Makes the handle of something that this member waits for."""
        return PendingOperation(what)

    def arrives_s(self, source: int, target: int, size_bytes: int) -> float:
        """Sends something now, and tells when it arrives."""
        return self.now_s

    def send(self, source: int, target: int, size_bytes: int, deliver: Callable[[], None]) -> None:
        """Carries something from now on; `deliver` is called when it arrives."""
        deliver()

    def when_published(self, rank: int, name: str, attempt: Callable[[], bool]) -> None:
        """Tries now, and whenever a member publishes or changes something, or goes, until it is true."""
        if not attempt():
            self._readers.setdefault((rank, name), []).append(attempt)

    def look(self, rank: int, name: str) -> None:
        """Tries those that wait for what a member publishes."""
        waiting = self._readers.pop((rank, name), [])
        self._readers[rank, name] = [attempt for attempt in waiting if not attempt()]

    def leave(self, rank: int) -> None:
        """Has a member be gone from now on."""
        self.present = [each for each in self.present if each != rank]
        for window in list(self.windows.values()):
            window.somebody_is_gone()
        for key in list(self._readers):
            self.look(*key)


class QueueingSlot(MemorySlot):
    """A slot whose writes are done in order, and wait while it is held, or full and to be sent to."""

    is_held = False

    def __init__(self, source: int, form: Form) -> None:
        super().__init__(source, *form)
        self._queue: list[tuple[Write, Callable[[], None]]] = []

    def offer(self, write: Write, done: Callable[[], None]) -> None:
        """Takes a write when its time has come, and calls `done` then."""
        self._queue.append((write, done))
        self.settle()

    def settle(self) -> None:
        """Does what writes can be done."""
        while self._queue and not self.is_held and self.may_take(self._queue[0][0]):
            write, done = self._queue.pop(0)
            self.take(write)
            done()

    def drop(self) -> None:
        """Forgets writes that wait: nobody will ever take them."""
        while self._queue:
            self._queue.pop(0)[1]()


class LocalWindow(Window):
    """One member's window: slots for its sources, and a way to others' windows of the same name."""

    def __init__(self, group: LocalGroup, name: str, form: Form, sources: Collection[int]) -> None:
        self.name = name
        self.num_elements, self.dtype, device = form
        self.device = device or torch.device("cpu")
        self._group = group
        self._rank = group.rank
        self._network = group._network
        # made again under a name that is in use, it goes on with what the one before has published
        before = self._network.windows.get((self._rank, name))
        self._published: torch.Tensor | None = None if before is None else before._published
        self._version: int = -1 if before is None else before._version
        self._is_changing = False
        self._slots = {source: QueueingSlot(source, form) for source in sorted(sources)}
        self._is_open = True
        self._network.windows[self._rank, name] = self

    def _write(self, to: int, write: Write) -> Handle[None]:
        """Is over when it is in the slot; at once for one that is gone."""
        self._check_open()
        check_write(write, self.name, self.num_elements, self.dtype)
        self._group._check_rank(to)
        network, rank = self._network, self._rank
        network.look_up()
        if to not in network.present:
            return Done(None)
        target = network.windows.get((to, self.name))
        if target is not None:
            target._slot_of(rank)
        if to != rank:
            self._group._counter.sent_bytes += write.tensor.nbytes
        handle: PendingOperation[None] = network.pending(rank, f"{write.kind} to rank {to} in {self.name!r}")
        sent, sent_s = dataclasses.replace(write, tensor=write.tensor.detach().clone()), network.now_s

        def done() -> None:
            handle.resolve(network.now_s, lambda: None)

        def arrived() -> None:
            there = network.windows.get((to, self.name))
            if there is None or to not in network.present:
                done()
            else:
                there._receive(rank, sent, sent_s, done)

        network.send(rank, to, write.tensor.nbytes, arrived)
        return handle

    def _receive(self, source: int, write: Write, sent_s: float, done: Callable[[], None]) -> None:
        self._slots[source].offer(write, done)

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[Slot]:
        """Holds a slot; what is written meanwhile is done after the block."""
        self._check_open()
        slot = self._slot_of(source)
        self._network.look_up()
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
            slot.settle()

    def filled(self) -> Sequence[int]:
        """Lists the sources whose slots have something in them."""
        self._check_open()
        return self._filled()

    def _filled(self) -> list[int]:
        return [source for source, slot in self._slots.items() if slot.num_writes]

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Lists as `filled`: nothing comes while this worker waits for itself."""
        return self.filled()

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """Lets others copy the tensor as it is when they ask."""
        self._begin()
        check_write(Write("put", tensor), self.name, self.num_elements, self.dtype)
        self._published, self._version = tensor.detach(), version
        self._network.look(self._rank, self.name)

    def reclaim(self, version: int) -> None:
        """Does nothing more than to check: snapshots are copies."""
        if self._published is not None and self._version <= version:
            raise UsageError(
                f"Version {version} of {self.name!r} is the newest that is published, and cannot be "
                "reclaimed.",
                next_step="publish a newer version first.",
            )

    @contextlib.contextmanager
    def changing(self, version: int) -> Iterator[None]:
        """Has readers wait until the block has ended, and for good if it raises."""
        self._begin()
        if self._published is None:
            raise UsageError(
                f"Nothing is published as {self.name!r}, so it cannot be changed.",
                next_step="publish it first.",
            )
        if version < self._version:
            raise UsageError(
                f"{self.name!r} is of version {self._version} and cannot become {version}.",
                next_step="count upwards.",
            )
        self._is_changing = True
        yield
        self._is_changing = False
        self._version = version
        self._network.look(self._rank, self.name)

    def snapshot(self, least_version: int = 0) -> CopiedSnapshot | None:
        """Copies what is published; None where it is older than asked for, or is being changed."""
        if self._published is None or self._is_changing or self._version < least_version:
            return None
        return CopiedSnapshot(self._rank, self._version, self._published.clone())

    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Copies what is there when the request comes, and brings it back."""
        if peer == self._rank:
            self._begin()
            return Done(self.snapshot())
        return self._ask("fetch", peer, None, lambda snapshot: snapshot)

    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Copies as `fetch` does, once the version is there, into a tensor."""
        return self._ask("read", peer, version, lambda found: copy_out(found, into.detach(), self.name))

    def _ask(
        self, what: str, peer: int, version: int | None, take: Callable[[CopiedSnapshot], T]
    ) -> Handle[T | None]:
        """Asks for what a peer has published; with a version, once it is that new."""
        self._group._check_rank(peer)
        self._begin()
        network, rank = self._network, self._rank
        handle: PendingOperation[T | None] = network.pending(rank, f"{what} {self.name!r} of rank {peer}")

        def attempt() -> bool:
            there = network.windows.get((peer, self.name)) if peer in network.present else None
            snapshot = None if there is None else there.snapshot(version or 0)
            if snapshot is not None or version is None:
                size_bytes = 0 if snapshot is None or peer == rank else snapshot.tensor.nbytes

                def finish() -> T | None:
                    self._group._counter.received_bytes += size_bytes
                    return None if snapshot is None else take(snapshot)

                handle.resolve(network.arrives_s(peer, rank, size_bytes), finish)
            elif peer not in network.present or (
                version == 0 and (there is None or there._published is None)
            ):
                handle.resolve(network.now_s, lambda: None)
            return handle.is_resolved

        when = partial(network.when_published, peer, self.name, attempt)
        if peer == rank:
            when()
        else:
            network.send(rank, peer, 0, when)
        return handle

    def close(self) -> None:
        """Drops what was not taken or comes later, and what was published."""
        if self._network.windows.get((self._rank, self.name)) is self:
            del self._network.windows[self._rank, self.name]
        if self._is_open:
            self._is_open = False
            self._network.look(self._rank, self.name)
            for slot in self._slots.values():
                slot.drop()

    def somebody_is_gone(self) -> None:
        """Drops what waits for this worker, if it is the one."""
        if self._rank not in self._network.present:
            for slot in self._slots.values():
                slot.drop()

    def _begin(self) -> None:
        """Comes to this worker's own time, unless it may not do anything more."""
        self._check_open()
        self._group._check_member()
        self._network.look_up()

    def _slot_of(self, source: int) -> QueueingSlot:
        if source not in self._slots:
            raise UsageError(
                f"rank {self._rank} has no slot for rank {source} in window {self.name!r}.",
                next_step="name it among the sources when the window is made.",
            )
        return self._slots[source]

    def _check_open(self) -> None:
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")
