"""Requests at a server: the queue in which they wait for the device, and what is kept between two of them.

Handlers on several network threads put jobs in, the device's thread takes them out in batches: jobs of one
expert and one kind, oldest first. Inputs of a forward are kept for its backward, and answers to a backward in
case it is sent again; both are bounded in bytes and time, and what is gone is sent or asked for again.
Everything here may be used from any thread.
"""

from __future__ import annotations

import asyncio
import bisect
import collections
import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec
import torch

from shoal.core import Deadline, DeadlineExceeded, PeerBusy, PeerRefused
from shoal.core.scope import settle
from shoal.experts.expert import Expert
from shoal.experts.settings import ServerSettings
from shoal.experts.wire import Fitting
from shoal.tensors import EncodedMeta
from shoal.tensors.codecs.base import PLAIN
from shoal.transport.messages import Reply

log = logging.getLogger(__name__)


Outcome = tuple[tuple[EncodedMeta | None, ...], list[Any]]
"""What is answered: descriptions of tensors, and their buffers."""
Waiter = asyncio.Future[Reply]
_MANY_CLIENTS = 1024  # whose turns are remembered before they are looked through


class JobKind(enum.Enum):
    """What an expert is asked for."""

    FORWARD = "forward"
    BACKWARD = "backward"

    __hash__ = object.__hash__  # each is there once; that of an enum's member is hashed from its name anew


class Job(msgspec.Struct, eq=False):
    """One request, from its arrival to its answer."""

    kind: JobKind
    expert: Expert
    num_samples: int
    client: Hashable
    deadline: Deadline
    received: tuple[tuple[Sequence[EncodedMeta], Sequence[Any]], ...] = ()
    """As it came: inputs, or gradients of outputs and then, unless they are `kept`, inputs."""
    kept: Sequence[Any] | None = None
    """Of a backward: the inputs of its forward, on the device."""
    keep_as: bytes = b""
    """The id under which inputs are to be kept (forward), or are kept (backward)."""
    request_id: bytes = b""
    codec: str = PLAIN
    known: Fitting | None = None
    """What is known of the tensors in `received`, where they are plain."""
    arrived_s: float = msgspec.field(default_factory=time.monotonic)
    turn: int = 0
    """Where it stands in line: see `JobQueue`."""
    waited_s: float = 0.0
    is_small: bool = False
    """Whether its tensors are plain, and few bytes: it may be computed where it arrived, and can be `stacked`
    with others."""
    is_taken: bool = False
    is_dropped: bool = False
    waiters: list[tuple[asyncio.AbstractEventLoop, Waiter]] = []


