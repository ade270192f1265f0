"""Groups around other groups: observed, under the conditions of a worse network, or a part of them.

`Metered` counts bytes and seconds of operations, `Traced` makes each a span of a timeline, `Shaped` is as
slow as a profile says, and `Faulty` fails as a fault script says. `ShardReplicas` has those members alone
that hold the same shard of a model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

import msgspec
import torch

from shoal.core import SYSTEM_CLOCK, Address, Clock, Deadline, DeadlineExceeded, PeerLost, ShoalError
from shoal.core.errors import UsageError
from shoal.group.base import Done, Group, Handle, Loss, Reduction, Snapshot, Window, Write
from shoal.group.elastic import elastic_of
from shoal.group.functions import Continued, others, share, spread_over_ranks
from shoal.group.operations import Bytes, ClockSleeper, GroupWrapper, OperationPlan
from shoal.report.timeline import Timeline
from shoal.topology import MachineWeights, Weights
from shoal.transport import Conditions, FaultScript, Profile
from shoal.transport.network import documents
from shoal.transport.network.conditions import Effects, effects_on
from shoal.transport.network.distributions import Draws
from shoal.transport.network.faults import (
    AnyFault,
    Duplicate,
    Event,
    Kill,
    LeaveWorld,
    Pause,
    Reorder,
    Schedule,
    Skew,
    Slow,
)
from shoal.transport.network.links import Passage

T = TypeVar("T")
_WHAT = "The fault script of a group"
_MOMENT_S = 1e-6
"""By which a change of the script is surely past."""
_NOTICE_S, _NAP_S = 2.0, 0.02
"""How long a loss may take to be noticed after torch's connection to that worker has broken."""
_LABEL_BYTES = 8
WAITING = "waiting"
"""The lane in which the caller's thread is seen to wait."""


class Traffic(msgspec.Struct):
    """What all calls of one kind of operation have cost."""

    num_calls: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    blocked_s: float = 0.0
    """The caller's thread was inside the call, or waited for it."""
    lasted_s: float = 0.0
    """From the call until its end was noticed; operations that overlap each count in full."""


