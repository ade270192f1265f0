"""A group in which things go wrong as a fault script says.

The file is long because it is one operation after another, each of a few lines.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from shoal.core import Address, Deadline, PeerLost
from shoal.group.base import Done, Group, Handle, Reduction, Snapshot, Window
from shoal.group.damage import damage, damage_snapshot
from shoal.group.faulty_window import FaultyWindow
from shoal.group.operations import Operation
from shoal.group.sleeper import Sleeper
from shoal.group.wrapper import GroupWrapper
from shoal.topology import Weights
from shoal.transport import FaultScript
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

    exchange_machines = Group.exchange_machines
    pair_gossip = Group.pair_gossip

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
