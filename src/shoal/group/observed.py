"""Groups whose operations are observed: their bytes and seconds counted, or each a span of a timeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from shoal.core import SYSTEM_CLOCK, Clock, Deadline, DeadlineExceeded
from shoal.group.base import Group, Handle
from shoal.group.operations import GroupWrapper, OperationPlan
from shoal.report.timeline import Timeline

T = TypeVar("T")
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
