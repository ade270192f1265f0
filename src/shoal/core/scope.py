"""Tasks with an owner: a scope that no task outlives, and a fan-out that returns errors as values.

Both cancel and wait in the order in which tasks were created. asyncio's own TaskGroup cancels in order of
memory address, which would make two runs in virtual time differ.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from shoal.core.deadlines import Deadline
from shoal.core.errors import DeadlineExceeded, UsageError

T = TypeVar("T")
log = logging.getLogger(__name__)


class Scope:
    """An `async with` block that owns tasks.

    Leaving the block normally waits for all of them; leaving it by an error, or `cancel`, ends them all.
    When a task fails, the block and the other tasks are cancelled and the block raises that error; errors of
    tasks that fail later are attached to it as notes.
    """

    def __init__(self, name: str = "scope") -> None:
        self._name = name
        self._tasks: dict[asyncio.Task[Any], None] = {}  # a dict keeps the order of creation
        self._owner: asyncio.Task[Any] | None = None
        self._error: BaseException | None = None
        self._is_closing = False
        self._owner_was_cancelled_by_us = False

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        return self

    def start(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Run a coroutine as a task of this scope; refused once the scope is closing."""
        return self._start(work, name, self._on_done)

    def start_soon(self, work: Coroutine[Any, Any, object], name: str | None = None) -> None:
        """Like `start` for work whose failure concerns nobody else: it is logged and goes no further."""
        self._start(work, name, functools.partial(self._on_done_alone, name or self._name))

    def _start(
        self, work: Coroutine[Any, Any, T], name: str | None, on_done: Callable[[asyncio.Task[T]], None]
    ) -> asyncio.Task[T]:
        if self._owner is None or self._is_closing:
            work.close()
            raise UsageError(
                f"The scope '{self._name}' takes no tasks now.",
                cause="it was not entered with 'async with', or it is closing.",
            )
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(on_done)
        return task

    def cancel(self) -> None:
        """Cancel every task once, oldest first; the block still waits for them to end."""
        if self._is_closing:
            return  # a second cancellation would cut short what a task does to clean up
        self._is_closing = True
        for task in tuple(self._tasks):
            task.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self.cancel()
        interrupted = await self._wait_for_all()
        self._is_closing = True
        if self._error is not None:
            if self._owner_was_cancelled_by_us and self._owner is not None:
                self._owner.uncancel()
            if error is not None and not isinstance(error, asyncio.CancelledError):
                error.add_note(f"Meanwhile a task of the scope '{self._name}' failed: {self._error!r}")
                return False
            raise self._error
        if error is None and interrupted is not None:
            raise interrupted
        return False

    async def _wait_for_all(self) -> asyncio.CancelledError | None:
        interrupted = None
        while self._tasks:
            task = next(iter(self._tasks))
            try:
                await _settled(task)
            except (
                asyncio.CancelledError
            ) as cancelled:  # the owner itself was cancelled: end the rest, then pass it on
                if not (self._owner_was_cancelled_by_us and self._error is not None):
                    interrupted = cancelled
                self.cancel()
        return interrupted

    def _on_done_alone(self, name: str, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", name, exc_info=error)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._error is not None:
            self._error.add_note(f"Another task of the scope '{self._name}' failed too: {error!r}")
            return
        self._error = error
        should_wake_owner = not self._is_closing
        self.cancel()
        if should_wake_owner and self._owner is not None and not self._owner.done():
            self._owner_was_cancelled_by_us = True
            self._owner.cancel()


class StandingScope:
    """A scope for objects that are opened by one task and closed by another.

    Its block is a task of its own; tasks in it end with `close`.
    """

    def __init__(self, name: str = "standing scope") -> None:
        self.scope = Scope(name)
        self._opened = asyncio.Event()
        self._closing = asyncio.Event()
        self._owner: asyncio.Task[None] | None = None

    async def open(self) -> Scope:
        """Begin on the running loop; the scope that tasks may be started in."""
        self._owner = asyncio.get_running_loop().create_task(self._own())
        await self._opened.wait()
        return self.scope

    async def close(self) -> None:
        """End every task, oldest first, and raise what a task failed with."""
        self._closing.set()
        if self._owner is not None:
            await self._owner

    async def _own(self) -> None:
        async with self.scope:
            self._opened.set()
            await self._closing.wait()
            self.scope.cancel()


async def fanout(
    calls: Iterable[Coroutine[Any, Any, T]],
    deadline: Deadline,
    *,
    limit: int | None = None,
    is_enough: Callable[[list[T | Exception]], bool] | None = None,
) -> list[T | Exception]:
    """Run calls that may fail, at most `limit` at once, and return their results in the order given.

    An error stands in its call's place as a value. What has not finished when the deadline passes, or when
    `is_enough` (which sees the results so far, in the order given) says so, is cancelled and stands as
    DeadlineExceeded. Only cancellation of the caller itself is raised.
    """
    pending = list(calls)
    if limit is not None and limit < 1:
        for work in pending:
            work.close()
        raise UsageError(f"limit must be above 0, not {limit}.", next_step="leave it out for no limit.")
    outcomes: dict[int, T | Exception] = {}
    running: dict[int, asyncio.Task[T]] = {}
    loop = asyncio.get_running_loop()
    wake = asyncio.Event()
    num_started = 0
    is_late = deadline.is_past

    def on_deadline() -> None:
        # not asked of the deadline again: loops round their timers and may ring a little early
        nonlocal is_late
        is_late = True
        wake.set()

    def on_done(index: int, task: asyncio.Task[T]) -> None:
        running.pop(index, None)
        if not task.cancelled():
            error = task.exception()
            # what is no Exception (SystemExit, KeyboardInterrupt) was already raised by the loop itself
            outcomes[index] = error if isinstance(error, Exception) else task.result()
        wake.set()

    timeout_s = deadline.timeout_s
    timer = None if timeout_s is None else loop.call_later(timeout_s, on_deadline)
    try:
        while not is_late:
            while num_started < len(pending) and (limit is None or len(running) < limit):
                task = loop.create_task(pending[num_started])
                running[num_started] = task
                task.add_done_callback(functools.partial(on_done, num_started))
                num_started += 1
            if not running or (is_enough and is_enough([outcomes[index] for index in sorted(outcomes)])):
                break
            wake.clear()
            await wake.wait()
    finally:
        if timer is not None:
            timer.cancel()
        for work in pending[num_started:]:
            work.close()
        unfinished = list(running.values())
        for task in unfinished:
            task.cancel()
        await _all_settled(unfinished)
    return [
        outcomes[index]
        if index in outcomes
        else DeadlineExceeded("The call had not finished when its fan-out ended.")
        for index in range(len(pending))
    ]


def results_of(outcomes: Iterable[T | Exception]) -> list[T]:
    """The results of calls that ran together; the first error is raised."""
    results = []
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
        results.append(outcome)
    return results


async def _settled(task: asyncio.Task[Any]) -> None:
    """Wait until a task and its earlier callbacks are done, whatever it ended in."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wake(_: object) -> None:
        if not waiter.done():
            waiter.set_result(None)

    task.add_done_callback(wake)
    try:
        await waiter
    finally:
        task.remove_done_callback(wake)


async def _all_settled(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait for all of them even when the caller is cancelled meanwhile; that is raised at the end."""
    interrupted = None
    for task in tasks:
        is_settled = False
        while not is_settled:
            try:
                await _settled(task)
                is_settled = True
            except asyncio.CancelledError as cancelled:
                interrupted = cancelled
    if interrupted is not None:
        raise interrupted


def settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    """Give a result to whoever waits, or have an error raised there; nothing once that was done."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