class Metered(GroupWrapper):
    """Counts bytes and seconds by operation.

    Bytes are what formulas say, whatever the group inside does to move them; B is the size of the tensor, n
    the number of members:

        all_reduce              2(n − 1)/n · B to the next member of a ring, as much from the one before
        broadcast               B from the root to each other member
        all_gather              one's own to n − 1 others, and from each what it has given
        exchange                B to each destination and B from each source; where destinations are not
                                given, they are the sources; by `MachineWeights` all workers of the machines
                                that are named, and of one's own, are both; peers that are gone do not count
        fetch, read             B from the peer
        put, add, send          B to the peer
        publish, changing, barrier, empty, free, settle, window, window_wait: nothing

    They count when an operation is issued, received sizes that only the result tells when it is waited for.
    What goes to and from servers, through `everybody`, is counted with the rest.
    """

    def __init__(self, inner: Group, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(inner)
        self._clock = clock
        self._traffic: dict[str, Traffic] = {}
        if inner.everybody is not None:
            self.everybody = Metered(inner.everybody, clock)
            self.everybody._traffic = self._traffic

    def totals(self) -> dict[str, Traffic]:
        """Copies the counts by operation, in the order in which they were first used."""
        return {name: msgspec.structs.replace(traffic) for name, traffic in self._traffic.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Lists the counts as plain rows for a report."""
        return [{"op": name, **msgspec.structs.asdict(traffic)} for name, traffic in self._traffic.items()]

    def reset(self) -> None:
        """Counts from zero; operations that are under way still add their seconds to the old count."""
        self._traffic = {}
        if isinstance(self.everybody, Metered):
            self.everybody._traffic = self._traffic

    def _issue(self, operation: OperationPlan, start: Callable[[], Handle[T]]) -> Handle[T]:
        traffic, began_s = self._count(operation), self._clock.now_s()

        def waited(from_s: float, until_s: float) -> None:
            traffic.blocked_s += until_s - from_s

        def ended(at_s: float) -> None:
            traffic.lasted_s += at_s - began_s

        def brought(result: T) -> None:
            if operation.learns is not None:
                traffic.received_bytes += sum(operation.learns(result).values())

        try:
            handle = start()
        finally:
            waited(began_s, self._clock.now_s())
        return _ObservedHandle(handle, self._clock, waited, ended, brought)

    def _call(self, operation: OperationPlan, act: Callable[[], T]) -> T:
        traffic, began_s = self._count(operation), self._clock.now_s()
        try:
            return act()
        finally:
            lasted_s = self._clock.now_s() - began_s
            traffic.blocked_s += lasted_s
            traffic.lasted_s += lasted_s

    def _count(self, operation: OperationPlan) -> Traffic:
        traffic = self._traffic.setdefault(operation.name, Traffic())
        traffic.num_calls += 1
        traffic.sent_bytes += operation.sent_bytes
        traffic.received_bytes += operation.received_bytes
        return traffic


class Traced(GroupWrapper):
    """Records operations in a lane for each kind, from the call until their end is noticed, and waits.

    Closing the group closes the timeline, which writes it.
    """

    timeline: Timeline

    def __init__(self, inner: Group, timeline: Timeline) -> None:
        super().__init__(inner)
        self.timeline = timeline
        if inner.everybody is not None:
            self.everybody = Traced(inner.everybody, timeline)

    def close(self, error: BaseException | None = None) -> None:
        """Closes the inner group and writes the timeline, whatever happens."""
        try:
            super().close(error)
        finally:
            self.timeline.close()

    def _issue(self, operation: OperationPlan, start: Callable[[], Handle[T]]) -> Handle[T]:
        waited = partial(self.timeline.add, f"wait for {operation.name}", WAITING)
        ended = partial(self._record, operation, self.timeline.clock.now_s())
        return _ObservedHandle(start(), self.timeline.clock, waited, ended)

    def _call(self, operation: OperationPlan, act: Callable[[], T]) -> T:
        began_s = self.timeline.clock.now_s()
        try:
            return act()
        finally:
            self._record(operation, began_s, self.timeline.clock.now_s())

    def _record(self, operation: OperationPlan, began_s: float, ended_s: float) -> None:
        self.timeline.add(operation.name, operation.name, began_s, ended_s, operation.size_bytes)


class _ObservedHandle(Handle[T]):
    """Tells each time that it is waited for, and once that its operation is over, and its result.

    Nobody tells a worker that an operation is over while it does not look: the end is when it is noticed.
    A wait that ran into its deadline is no end.
    """

    def __init__(
        self,
        inner: Handle[T],
        clock: Clock,
        waited: Callable[[float, float], None],
        ended: Callable[[float], None],
        brought: Callable[[T], None] = lambda result: None,
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._waited = waited
        self._ended = ended
        self._brought = brought
        self._is_over = self._has_result = False

    def wait(self, deadline: Deadline | None = None) -> T:
        began_s = self._clock.now_s()
        is_over = True
        try:
            result = self._inner.wait(deadline)
        except DeadlineExceeded:
            is_over = False
            raise
        finally:
            ended_s = self._clock.now_s()
            self._waited(began_s, ended_s)
            if is_over:
                self._notice(ended_s)
        if not self._has_result:
            self._has_result = True
            self._brought(result)
        return result

    def is_done(self) -> bool:
        is_done = self._inner.is_done()
        if is_done:
            self._notice(self._clock.now_s())
        return is_done

    def _notice(self, at_s: float) -> None:
        if not self._is_over:
            self._is_over = True
            self._ended(at_s)


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
        sleeper: ClockSleeper | None = None,
    ) -> None:
        super().__init__(inner)
        self._conditions = Conditions(
            profile if isinstance(profile, Profile) else Profile.load(profile), seed=seed
        )
        self._addresses = [
            Address("machine", machine) if between == "machines" else Address("rank", rank)
            for rank, machine in enumerate(inner.machines)
        ]
        self._sleeper = sleeper or ClockSleeper()

    def _issue(self, operation: OperationPlan, start: Callable[[], Handle[T]]) -> Handle[T]:
        issued_s = due_s = self._sleeper.clock.now_s()
        handle = start()
        num_steps = operation.num_steps
        for _ in range(num_steps):
            began_s = due_s
            for rank, size_bytes in operation.sends.items():
                passage = self._carry(self.rank, rank, began_s, size_bytes // num_steps)
                due_s = max(due_s, passage.arrives_at_s if operation.is_request else passage.left_at_s)
            due_s = max(due_s, self._received_s(began_s, operation.receives, num_steps))
        return _DelayedHandle(handle, self, operation, due_s if operation.is_request else issued_s, due_s)

    def _received_s(self, now_s: float, receives: Bytes, num_steps: int = 1) -> float:
        """Tells when the last byte of one step has come."""
        passages = [
            self._carry(rank, self.rank, now_s, size_bytes // num_steps)
            for rank, size_bytes in receives.items()
        ]
        return max([now_s, *(passage.arrives_at_s for passage in passages)])

    def _carry(self, source: int, target: int, now_s: float, size_bytes: int) -> Passage:
        ends = self._addresses[source], self._addresses[target]
        return self._conditions.link(*ends).carry_stream(now_s, size_bytes)


class _DelayedHandle(Handle[T]):
    """Is over when the inner one is, and not before it is due; what a result tells was sent at `asked_s`."""

    def __init__(
        self, inner: Handle[T], group: Shaped, operation: OperationPlan, asked_s: float, due_s: float
    ) -> None:
        self._inner = inner
        self._group = group
        self._what = f"{operation.name} over a shaped link"
        self._learns = operation.learns
        self._asked_s = asked_s
        self._due_s = due_s

    def wait(self, deadline: Deadline | None = None) -> T:
        result = self._inner.wait(deadline)
        self._take(result)
        sleeper, progress = self._group._sleeper, self._group.inner.progress
        sleeper.until(self._due_s, progress, deadline or Deadline.never(), self._what)
        return result

    def is_done(self) -> bool:
        if not self._inner.is_done():
            return False
        if self._learns is not None:
            try:
                self._take(self._inner.wait())
            except ShoalError:
                return True  # `wait` says it at once
        return self._group._sleeper.clock.now_s() >= self._due_s

    def _take(self, result: T) -> None:
        if self._learns is not None:
            self._due_s = max(self._due_s, self._group._received_s(self._asked_s, self._learns(result)))
            self._learns = None


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
                deadline; an operation that needs everybody takes place (nobody hangs) but raises PeerLost,
                unless the group `should_survive`, and leaves its tensor as it was
    drop        the same for single messages; `probability` is that of each peer's in each operation. Of
                writes only a `put` is lost: what must not be missed would be sent again
    corrupt     one wrong bit in what an operation brings, likewise

    Other kinds need a network: UsageError. `end` is called instead of both signals where it is given.
    Of a group whose first members are servers, `first_rank` is the one that a script calls `rank:0`.
    Around an elastic group a script names workers by their numbers, which they keep; `check_script` is the
    caller's affair then, and so is what happens at a time to those who may be in no group: `kill`, `join` and
    `leave` with `at_s`. `leave` is called for one with `at_step`.
    Without `should_stretch` nobody is slow by itself: whoever makes its time pass asks for its `slowness`.
    """

    def __init__(
        self,
        inner: Group,
        script: FaultScript | str | Path,
        *,
        seed: int = 0,
        sleeper: ClockSleeper | None = None,
        end: Callable[[], None] | None = None,
        leave: Callable[[], None] | None = None,
        first_rank: int = 0,
        should_stretch: bool = True,
    ) -> None:
        super().__init__(inner)
        self._script = script if isinstance(script, FaultScript) else FaultScript.load(script)
        self._seed = seed
        self._elastic = elastic_of(inner)
        if self._elastic is None:
            self._script.refuse_changes(_WHAT)
            check_script(self._script, inner.size - first_rank, inner.num_machines)
        self._sleeper = sleeper or ClockSleeper()
        self._end = end or (lambda: os.kill(os.getpid(), signal.SIGKILL))
        self._stop = end or (lambda: os.kill(os.getpid(), signal.SIGSTOP))
        self._leave = leave or (lambda: None)
        self._should_stretch = should_stretch
        self._first_rank = first_rank
        self._naming = Schedule(self._script, seed)
        self._known_draws: dict[int, Draws] = {}
        self.restart()
        self._returned_s = self._started_s
        """Since when the worker has been on its own."""
        self._meet()

    def hold(self) -> None:
        """Has nothing of the script happen until `restart`."""
        self._schedule = Schedule(FaultScript(), self._seed)

    def restart(self, at_s: float | None = None) -> None:
        """Has the script begin now, or at a time that is past: times and steps count from here."""
        self._started_s = self._sleeper.clock.now_s() if at_s is None else at_s
        self._step = -1
        self._schedule = Schedule(self._script, self._seed)
        self._effects = [Effects()] * self.size
        """On what comes from each rank."""
        self._reverse = [Effects()] * self.size
        """On what goes to each rank."""
        self._stopped: list[Event] = []

    @property
    def slowness(self) -> float:
        """How many times as long as without faults this worker's own time lasts now."""
        self._advance()
        return math.prod(event.fault.factor for event in self._own_events() if isinstance(event.fault, Slow))

    # --- operations ---

    def _issue(self, operation: OperationPlan, start: Callable[[], Handle[T]]) -> Handle[T]:
        """Issues what needs everybody, or asks one peer; None is what comes from beyond a partition."""
        with self._being_called(num_steps=1):
            cut = self._cut(operation.needs)
            if cut and not operation.needs_all:
                return _FaultyHandle(Done[Any](None), self)
            damaged = self._damaged(operation.needs)
            before = operation.tensor.detach().clone() if cut and operation.tensor is not None else None

            def finish(result: Any) -> Any:
                if before is not None and operation.tensor is not None:
                    operation.tensor.detach().copy_(before)
                if cut and not self.should_survive:
                    raise _unreachable(cut[0])
                if isinstance(result, list):
                    # a member may have left since, so that there is less
                    parts = dict(zip(sorted({*operation.needs, self.rank}), result, strict=False))
                    for rank in parts.keys() & damaged:
                        self._damage(parts[rank], [rank])
                    return [part for rank, part in parts.items() if rank not in cut]
                if isinstance(result, Snapshot) and damaged:
                    # a copy: the publisher's own memory stays as it is
                    result.tensor = self._damage(result.tensor.clone(), damaged)
                elif operation.tensor is not None and result is not None and not cut:
                    self._damage(operation.tensor.detach(), damaged)
                return result

            return _FaultyHandle(start(), self, finish)

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Exchanges with those that can be reached."""
        weights = spread_over_ranks(self, weights)
        weights.check(self.rank, self.size)
        with self._being_called(num_steps=1):
            rest = weights.without(self._cut(weights.sources))
            # a source sends in any case: whether it is heard is its receiver's affair
            rest = dataclasses.replace(rest, destinations=weights.destinations)
            damaged = self._damaged(rest.sources)
            handle = self.inner.exchange(tensor, rest, out=out)
            return _FaultyHandle(handle, self, lambda result: self._damage(result, damaged))

    def _write(self, window: Window, to: int, one: Write) -> Handle[None]:
        """Writes what of it comes to its destination, if anything."""
        with self._being_called(num_steps=1):
            if to in others(self):
                effects = self._reverse[to]
                # what must not be missed would be sent again
                if effects.is_cut or (one.kind == "put" and self._happens(to, 1 - effects.passes)):
                    return Done(None)
                if self._happens(to, 1 - effects.is_right):
                    wrong = self._damage(one.tensor.detach().clone(), [to])
                    one = dataclasses.replace(one, tensor=wrong)
            return _FaultyHandle(window._write(to, one), self)

    def _wait(self, window: Window, sources: Collection[int], deadline: Deadline | None) -> Sequence[int]:
        """Waits, but not for those beyond a partition, unless there is a deadline."""
        with self._being_called():
            while deadline is None:
                members = others(self)
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

    def progress(self) -> None:
        """Does work of the inner group's operations, and of the script."""
        with self._being_called():
            super().progress()

    # --- what holds now ---

    @contextlib.contextmanager
    def _being_called(self, num_steps: int = 0) -> Iterator[None]:
        """Ends what the worker has done on its own, which begins again after the block.

        The script catches up, steps of it included; what a slow worker has done on its own lasts longer.
        """
        self._step += num_steps
        self._turn()
        if self._should_stretch:
            extra_s = (self.slowness - 1) * (self._sleeper.clock.now_s() - self._returned_s)
            if extra_s > 0:
                self._sleeper.sleep(extra_s)
        try:
            yield
        finally:
            self._returned_s = self._sleeper.clock.now_s()

    def _turn(self) -> None:
        """Has the script catch up, and this worker suffer what it says."""
        now_s = self._advance()
        for event in self._own_events():
            is_callers = self._elastic is not None and event.fault.at_step is None
            if isinstance(event.fault, Kill) and not is_callers:
                self._end()
            elif isinstance(event.fault, LeaveWorld) and not is_callers:
                self._leave()
            elif isinstance(event.fault, Pause) and event.fault.for_s is not None:
                self._sleeper.sleep(max(0.0, event.ends_s - now_s))
            elif isinstance(event.fault, Pause) and event not in self._stopped:
                self._stopped.append(event)
                self._stop()

    def _own_events(self) -> Iterator[Event]:
        """Lists what is active now and concerns this worker."""
        own = self._names[self.rank]
        return (event for event in self._schedule.events if event.is_active and event.concerns(own))

    def _advance(self) -> float:
        """Brings the script up to now, in seconds since its start."""
        now_s = self._sleeper.clock.now_s() - self._started_s
        if self._schedule.advance(now_s, self._step):
            self._find_effects()
        return now_s

    def _find_effects(self) -> None:
        events, own = self._schedule.events, self._names[self.rank]
        self._effects = [effects_on(events, names, own, self._started_s) for names in self._names]
        self._reverse = [effects_on(events, own, names, self._started_s) for names in self._names]

    def _cut(self, sources: Iterable[int]) -> list[int]:
        """Finds those of them whose message does not come this time."""
        return [
            rank
            for rank in sources
            if self._effects[rank].is_cut or self._happens(rank, 1 - self._effects[rank].passes)
        ]

    def _damaged(self, sources: Iterable[int]) -> list[int]:
        """Finds those of them whose message comes with a wrong bit."""
        return [rank for rank in sources if self._happens(rank, 1 - self._effects[rank].is_right)]

    def _happens(self, rank: int, probability: float) -> bool:
        return probability > 0 and self._draws[rank].uniform() < probability

    def _damage(self, tensor: torch.Tensor, sources: Iterable[int]) -> torch.Tensor:
        for rank in sources:
            damage(tensor, self._draws[rank])
        return tensor

    def _adopt_anew(self) -> None:
        super()._adopt_anew()
        self._meet()
        self._find_effects()

    def _meet(self) -> None:
        """Finds what the script calls the members, and their random numbers, which go on."""
        form = None if self._elastic is None else self._elastic.form
        numbers, machines = list(range(self.size)), list(self.machines)
        if self._elastic is not None:
            numbers = [self._elastic.link.number]
        if form is not None:
            places = form.places[self.num_servers :]
            numbers = [place.number for place in places]
            machines = [place.machine for place in places]
        own = numbers[self.rank]
        for number in numbers:
            if number not in self._known_draws:
                self._known_draws[number] = Draws(self._seed, "group", str(number), str(own))
        self._draws = [self._known_draws[number] for number in numbers]
        self._names = [
            self._names_of(number - self._first_rank, machine)
            for number, machine in zip(numbers, machines, strict=True)
        ]

    def _names_of(self, number: int, machine: int) -> tuple[str | None, ...]:
        if number < 0:
            return ()
        peers = Address("rank", number), Address("machine", machine)
        return tuple(name for peer in peers for name in self._naming.names_of(peer, None))


class _FaultyHandle(Continued[T]):
    """An operation that ends as the script wants it."""

    def __init__(
        self, first: Handle[T], group: Faulty, finish: Callable[[T], T] = lambda result: result
    ) -> None:
        super().__init__(first, finish)
        self._group = group

    def wait(self, deadline: Deadline | None = None) -> T:
        with contextlib.nullcontext() if self._first is None else self._group._being_called():
            return super().wait(deadline)

    def is_done(self) -> bool:
        with contextlib.nullcontext() if self._first is None else self._group._being_called():
            return super().is_done()


def _unreachable(rank: int) -> PeerLost:
    return PeerLost(
        f"rank {rank} is lost: the fault script keeps its messages away.",
        peer=rank,
        cause="a partition or drop in the script.",
        next_step="use a strategy that outlives a lost worker (neighbor, pair), or another script.",
    )


def check_script(script: FaultScript, num_workers: int, num_machines: int) -> None:
    """Raises UsageError for what a group cannot do, and for whom it does not know."""
    known = ["rank:*", *(f"rank:{rank}" for rank in range(num_workers))]
    known += ["machine:*", *(f"machine:{machine}" for machine in range(num_machines))]
    named = [(f"peers.{name}", pattern, known) for name, pattern in script.peers.items()]
    for index, fault in enumerate(script.fault):
        reason = _impossible(fault)
        if reason:
            documents.refuse(_WHAT, f"fault[{index}]", reason)
        names = [name for names in fault.groups() for name in names]
        named += [(f"fault[{index}]", name, [*known, *script.peers]) for name in names]
    for where, name, allowed in named:
        if name not in allowed:
            near = documents.suggest(name, allowed)
            documents.refuse(_WHAT, where, f"no worker is called {name!r}, {near}")


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


def damage(tensor: torch.Tensor, draws: Draws) -> None:
    """Turns one bit of one element over, in place."""
    if not tensor.numel():
        return
    index = torch.tensor(int(draws.uniform() * tensor.numel()), device=tensor.device)
    bit = int(draws.uniform() * 8 * tensor.element_size())
    with torch.no_grad():
        raw = tensor.take(index).reshape(1).view(torch.uint8)
        raw[bit // 8] ^= 1 << bit % 8
        tensor.put_(index, raw.view(tensor.dtype)[0])


class ShardReplicas(GroupWrapper):
    """The group, with this worker's replicas as its only members; ranks and machines stay what they are.

    FSDP2 (`fully_shard`) shards a model inside each machine. The workers of a machine hold it together, and
    each of them shares its shard with the workers of other machines that hold the same shard: its *replicas*.
    They are all that a strategy sees of the group, which stays one for the operations beneath: all workers
    issue them in the same order, and on equally many elements (`tensors.buckets`). What looks at values looks
    at this worker's shard alone.

    A worker that is lost leaves the others of its machine, its *mates*, without their model: they end. The
    other machines go on, if their strategy outlives losses.
    """

    def __init__(self, inner: Group, replicas: Sequence[Sequence[int]]) -> None:
        super().__init__(inner)
        self._all_replicas = replicas
        """The ranks that hold each shard, one of each machine, machine by machine."""
        self._shard = next(number for number, ranks in enumerate(replicas) if inner.rank in ranks)
        self._replicas = replicas[self._shard]
        self.mates = [rank for rank in range(self.size) if self.machines[rank] == self.machine]
        """The workers of this machine, which hold the model together."""

    @classmethod
    def find(cls, group: Group, sharded: Sequence[torch.Tensor]) -> Self:
        """Finds the workers that hold the same shards. Collective; UsageError, on all, for other meshes."""
        meshes: list[Any] = [tensor.device_mesh for tensor in cast(Sequence[Any], sharded)]
        coordinates = msgspec.msgpack.encode([mesh.get_coordinate() for mesh in meshes])
        num_shards = max(mesh.size() for mesh in meshes)
        told = share(group, [group.rank, hashlib.sha256(coordinates).digest(), num_shards])
        holders: dict[bytes, list[int]] = {}
        for rank, shard, _ in sorted(told, key=lambda one: (group.machines[one[0]], one[0])):
            holders.setdefault(shard, []).append(rank)
        machines = sorted({group.machines[rank] for rank in group.members})
        is_one_each = all([group.machines[rank] for rank in ranks] == machines for ranks in holders.values())
        if not is_one_each or {size for _, _, size in told} != {len(holders)}:
            num_workers = [list(group.machines).count(machine) for machine in machines]
            raise UsageError(
                f"the meshes of fully_shard ({max(size for _, _, size in told)} workers) are not the "
                f"machines of the group ({', '.join(map(str, num_workers))} workers).",
                cause="every machine holds the whole model once: its workers are one mesh, and there are "
                "equally many on each.",
                next_step="init_device_mesh(device, (group.num_machines, workers per machine), "
                'mesh_dim_names=("machine", "shard")), and fully_shard(model, mesh=mesh["shard"]).',
            )
        return cls(group, sorted(holders.values()))

    @property
    def members(self) -> Sequence[int]:
        """The replicas that are there, with this worker."""
        return [rank for rank in self.inner.members if rank in self._replicas]

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Takes the mean over the replicas, in place; bits may differ, since each sums in its own order."""
        if op != "mean":
            raise UsageError(f"Shards are averaged; {op} is not supported.", next_step='take op="mean".')
        peers = others(self)
        return self.exchange(tensor, Weights.uniform(peers, peers))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Copies the replica `root`'s tensor; each shard in turn, from the same machine."""
        place = self._replicas.index(root)
        for shard, ranks in enumerate(self._all_replicas):
            into = tensor if shard == self._shard else torch.empty_like(tensor)
            self.inner.broadcast(into, ranks[place]).wait()
        return Done(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Collects the replicas' tensors, out of everybody's."""
        # with its shard, since it cannot be told who is missing when a worker is lost meanwhile
        label = torch.tensor([self._shard]).view(torch.uint8)
        labelled = torch.cat([tensor.detach().cpu().contiguous().view(-1).view(torch.uint8), label])

        def pick(parts: list[torch.Tensor]) -> list[torch.Tensor]:
            own = [part[:-_LABEL_BYTES] for part in parts if torch.equal(part[-_LABEL_BYTES:], label)]
            return [part.view(tensor.dtype).view(-1, *tensor.shape[1:]).to(tensor.device) for part in own]

        return Continued(self.inner.all_gather(labelled), pick)

    def norm(self, part: float) -> float:
        """Combines the norms of all shards, each the same on its replicas, into that of all. Collective."""
        return math.sqrt(sum(share(self.inner, part**2)) / len(self.members))

    def find_lost_mate(self) -> Loss | None:
        """Finds the worker of this machine without which torch's collectives fail; waits a little for it."""
        deadline = Deadline.after(_NOTICE_S * self.patience)
        while not deadline.is_past:
            lost = self.lost
            if found := [lost[rank] for rank in self.mates if rank in lost]:
                return found[0]
            time.sleep(_NAP_S)
        return None


def lost_mate(loss: Loss) -> PeerLost:
    """Makes the error of a worker whose machine has no whole model any more."""
    root = loss.root
    return PeerLost(
        f"rank {root.rank} is lost, which held a part of this machine's model: {root.reason}.",
        peer=root.rank,
        cause="it was killed, stopped, or failed; its own output says more.",
        next_step="look at its output; the machine takes part again when the run is started again.",
    )
