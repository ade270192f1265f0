"""Members of one process: what they share, their windows, and the group of one, which has nobody to lose.

Slots, and what is published, lie in ordinary tensors. Members take turns, and what they send takes time, in
`simulated`. For one worker alone time stands still: whatever is sent has arrived at once, and whoever waits
waits for itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import NoReturn, TypeVar

import torch

from shoal.core import Deadline, DeadlineExceeded, ShoalError, TensorError, UsageError
from shoal.core.turns import Turn, Turns
from shoal.group.base import (
    Done,
    Group,
    GroupStats,
    Handle,
    Loss,
    Reduction,
    Snapshot,
    Window,
    WindowForm,
    WindowSlot,
    Write,
    check_rank,
    has_left,
    held_by_itself,
)
from shoal.group.functions import others, share, spread_over_ranks
from shoal.group.kernels import CopiedSnapshot, MemorySlot, check_reduction, check_write, copy_out
from shoal.group.operations import TrafficCounter
from shoal.topology import MachineWeights, Weights

T = TypeVar("T")


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
        return self._counter.stats(waited_s)

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

    def _make_window(self, form: WindowForm, sources: Collection[int] | None) -> Window:
        """Makes a window; all have theirs when it returns, unless it has no slots."""
        self._check_member()
        for rank in sources or ():
            check_rank(rank, self.size)
        window = _LocalWindow(self, form, others(self) if sources is None else sources)
        if self._network.size > 1 and sources != ():  # an empty list is one member's: others have slots
            share(self, [form.name, form.num_elements, str(form.dtype)])
        return window

    def progress(self) -> None:
        """Does nothing: nothing is ever under way."""

    def leave(self) -> None:
        """Has the others go on without this worker from now on."""
        if not self._has_left:
            self._network.turns.current.look_up()
            self._has_left = True
            self._network.leave(self.rank)

    def close(self, error: BaseException | None = None) -> None:
        """Leaves; there is nothing to give back."""
        self.leave()

    def _check_member(self) -> None:
        """Raises UsageError for whoever does something after it has left."""
        if self.rank not in self.members:
            raise has_left(self.rank)

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
        check_rank(root, self.size)
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


class LocalNetwork:
    """What the members of one process share: the time, who is there, and their windows."""

    def __init__(self, size: int, turns: Turns | None = None) -> None:
        self.size = size
        self.present = list(range(size))
        self.lost: dict[int, Loss] = {}
        self.waited_s = [[0.0] * size for _ in range(size)]
        self.windows: dict[tuple[int, str], _LocalWindow] = {}
        self.turns: Turns | _Standstill = turns or _Standstill()
        self._attempts: dict[tuple[int, str], list[Callable[[], bool]]] = {}
        """By a member's rank, and the name of its window: what waits for a change of it."""

    def arrives_s(self, source: int, target: int, size_bytes: int) -> float:
        """Sends something now, and tells when it arrives."""
        return self.turns.now_s

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


class _Standstill:
    """The turns of one worker alone: no time passes, and nothing happens while it waits."""

    now_s = 0.0

    @property
    def current(self) -> _Standstill:
        return self

    def look_up(self) -> None: ...

    def wake(self, at_s: float) -> None: ...

    def poll(self, is_there: Callable[[], bool], what: str) -> bool:
        return is_there()

    def park(self, what: str, until_s: float) -> NoReturn:
        raise DeadlineExceeded(
            f"{what}: nobody else is there to see to it.", next_step="do it first, then wait."
        )

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        call()


class PendingOperation(Handle[T]):
    """Is under way until the time that `resolve` says."""

    def __init__(self, network: LocalNetwork, rank: int, what: str) -> None:
        self.is_resolved = False
        """Whether its end is known."""
        self.is_taken = False
        """Whether somebody has the result, or the error."""
        self._network = network
        self._rank = rank
        self._what = what
        self._take: Callable[[], T]
        self._due_s = self._until_s = math.inf
        self._waiter: Turn | _Standstill | None = None
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


class _QueueingSlot(MemorySlot):
    """A slot whose writes are done in order, and wait while it is held, or full and to be sent to."""

    is_held = False

    def __init__(self, source: int, form: WindowForm) -> None:
        super().__init__(source, form)
        self._queue: list[tuple[Write, Callable[[], None]]] = []

    def offer(self, write: Write, done: Callable[[], None]) -> None:
        self._queue.append((write, done))
        self.settle()

    def settle(self) -> None:
        """Does what writes can be done."""
        while self._queue and not self.is_held and self.may_take(self._queue[0][0]):
            write, done = self._queue.pop(0)
            self.take(write)
            done()

    def drop(self) -> None:
        while self._queue:
            self._queue.pop(0)[1]()


class _LocalWindow(Window):
    """One member's window: slots for its sources, and a way to others' windows of the same name."""

    def __init__(self, group: LocalGroup, form: WindowForm, sources: Collection[int]) -> None:
        super().__init__(form)
        self._group = group
        self._rank = group.rank
        self._network = group._network
        # made again under a name that is in use, it goes on with what the one before has published
        before = self._network.windows.get((self._rank, self.name))
        self._published: torch.Tensor | None = None if before is None else before._published
        self._version: int = -1 if before is None else before._version
        self._is_changing = False
        self._slots = {source: _QueueingSlot(source, form) for source in sorted(sources)}
        self._sent_s: dict[int, float] = {}
        """By source: when the last write that has come was sent."""
        self._what = f"writes into window {self.name!r}"
        self._network.windows[self._rank, self.name] = self

    def _write(self, to: int, write: Write) -> Handle[None]:
        """Is over when it is in the slot; at once for one that is gone."""
        self._check_open()
        check_write(write, self)
        check_rank(to, self._group.size)
        network, rank = self._network, self._rank
        network.turns.current.look_up()
        if to not in network.present:
            return Done(None)
        target = network.windows.get((to, self.name))
        if target is not None:
            target._slot_of(rank)
        if to != rank:
            self._group._counter.sent_to[to] += write.tensor.nbytes
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

    @contextlib.contextmanager
    def slot(self, source: int) -> Iterator[WindowSlot]:
        """Holds a slot; what is written meanwhile is done after the block."""
        self._check_open()
        slot = self._slot_of(source)
        self._network.turns.current.look_up()
        if slot.is_held:
            raise held_by_itself(self._rank, f"slot of rank {source} in window {self.name!r}")
        slot.is_held = True
        try:
            yield slot
        finally:
            slot.is_held = False
            slot.settle()

    def filled(self) -> Sequence[int]:
        self._check_open()
        self._network.turns.current.poll(lambda: bool(self._filled()), self._what)
        return self._filled()

    def _filled(self) -> list[int]:
        return [source for source, slot in self._slots.items() if slot.num_writes]

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
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

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """Lets others copy the tensor as it is when they ask."""
        self._begin()
        check_write(Write("put", tensor), self)
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
        self._check_change(None if self._published is None else self._version, version)
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
                    self._group._counter.received_from[peer] += size_bytes
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
            self._network.look(self._rank, self.name)
            self.drop_writes()

    def drop_writes(self) -> None:
        """Ends writes that wait: nobody will ever take them."""
        for slot in self._slots.values():
            slot.drop()

    def _begin(self) -> None:
        """Comes to this worker's own time, unless it may not do anything more."""
        self._check_open()
        self._group._check_member()
        self._network.turns.current.look_up()

    def _slot_of(self, source: int) -> _QueueingSlot:
        if source not in self._slots:
            raise self._no_slot(self._rank, source)
        return self._slots[source]
