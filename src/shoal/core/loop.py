"""The asyncio loop in its own thread, and the one bridge by which blocking code crosses to it."""

from __future__ import annotations

import abc
import asyncio
import concurrent.futures
import contextlib
import functools
import gc
import logging
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from shoal.core.deadlines import Deadline
from shoal.core.errors import DeadlineExceeded, UsageError

T = TypeVar("T")
R = TypeVar("R")
log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 2e-4  # beside a busy Python thread an echo's p95 is 10 ms at the default, 52 µs at this
GARBAGE_THRESHOLDS = (20_000, 20, 50)
_CLOSE_GRACE_S = 5.0
_CLOSE_ROUNDS = 3
_LATE = "The call did not finish before its deadline and was cancelled."
_CLOSED = "The call was cancelled: its loop thread was closed."
# Ctrl-C interrupts a wait on a lock, but not on Windows, and nowhere if it comes in the moment before the
# wait begins: wake up to look
_INTERRUPT_POLL_S = 0.2 if sys.platform == "win32" else 1.0


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, the standard library's otherwise."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def own_the_process() -> None:
    """For processes that Shoal starts itself: hand the interpreter over often, so that calls stay prompt.

    And look for garbage in cycles seldom: a program with torch has half a million objects to look through,
    which took a sixth of the time of small calls.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*GARBAGE_THRESHOLDS)


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
        self._lock = threading.RLock()  # a signal handler may come back in while this thread holds it
        self._is_closing = False

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
        if thread.is_alive():  # not in a forked child, which must not touch what it shares with its parent
            with self._lock:
                self._is_closing = True
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(loop.stop)
            thread.join()
        self._loop = self._thread = None
        self._is_closing = False

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
        return self._hand_over(work, functools.partial(asyncio.run_coroutine_threadsafe, work))

    def _hand_over(self, work: Coroutine[Any, Any, Any], give: Callable[[asyncio.AbstractEventLoop], R]) -> R:
        """Give work to the loop; closes it where the loop takes none."""
        try:
            loop, thread = self.loop, self._thread
            if thread is not None and thread.is_alive():
                with self._lock:  # what is queued before the loop is told to stop is ended by it, not lost
                    if loop is self._loop and not self._is_closing:
                        return give(loop)
            raise UsageError(
                f"The loop thread '{self._name}' takes no work now.",
                cause="it is closing, or this process was forked from the one that opened it.",
                next_step="open a loop thread in this process, and let it live as long as the work.",
            )
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
        crossing = _Crossing(work)
        self._hand_over(work, crossing.begin)
        try:
            crossing.wait(deadline or Deadline.never())
        except BaseException:
            crossing.abandon()
            raise
        return crossing.result()

    async def run_from_async(self, work: Coroutine[Any, Any, T], deadline: Deadline | None = None) -> T:
        """Like `run`, for a caller on some other loop: it waits without blocking that loop.

        When the caller is cancelled, so is the work, and nobody waits for it to clean up.
        """
        tracked = _Tracked(work)
        limit_s = None if deadline is None else deadline.timeout_s
        try:
            future = self.submit(tracked.run())
            try:
                async with asyncio.timeout(limit_s) as limit:
                    return await _crossed(future)
            except TimeoutError:
                if not limit.expired():
                    raise  # the coroutine's own
                with contextlib.suppress(UsageError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_GRACE_S):
                        await _crossed(self.submit(tracked.ended()))
                raise DeadlineExceeded(_LATE) from None
        finally:
            tracked.close()

    async def run_blocking(self, work: Callable[[], T]) -> T:
        """Run code that blocks on this thread, for a caller on another loop, which does not block."""

        async def blocking() -> T:
            return work()

        return await self.run_from_async(blocking())

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


class BlockingBridge(abc.ABC):
    """What blocking code opens with `with`, or by `open` and `close`, and what then lives on some loop.

    For any thread but that loop's own. It can be opened again once it was closed.
    """

    _what = "bridge"
    """What a user calls it, and how it is opened: for errors."""
    _how = "'with'"

    def __init__(self) -> None:
        self._run: Callable[..., Any] | None = None
        self._closing = contextlib.ExitStack()
        self._lock = threading.RLock()  # of opening and closing, which a signal may cut into

    @abc.abstractmethod
    def _begin(self, closing: contextlib.ExitStack) -> Callable[..., Any]:
        """Open it; what ends it goes into `closing`. Returns the `run` of the loop that it lives on."""

    def open(self) -> Self:
        """Begin, on a loop thread of its own unless one was given."""
        with self._lock, contextlib.ExitStack() as closing:
            if self._run is not None:
                raise UsageError(
                    f"This {self._what} is open already.", next_step="open it in one place only."
                )
            self._run = self._begin(closing)
            closing.callback(setattr, self, "_run", None)
            self._closing = closing.pop_all()
        return self

    def close(self) -> None:
        """End; does nothing when that was done before."""
        with self._lock:
            self._closing.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, work: Coroutine[Any, Any, T], deadline: Deadline | None = None) -> T:
        """Run any coroutine on the loop that it lives on, and wait for its result."""
        run = self._run
        if run is None:
            work.close()
            raise self._not_open()
        result: T = run(work, deadline)
        return result

    def _not_open(self) -> UsageError:
        return UsageError(f"This {self._what} is not open.", next_step=f"use it inside {self._how}.")


class _Crossing(Generic[T]):
    """A coroutine that another thread waits for: a lock that is free once it has ended.

    What asyncio and concurrent.futures have for it takes 60 µs longer, each time.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[T] | None = None
        self._is_dropped = False
        self._ended = threading.Lock()
        self._ended.acquire()

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have it started in the loop's next turn."""
        self._loop = loop
        loop.call_soon_threadsafe(self._start)

    def wait(self, deadline: Deadline) -> None:
        """Until it has ended; DeadlineExceeded when that comes first."""
        while not self._ended.acquire(timeout=min(deadline.remaining_s, _INTERRUPT_POLL_S)):
            if deadline.is_past:
                raise DeadlineExceeded(_LATE)

    def result(self) -> T:
        """What it has returned, or raised."""
        assert self._task is not None
        if self._task.cancelled():
            raise DeadlineExceeded(_CLOSED)
        return self._task.result()

    def abandon(self) -> None:
        """Cancel it, and give it a moment to clean up."""
        assert self._loop is not None
        self._is_dropped = True
        with contextlib.suppress(RuntimeError, KeyboardInterrupt):  # RuntimeError: the loop was closed
            self._loop.call_soon_threadsafe(self._cancel)
            self._ended.acquire(timeout=_CLOSE_GRACE_S)

    def _start(self) -> None:
        if self._is_dropped:
            self._work.close()
            self._ended.release()
            return
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if self._is_dropped and not task.cancelled():
            task.exception()  # nobody asks for it any more
        self._ended.release()


