"""The order of a worker's operations in a group over several machines.

An operation is a generator: it yields what it waits for, and goes on with the result. Its steps inside the
machine must come in the same order on all of the machine's workers, so one operation after another has the
lane; it gives the lane free (`yield FREE`) when it has issued its last step there, and may go on beside later
ones. Everything happens in the thread that calls, whenever it calls.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Protocol

from shoal.group.host.engine import Span, is_overlapping


class Waitable(Protocol):
    """Something that an operation waits for."""

    def is_done(self) -> bool:
        """Whether `result` returns, or raises, at once."""

    def result(self) -> Any:
        """What it brought."""


class Free:
    """Yielded by an operation whose last step inside the machine is issued."""


FREE = Free()
Steps = Generator[Waitable | Free, Any, Any]


class Step(abc.ABC):
    """A waitable that can say for whom it waits."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether `result` returns, or raises, at once."""

    @abc.abstractmethod
    def result(self) -> Any:
        """What it brought, or its error."""

    def awaited(self) -> int | None:
        """The rank that has not come, where it is known."""
        return None


class Operation:
    """One numbered operation under way."""

    def __init__(self, seq: int, what: str, steps: Steps, spans: Sequence[Span]) -> None:
        self.seq = seq
        self.what = what
        self.spans = spans
        """Memory that it reads or writes: a later operation on any of it begins when this one is over."""
        self.is_begun = False
        self.is_free = False
        self.is_over = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._steps = steps
        self._waiting: Waitable | None = None

    def awaited(self) -> int | None:
        """The rank that it waits for, where it is known."""
        return self._waiting.awaited() if isinstance(self._waiting, Step) else None

    def advance(self) -> bool:
        """Go on as far as it can; whether it moved."""
        moved = False
        while not self.is_over:
            if self._waiting is not None and not self._waiting.is_done():
                return moved
            moved = True
            self._go_on()
        return moved

    def drop(self) -> None:
        """Forget it where it stands."""
        self._end()
        self._steps.close()

    def _go_on(self) -> None:
        waited, self._waiting = self._waiting, None
        self.is_begun = True
        try:
            brought = None if waited is None else waited.result()
        except Exception as error:  # noqa: BLE001  (it is the operation's, which may catch it)
            self._resume(error)
        else:
            self._resume(brought)

    def _resume(self, brought: Any) -> None:
        try:
            if isinstance(brought, Exception):
                asked = self._steps.throw(brought)
            else:
                asked = self._steps.send(brought)
            while isinstance(asked, Free):
                self.is_free = True
                asked = next(self._steps)
            self._waiting = asked
        except StopIteration as end:
            self.value = end.value
            self._end()
        except BaseException as error:
            self.error = error
            self._end()
            if not isinstance(error, Exception):
                raise

    def _end(self) -> None:
        self.is_free = self.is_over = True
        self._waiting = None


class Lane:
    """A worker's operations, in order."""

    def __init__(self) -> None:
        self._open: deque[Operation] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._open

    @property
    def is_clear(self) -> bool:
        """Whether all operations have issued their last step inside the machine."""
        return all(operation.is_free for operation in self._open)

    @property
    def first_seq(self) -> int:
        """The number of the first operation under way."""
        return self._open[0].seq

    def add(self, operation: Operation) -> None:
        """The next one."""
        self._open.append(operation)

    def advance(self) -> None:
        """Go on with all that can go on."""
        moved = True
        while moved:
            moved = False
            is_clear = True
            for operation in tuple(self._open):
                may_go_on = is_clear or operation.is_free
                if may_go_on and (operation.is_begun or not self._is_in_use(operation)):
                    moved |= operation.advance()
                is_clear = is_clear and operation.is_free
            while self._open and self._open[0].is_over:
                self._open.popleft()

    def awaited(self) -> int | None:
        """The rank that the first operation waits for, where it is known."""
        return next((rank for each in self._open if (rank := each.awaited()) is not None), None)

    def uses(self, span: Span) -> bool:
        """Whether an operation under way reads or writes some memory."""
        return any(not each.is_over and is_overlapping(each.spans, [span]) for each in self._open)

    def drop(self) -> None:
        """Forget all that is under way."""
        while self._open:
            self._open.popleft().drop()

    def _is_in_use(self, operation: Operation) -> bool:
        for earlier in self._open:
            if earlier is operation:
                return False
            if not earlier.is_over and is_overlapping(earlier.spans, operation.spans):
                return True
        return False
