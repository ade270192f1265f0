"""An expert server: requests come in through an endpoint, a device computes them in batches.

The endpoint belongs to whoever made it, and so does the DHT: declaring, saving and averaging experts is done
beside the server by `hosting`. Handlers run on the endpoint's loops; the device has a thread of its own.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch

from shoal.core import (
    Deadline,
    LoopThread,
    PeerBusy,
    PeerError,
    PeerLeaving,
    PeerRefused,
    TensorError,
    UsageError,
)
from shoal.experts.devices.device import CpuDevice, Device, Results, explained
from shoal.experts.expert import Expert
from shoal.experts.server.jobs import BackwardAnswers, InputCache, Job, JobKind, JobQueue, Outcome, Waiter
from shoal.experts.settings import ServerSettings
from shoal.experts.wire import (
    BACKWARD,
    FORWARD,
    INFO,
    Answer,
    BackwardRequest,
    Fitting,
    ForwardRequest,
    Info,
    InfoRequest,
    check_sizes,
    fitting,
    num_buffers,
    specs_of,
)
from shoal.tensors import codec_from_name
from shoal.tensors.codecs.base import PLAIN
from shoal.transport import Endpoint, Head, Reply
from shoal.transport.frames import INLINE_BYTES

T = TypeVar("T")
log = logging.getLogger(__name__)


class ExpertServer:
    """Serves experts; open it with `async with` on the loop of its endpoint, which may listen already."""

    def __init__(
        self, endpoint: Endpoint, experts: Iterable[Expert], settings: ServerSettings | None = None
    ) -> None:
        self.endpoint = endpoint
        self.settings = settings or ServerSettings()
        self.experts: dict[str, Expert] = {}
        for expert in experts:
            if self.experts.setdefault(expert.uid, expert) is not expert:
                raise UsageError(f"Two experts are called {expert.uid}.")
        self.is_leaving = False
        self.kept = InputCache(self.settings.kept_bytes, self.settings.kept_s)
        if self.settings.pinned_bytes is None:
            pinned_bytes = min(2 * endpoint.limits.max_bytes_in_flight, _memory_bytes() // 8)
            self.settings = dataclasses.replace(self.settings, pinned_bytes=pinned_bytes)
        self.device = make_device(self.settings, self.kept)
        self.statistics = ServerStatistics()
        self._applied = BackwardAnswers(self.settings.remembered_bytes)
        self._queue = JobQueue(self.settings, self._wake, self._deliver)
        self._thread = LoopThread("shoal-device")
        self._lock = threading.Lock()
        self._inline = InlineComputing()
        self._is_awake = False
        self._num_open = 0
        self._when_all_sent: Callable[[], object] | None = None
        self._closing = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        with contextlib.ExitStack() as closing:
            closing.enter_context(self._thread)
            closing.callback(self.device.close)
            await self._thread.run_from_async(self._prepare())
            routes = self.endpoint.routes
            routes.add(INFO, self._serve_info, None, InfoRequest)
            routes.add(
                FORWARD, self._serve_forward, self._allocate_forward, ForwardRequest, is_allocating_late=True
            )
            routes.add(
                BACKWARD,
                self._serve_backward,
                self._allocate_backward,
                BackwardRequest,
                is_allocating_late=True,
            )
            for method in (INFO, FORWARD, BACKWARD):
                closing.callback(routes.remove, method)
            self._closing = closing.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_leaving = True
        self._queue.drop_all(None, _leaving())
        self._closing.close()
        self._queue.drop_all(None, _leaving())  # what other loops have put meanwhile

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the device."""
        return self._queue.num_waiting

    async def add(self, expert: Expert) -> None:
        """Serve one more expert from now on."""
        if expert.uid in self.experts:
            raise UsageError(f"The expert {expert.uid} is served here already.")
        await self.on_device(lambda: expert.place(self.device.torch_device))
        self.experts[expert.uid] = expert

    async def remove(self, uid: str) -> Expert:
        """Serve an expert no longer; those who wait for it are told to ask another peer."""
        expert = self.experts.pop(uid)
        self._queue.drop_all(uid, _leaving())
        return await self.on_device(lambda: expert)  # whatever of it runs now has ended then

    async def on_device(self, work: Callable[[], T]) -> T:
        """Run blocking torch code on the device's thread, between two batches."""

        async def between_batches() -> T:
            with self._inline.device:
                return self.device.between_batches(work)

        return await self._thread.run_from_async(between_batches())

    async def leave(self, deadline: Deadline) -> bool:
        """Take no more requests and finish those that were accepted; False when the deadline came first."""
        self.is_leaving = True
        all_sent = asyncio.Event()
        with self._lock:
            loop = asyncio.get_running_loop()
            self._when_all_sent = lambda: loop.call_soon_threadsafe(all_sent.set)
            if self._num_open == 0:
                return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline.timeout_s):
                await all_sent.wait()
        return self._num_open == 0

    # --- on the endpoint's loops ---

    def _expert(self, uid: str) -> Expert:
        expert = self.experts.get(uid)
        if expert is None:
            raise PeerRefused(
                f"the expert {uid[:100]!r} is not served here.",
                next_step="look up who serves it now.",
            )
        return expert

    def _serve_info(self, head: Head, _: Sequence[memoryview]) -> Reply:
        return Reply(Info(self._expert(head.payload.uid).schema, self.settings.max_batch_size))

    def _allocate_forward(self, head: Head) -> Sequence[Any] | None:
        self._check_forward(head)
        return self.device.allocate(head)

    def _allocate_backward(self, head: Head) -> Sequence[Any] | None:
        self._check_backward(head)
        return self.device.allocate(head)

    def _check_forward(self, head: Head) -> tuple[Expert, int, Fitting | None]:
        """Refuse what is no request for an expert of this server, before its buffers are received.

        Returns the expert, the number of samples, and what is known of plain tensors.
        """
        self._check_open()
        request: ForwardRequest = head.payload
        expert = self._expert(request.uid)
        if (known := fitting(expert.schema.inputs, request.inputs, head.sizes)) is not None:
            self._check_batch(known.num_samples, request.codec)
            return expert, known.num_samples, known
        num_samples = expert.schema.check_inputs(specs_of(request.inputs))
        self._check_batch(num_samples, request.codec)
        check_sizes(request.inputs, head.sizes)
        return expert, num_samples, None

    def _check_backward(self, head: Head) -> tuple[Expert, int, Fitting | None]:
        self._check_open()
        request: BackwardRequest = head.payload
        expert = self._expert(request.uid)
        schema, metas = expert.schema, (*request.grad_outputs, *request.inputs)
        schemas = (*schema.outputs, *schema.inputs) if request.inputs else schema.outputs
        if (known := fitting(schemas, metas, head.sizes)) is not None:
            self._check_batch(known.num_samples, request.codec)
            return expert, known.num_samples, known
        num_samples = schema.check_outputs(specs_of(request.grad_outputs))
        if request.inputs and schema.check_inputs(specs_of(request.inputs)) != num_samples:
            raise TensorError(f"outputs for {num_samples} samples came with inputs for others")
        self._check_batch(num_samples, request.codec)
        check_sizes(metas, head.sizes)
        return expert, num_samples, None

    def _check_batch(self, num_samples: int, codec: str) -> None:
        if not 0 <= num_samples <= self.settings.max_batch_size:
            raise PeerRefused(
                f"{num_samples} samples are above this server's {self.settings.max_batch_size} a batch.",
                next_step="split it, or start the server with a larger --max-batch-size.",
            )
        if codec != PLAIN:
            codec_from_name(codec)

    def _serve_forward(self, head: Head, buffers: Sequence[memoryview]) -> Waiter | Reply:
        expert, num_samples, known = self._check_forward(head)
        request: ForwardRequest = head.payload
        return self._reply_to(
            Job(
                JobKind.FORWARD,
                expert,
                num_samples,
                head.peer.id or head.peer,
                head.deadline,
                received=((request.inputs, buffers),),
                keep_as=request.keep_as,
                codec=request.codec,
                known=known,
                is_small=known is not None and known.size_bytes <= _SMALL_BYTES,
            )
        )

    def _serve_backward(self, head: Head, buffers: Sequence[memoryview]) -> Waiter | Reply:
        expert, num_samples, known = self._check_backward(head)
        request: BackwardRequest = head.payload
        before = self._applied.find(expert, request.request_id)
        if before is not None:
            return self._reply_again(before)
        kept = None
        if not request.inputs and (kept := self.kept.find(request.kept_as, request.uid)) is None:
            return Reply(Answer((), is_missing_inputs=True))
        if kept is not None and len(kept[0]) != num_samples:
            raise TensorError(f"gradients for {num_samples} samples, of which {len(kept[0])} were asked")
        received: tuple[Any, ...] = ((request.grad_outputs, buffers),)
        if kept is None:
            num_grads = sum(map(num_buffers, request.grad_outputs))
            received = (request.grad_outputs, buffers[:num_grads]), (request.inputs, buffers[num_grads:])
        job = Job(
            JobKind.BACKWARD,
            expert,
            num_samples,
            head.peer.id or head.peer,
            head.deadline,
            received=received,
            kept=kept,
            keep_as=request.kept_as,
            request_id=request.request_id,
            codec=request.codec,
            known=known if kept is not None else None,
            is_small=known is not None and known.size_bytes <= _SMALL_BYTES,
        )
        first = self._applied.begin(job)
        return self._reply_to(job) if first is job else self._reply_again(first)

    def _reply_again(self, known: Job | Outcome) -> Waiter | Reply:
        """To a backward that came before: it is applied once."""
        if isinstance(known, Job):
            return self._reply_to(known, is_again=True)
        return Reply(Answer(known[0]), known[1])

    def _reply_to(self, job: Job, *, is_again: bool = False) -> Waiter | Reply:
        """Have a job done, or wait for one that is under way."""
        try:
            self._check_open()
            if (
                not is_again
                and self._queue.num_waiting == 0
                and self.device.can_compute_here
                and self._inline.try_begin(job)
            ):
                return self._reply_at_once(job)
            waiter: Waiter = asyncio.get_running_loop().create_future()
            if not is_again:
                self._queue.put(job, waiter)
            elif not self._queue.join(job, waiter):
                raise PeerBusy("its first answer is on its way.", next_step="ask again.")
        except PeerError:
            if job.request_id and not is_again:
                self._applied.end(job, None)
            raise
        with self._lock:
            self._num_open += 1
        waiter.add_done_callback(functools.partial(self._on_reply, job))
        return waiter

    def _reply_at_once(self, job: Job) -> Reply:
        began_s = time.perf_counter()
        try:
            outcome = self.device.compute_here(job)
        finally:
            self._inline.end(job, time.perf_counter() - began_s)
        reply = self._reply(job, outcome)
        if type(reply) is not Reply:
            raise cast("Exception", reply)
        if sum(map(len, reply.buffers)) > INLINE_BYTES:  # else it is copied, and on its way, at once
            with self._lock:
                self._num_open += 1
            reply.on_sent = self._on_sent
        return reply

    def _on_reply(self, job: Job, waiter: Waiter) -> None:
        if not waiter.cancelled() and waiter.exception() is None:
            return  # the transport says when it is sent
        if self._queue.leave(job, waiter) and job.request_id:
            self._applied.end(job, None)
        self._on_sent()

    def _on_sent(self) -> None:
        with self._lock:
            self._num_open -= 1
            if self._num_open == 0 and self._when_all_sent is not None:
                self._when_all_sent()

    def _check_open(self) -> None:
        if self.is_leaving:
            raise _leaving()

    # --- on the device's thread ---

    async def _prepare(self) -> None:
        if self.settings.num_threads is not None:
            torch.set_num_threads(self.settings.num_threads)
        self.device.open(self._deliver, self._wake)
        self._sweep()
        for expert in self.experts.values():
            self.device.between_batches(functools.partial(expert.place, self.device.torch_device))

    def _wake(self) -> None:
        """There may be work for the device. For any thread."""
        with self._lock:
            if self._is_awake:
                return
            self._is_awake = True
        with contextlib.suppress(RuntimeError, UsageError):  # closed: nobody waits for an answer any more
            self._thread.loop.call_soon_threadsafe(self._work)

    def _work(self) -> None:
        """Start one batch, and come back for more after whatever else waits for this thread."""
        num_puts = self._queue.num_puts
        wait_s: float | None = None
        if self.device.can_start():
            jobs, wait_s = self._queue.take()
            if jobs:
                self._start(jobs)
        if self._queue.num_waiting and self.device.can_start() and not wait_s:
            self._thread.loop.call_soon(self._work)
            return
        self._rest()
        if wait_s:
            self._thread.loop.call_later(wait_s, self._wake)
        # while this thread counted as awake, nobody woke it: neither who came, nor the device
        if self._queue.num_puts != num_puts or (
            not wait_s and self._queue.num_waiting and self.device.can_start()
        ):
            self._wake()

    def _start(self, jobs: list[Job]) -> None:
        began_s = time.perf_counter()
        try:
            with self._inline.device:
                self.device.start(jobs)
        except Exception as error:  # whatever it is, this thread has to go on
            log.exception("a batch of %s could not be computed", jobs[0].expert.uid)
            untold = [job for job in jobs if job.waiters or job.request_id]
            self._deliver([(job, explained(error, job.expert)) for job in untold])
        busy_s = time.perf_counter() - began_s
        self._inline.learn(jobs[0], busy_s)
        self.statistics.count_batch(jobs[0].expert, busy_s)

    def _sweep(self) -> None:
        """Let go of inputs whose backward never came."""
        self.kept.sweep()
        self._thread.loop.call_later(self.settings.kept_s, self._sweep)

    def _rest(self) -> None:
        with self._lock:
            self._is_awake = False

    def _deliver(self, results: Results) -> None:
        """Tell what became of jobs. For any thread."""
        told: list[tuple[Job, Reply | Exception]] = []
        for job, outcome in results:
            reply = self._reply(job, outcome)
            if isinstance(reply, Reply):
                reply.on_sent = self._on_sent
            told.append((job, reply))
        self._queue.finish(told)

    def _reply(self, job: Job, outcome: Outcome | Exception) -> Reply | Exception:
        """Take note of what became of a job, and say it as its clients are told."""
        if isinstance(outcome, Exception):
            if job.kind is JobKind.BACKWARD:
                self._applied.end(job, None)
            self.statistics.count(job, is_failed=True)
            return outcome
        if job.kind is JobKind.BACKWARD:
            self._applied.end(job, outcome)
            if job.keep_as:
                self.kept.drop(job.keep_as)
        self.statistics.count(job, is_failed=False)
        metas, buffers = outcome
        return Reply(Answer(metas, job.waited_s), buffers)


