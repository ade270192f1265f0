"""The order of a worker's operations over several machines.

An operation is a generator: it yields the handles that it waits for, and goes on with their results. Its
steps inside the machine must come in the same order on all of the machine's workers, so the operations take
turns; one gives its turn away (`yield FREE`) when it has issued its last step there, and may go on beside
later ones. Everything happens in the thread that calls, whenever it calls.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

from shoal.core import Deadline
from shoal.group.base import Done, Handle
from shoal.group.host.engine import Span, is_overlapping

FREE: Handle[None] = Done(None)
"""Yielded by an operation whose last step inside the machine is issued."""
Steps = Generator[Handle[Any], Any, Any]


class Step(Handle[Any]):
    """Something that an operation waits for; `awaited` names the rank that has not come, where it is known.

    Its result is asked for once, when it is done.
    """

    def __init__(
        self,
        is_done: Callable[[], bool],
        result: Callable[[], Any] = lambda: None,
        awaited: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._is_done = is_done
        self._result = result
        self.awaited = awaited

    def is_done(self) -> bool:
        """Tells whether there is a result, or an error."""
        return self._is_done()

    def wait(self, deadline: Deadline | None = None) -> Any:
        """Gives the result, or raises the error."""
        return self._result()


def arrived(handles: Sequence[Handle[Any]]) -> Step:
    """Waits until all that was sent has arrived; who is gone is noticed where something is expected of it."""
    return Step(lambda: all(handle.is_done() for handle in handles))


class Operation(Handle[Any]):
    """One numbered operation under way; `OperationQueue.advance` drives it."""

    def __init__(
        self,
        seq: int,
        steps: Steps,
        spans: Sequence[Span],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.seq = seq
        self.spans = spans
        """Memory that it reads or writes: a later operation on any of it begins when this one is over."""
        self.is_begun = False
        self.is_free = False
        self.is_over = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._steps = steps
        self._context = context
        """In what it goes on: the stream of a GPU."""
        self._waiting: Handle[Any] | None = None

    def is_done(self) -> bool:
        """Tells whether it is over."""
        return self.is_over

    def wait(self, deadline: Deadline | None = None) -> Any:
        """Returns the result of an operation that is over, or raises its error."""
        if self._error is not None:
            raise self._error
        return self._result

    def awaited(self) -> int | None:
        """Names the rank that it waits for, where it is known."""
        return self._waiting.awaited() if isinstance(self._waiting, Step) else None

    def advance(self) -> bool:
        """Goes on as far as it can; tells whether it moved."""
        moved = False
        with self._context():
            while not self.is_over and (self._waiting is None or self._waiting.is_done()):
                moved = self.is_begun = True
                waited, self._waiting = self._waiting, None
                try:
                    brought = None if waited is None else waited.wait()
                except Exception as error:  # noqa: BLE001  (it is the operation's, which may catch it)
                    self._resume(error)
                else:
                    self._resume(brought)
        return moved

    def drop(self) -> None:
        """Forgets it where it stands."""
        self._end()
        self._steps.close()

    def _resume(self, brought: Any) -> None:
        try:
            if isinstance(brought, Exception):
                asked = self._steps.throw(brought)
            else:
                asked = self._steps.send(brought)
            while asked is FREE:
                self.is_free = True
                asked = next(self._steps)
            self._waiting = asked
        except StopIteration as end:
            self._result = end.value
            self._end()
        except BaseException as error:
            self._error = error
            self._end()
            if not isinstance(error, Exception):
                raise

    def _end(self) -> None:
        self.is_free = self.is_over = True
        self._waiting = None


class OperationQueue:
    """Holds a worker's operations that are under way, in order."""

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
        """Appends the next operation."""
        self._open.append(operation)

    def advance(self) -> None:
        """Goes on with all operations that can go on."""
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
        """Names the rank that the first operation waits for, where it is known."""
        return next((rank for each in self._open if (rank := each.awaited()) is not None), None)

    def uses(self, span: Span) -> bool:
        """Tells whether an operation under way reads or writes some memory."""
        return any(not each.is_over and is_overlapping(each.spans, [span]) for each in self._open)

    def drop(self) -> None:
        """Forgets all that is under way."""
        while self._open:
            self._open.popleft().drop()

    def _is_in_use(self, operation: Operation) -> bool:
        for earlier in self._open:
            if earlier is operation:
                return False
            if not earlier.is_over and is_overlapping(earlier.spans, operation.spans):
                return True
        return False
