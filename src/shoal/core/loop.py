"""The asyncio loop in its own thread, and the one bridge by which blocking code crosses to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from shoal.core.deadlines import Deadline
from shoal.core.errors import DeadlineExceeded, UsageError

T = TypeVar("T")
log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 2e-4  # beside a busy Python thread an echo's p95 is 10 ms at the default, 52 µs at this
_CLOSE_GRACE_S = 5.0
# Windows does not interrupt a wait on a lock when Ctrl-C is pressed: wake up to look
_INTERRUPT_POLL_S = 0.2 if sys.platform == "win32" else threading.TIMEOUT_MAX


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, the standard library's otherwise."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def own_the_process() -> None:
    """For processes that Shoal starts itself: hand the interpreter over often, so that calls stay prompt."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class LoopThread:
    """One asyncio loop in one thread; open it with `with`, pass it to whoever needs it.

    `run` blocks the calling thread, so it serves scripts and notebooks alike (a notebook's own loop is
    another one); code that runs on some other loop awaits `run_from_async`. On the loop's own thread there
    is nothing to cross: await the coroutine there.
    """

    def __init__(
        self, name: str = "shoal-loop", make_loop: Callable[[], asyncio.AbstractEventLoop] = new_event_loop
    ) -> None:
        self._name = name
        self._make_loop = make_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise UsageError(
                f"The loop thread '{self._name}' is open already.", next_step="open it in one place only."
            )
        started = threading.Event()
        self._loop = self._make_loop()
        # a daemon, so that a program that forgets to close it can still end
        self._thread = threading.Thread(
            target=self._serve, args=(self._loop, started), name=self._name, daemon=True
        )
        self._thread.start()
        started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        if threading.current_thread() is thread:
            raise UsageError(
                "A loop thread cannot close itself.", next_step="close it from the thread that opened it."
            )
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            loop.call_soon_threadsafe(loop.stop)
        thread.join()
        self._loop = self._thread = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop itself, for code that must hand it to asyncio."""
        if self._loop is None:
            raise UsageError(
                f"The loop thread '{self._name}' is not open.",
                next_step=f"use it inside 'with {type(self).__name__}() as loop:'.",
            )
        return self._loop

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop and return at once; cancelling the future cancels it."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop)
        except BaseException:
            work.close()
            raise

    def run(self, work: Coroutine[Any, Any, T], deadline: Deadline | None = None) -> T:
        """Run a coroutine on the loop and wait for its result.

        When the deadline passes, or on Ctrl-C, the coroutine is cancelled, given a few seconds to clean up,
        and DeadlineExceeded or KeyboardInterrupt is raised here.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError(
                "run() was called on the loop's own thread and would wait for itself.",
                next_step="await the coroutine instead.",
            )
        started, finished = threading.Event(), threading.Event()

        async def tracked() -> T:
            started.set()
            try:
                return await work
            finally:
                finished.set()

        future = self.submit(tracked())
        try:
            return _wait(future, deadline)
        except concurrent.futures.CancelledError:
            raise DeadlineExceeded("The call was cancelled: its loop thread was closed.") from None
        except BaseException:
            if not future.done():
                future.cancel()
                with contextlib.suppress(UsageError, RuntimeError, TimeoutError, KeyboardInterrupt):
                    # after one turn of the loop it is certain whether the work ever started
                    self.submit(asyncio.sleep(0)).result(_CLOSE_GRACE_S)
                    if started.is_set():
                        finished.wait(_CLOSE_GRACE_S)
            raise
        finally:
            if not started.is_set():
                work.close()

    async def run_from_async(self, work: Coroutine[Any, Any, T], deadline: Deadline | None = None) -> T:
        """Like `run`, for a caller on some other loop: it waits without blocking that loop."""
        future = asyncio.wrap_future(self.submit(work))
        if deadline is None or deadline.remaining_s == float("inf"):
            return await future
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await future
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise DeadlineExceeded("The call did not finish before its deadline and was cancelled.") from None

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
        asyncio.set_event_loop(loop)
        loop.call_soon(started.set)
        try:
            loop.run_forever()
        finally:
            _end_tasks(loop)
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()


def _wait(future: concurrent.futures.Future[T], deadline: Deadline | None) -> T:
    deadline = deadline or Deadline.never()
    while True:
        try:
            return future.result(min(deadline.remaining_s, _INTERRUPT_POLL_S))
        except TimeoutError:
            if future.done():
                raise  # the coroutine's own TimeoutError
            if deadline.is_past:
                raise DeadlineExceeded(
                    "The call did not finish before its deadline and was cancelled."
                ) from None


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is still running, in order of creation, and let it clean up."""
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(_gather_ended(tasks))


async def _gather_ended(tasks: list[asyncio.Task[Any]]) -> None:
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception) and not isinstance(outcome, asyncio.CancelledError):
            log.warning("A task failed while its loop was closing: %r", outcome)
