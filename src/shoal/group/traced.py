"""A group whose every operation is a span of a timeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from shoal.group.base import Group, Handle
from shoal.group.operations import Operation
from shoal.group.timeline import Timeline
from shoal.group.wrapper import GroupWrapper, ObservedHandle

T = TypeVar("T")

WAITING = "waiting"
"""The lane in which the caller's thread is seen to wait."""


class Traced(GroupWrapper):
    """Records operations in a lane for each kind, from the call until their end is noticed, and waits.

    Closing the group closes the timeline, which writes it.
    """

    def __init__(self, inner: Group, timeline: Timeline) -> None:
        super().__init__(inner)
        self.timeline = timeline
        if inner.everybody is not None:
            self.everybody = Traced(inner.everybody, timeline)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A named part of the user's program."""
        with self.timeline.span(name), self.inner.span(name):
            yield

    def close(self) -> None:
        """Close the inner group and write the timeline."""
        try:
            super().close()
        finally:
            self.timeline.close()

    def abandon(self) -> None:
        """Abandon the inner group; what is in the timeline is written all the same."""
        try:
            super().abandon()
        finally:
            self.timeline.close()

    def _issue(self, operation: Operation, start: Callable[[], Handle[T]]) -> Handle[T]:
        began_s = self.timeline.clock.now_s()
        return _TracedHandle(start(), self.timeline, operation, began_s)

    def _call(self, operation: Operation, act: Callable[[], T]) -> T:
        began_s = self.timeline.clock.now_s()
        try:
            return act()
        finally:
            _record(self.timeline, operation, began_s, self.timeline.clock.now_s())


class _TracedHandle(ObservedHandle[T]):
    def __init__(self, inner: Handle[T], timeline: Timeline, operation: Operation, began_s: float) -> None:
        super().__init__(inner, timeline.clock)
        self._timeline = timeline
        self._operation = operation
        self._began_s = began_s

    def _waited(self, began_s: float, ended_s: float) -> None:
        self._timeline.add(f"wait for {self._operation.name}", WAITING, began_s, ended_s)

    def _ended(self, at_s: float) -> None:
        _record(self._timeline, self._operation, self._began_s, at_s)


def _record(timeline: Timeline, operation: Operation, began_s: float, ended_s: float) -> None:
    timeline.add(operation.name, operation.name, began_s, ended_s, operation.size_bytes)
