"""Groups under the conditions of a worse network: slow as a profile says, or failing as a fault script says.

A script may also have bits come out wrong, of what operations move and of what is written into windows.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch

from shoal.core import Address, Deadline, PeerLost, ShoalError
from shoal.group.base import Done, Group, Handle, Reduction, Snapshot, Window
from shoal.group.operations import Bytes, GroupWrapper, Issue, Operation, Sleeper, WrappedWindow
from shoal.topology import Weights
from shoal.transport import Conditions, FaultScript, Profile
from shoal.transport.conditions import documents
from shoal.transport.conditions.distributions import Draws
from shoal.transport.conditions.faults import (
    AnyFault,
    Duplicate,
    Event,
    Kill,
    Pause,
    Reorder,
    Schedule,
    Skew,
    Slow,
)
from shoal.transport.conditions.faulty_links import Effects, effects_on

T = TypeVar("T")
_WHAT = "The fault script of a group"
_MOMENT_S = 1e-6
"""By which a change of the script is surely past."""
Meddle = Callable[[int, torch.Tensor, bool], torch.Tensor | None]
"""What arrives of a tensor that is written to a rank, None for nothing; whether it would be sent again."""
Listen = Callable[[Deadline | None], Sequence[int]]
"""Waits as a window does."""


class Shaped(GroupWrapper):
    """Holds back each operation's end until its bytes would have come over the links of a profile.

    What is sent, and to whom, is what `shoal.group.operations` says. Links are those of the transport's
    profiles: queues with a bandwidth, a delay, jitter, loss as a pause; the same seed gives the same delays.
    With `between="workers"` every worker is a peer of its own, which a profile calls `rank:0`, `rank:1`, …;
    with "machines" the workers of one machine reach each other at once, and peers are `machine:0`, ….
    Each worker reckons with the links at its own end: a slow link elsewhere in a ring delays the others only
    by the next operation. Waits hold the caller's thread, and end by their deadline.
    """

    def __init__(
        self,
        inner: Group,
        profile: Profile | str | Path,
        *,
        between: Literal["workers", "machines"] = "workers",
        seed: int = 0,
        sleeper: Sleeper | None = None,
    ) -> None:
        super().__init__(inner)
        self._conditions = Conditions(
            profile if isinstance(profile, Profile) else Profile.load(profile), seed=seed
        )
        self._is_by_machine = between == "machines"
        self._sleeper = sleeper or Sleeper()
        self._here = self._address(inner.rank)

    def _issue(self, operation: Operation, start: Callable[[], Handle[T]]) -> Handle[T]:
        issued_s = self._sleeper.clock.now_s()
        handle = start()
        due_s = issued_s
        step_sends = {rank: size // operation.num_steps for rank, size in operation.sends.items()}
        step_receives = {rank: size // operation.num_steps for rank, size in operation.receives.items()}
        for _ in range(operation.num_steps):
            began_s = due_s
            due_s = self._sent_s(began_s, step_sends, has_to_arrive=operation.is_request)
            due_s = max(due_s, self._received_s(began_s, step_receives))
        learn = None
        if operation.learns is not None:
            learn = partial(self._learn, operation.learns, due_s if operation.is_request else issued_s)
        return _DelayedHandle(handle, self, operation.name, due_s, learn)

    def _learn(self, learns: Callable[[object], Bytes], began_s: float, result: object) -> float:
        return self._received_s(began_s, learns(result))

    def _sent_s(self, now_s: float, sends: Bytes, *, has_to_arrive: bool) -> float:
        """When the last byte has left this worker, or reached the other side."""
        ends_s = [now_s]
        for rank, size_bytes in sends.items():
            passage = self._conditions.link(self._here, self._address(rank)).carry_stream(now_s, size_bytes)
            ends_s.append(passage.arrives_at_s if has_to_arrive else passage.left_at_s)
        return max(ends_s)

    def _received_s(self, now_s: float, receives: Bytes) -> float:
        """When the last byte has come."""
        ends_s = [now_s]
        for rank, size_bytes in receives.items():
            passage = self._conditions.link(self._address(rank), self._here).carry_stream(now_s, size_bytes)
            ends_s.append(passage.arrives_at_s)
        return max(ends_s)

    def _address(self, rank: int) -> Address:
        if self._is_by_machine:
            return Address("machine", self.inner.machine_of(rank))
        return Address("rank", rank)


class _DelayedHandle(Handle[T]):
    """Over when the inner one is, and not before it is due."""

    def __init__(
        self,
        inner: Handle[T],
        group: Shaped,
        name: str,
        due_s: float,
        learn: Callable[[object], float] | None,
    ) -> None:
        self._inner = inner
        self._group = group
        self._name = name
        self._due_s = due_s
        self._learn = learn

    def wait(self, deadline: Deadline | None = None) -> T:
        """As the inner handle's, later."""
        result = self._inner.wait(deadline)
        self._take(result)
        self._group._sleeper.until(
            self._due_s,
            self._group.inner.progress,
            deadline or Deadline.never(),
            f"{self._name} over a shaped link",
        )
        return result

    def is_done(self) -> bool:
        """Not before it is due."""
        if not self._inner.is_done():
            return False
        if self._learn is not None:
            try:
                self._take(self._inner.wait())
            except ShoalError:
                return True  # `wait` says it at once
        return self._group._sleeper.clock.now_s() >= self._due_s

    def _take(self, result: T) -> None:
        if self._learn is not None:
            self._due_s = max(self._due_s, self._learn(result))
            self._learn = None