class _Tracked(Generic[T]):
    """A coroutine of which another thread knows whether it began."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._is_dropped = False
        self.started = threading.Event()

    async def run(self) -> T:
        """The coroutine itself, on its loop."""
        self._task = asyncio.current_task()
        self.started.set()
        if self._is_dropped:  # after `started`, so that one of the two threads closes the coroutine
            self._work.close()
            raise asyncio.CancelledError
        return await self._work

    async def ended(self) -> None:
        """Wait for its end, on the same loop, after it was cancelled."""
        await asyncio.sleep(0)  # after this turn it is certain whether it ever started
        if self._task is not None:
            await asyncio.wait([self._task])

    def close(self) -> None:
        """Drop it if it never began, so that nothing warns of a coroutine that was never awaited."""
        self._is_dropped = True
        if not self.started.is_set():
            self._work.close()


async def _crossed(future: concurrent.futures.Future[T]) -> T:
    """Wait for another loop's future; when that loop was closed, it is not this task that was cancelled."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise DeadlineExceeded(_CLOSED) from None


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is still running and let it clean up; what does not end within a few seconds is left."""
    for _ in range(_CLOSE_ROUNDS):  # cleaning up may start further tasks
        # asyncio keeps them in a set: unnamed ones are sorted by their number, so by age
        tasks = sorted(asyncio.all_tasks(loop), key=lambda task: (len(task.get_name()), task.get_name()))
        if not tasks:
            return
        for task in tasks:
            task.cancel()
        loop.run_until_complete(_ended(tasks))
    for task in asyncio.all_tasks(loop):
        log.warning("A task did not end when its loop was closed, and is left: %r", task)


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    ended, _ = await asyncio.wait(tasks, timeout=_CLOSE_GRACE_S)
    for task in tasks:
        if task in ended and not task.cancelled() and (error := task.exception()) is not None:
            log.warning("A task failed while its loop was closing: %r", error)


class ByteThreads:
    """Starts threads that only move bytes, and waits for their end.

    Blocking sockets copy without the interpreter's lock, which those of a loop do not. Such threads are the
    exception to one loop thread for a process. Whoever starts one ends it by closing what it blocks on.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Does `work` in a thread of its own, which is a daemon: a program that forgets to close can end."""
        thread = threading.Thread(target=_log_failure, args=(name, work), name=name, daemon=True)
        with self._lock:
            self._threads = [each for each in self._threads if each.is_alive()]
            self._threads.append(thread)
            thread.start()

    def join(self, deadline: Deadline) -> bool:
        """Waits until all have ended; False when one has not before the deadline."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline.remaining_s))
        return not any(thread.is_alive() for thread in threads)


def _log_failure(name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception:
        log.exception("%s has ended", name)