class JobQueue:
    """Jobs that wait, in a line for each expert and kind.

    Clients take turns, in all lines together (start-time fair queuing, Goyal, Vin and Cheng 1996, with
    samples as the cost): a job's turn is the end of its client's job before, or now, where that is later. Who
    asks for one thing after another is not behind those who ask for many at once; among equal turns the
    oldest is first.
    """

    def __init__(
        self,
        settings: ServerSettings,
        on_put: Callable[[], None],
        on_undone: Callable[[list[tuple[Job, Any]]], None],
    ) -> None:
        self._settings = settings
        self._on_put = on_put
        self._on_undone = on_undone
        """Told of jobs that nobody will do, and why."""
        self._lines: dict[tuple[str, JobKind], list[Job]] = {}
        self._num_of: collections.Counter[Hashable] = collections.Counter()
        self._lock = threading.Lock()
        self._turn = 0
        self._next_turns: dict[Hashable, int] = {}
        self.num_waiting = 0
        self.num_puts = 0

    def put(self, job: Job, waiter: Waiter) -> None:
        """Have a job done and its waiter told, on the waiter's loop; PeerBusy when too many wait already."""
        with self._lock:
            self._admit(job.client)
            job.waiters.append((waiter.get_loop(), waiter))
            job.turn = max(self._turn, self._next_turns.get(job.client, 0))
            self._next_turns[job.client] = job.turn + max(1, job.num_samples)
            bisect.insort(self._lines.setdefault((job.expert.uid, job.kind), []), job, key=_turn_of)
            self._num_of[job.client] += 1
            self.num_waiting += 1
            self.num_puts += 1
        self._on_put()

    def join(self, job: Job, waiter: Waiter) -> bool:
        """Wait for a job that was put before; False when it has ended meanwhile."""
        with self._lock:
            if not job.waiters:
                return False
            job.waiters.append((waiter.get_loop(), waiter))
            return True

    def leave(self, job: Job, waiter: Waiter) -> bool:
        """Wait no longer. A job that nobody waits for is dropped, unless it runs already: whether it was."""
        with self._lock:
            job.waiters = [other for other in job.waiters if other[1] is not waiter]
            if job.waiters or job.is_taken or job.is_dropped:
                return False
            job.is_dropped = True
            self._forget(job)
            return True

    def take(self) -> tuple[list[Job], float | None]:
        """The next batch; when there is none, how long to wait until there is (None: for the next job)."""
        with self._lock:
            now_s = time.monotonic()
            wait_s: float | None = None
            best: tuple[tuple[int, float], tuple[str, JobKind]] | None = None
            for key, line in tuple(self._lines.items()):
                if line[0].is_dropped:
                    line[:] = [job for job in line if not job.is_dropped]
                if not line:
                    del self._lines[key]
                    continue
                first = (line[0].turn, line[0].arrived_s)
                lacks_s = self._lacks_s(line, now_s)
                if lacks_s > 0:
                    wait_s = lacks_s if wait_s is None else min(wait_s, lacks_s)
                elif best is None or first < best[0]:
                    best = (first, key)
            if best is None:
                return [], wait_s
            jobs, late = self._pick(best[1], now_s)
        if late:
            self._on_undone(
                [(job, DeadlineExceeded("the deadline passed before its turn came.")) for job in late]
            )
        return jobs, None

    def finish(self, results: Sequence[tuple[Job, Reply | Exception]]) -> None:
        """Tell everybody who waits for these jobs, with one wake-up for each of their loops."""
        told: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, Reply | Exception]]] = {}
        with self._lock:
            for job, outcome in results:
                waiters, job.waiters = job.waiters, []
                for loop, waiter in waiters:
                    told.setdefault(loop, []).append((waiter, outcome))
        for loop, settled in told.items():
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody waits any more
                loop.call_soon_threadsafe(_settle_all, settled)

    def drop_all(self, uid: str | None, error: Exception) -> None:
        """Nobody will do the jobs of this expert (None: of any), and those who wait are told why."""
        dropped: list[tuple[Job, Exception]] = []
        with self._lock:
            for key, line in self._lines.items():
                if uid in (None, key[0]):
                    for job in line:
                        if not job.is_dropped:
                            job.is_dropped = True
                            self._forget(job)
                            dropped.append((job, error))
        if dropped:
            self._on_undone(dropped)

    def _admit(self, client: Hashable) -> None:
        limit = self._settings.max_waiting
        if self.num_waiting < limit:
            return
        share = max(1, limit // max(1, len(self._num_of)))
        if self._num_of[client] >= share or self.num_waiting >= 2 * limit:
            raise PeerBusy(
                f"{self.num_waiting} requests wait here already.",
                next_step="try again later, or ask a replica.",
            )

    def _forget(self, job: Job) -> None:
        self.num_waiting -= 1
        self._num_of[job.client] -= 1
        if self._num_of[job.client] <= 0:
            del self._num_of[job.client]

    def _lacks_s(self, line: list[Job], now_s: float) -> float:
        """How long this line should still wait for others to come."""
        settings = self._settings
        if settings.min_batch_size == 1:
            return 0.0
        if sum(job.num_samples for job in line if not job.is_dropped) >= settings.min_batch_size:
            return 0.0
        return line[0].arrived_s + settings.max_wait_s - now_s

    def _pick(self, key: tuple[str, JobKind], now_s: float) -> tuple[list[Job], list[Job]]:
        """Take a batch out of a line, as many as fit; and those whose time is over."""
        taken: list[Job] = []
        late: list[Job] = []
        left: list[Job] = []
        room = self._settings.max_batch_size
        for job in self._lines.pop(key):
            if job.is_dropped:
                continue
            if job.deadline.is_past:
                late.append(job)
            elif left or job.num_samples > room:
                left.append(job)
            else:
                room -= job.num_samples
                taken.append(job)
        for job in (*taken, *late):
            job.is_taken = True
            job.waited_s = now_s - job.arrived_s
            self._forget(job)
        if left:
            self._lines[key] = left
        if taken:
            self._turn = max(self._turn, taken[0].turn)
        self._forget_turns()
        return taken, late

    def _forget_turns(self) -> None:
        """Of clients that are behind nobody any more."""
        if self.num_waiting == 0:
            self._next_turns.clear()
        elif len(self._next_turns) > 2 * len(self._num_of) + _MANY_CLIENTS:
            self._next_turns = {who: turn for who, turn in self._next_turns.items() if turn > self._turn}


def _turn_of(job: Job) -> int:
    return job.turn


def _settle_all(settled: list[tuple[Waiter, Reply | Exception]]) -> None:
    for waiter, outcome in settled:
        try:
            settle(waiter, outcome)
        except Exception:  # an error that futures do not take: the others must be told theirs
            log.exception("a request could not be told what became of it")
            waiter.cancel()


_ENTRY_BYTES = 2 << 10  # what an entry takes beside its tensors
_MAX_ANSWERS = 8192  # seconds of small requests: one that is sent again comes soon


_Key = tuple[str, bytes]  # an expert's uid, and the id of a request


class InputCache:
    """Inputs of forward requests, where the device needs them, until their backward comes."""

    def __init__(self, max_bytes: int, max_age_s: float) -> None:
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._kept: collections.OrderedDict[bytes, _Inputs] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, key: bytes, uid: str, tensors: Sequence[torch.Tensor]) -> None:
        """Keep the tensors of a request; the oldest go when there are too many."""
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.keep_all(uid, [(key, tensors)], size_bytes)

    def keep_all(
        self, uid: str, kept: Sequence[tuple[bytes, Sequence[torch.Tensor]]], size_bytes: int
    ) -> None:
        """Keep the tensors of several requests, which share memory that counts until the last one goes."""
        if _ENTRY_BYTES * len(kept) + size_bytes > self._max_bytes:
            return
        now_s = time.monotonic()
        memory = _SharedMemory(size_bytes, len(kept))
        with self._lock:
            self.used_bytes += size_bytes
            for key, tensors in kept:
                if (known := self._kept.pop(key, None)) is not None:
                    self._let_go(known)
                self._kept[key] = _Inputs(uid, tensors, memory, now_s)
                self.used_bytes += _ENTRY_BYTES
            self._drop_oldest(now_s)

    def sweep(self) -> None:
        """Let those go that were kept for long enough."""
        with self._lock:
            self._drop_oldest(time.monotonic())

    def _drop_oldest(self, now_s: float) -> None:
        while self._kept:
            oldest = next(iter(self._kept.values()))
            if self.used_bytes <= self._max_bytes and oldest.since_s >= now_s - self._max_age_s:
                break
            self._kept.popitem(last=False)
            self._let_go(oldest)

    def _let_go(self, inputs: _Inputs) -> None:
        self.used_bytes -= _ENTRY_BYTES
        inputs.memory.num_users -= 1
        if inputs.memory.num_users == 0:
            self.used_bytes -= inputs.memory.size_bytes

    def find(self, key: bytes, uid: str) -> Sequence[torch.Tensor] | None:
        """Those that were kept, while they are; they stay until `drop`."""
        found = self._kept.get(key)
        return None if found is None or found.uid != uid else found.tensors

    def drop(self, key: bytes) -> None:
        """They are needed no more."""
        with self._lock:
            if (known := self._kept.pop(key, None)) is not None:
                self._let_go(known)


