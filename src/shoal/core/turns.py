"""Blocking programs in virtual time: a thread for each, of which one runs at a time.

Who waits passes the turn to the one whose time comes first; among equal times calls come before threads, and
threads in their order. So a program that blocks in plain calls runs the same way every time, and waits cost
nothing. One that only looks, over and over, waits too: until something happens. Coroutines have `virtual`
instead; where such programs wait for coroutines, these live on the turns' clock (`LoopInTurns`).
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from shoal.core import clock as clocks
from shoal.core.deadlines import Deadline
from shoal.core.errors import DeadlineExceeded, ShoalError
from shoal.core.virtual import START_WALL_S, VirtualLoop, end

T = TypeVar("T")

_CALL = -1
_MAX_NAMES = 8
_INTERRUPTED_AFTER_S = 0.2
"""At the latest: an interrupt that comes just before a wait begins is not seen by it."""
_MAX_LOOKS = 64
"""At one moment, with nothing done in between: who looks more often than that waits."""
_MAX_LAST_LOOKS = 65_536
"""The same where nothing can happen, so that to wait would be the end."""


class Ended(BaseException):
    """Raised inside a thread that is to end: nothing that catches errors holds it up."""


class Turn:
    """One thread's place. All but `wake` is for the thread itself."""

    def __init__(self, turns: Turns, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.waits_for = ""
        self.is_over = False
        self.error: BaseException | None = None
        self._turns = turns
        self._go = threading.Semaphore(0)
        self._entry = 0
        """Of the queue: the one that counts. 0: it waits to be woken."""
        self._debt_s = 0.0
        self._num_looks = 0
        self._is_looking = False
        """Whether it has done nothing since it last waited as one that only looks."""
        self._interruption: BaseException | None = None

    @property
    def now_s(self) -> float:
        """Of this thread: that of all, and what it has spent since it had the turn."""
        return self._turns.now_s + self._debt_s

    def spend(self, seconds: float) -> None:
        """Let so much time pass for this thread alone; it counts for all when it next looks up."""
        self._debt_s += seconds
        self._acts()

    def look_up(self) -> None:
        """Let all others come to this thread's time first: what it sees and does then is in order."""
        self._come()
        self._acts()

    def poll(self, is_there: Callable[[], bool], what: str) -> bool:
        """Whether something is there at this thread's time.

        No time passes by looking: one that does nothing else waits until something has happened, and looks
        again. ShoalError where nothing can happen.
        """
        self._come()
        if is_there():
            self._acts()
            return True
        self._num_looks += 1
        if self._num_looks < _MAX_LOOKS:
            return False
        if self._num_looks < _MAX_LAST_LOOKS and not self._turns._can_happen(self):
            return False
        self._turns._wait_for_any(self, what)
        return is_there()

    def pause(self, until_s: float) -> None:
        """Wait until a time; one that is past is now."""
        until_s = max(until_s, self.now_s)
        self._debt_s = 0.0
        self._acts()
        self._turns._queue(until_s, self)
        self._turns._pass_on(self)

    def park(self, what: str, until_s: float = math.inf) -> None:
        """Wait to be woken, or until a time. ShoalError where nobody is left who could do that."""
        self.look_up()
        self.waits_for = what
        if until_s < math.inf:
            self._turns._queue(max(until_s, self.now_s), self)
        else:
            self._entry = 0
        self._turns._pass_on(self)
        self.waits_for = ""

    def _come(self) -> None:
        self._turns._check_going()
        if self._debt_s > 0:
            self.pause(self.now_s)

    def _acts(self) -> None:
        self._num_looks = 0
        self._is_looking = False

    def wake(self, at_s: float) -> None:
        """Have it go on at a time, or now; for another thread or call."""
        self._turns._queue(max(at_s, self._turns.now_s), self)

    def interrupt(self, error: BaseException) -> None:
        """Have it raise this where it waits, now; for another thread or call."""
        if not self.is_over:
            self._interruption = error
            self.wake(self._turns.now_s)

    def _check_interruption(self) -> None:
        error, self._interruption = self._interruption, None
        if error is not None:
            self._debt_s = 0.0
            raise error


class Turns:
    """Threads that take turns, and the clock that they share."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns: list[Turn] = []
        self._threads: list[threading.Thread] = []
        self._heap: list[tuple[float, int, int, Turn | Callable[[], None]]] = []
        self._num_entries = 0
        self._current: Turn | None = None
        self._home = threading.Semaphore(0)
        self._failure: BaseException | None = None
        self._is_ending = False
        self._num_going = 0
        """Threads that are not over; without any, calls that are still to come do not."""
        self._looking: list[Turn] = []
        self._has_happened = False
        """Anything, since those that look were last let look."""

    @property
    def clock(self) -> clocks.Clock:
        """As the thread reads it whose turn it is; the calendar begins on a fixed day."""
        return _TurnClock(self)

    @property
    def current(self) -> Turn:
        """Whose turn it is."""
        assert self._current is not None, "outside of run"
        return self._current

    def call_at(self, at_s: float, call: Callable[[], None]) -> None:
        """Have something called at a time, between turns; it may not wait."""
        self._num_entries += 1
        heapq.heappush(self._heap, (max(at_s, self.now_s), _CALL, self._num_entries, call))

    def add(self, name: str, program: Callable[[Turn], None]) -> Turn:
        """Have another program begin now; for a thread whose turn it is, or a call."""
        turn = Turn(self, len(self.turns), name)
        thread = threading.Thread(target=self._live, args=(turn, program), name=name, daemon=True)
        self.turns.append(turn)
        self._num_going += 1
        self._threads.append(thread)
        self._queue(self.now_s, turn)
        thread.start()
        return turn

    def run(self, programs: Sequence[tuple[str, Callable[[Turn], None]]]) -> None:
        """Run programs, each with a name, to their ends; what one raises is kept in its turn's `error`.

        ShoalError when all that are left wait for each other; an interrupt ends all of them.
        """
        for name, program in programs:
            self.add(name, program)
        try:
            self._pass_on(None)
        finally:
            self._is_ending = True
            for turn, thread in zip(self.turns, self._threads, strict=True):
                turn._go.release()
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _live(self, turn: Turn, program: Callable[[Turn], None]) -> None:
        clocks.set_thread_clock(self.clock)
        turn._go.acquire()
        if not self._is_ending:
            try:
                turn._check_interruption()
                program(turn)
            except BaseException as error:  # noqa: BLE001 - whoever runs the world decides
                turn.error = error
        turn.is_over = True
        self._num_going -= 1
        if not self._is_ending:
            self._pass_on(None, is_over=True)

    def _queue(self, at_s: float, turn: Turn) -> None:
        self._num_entries += 1
        turn._entry = self._num_entries
        heapq.heappush(self._heap, (at_s, turn.number, self._num_entries, turn))

    def _can_happen(self, turn: Turn) -> bool:
        """Whether anything, while this one waits."""
        while self._heap and self._is_stale(*self._heap[0][2:]):
            heapq.heappop(self._heap)
        return bool(self._heap or (self._looking and (self._has_happened or not turn._is_looking)))

    @staticmethod
    def _is_stale(entry: int, who: Turn | Callable[[], None]) -> bool:
        return isinstance(who, Turn) and (entry != who._entry or who.is_over)

    def _wait_for_any(self, turn: Turn, what: str) -> None:
        """Until somebody has done something, or time has passed."""
        has_happened = self._has_happened or not turn._is_looking
        turn._acts()
        turn._is_looking, turn.waits_for, turn._entry = True, what, 0
        self._looking.append(turn)
        self._pass_on(turn, has_happened=has_happened)
        turn.waits_for = ""

    def _pass_on(self, turn: Turn | None, *, is_over: bool = False, has_happened: bool = True) -> None:
        """Give the turn to whose time comes first; return when it is this one's again."""
        self._check_going()
        self._has_happened = has_happened
        following = self._next()
        if following is turn and turn is not None:
            self._current = turn
            turn._check_interruption()
            return
        self._current = following
        (self._home if following is None else following._go).release()
        if is_over:
            return
        if turn is None:
            while not self._home.acquire(timeout=_INTERRUPTED_AFTER_S):
                pass
        else:
            turn._go.acquire()
            self._check_going()
            turn._check_interruption()

    def _check_going(self) -> None:
        if self._is_ending:
            raise Ended

    def _next(self) -> Turn | None:
        """Whose time comes first, and that time; None when all are over, or nothing can happen any more."""
        while self._num_going and (self._heap or (self._looking and self._has_happened)):
            if self._looking and self._has_happened:
                self._let_look()
            at_s, _, entry, who = heapq.heappop(self._heap)
            if not isinstance(who, Turn):
                self.now_s = at_s
                self._has_happened = True
                try:
                    who()
                except BaseException as error:  # noqa: BLE001 - it belongs to no thread
                    self._failure = error
                    return None
            elif not self._is_stale(entry, who):
                self.now_s = at_s
                return who
        stuck = [turn for turn in self.turns if not turn.is_over]
        if stuck:
            waits = [f"{turn.name} for {turn.waits_for or 'its turn'}" for turn in stuck[:_MAX_NAMES]]
            more = f" and {len(stuck) - _MAX_NAMES} more" if len(stuck) > _MAX_NAMES else ""
            self._failure = ShoalError(
                f"Nothing can happen any more at {self.now_s:g} s of virtual time: {'; '.join(waits)}{more}.",
                cause="they wait for each other, or for one that is over.",
            )
        return None

    def _let_look(self) -> None:
        """Those that wait for anything, once all is done that is to be done at this time."""
        if not self._heap or self._heap[0][0] > self.now_s:
            looking, self._looking, self._has_happened = self._looking, [], False
            for turn in looking:
                self._queue(self.now_s, turn)


class _TurnClock:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def now_s(self) -> float:
        turns = self._turns
        return turns.now_s if turns._current is None else turns._current.now_s

    def wall_s(self) -> float:
        return START_WALL_S + self.now_s()


class LoopInTurns:
    """A loop whose time is that of turns: their threads wait for its coroutines as for a LoopThread's.

    What is due on it happens between turns, before the threads whose time is the same.
    """

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._loop = VirtualLoop()
        self._due_s = math.inf
        """When the turns are to come here the next time."""

    def run(self, work: Coroutine[Any, Any, T], deadline: Deadline | None = None) -> T:
        """Runs a coroutine and waits for its result; for the thread whose turn it is.

        When the deadline passes, or the thread is to end, the coroutine is cancelled.
        """
        turn = self._turns.current
        try:
            turn.look_up()
        except BaseException:
            work.close()
            raise
        self._loop.now_s = turn.now_s
        task = self._loop.create_task(work)
        until_s = math.inf if deadline is None else deadline.at_s
        is_waiting = False

        def wake(_: object) -> None:
            if is_waiting:
                turn.wake(self._turns.now_s)

        task.add_done_callback(wake)
        try:
            self._advance()
            while not task.done():
                if turn.now_s >= until_s:
                    raise DeadlineExceeded("The call did not finish before its deadline and was cancelled.")
                is_waiting = True
                turn.park(f"{getattr(work, '__qualname__', 'a coroutine')} on the loop", until_s)
                is_waiting = False
        except BaseException:
            is_waiting = False
            task.cancel()
            self._advance()
            raise
        return task.result()

    def call(self, work: Callable[[], T]) -> T:
        """Has something done on the loop, at once; for calls of the turns, which may not wait."""

        async def do() -> T:
            return work()

        task = self._loop.create_task(do())
        self._advance()
        return task.result()

    def close(self) -> None:
        """Ends what is left on it, once all turns are over."""
        try:
            end(self._loop)
        finally:
            self._loop.close()

    def _advance(self) -> None:
        next_s = self._loop.advance(self._turns.now_s)
        if next_s < self._due_s:
            self._due_s = next_s
            self._turns.call_at(next_s, self._come)

    def _come(self) -> None:
        if self._due_s <= self._turns.now_s:
            self._due_s = math.inf
        self._advance()