def make_device(settings: ServerSettings, kept: InputCache) -> Device:
    """The device that the settings name; UsageError when this machine has none such."""
    try:
        kind = torch.device(settings.device).type
    except RuntimeError:
        kind = "unknown"
    if kind == "cpu":
        return CpuDevice(settings, kept)
    if kind == "cuda":
        from shoal.experts.devices.cuda import CudaDevice

        return CudaDevice(settings, kept)
    raise UsageError(f"Experts cannot be served on {settings.device!r}.", next_step="use cpu or cuda.")


def _memory_bytes() -> int:
    """Of this machine; 16 GiB where that cannot be told."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 16 << 30


def _leaving() -> PeerLeaving:
    return PeerLeaving("this server is leaving.", next_step="ask another peer that serves the expert.")


_QUICK_S = 250e-6  # about what the way to the device's thread and back takes when the caches are cold
_SMALL_BYTES = 32 << 10  # what a network's loop can do in between
_NUM_LATEST = 16


class InlineComputing:
    """Small requests that take less time than handing them to another thread are computed where they arrive.

    What an expert takes is learnt from the requests before; one that has become slow goes back to the
    device's thread. One thread computes at a time: the device's, or that of a loop.
    """

    def __init__(self) -> None:
        self.device = threading.Lock()
        """Held by whoever touches an expert."""
        self._is_quick: dict[tuple[str, JobKind], bool] = {}
        self._latest_s: dict[tuple[str, JobKind], collections.deque[float]] = {}

    def try_begin(self, job: Job) -> bool:
        """Whether this thread may compute the job now; who may says `end` afterwards. Never waits."""
        return (
            job.is_small
            and self._is_quick.get((job.expert.uid, job.kind), False)
            and self.device.acquire(blocking=False)
        )

    def end(self, job: Job, seconds: float) -> None:
        """The job is computed, and has taken so long."""
        self.device.release()
        self.learn(job, seconds)

    def learn(self, job: Job, seconds: float) -> None:
        """A batch with this job has taken so long."""
        if not job.is_small:
            return
        key = (job.expert.uid, job.kind)
        latest_s = self._latest_s.get(key)
        if latest_s is None:
            latest_s = self._latest_s[key] = collections.deque(maxlen=_NUM_LATEST)
        latest_s.append(seconds)
        if seconds > _QUICK_S or not self._is_quick.get(key):  # else nothing can have changed
            # not their mean: threads that take turns make single ones seem slow
            self._is_quick[key] = sorted(latest_s)[len(latest_s) // 4] <= _QUICK_S


class ServerStatistics:
    """Counts of requests that were answered; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_forward = 0
        self.num_backward = 0
        self.num_forward_samples = 0
        self.num_backward_samples = 0
        self.num_failed = 0
        self.num_batches = 0
        self.busy_s = 0.0
        """That the device thread has spent on batches."""

    @property
    def num_samples(self) -> int:
        """Of forward and backward requests."""
        return self.num_forward_samples + self.num_backward_samples

    def count(self, job: Job, *, is_failed: bool) -> None:
        """A request is answered."""
        with self._lock:
            if is_failed:
                self.num_failed += 1
            elif job.kind is JobKind.FORWARD:
                self.num_forward += 1
                self.num_forward_samples += job.num_samples
            else:
                self.num_backward += 1
                self.num_backward_samples += job.num_samples

    def count_batch(self, expert: Expert, busy_s: float) -> None:
        """The device thread has spent so long on one more batch."""
        self.num_batches += 1
        self.busy_s += busy_s
        expert.statistics.busy_s += busy_s