class BackwardAnswers:
    """Backward requests by their ids: those under way, and what was answered to those that are done.

    That a request was applied is remembered by its expert, together with what it has learned from it: for
    longer than the answer, and in its checkpoints.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._under_way: dict[_Key, Job] = {}
        self._answers: collections.OrderedDict[_Key, Outcome] = collections.OrderedDict()
        self._lock = threading.Lock()
        self.used_bytes = 0

    @property
    def num_under_way(self) -> int:
        """Requests that are not answered yet."""
        return len(self._under_way)

    def find(self, expert: Expert, request_id: bytes) -> Job | Outcome | None:
        """The job that does it, or what it was answered with; PeerRefused when that is kept no longer."""
        with self._lock:
            return self._find(expert, request_id)

    def begin(self, job: Job) -> Job | Outcome:
        """Note that a job does it, and give that job back; or what `find` gives, where that is something."""
        with self._lock:
            known = self._find(job.expert, job.request_id)
            if known is None:
                self._under_way[job.expert.uid, job.request_id] = job
                return job
            return known

    def end(self, job: Job, outcome: Outcome | None) -> None:
        """A job is over, with this answer; with None it has none, and may not have been done at all."""
        key = job.expert.uid, job.request_id
        with self._lock:
            if self._under_way.get(key) is not job:
                return
            del self._under_way[key]
            if outcome is None:
                return
            self._answers[key] = outcome
            self.used_bytes += _bytes_of(outcome)
            while self._answers and (self.used_bytes > self._max_bytes or len(self._answers) > _MAX_ANSWERS):
                _, oldest = self._answers.popitem(last=False)
                self.used_bytes -= _bytes_of(oldest)

    def _find(self, expert: Expert, request_id: bytes) -> Job | Outcome | None:
        key = expert.uid, request_id
        known = self._under_way.get(key) or self._answers.get(key)
        if known is None and expert.has_applied(request_id):
            raise PeerRefused(
                "this backward was applied before, and its answer is kept no longer.",
                cause="it was sent again late, or after this server was started anew.",
                next_step="go on without its gradient.",
            )
        return known


class _SharedMemory(msgspec.Struct):
    """What the inputs of requests that were computed together lie in."""

    size_bytes: int
    num_users: int


class _Inputs(msgspec.Struct, frozen=True):
    uid: str
    tensors: Sequence[Any]
    memory: _SharedMemory
    since_s: float


def _bytes_of(outcome: Outcome) -> int:
    return _ENTRY_BYTES + sum(memoryview(buffer).nbytes for buffer in outcome[1])
