"""Operations under way on one machine: their order, who has come to them, and waiting for the others.

All members number their operations alike. Of each one a member says first that it has arrived (what it gives
lies in shared memory), then that it has finished its part of the work. Everything happens in the thread that
calls, whenever it calls: a worker's own computing leaves no core free for another thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shoal.core import Deadline, PeerLost, ShoalError
from shoal.group.base import (
    LINE_EVERY_S,
    GroupSettings,
    Handle,
    T,
    WaitListener,
    WaitReport,
    forked,
    has_left,
    mismatch,
    out_of_step,
    rank_to_blame,
)
from shoal.group.host.heartbeat import ProcessWatch
from shoal.group.host.memory import (
    ANNOUNCED,
    ARRIVED,
    ASLEEP,
    DEVICE_ARRIVED,
    DEVICE_FINISHED,
    DTYPES,
    FINISHED,
    FREED,
    LEFT,
    MAX_AHEAD,
    NOT_YET,
    VERDICT,
    ControlPage,
    WakePipes,
)
from shoal.group.kernels import OPS

log = logging.getLogger(__name__)
_SPIN_S = 5e-4
_SPIN_CROWDED_S = 2e-4  # with more workers than cores the one that is waited for needs this one's core
_DEVICE_BUSY_S, _DEVICE_SPIN_S, _DEVICE_NAP_S = 3e-3, 0.1, 2e-5
_NAP_S = 5e-3  # a wake-up that came just before the nap is missed for this long
_give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))
KINDS = ("all_reduce", "broadcast", "all_gather", "exchange", "barrier", "empty", "free")
Span = tuple[int, int]
"""First address of some memory, and the first behind it."""


@dataclass(slots=True, eq=False)
class Task:
    """One numbered step of an operation."""

    words: list[int]
    """What this worker does: kind, dtype, number of elements, detail, place; compared with others.

    An exchange has no detail, its place comes first; a piece of a gather has a negative number of elements.
    """
    work: Callable[[Task, list[int]], None] | None = None
    """Called with the ranks that take part, once all `sources` (None: everybody) have arrived."""
    spans: Sequence[Span] = ()
    """The memory that it reads or writes here: a later task on any of it waits for this one."""
    sources: Sequence[int] | None = None
    prepare: Callable[[Task], None] | None = None
    """Called before this worker arrives."""
    may_arrive: Callable[[Task], bool] | None = None
    """Asked before this worker arrives: whether all have issued their reads of GPU memory that it writes."""
    may_work: Callable[[Task, list[int]], bool] | None = None
    """Asked before `work`: whether the GPU memory that it reads is written by those that take part."""
    is_staged: bool = False
    """Whether it writes staging memory before it arrives."""
    half: int = -1
    """Of the staging memory, 0 or 1; by its number unless it is said."""
    num_holding: int = 0
    """How many of the next tasks use that half, too."""
    follows: Task | None = None
    """A task on the same memory that it belongs to, and need not wait for."""
    after: int = 0
    """Work only when everybody has finished this operation: until then they read what it writes."""
    factors: Sequence[float] | None = None
    must_match: int = 8
    """How many of the words, at most, must be equal on all that take part."""
    is_shared: bool = False
    """Complete only when all have finished: they read this worker's tensor until then."""
    needs_shares: bool = False
    """Complete only with everybody's part of the work."""
    is_survivable: bool = False
    """Whether it goes on without those that are lost."""
    may_precede: bool = False
    """Whether it may work when others have announced it: their GPUs say when their parts are there."""
    may_lead: bool = False
    """Whether it may work when others have come to the operation before, also if they are lost after that."""
    check: Callable[[Task, Sequence[int]], ShoalError | None] | None = None
    """Looks at what some of those that it did not wait for have said since."""
    seq: int = 0
    present: list[int] | None = None
    """Who took part, once this worker's part is done."""
    error: ShoalError | None = None


