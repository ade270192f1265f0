"""Time that is simulated: an event loop whose clock jumps to the next timer when nothing is ready.

What waits costs nothing, and a program of coroutines runs the same way every time: callbacks run in order of
their time, and of their creation where the times are equal. Sockets, threads and signals belong to real time
and are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import heapq
import math
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Mapping
from contextvars import Context
from pathlib import Path
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from shoal.core.errors import DeadlineExceeded, ShoalError, UsageError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_WALL_S = 1_700_000_000.0
_MAX_TURNS = 100_000  # at one moment: something yields again and again and waits for time to pass
_NUM_WATCHED_TURNS = 1_000  # the last ones before that: who runs in them is named
_MANY_CANCELLED, _MANY_TASKS = 100, 1000
_MAX_NAMES = 8
_MAX_LAST_ROUNDS, _MAX_STUBBORN = 100, 10
_LAST_ROUND_S = 3600.0
_YOUNG_OBJECTS = 200_000
_NEVER = 1_000_000


class VirtualClock:
    """The clock of a virtual loop: starts at zero, and on one fixed day for everybody."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        """Reads the time of the loop, in seconds."""
        return self._loop.now_s

    def wall_s(self) -> float:
        """The calendar of the simulation."""
        return START_WALL_S + self._loop.now_s


class VirtualLoop(asyncio.SelectorEventLoop):
    """Never blocks; raises ShoalError out of `run_until_complete` when nothing can ever happen again."""

    def __init__(self, *, limit_s: float = math.inf) -> None:
        super().__init__(_NoSelector())
        self.now_s = 0.0
        self.limit_s = limit_s
        """The time that nothing may pass; DeadlineExceeded is raised instead."""
        self.until_s = math.inf
        """What comes later waits: the loop stops before it (see `advance`)."""
        self.clock = VirtualClock(self)
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._num_timers = 0
        self._num_cancelled = 0
        self._tasks: list[weakref.ref[asyncio.Task[Any]]] = []  # in order of their creation
        self._many_tasks = _MANY_TASKS

    def time(self) -> float:
        """Seconds since the simulation began."""
        return self.now_s

    def advance(self, until_s: float) -> float:
        """Runs all that happens up to a time, and then gives the time of the next timer.

        So another clock can drive this loop (`turns`). Infinity where nothing is to come by itself.
        """
        if not self._timers or self._timers[0][0] >= until_s:
            self.now_s = max(self.now_s, until_s)
        self.until_s = until_s
        try:
            self.run_forever()
        finally:
            self.until_s = math.inf
        return self._next_s()

    # --- what happens when ---

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's, without its checks: it is called for every event."""
        if self._closed:  # type: ignore[attr-defined]
            self._check_closed()  # type: ignore[attr-defined]
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """As asyncio's; timers of equal times run in order of their creation."""
        self._check_closed()  # type: ignore[attr-defined]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if when > self.now_s:
            timer._scheduled = True  # type: ignore[attr-defined]
            self._num_timers += 1
            heapq.heappush(self._timers, (when, self._num_timers, timer))
        else:
            self._ready.append(timer)  # type: ignore[attr-defined]
        return timer

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Calls back later, in virtual time, as asyncio's own method does."""
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def create_task(
        self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        """As asyncio's; the order is remembered."""
        task = super().create_task(coro, **options)
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) > self._many_tasks:
            self._tasks = [each for each in self._tasks if each() is not None]
            self._many_tasks = max(_MANY_TASKS, 2 * len(self._tasks))
        return task

    def tasks_left(self) -> list[asyncio.Task[Any]]:
        """Those that have not ended, in order of their creation: asyncio knows them by memory address."""
        return [task for each in self._tasks if (task := each()) is not None and not task.done()]

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        if not timer._scheduled:  # type: ignore[attr-defined]
            return
        self._num_cancelled += 1
        if self._num_cancelled > _MANY_CANCELLED and 2 * self._num_cancelled > len(self._timers):
            # the one that is being cancelled does not say so yet, and goes when its time comes
            self._timers = [entry for entry in self._timers if not entry[2]._cancelled]
            heapq.heapify(self._timers)
            self._num_cancelled = 1

    def _run_once(self) -> None:
        """Run moment after moment until the loop is stopped."""
        ready: Any = self._ready  # type: ignore[attr-defined]
        num_turns = 0
        standing: dict[str, int] = {}
        while True:
            if not ready:
                if self._stopping:  # type: ignore[attr-defined]
                    return
                self._jump()
                num_turns = 0
                standing.clear()
            if num_turns > _MAX_TURNS - _NUM_WATCHED_TURNS:
                for handle in ready:
                    where = _where(handle)
                    standing[where] = standing.get(where, 0) + 1
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:  # type: ignore[attr-defined]
                return
            num_turns += 1
            if num_turns > _MAX_TURNS:
                often = sorted(standing, key=lambda where: -standing[where])[:_MAX_NAMES]
                raise ShoalError(
                    f"Virtual time stands still at {self.now_s:g} s: {'; '.join(often)}.",
                    cause="something yields again and again instead of waiting for an event or a timer.",
                    next_step="wait with asyncio.sleep(seconds) there.",
                )

    def _jump(self) -> None:
        """Go on to the next timer, and to its own time: adding up would drift."""
        when_s = self._next_s()
        timers = self._timers
        if when_s > self.until_s:
            self.now_s = max(self.now_s, self.until_s)
            self.stop()
            return
        if when_s == math.inf:
            raise ShoalError(
                f"Nothing can happen any more at {self.now_s:g} s of virtual time: {self._who_waits()}.",
                cause="they wait for each other, or for something outside of virtual time.",
            )
        if when_s > self.limit_s:
            raise DeadlineExceeded(
                f"Virtual time passes its limit of {self.limit_s:g} s: {self._who_waits()}.",
                next_step="raise the limit, or look for what keeps the program alive.",
            )
        self.now_s = when_s
        while timers and timers[0][0] == when_s:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False  # type: ignore[attr-defined]
            if timer._cancelled:
                self._num_cancelled -= 1
            else:
                self._ready.append(timer)  # type: ignore[attr-defined]

    def _next_s(self) -> float:
        """Gives the time of the next timer; infinity without one."""
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)[2]._scheduled = False  # type: ignore[attr-defined]
            self._num_cancelled -= 1
        return timers[0][0] if timers else math.inf

    def _who_waits(self) -> str:
        names = sorted(task.get_name() for task in asyncio.all_tasks(self))
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return f"{len(names)} tasks wait ({', '.join(names[:_MAX_NAMES])}{more})"

    # --- what belongs to real time ---

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """For the loop's own thread only: another one would come at a time that nobody can repeat."""
        runs_in: int | None = self._thread_id  # type: ignore[attr-defined]
        if runs_in is not None and runs_in != threading.get_ident():
            _refuse("a call from another thread")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> NoReturn:
        """Refuses: a thread would make runs differ."""
        _refuse("a thread")

    def add_signal_handler(self, sig: int, callback: Callable[[*Ts], object], *args: *Ts) -> NoReturn:
        """Refuses: signals come in real time."""
        _refuse("a signal")

    async def create_connection(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses: a socket would make runs differ."""
        _refuse("a socket")

    create_server = create_datagram_endpoint = connect_accepted_socket = create_connection

    def _make_self_pipe(self) -> None:
        """None is needed: nobody wakes this loop from outside."""

    def _close_self_pipe(self) -> None:
        """There is none."""


class _NoSelector(selectors.BaseSelector):
    def register(self, fileobj: Any, events: int, data: Any = None) -> NoReturn:
        _refuse("a socket")

    def unregister(self, fileobj: Any) -> NoReturn:
        raise KeyError(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return {}


def _where(handle: asyncio.Handle) -> str:
    """Names the task that a callback goes on with, and the lines at which its coroutines stand."""
    callback = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if not isinstance(task, asyncio.Task):
        return getattr(callback, "__qualname__", repr(callback))
    lines: list[str] = []
    waits: Any = task.get_coro()
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None)
        if frame is not None:
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}")
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)
    return f"{task.get_name()} at {' > '.join(lines)}"


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"Virtual time has no place for {what}.",
        cause="it would happen at a moment of real time.",
        next_step="use links in memory (MemoryNetwork) and coroutines, or an ordinary loop.",
    )


def run_virtual(main: Coroutine[Any, Any, T], *, limit_s: float | None = None) -> T:
    """Run a program of coroutines in virtual time, from zero to its end, and return its result.

    DeadlineExceeded when it does not end by `limit_s` of virtual time. Tasks that it leaves behind are
    cancelled; one that goes on for an hour although it was cancelled ten times is left where it is.
    """
    if _is_loop_running():
        main.close()
        raise UsageError(
            "Virtual time cannot begin inside another loop.", next_step="call run_virtual from plain code."
        )
    loop = VirtualLoop(limit_s=math.inf if limit_s is None else limit_s)
    try:
        task = loop.create_task(main, name="main")
        with _rare_collections():
            try:
                return loop.run_until_complete(task)
            finally:
                end(loop)
    finally:
        loop.close()


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """A world is millions of objects that live to its end: look for garbage among the new ones only."""
    usual = gc.get_threshold()
    gc.set_threshold(_YOUNG_OBJECTS, _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def _is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def end(loop: VirtualLoop) -> None:
    """Cancels what is left on a loop, and lets it clean up."""
    num_stubborn = 0
    for _ in range(_MAX_LAST_ROUNDS):
        left = loop.tasks_left()
        if not left or num_stubborn == _MAX_STUBBORN:
            break
        for task in left:
            task.cancel()
        loop.limit_s = loop.now_s + _LAST_ROUND_S
        try:
            loop.run_until_complete(_all_done(left))
        except ShoalError:  # one goes on although it was cancelled
            num_stubborn += 1
    loop.limit_s = loop.now_s + _LAST_ROUND_S
    with contextlib.suppress(ShoalError):
        loop.run_until_complete(loop.shutdown_asyncgens())


async def _all_done(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        await asyncio.wait([task])