class Faulty(GroupWrapper):
    """Injects the faults of a script (`docs/networks.md`) that concern this worker; all members get the same.

    A script calls workers `rank:0`, `rank:1`, …, or all of a machine `machine:0`. `at_s` counts from the
    construction, `at_step` the operations with a handle that this worker has issued before. Faults take
    hold when an operation is issued or waited for, and in `progress`; they are looked at again while a window
    is waited for.

    kill        SIGKILL to oneself
    pause       with `for_s` the caller's thread sleeps, so the others wait; without it SIGSTOP to oneself, so
                the others find it silent until somebody continues it
    slow        the worker's own time between calls of the group lasts `factor` times as long
    partition   an exchange goes on without the peers beyond, a fetch or read brings None, a write into their
                windows does nothing, and a window whose sources are all beyond is not waited for without a
                deadline; their mutex raises PeerLost; an operation that needs everybody takes
                place (nobody hangs) but raises PeerLost, unless the group `should_survive`, and leaves its
                tensor as it was
    drop        the same for single messages; `probability` is that of each peer's in each operation. Of
                writes only a `put` is lost: what must not be missed would be sent again
    corrupt     one wrong bit in what an operation brings, likewise

    Other kinds need a network: UsageError. `end` is called instead of both signals where it is given.
    Of a group whose first members are servers, `first_rank` is the one that a script calls `rank:0`.
    Without `should_stretch` nobody is slow by itself: whoever makes its time pass asks for its `slowness`.
    """

    def __init__(
        self,
        inner: Group,
        script: FaultScript | str | Path,
        *,
        seed: int = 0,
        sleeper: Sleeper | None = None,
        end: Callable[[], None] | None = None,
        first_rank: int = 0,
        should_stretch: bool = True,
    ) -> None:
        super().__init__(inner)
        script = script if isinstance(script, FaultScript) else FaultScript.load(script)
        self._first_rank = first_rank
        _check(script, inner, first_rank)
        self._sleeper = sleeper or Sleeper()
        self._script, self._seed = script, seed
        self._schedule = Schedule(script, seed)
        self._end = end or partial(_signal_oneself, signal.SIGKILL)
        self._stop = end or partial(_signal_oneself, signal.SIGSTOP)
        self._started_s = self._sleeper.clock.now_s()
        self._returned_s = self._started_s
        """Since when the worker has been on its own."""
        self._step = -1
        self._names = [self._names_of(rank) for rank in range(inner.size)]
        self._effects = [Effects()] * inner.size
        """On what comes from each rank."""
        self._reverse = [Effects()] * inner.size
        """On what goes to each rank."""
        self._stopped: list[Event] = []
        self._should_stretch = should_stretch
        self._draws = [Draws(seed, "group", str(rank), str(inner.rank)) for rank in range(inner.size)]

    def hold(self) -> None:
        """Nothing of the script happens until `restart`."""
        self._schedule = Schedule(FaultScript(), self._seed)

    def restart(self) -> None:
        """Have the script begin now: times and steps count from here."""
        self._started_s = self._sleeper.clock.now_s()
        self._step = -1
        self._schedule = Schedule(self._script, self._seed)
        self._effects = self._reverse = [Effects()] * self.size
        self._stopped = []

    @property
    def slowness(self) -> float:
        """How many times as long as without faults this worker's own time lasts now."""
        slowness = 1.0
        self._advance()
        for event in self._schedule.events:
            if event.is_active and isinstance(event.fault, Slow) and event.concerns(self._names[self.rank]):
                slowness *= event.fault.factor
        return slowness

    # --- operations that need everybody ---

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """PeerLost when any member cannot be reached."""
        return self._collective(tensor, partial(self.inner.all_reduce, tensor, op), self._others())

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """PeerLost when the root cannot be reached."""
        sources = [root] if root in self._others() else []
        return self._collective(tensor, partial(self.inner.broadcast, tensor, root), sources)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """PeerLost when any member cannot be reached."""
        members = list(self.members)
        self._begin()
        sources = self._others()
        cut = self._cut(sources)
        damaged = [members.index(rank) for rank in self._damaged(sources)]

        def finish(parts: list[torch.Tensor]) -> list[torch.Tensor]:
            self._check_reached(cut)
            for place in damaged:
                damage(parts[place], self._draws[members[place]])
            return [part for rank, part in zip(members, parts, strict=False) if rank not in cut]

        return self._handle(self.inner.all_gather(tensor), finish)

    def barrier(self) -> Handle[None]:
        """PeerLost when any member cannot be reached."""
        self._begin()
        return self._handle(self.inner.barrier(), partial(self._check_reached, self._cut(self._others())))

    # --- operations that do without ---

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Without those that cannot be reached."""
        weights.check(self.rank, self.size)
        self._begin()
        rest = weights.without(self._cut(weights.sources))
        # a source sends in any case: whether it is heard is its receiver's affair
        rest = Weights(rest.own, rest.sources, weights.destinations)
        damaged = self._damaged(rest.sources)
        return self._handle(self.inner.exchange(tensor, rest, out=out), partial(self._damage, damaged))

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """None when the peer cannot be reached."""
        self._begin()
        sources = [peer] if peer in self._others() else []
        if self._cut(sources):
            return self._handle(Done(None), lambda nothing: nothing)
        is_damaged = bool(self._damaged(sources))

        def finish(snapshot: Snapshot | None) -> Snapshot | None:
            return damage_snapshot(snapshot, self._draws[peer]) if snapshot and is_damaged else snapshot

        return self._handle(self.inner.fetch(name, peer), finish)

    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """None when the peer cannot be reached."""
        self._begin()
        sources = [peer] if peer in self._others() else []
        if self._cut(sources):
            return self._handle(Done[int | None](None), lambda nothing: nothing)
        damaged = self._damaged(sources)

        def finish(got: int | None) -> int | None:
            if got is not None:
                self._damage(damaged, into.detach())
            return got

        return self._handle(self.inner.read(name, peer, into, version=version), finish)

    @contextlib.contextmanager
    def mutex(self, name: str, owner: int) -> Iterator[None]:
        """PeerLost when the owner is beyond a partition."""
        self._turn()
        if owner in self._others() and self._reverse[owner].is_cut:
            raise _unreachable(owner)
        with super().mutex(name, owner):
            yield

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
    ) -> Window:
        """One of the inner group, whose writes go wrong."""
        inner = self.inner.window(name, num_elements, dtype, sources=sources)
        heard = self._others() if sources is None else list(sources)
        wait = partial(self._wait_for_writes, inner, heard)
        return FaultyWindow(inner, self.inner, self._issue_write, self._arriving, wait)

    def progress(self) -> None:
        """Of the inner group's operations and of the script."""
        with self._being_called():
            super().progress()

    # --- what holds now ---

    def _begin(self) -> None:
        """Before each operation."""
        self._step += 1
        self._turn()
        self._stretch()

    @contextlib.contextmanager
    def _being_called(self) -> Iterator[None]:
        """What the worker has done on its own ends, and begins again after the block."""
        self._turn()
        self._stretch()
        try:
            yield
        finally:
            self._returned_s = self._sleeper.clock.now_s()

    def _stretch(self) -> None:
        """Make what the worker has done on its own last longer, if it is slow."""
        if self._should_stretch:
            extra_s = (self.slowness - 1) * (self._sleeper.clock.now_s() - self._returned_s)
            if extra_s > 0:
                self._sleeper.sleep(extra_s)

    def _turn(self) -> None:
        now_s = self._advance()
        for event in self._schedule.events:
            if event.is_active and event.concerns(self._names[self.rank]):
                self._suffer(event, now_s)

    def _advance(self) -> float:
        """Since the start."""
        now_s = self._sleeper.clock.now_s() - self._started_s
        if self._schedule.advance(now_s, self._step):
            events, own = self._schedule.events, self._names[self.rank]
            self._effects = [effects_on(events, names, own, self._started_s) for names in self._names]
            self._reverse = [effects_on(events, own, names, self._started_s) for names in self._names]
        return now_s

    def _suffer(self, event: Event, now_s: float) -> None:
        if isinstance(event.fault, Kill):
            self._end()
        elif isinstance(event.fault, Pause) and event.fault.for_s is not None:
            self._sleeper.sleep(max(0.0, event.ends_s - now_s))
        elif isinstance(event.fault, Pause) and event not in self._stopped:
            self._stopped.append(event)
            self._stop()

    def _cut(self, sources: Iterable[int]) -> list[int]:
        """Those of them whose message does not come this time."""
        return [
            rank
            for rank in sources
            if self._effects[rank].is_cut or self._happens(rank, 1 - self._effects[rank].passes)
        ]

    def _arriving(self, to: int, tensor: torch.Tensor, is_sent_again: bool) -> torch.Tensor | None:
        """What of a write comes to its destination."""
        self._begin()
        if to not in self._others():
            return tensor
        effects = self._reverse[to]
        if effects.is_cut or (not is_sent_again and self._happens(to, 1 - effects.passes)):
            self._returned_s = self._sleeper.clock.now_s()
            return None
        if self._happens(to, 1 - effects.is_right):
            tensor = tensor.detach().clone()
            damage(tensor, self._draws[to])
        return tensor

    def _wait_for_writes(
        self, window: Window, sources: Sequence[int], deadline: Deadline | None
    ) -> Sequence[int]:
        with self._being_called():
            while deadline is None:
                members = self._others()
                there = [rank for rank in sources if rank in members]
                if not there or all(self._effects[rank].is_cut for rank in there):
                    return window.filled()
                left_s = self._schedule.next_change_s + self._started_s - self._sleeper.clock.now_s()
                if left_s == math.inf:
                    break
                filled = window.wait(Deadline.after(left_s + _MOMENT_S))
                if filled:
                    return filled
                self._turn()
            return window.wait(deadline)

    def _issue_write(self, operation: Operation, start: Callable[[], Handle[None]]) -> Handle[None]:
        return self._handle(start(), lambda nothing: nothing)

    def _damaged(self, sources: Iterable[int]) -> list[int]:
        """Those of them whose message comes with a wrong bit."""
        return [rank for rank in sources if self._happens(rank, 1 - self._effects[rank].is_right)]

    def _happens(self, rank: int, probability: float) -> bool:
        return probability > 0 and self._draws[rank].uniform() < probability

    def _damage(self, sources: Sequence[int], tensor: torch.Tensor) -> torch.Tensor:
        for rank in sources:
            damage(tensor, self._draws[rank])
        return tensor

    def _collective(
        self,
        tensor: torch.Tensor,
        start: Callable[[], Handle[torch.Tensor]],
        sources: Sequence[int],
    ) -> Handle[torch.Tensor]:
        self._begin()
        cut = self._cut(sources)
        damaged = self._damaged(sources)
        before = tensor.detach().clone() if cut else None

        def finish(result: torch.Tensor) -> torch.Tensor:
            if before is not None:
                result.detach().copy_(before)
                self._check_reached(cut)
                return result
            return self._damage(damaged, result)

        return self._handle(start(), finish)

    def _handle(self, inner: Handle[T], finish: Callable[[T], T]) -> Handle[T]:
        self._returned_s = self._sleeper.clock.now_s()
        return _FaultyHandle(inner, self, finish)

    def _check_reached(self, cut: Sequence[int], _: object = None) -> None:
        if cut and not self.should_survive:
            raise _unreachable(cut[0])

    def _others(self) -> list[int]:
        return [rank for rank in self.members if rank != self.rank]

    def _names_of(self, rank: int) -> tuple[str | None, ...]:
        if rank < self._first_rank:
            return ()
        peers = (
            Address("rank", rank - self._first_rank),
            Address("machine", self.inner.machine_of(rank)),
        )
        return tuple(name for peer in peers for name in self._schedule.names_of(peer, None))


class _FaultyHandle(Handle[T]):
    """An operation that ends as the script wants it."""

    def __init__(self, inner: Handle[T], group: Faulty, finish: Callable[[T], T]) -> None:
        self._inner = inner
        self._group = group
        self._finish = finish
        self._result: list[T] = []

    def wait(self, deadline: Deadline | None = None) -> T:
        """The inner handle's result, damaged or lost."""
        if not self._result:
            with self._group._being_called():
                self._result.append(self._finish(self._inner.wait(deadline)))
        return self._result[0]

    def is_done(self) -> bool:
        """As the inner handle's."""
        if self._result:
            return True
        with self._group._being_called():
            return self._inner.is_done()


def _signal_oneself(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _unreachable(rank: int) -> PeerLost:
    return PeerLost(
        f"rank {rank} is lost: the fault script keeps its messages away.",
        peer=rank,
        cause="a partition or drop in the script.",
        next_step="use a strategy that outlives a lost worker (neighbor, pair), or another script.",
    )


def _check(script: FaultScript, group: Group, first_rank: int) -> None:
    """UsageError for what a group cannot do, and for whom it does not know."""
    known = ["rank:*", *(f"rank:{rank}" for rank in range(group.size - first_rank))]
    known += ["machine:*", *(f"machine:{machine}" for machine in range(group.num_machines))]
    for name, pattern in script.peers.items():
        if pattern not in known:
            documents.refuse(_WHAT, f"peers.{name}", _unknown(pattern, known))
    for index, fault in enumerate(script.fault):
        where = f"fault[{index}]"
        reason = _impossible(fault)
        if reason:
            documents.refuse(_WHAT, where, reason)
        for name in (name for names in fault.groups() for name in names):
            if name not in known and name not in script.peers:
                documents.refuse(_WHAT, where, _unknown(name, [*known, *script.peers]))


def _unknown(name: str, known: Sequence[str]) -> str:
    return f"no worker is called {name!r}, {documents.suggest(name, known)}"


def _impossible(fault: AnyFault) -> str:
    if isinstance(fault, Skew | Duplicate | Reorder):
        return f"{fault.__struct_config__.tag!r} is a matter of networks, a group has no such thing"
    if isinstance(fault, Slow) and (fault.link or fault.between):
        return "a group has no links to slow down; name workers, or shape the group by a profile"
    if isinstance(fault, Slow) and fault.factor < 1:
        return "no worker becomes faster; give a factor of 1 or more"
    if isinstance(fault, Pause) and fault.for_steps is not None:
        return "a worker that is paused takes no steps; give 'for_s'"
    return ""


class FaultyWindow(WrappedWindow):
    """Does what `inner` does with what `meddle` leaves of a write; `listen` waits for others'."""

    def __init__(self, inner: Window, group: Group, issue: Issue, meddle: Meddle, listen: Listen) -> None:
        super().__init__(inner, group, issue, _at_once)
        self._meddle = meddle
        self._listen = listen

    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Not for those beyond a partition, unless there is a deadline."""
        return self._listen(deadline)

    def put(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Not at all when it is dropped."""
        put = partial(super().put, weight=weight, mass=mass, note=note)
        return self._write(to, tensor, put, is_sent_again=False)

    def accumulate(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Not at all beyond a partition."""
        accumulate = partial(super().accumulate, weight=weight, mass=mass, note=note)
        return self._write(to, tensor, accumulate, is_sent_again=True)

    def send(self, to: int, tensor: torch.Tensor, *, note: bytes = b"") -> Handle[None]:
        """Not at all beyond a partition."""
        return self._write(to, tensor, partial(super().send, note=note), is_sent_again=True)

    def _write(
        self,
        to: int,
        tensor: torch.Tensor,
        write: Callable[[int, torch.Tensor], Handle[None]],
        *,
        is_sent_again: bool,
    ) -> Handle[None]:
        arriving = self._meddle(to, tensor, is_sent_again)
        return Done(None) if arriving is None else write(to, arriving)


def _at_once(operation: Operation, act: Callable[[], Sequence[int]]) -> Sequence[int]:
    return act()


def damage(tensor: torch.Tensor, draws: Draws) -> None:
    """Turn one bit of one element over, in place."""
    if not tensor.numel():
        return
    rest = int(draws.uniform() * tensor.numel())
    place = []
    for extent in reversed(tensor.shape):
        rest, index = divmod(rest, extent)
        place.append(index)
    bit = int(draws.uniform() * 8 * tensor.element_size())
    with torch.no_grad():
        element = tensor[tuple(reversed(place))]
        raw = element.reshape(1).view(torch.uint8).clone()
        raw[bit // 8] ^= 1 << bit % 8
        element.copy_(raw.view(tensor.dtype)[0])


def damage_snapshot(snapshot: Snapshot, draws: Draws) -> Snapshot:
    """A copy with a wrong bit: the publisher's own memory stays as it is."""
    return _DamagedSnapshot(snapshot, draws)


class _DamagedSnapshot(Snapshot):
    def __init__(self, inner: Snapshot, draws: Draws) -> None:
        self.rank = inner.rank
        self.version = inner.version
        self.tensor = inner.tensor.clone()
        self._inner = inner
        damage(self.tensor, draws)

    def is_intact(self) -> bool:
        """As the one that was copied."""
        return self._inner.is_intact()