class ProgressEngine:
    """Does one worker's collective operations in their order, as far as the others have come."""

    def __init__(
        self,
        rank: int,
        size: int,
        control: ControlPage,
        pipes: WakePipes,
        watch: ProcessWatch,
        settings: GroupSettings,
    ) -> None:
        self.should_survive = False
        self.waited_s = [0.0] * size
        self.on_wait: list[WaitListener] = []
        """What `Group.on_wait` says."""
        self.issued = 0
        self.culprit: int | None = None
        """The rank, as people know it, without which an operation could not be finished."""
        self.besides: Callable[[], None] | None = None
        """Other work that can make progress whenever this does."""
        self.rank = rank
        self.size = size
        self._everybody = tuple(range(size))
        self._others = [other for other in range(size) if other != rank]
        self.control = control
        self._counters = control.counters
        self.pipes = pipes
        self.watch = watch
        self._settings = settings
        self.name_of = settings.name_of
        self._to_arrive: deque[Task] = deque()
        self._to_work: deque[Task] = deque()
        self._open: deque[Task] = deque()
        """Tasks in order, from the first that is not complete."""
        self._halves = [0, 0]
        self._finished_by_all = 0
        """An operation that all who are there have finished, one of the latest."""
        self._pid = os.getpid()
        self._breakage: BaseException | None = None
        self._void: ShoalError | None = None
        """What leaves the result of an operation on the GPU without meaning: a loss, or a mismatch."""
        self._unchecked: deque[tuple[Task, Sequence[int]]] = deque()
        """Operations that this worker has done before some had come to them."""
        self._led_s = 0.0
        """When the last of them was done."""
        self._led_line_s = 0.0
        """When a line said that they still had not."""
        self._on_device: deque[tuple[int, Sequence[int], Sequence[int]]] = deque()
        """Operations in which streams may still wait for each other: who gives, and who must finish."""
        self._guard = threading.Lock()
        self.is_on_device = False
        """Whether a GPU has been used: then what is waited for may come without anybody's saying so."""
        self.flush: Callable[[], None] | None = None
        """Called when all is begun that can be: gives a GPU's stream what is kept to be given at once."""
        self.on_loss: list[Callable[[int], None]] = []
        """Called in the watching thread with a rank that is lost."""
        watch.on_loss = self._free_streams
        watch.on_beat = self._tell_of_late_ones
        self.blocker: int | None = None
        """Whom the wait under way is for, the last one that was seen to be missing."""
        is_crowded = size > (os.cpu_count() or 1)
        self._spin_s = _SPIN_CROWDED_S if is_crowded else _SPIN_S
        self._device_busy_s = _SPIN_CROWDED_S if is_crowded else _DEVICE_BUSY_S

    def issue(self, task: Task) -> Task:
        """Numbers a task and begins with it."""
        self.check_usable()
        self.issued += 1
        task.seq = self.issued
        if task.half < 0:
            task.half = task.seq & 1
        self._to_arrive.append(task)
        self._to_work.append(task)
        self._open.append(task)
        if self.besides is not None:
            self.besides()
        if self._unchecked:
            self._check_late()
        self._advance()
        return task

    def announce(self, num_operations: int) -> None:
        """Says that this worker will issue so many operations next."""
        self.pipes.tell(ANNOUNCED, self.issued + num_operations)

    @property
    def is_usable(self) -> bool:
        """Whether this worker is in step with the others, and owes them nothing that it has announced."""
        is_owing = self.control.get(self.rank, ANNOUNCED) > self.issued
        return self._breakage is None and not is_owing and not self.is_forked

    @property
    def is_forked(self) -> bool:
        """Whether this is a child of the process that opened the group, which it does not belong to."""
        return os.getpid() != self._pid

    def fail(self, error: BaseException) -> None:
        """Puts this worker out of step: it did not finish what the others count on."""
        if self._breakage is None:
            self._breakage = error

    def drop(self) -> None:
        """Forgets all operations under way."""
        self._to_arrive.clear()
        self._to_work.clear()
        self._open.clear()

    def progress(self) -> None:
        """Arrives and works as far as the others allow; never blocks."""
        if self.besides is not None:
            self.besides()
        if self._unchecked:
            self._check_late()
        if not self._to_work:
            if self._void is not None:
                raise self._void
            return
        self.check_usable()
        self._advance()

    def _advance(self) -> None:
        """Does what can be done of the operations under way."""
        if self.pipes.must_listen:
            self.pipes.take_in()
        try:
            moved = True
            while moved:
                moved = False
                while self._to_arrive and self._arrive(self._to_arrive[0]):
                    self._to_arrive.popleft()
                    moved = True
                while self._to_work and self._try(self._to_work[0]):
                    self._to_work.popleft()
                    moved = True
            if self.is_on_device and self.flush is not None:
                self.flush()
        except BaseException as error:
            self.fail(error)  # half of the work may be done, and must not be done again
            raise

    def is_complete(self, task: Task) -> bool:
        """Tells whether there is nothing left to wait for."""
        if task.error is not None:
            return True
        if task.present is None:
            return False
        if not (task.is_shared or task.needs_shares):
            return True
        if self.pipes.must_listen:
            self.pipes.take_in()
        for rank in task.present:
            if self._counters[rank][FINISHED] >= task.seq:
                continue
            if self.control.gone_after(rank) == NOT_YET:
                self.blocker = rank
                return False
            if task.needs_shares:
                task.error = self.lost_error(rank)
                break
        return True

    @property
    def is_busy(self) -> bool:
        """Whether this worker has something left to do."""
        return bool(self._to_work)

    def wait(self, task: Task, deadline: Deadline | None) -> None:
        """Waits until a task is complete; raises its error."""
        if not self.is_complete(task):
            self.wait_until(lambda: self.is_complete(task), deadline, KINDS[task.words[0]])
        if task.error is not None:
            raise task.error

    def wait_until(
        self,
        is_done: Callable[[], bool],
        deadline: Deadline | None,
        what: str,
        whom: Callable[[], str] | None = None,
    ) -> None:
        """Spins briefly, then sleeps; PeerLost when this worker itself was given up by the others.

        `whom` says who is waited for that is not of this machine.
        """
        began_s = time.perf_counter()
        self.blocker = None

        def line(waited_s: float) -> str:
            return self._waiting_line(what, waited_s, self.blocker, "" if whom is None else whom())

        report = WaitReport(line, self.on_wait, deadline, self._settings.timeout_s)
        try:
            while True:
                self.progress()
                if is_done():
                    return
                waited_s = time.perf_counter() - began_s
                # a nap on a GPU's behalf takes 0.08 ms however short it is, a step often 1 ms
                if waited_s < (self._device_busy_s if self.is_on_device else self._spin_s):
                    _give_way()
                    continue
                self.check_own_verdict()
                report.look(self.blocker)
                if self.is_on_device and waited_s < _DEVICE_SPIN_S:
                    time.sleep(_DEVICE_NAP_S)  # a GPU wakes nobody
                else:
                    self._nap(is_done)
        finally:
            self._count_wait(time.perf_counter() - began_s)

    def check_own_verdict(self) -> None:
        """PeerLost when the others have given this worker up."""
        if self._counters[self.rank][VERDICT] != NOT_YET:
            name = self.name_of(self.rank)
            raise PeerLost(
                f"rank {name}, this worker, was silent for more than {self._settings.silence_s:g} s, and the "
                "others went on without it.",
                peer=name,
                cause="it was stopped, or its machine was.",
                next_step="start again with a larger --patience.",
            )

    def members(self) -> Sequence[int]:
        """Lists who takes part in the next operation."""
        if self.control.is_complete():
            return self._everybody
        gone = ((rank, self.control.gone_after(rank)) for rank in range(self.size))
        return [rank for rank, after in gone if after == NOT_YET or self.issued < after]

    def is_gone(self, rank: int) -> bool:
        """Tells whether another rank is lost or has left."""
        return rank != self.rank and self.control.gone_after(rank) != NOT_YET

    def judged(self) -> list[int]:
        """Lists those that are gone without having left, by the verdicts."""
        return [rank for rank in self._others if self._is_lost(rank)]

    def has_come_to(self, seq: int, rank: int) -> bool:
        """Tells whether a rank has issued an operation, and said what it does in it."""
        return self._counters[rank][ARRIVED] >= seq

    def left(self) -> list[int]:
        """Lists those that have left in order."""
        return [rank for rank in self._others if self.control.get(rank, LEFT) != NOT_YET]

    def is_finished(self, seq: int) -> bool:
        """Tells whether everybody who is still there has finished an operation, this worker included."""
        if seq <= self._finished_by_all:
            return True
        if self._counters[self.rank][FINISHED] < seq:
            return False
        for rank in self._others:
            if self._counters[rank][FINISHED] < seq and self.control.gone_after(rank) == NOT_YET:
                self.blocker = rank
                return False
        self._finished_by_all = seq
        return True

    def are_done_on_device(self, name: int, seq: int, ranks: Iterable[int]) -> bool:
        """Tells whether the GPUs of those of some ranks that are there have come so far.

        One that has gone before it gave its part is not done: the next look finds that it takes no part.
        """
        for rank in ranks:
            if seq <= self._counters[rank][name] < FREED:
                continue
            gone_after = self.control.gone_after(rank)
            if rank == self.rank or gone_after == NOT_YET:
                self.blocker = None if rank == self.rank else rank
                return False
            if name == DEVICE_ARRIVED and seq > gone_after:
                return False
        return True

    def note_on_device(
        self, seq: int, givers: Sequence[int], finishers: Sequence[int] = (), *, is_weighted: bool = False
    ) -> None:
        """Remembers an operation before this worker's stream is told to wait for others in it.

        Should one of them be lost before its GPU has given or finished its part, the result has no meaning,
        unless it is weighted by what `ControlPage.set_weights` has written before: then that one is left out.
        """
        with self._guard:  # and its atomic operations order what was written before what is looked at
            self._on_device.append((seq, () if is_weighted else givers, finishers))
        if not self.control.is_complete():  # the watching thread may have looked before this was noted
            for rank in (*givers, *finishers):
                if self.is_gone(rank):
                    self._go_without(rank)
        is_done = self.control.is_done_on_device
        while self._on_device:  # from the first on in which a stream may still wait for another
            seq, _, finishers = self._on_device[0]
            if not is_done(self.rank, DEVICE_FINISHED, seq):
                break
            if finishers and not all(is_done(rank, DEVICE_FINISHED, seq) for rank in finishers):
                break
            self._on_device.popleft()

    def _go_without(self, rank: int) -> None:
        """Leaves out one that is gone, or remembers the error where it owes its part of an operation.

        In the caller's thread or the watching one.
        """
        self.control.leave_out(rank)
        if self.should_survive or self._void is not None:
            return
        was_done = self.control.was_done_on_device
        with self._guard:
            noted = tuple(self._on_device)
        for seq, givers, finishers in noted:
            has_given = rank not in givers or was_done(rank, DEVICE_ARRIVED, seq)
            if not (has_given and (rank not in finishers or was_done(rank, DEVICE_FINISHED, seq))):
                self._void = self.lost_error(rank)

    def _free_streams(self, rank: int) -> None:
        """Frees the streams that wait for a rank that is gone, in the watching thread."""
        self._go_without(rank)
        self.control.free_device(rank)
        for callback in tuple(self.on_loss):
            callback(rank)

    def _tell_of_late_ones(self) -> None:
        """Says for whom this worker's GPU waits for long, in the watching thread.

        The processor says nothing then: it may be inside a call that waits for the GPU.
        """
        now_s = time.monotonic()
        if not self._unchecked or now_s - max(self._led_s, self._led_line_s) < LINE_EVERY_S:
            return
        with contextlib.suppress(IndexError):  # the caller's thread has just looked, too
            task, early = self._unchecked[0]
            late = [rank for rank in early if self.control.get(rank, ARRIVED) < task.seq]
            if late:
                self._led_line_s = now_s
                what = KINDS[task.words[0]]
                log.warning("%s", self._waiting_line(what, now_s - self._led_s, late[0]))

    def _count_wait(self, waited_s: float) -> None:
        if self.blocker is not None:
            self.waited_s[self.blocker] += waited_s

    def _arrive(self, task: Task) -> bool:
        if task.seq > MAX_AHEAD and not self.is_finished(task.seq - MAX_AHEAD):
            return False
        if task.is_staged and not self.is_finished(self._halves[task.half]):
            return False
        if self._is_in_use(task) or (task.may_arrive is not None and not task.may_arrive(task)):
            return False
        self.check_own_verdict()
        if task.prepare is not None:
            task.prepare(task)
        if task.is_staged:
            self._halves[task.half] = task.seq + task.num_holding
        self.control.describe(task.seq, task.words, task.factors)
        self.pipes.tell(ARRIVED, task.seq)
        return True

    def _is_in_use(self, task: Task) -> bool:
        """Tells whether an earlier operation on the same memory is still under way."""
        while self._open and self._open[0] is not task and self.is_complete(self._open[0]):
            self._open.popleft()
        if self._open[0] is task:
            return False
        for earlier in self._open:
            if earlier is task:
                break
            is_apart = earlier is task.follows or not is_overlapping(earlier.spans, task.spans)
            if not is_apart and not self.is_complete(earlier):
                return True
        return False

    def _try(self, task: Task) -> bool:
        """Does a task's work if all whom it needs have arrived; True when it is over."""
        if task.seq > self._counters[self.rank][ARRIVED]:
            return False
        if task.after and not self.is_finished(task.after):
            return False
        present, early = [self.rank], []
        is_complete = self.control.is_complete()
        for rank in self._others if task.sources is None else task.sources:
            gone_after = NOT_YET if is_complete else self.control.gone_after(rank)
            if gone_after == NOT_YET:
                counters = self._counters[rank]
                if counters[ARRIVED] < task.seq:
                    may_lead = task.may_lead and counters[ARRIVED] == task.seq - 1
                    if not (may_lead or (task.may_precede and counters[ANNOUNCED] >= task.seq)):
                        self.blocker = rank
                        return False
                    early.append(rank)
                present.append(rank)
            elif task.seq <= gone_after:
                present.append(rank)
            elif not (task.is_survivable or self.should_survive) and self._is_lost(rank):
                task.error = self.lost_error(rank)
        if task.error is None:
            present.sort()
            arrived = [rank for rank in present if rank not in early] if early else present
            task.error = self._mismatch(task, arrived)
        if task.error is None and task.may_work is not None and not task.may_work(task, present):
            return False
        if task.error is None and task.work is not None:
            try:
                task.work(task, present)
                # the others write over what this worker was reading as soon as they have given it up
                self.check_own_verdict()
            except ShoalError as error:
                task.error = error
        task.present = present
        if early:
            self._unchecked.append((task, early))
            self._led_s = time.monotonic()
        self.pipes.tell(FINISHED, task.seq)
        return True

    def _check_late(self) -> None:
        """Compares operations with what others have issued since, where they were not waited for."""
        while self._unchecked:
            task, ranks = self._unchecked[0]
            arrived = [rank for rank in ranks if self.control.get(rank, ARRIVED) >= task.seq]
            if any(rank not in arrived and not self.is_gone(rank) for rank in ranks):
                return
            self._unchecked.popleft()
            self._void = self._void or self._mismatch(task, arrived)
            if self._void is None and task.check is not None:
                self._void = task.check(task, arrived)
            if self._void is not None:
                raise self._void

    def _is_lost(self, rank: int) -> bool:
        return self.control.get(rank, LEFT) == NOT_YET and self.control.get(rank, VERDICT) != NOT_YET

    def _mismatch(self, task: Task, present: list[int]) -> ShoalError | None:
        own = task.words[: task.must_match]
        for rank in present:
            if rank == self.rank:
                continue
            other = self.control.description(rank, task.seq)[: len(own)]
            if other != own:
                return mismatch(self.name_of(self.rank), _describe(own), self.name_of(rank), _describe(other))
        return None

    def lost_error(self, rank: int) -> PeerLost:
        """Makes the error for a rank that is gone; it names the one because of which it is."""
        error = dataclasses.replace(self.watch.loss(rank), rank=self.name_of(rank)).error()
        if self.culprit is None:
            self.culprit = rank_to_blame(error, self.name_of(self.rank))
        return error

    def check_usable(self) -> None:
        """UsageError in a forked child, and when this worker is out of step."""
        if os.getpid() != self._pid:
            raise forked()
        if self._void is not None:
            raise self._void
        if self._breakage is not None:
            raise out_of_step(self.name_of(self.rank), self._breakage)
        if self._counters[self.rank][LEFT] != NOT_YET:
            raise has_left(self.name_of(self.rank))

    def _waiting_line(self, what: str, waited_s: float, who: int | None, outside: str = "") -> str:
        """Says for whom this worker waits: a rank of this machine, or what `outside` says."""
        line = f"rank {self.name_of(self.rank)}: {what}"
        if outside:
            return f"{line}: waiting for {outside}, {waited_s:.0f} s"
        if who is None:
            return f"{line}, {waited_s:.0f} s"
        return (
            f"{line}: waiting for rank {self.name_of(who)} (process {self.watch.pids[who]}), "
            f"{waited_s:.0f} s, last beat {self.watch.last_beat_s(who):.1f} s ago"
        )

    def _nap(self, is_done: Callable[[], bool]) -> None:
        self.control.set(ASLEEP, 1)
        try:
            self.progress()
            if not is_done():
                self.pipes.sleep(_NAP_S)
        finally:
            self.control.set(ASLEEP, 0)


def _describe(words: Sequence[int]) -> str:
    kind = KINDS[words[0]] if 0 <= words[0] < len(KINDS) else "something else"
    if kind in ("barrier", "free"):
        return kind
    if words[2] < 0:
        return f"the rest of an {kind}"
    dtype = str(DTYPES[words[1]]).removeprefix("torch.") if words[1] < len(DTYPES) else "another dtype"
    place = "" if kind in ("all_gather", "empty") else f", {'group' if words[-1] >= 0 else 'other'} memory"
    detail = {"all_reduce": f", {OPS[words[3] % len(OPS)]}", "broadcast": f", root {words[3]}"}.get(kind, "")
    return f"{kind} of {words[2]} elements ({dtype}{detail}{place})"


def is_overlapping(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Tells whether two lists of memory have a byte in common."""
    for start, end in some:
        for other_start, other_end in others:
            if start < other_end and other_start < end:
                return True
    return False


@dataclass(eq=False, slots=True)
class TasksHandle(Handle[T]):
    """An operation that consists of tasks, which end in order; `order` is called before the result."""

    engine: ProgressEngine
    tasks: Sequence[Task]
    result: Callable[[], T]
    order: Callable[[], None] | None = None

    def wait(self, deadline: Deadline | None = None) -> T:
        """Returns the result, or raises the error of the first task that has one."""
        for task in self.tasks:
            self.engine.wait(task, deadline)
        if self.order is not None:
            self.order()
        return self.result()

    @property
    def present(self) -> Sequence[int]:
        """The ranks that took part in the first task, once it is over; the cluster's collectives ask."""
        return (self.tasks[0].present if self.tasks else None) or ()

    def is_done(self) -> bool:
        """Makes progress; tells whether all tasks are complete."""
        self.engine.progress()
        return all(self.engine.is_complete(task) for task in self.tasks)


def span_of(tensor: torch.Tensor) -> Span:
    """Finds the memory of a tensor without gaps."""
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


def put_back(flat: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, with what was computed in a flat copy of it, where it was a copy."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor
