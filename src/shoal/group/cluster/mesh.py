"""Streams to the workers of other machines: tagged tensors, small calls, and who of them is there.

Every pair of workers on different machines is connected from the start, by TLS with the secret of the run. A
tensor travels as one message out of the memory where it lies into the memory where it was asked for. What the
messages mean is the business of others, as are workers of one's own machine; the `HeartbeatMonitor` knows who
is there.

What waits to be taken lies in the `Mailbox`, where each tensor that has come and each that is waited for
finds its counterpart by its key. What was asked for before it came is received where it belongs. What nobody
has asked for yet lies in memory of the mailbox, up to a bound; beyond it a sender keeps its tensor, and asks
when there is room. The mailbox, and the handles of what is under way, are for any thread.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import torch

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    LoopThread,
    Peer,
    PeerBusy,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    StandingScope,
    TensorError,
    UsageError,
)
from shoal.core.identity import Identity
from shoal.core.run_options import SILENCE_S
from shoal.group.base import Handle, Loss
from shoal.group.cluster.members import Departure, HeartbeatMonitor
from shoal.group.cluster.rendezvous import LOOPBACK
from shoal.tensors.memory import copy_into, tensor_over
from shoal.transport import (
    Allocate,
    BufferPool,
    Head,
    Limits,
    Membership,
    Reply,
    Serve,
    StreamTransport,
    SwarmSecret,
    byte_view,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
log = logging.getLogger(__name__)
Key = tuple[int | str, ...]
_SEND, _ROOM = "mesh.send", "mesh.room"
CONNECTING_S = 60.0
_FAREWELL_S = 2.0
_BUSY_S = 0.02
_SETTING_S = 30.0
"""How much later than one worker another may set its handlers."""
_LOOK_S, _SLOWEST_LOOK_S = 2e-4, 5e-3
_ANY_SIZE = 1 << 50  # what is in flight is bounded by the mailbox, and by memory that others have given


class MeshHandle(Handle[T]):
    """A result or an error, once there is one; the first that is given counts."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def is_done(self) -> bool:
        """Tells whether `wait` would return, or raise, at once."""
        return self._future.done()

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result, when there is one; not for the mesh's own loop, which it would block."""
        try:
            return self._future.result(None if deadline is None else deadline.timeout_s)
        except TimeoutError:
            if self._future.done():  # the error that it was given
                raise
            raise DeadlineExceeded(f"{self._what} was not over before its deadline.") from None

    def finish(self, result: T | Exception) -> None:
        """Gives it its end, unless it has one."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            if isinstance(result, Exception):
                self._future.set_exception(result)
            else:
                self._future.set_result(result)


class Delivery(MeshHandle[torch.Tensor | None]):
    """A tensor that somebody waits for, by this handle, or that is arriving or has arrived, or both."""

    def __init__(
        self, key: Key, source: int | None = None, into: torch.Tensor | None = None, *, is_wanted: bool = True
    ) -> None:
        super().__init__(f"receiving {key} from rank {source}")
        self.key = key
        self.source = source
        """Who shall send it; None for anybody."""
        self.into = into
        self.is_wanted = is_wanted
        self.sender: int | None = None
        self.content: torch.Tensor | None = None
        """Flat, uint8, from when its bytes begin to arrive; of the memory of `into` where that was known."""
        self.is_here = False
        """Whether all bytes have arrived."""

    def give_content(self) -> None:
        """Gives the tensor to whoever waits for it, copied if it did not come into its place."""
        assert self.content is not None
        if self.into is None:
            self.finish(self.content)
        elif self.into.nbytes != self.content.nbytes:
            self.finish(self.error_of_size(self.content.nbytes))
        else:
            if self.into.data_ptr() != self.content.data_ptr():
                copy_into(flat_bytes(self.into), self.content)
            self.finish(self.into)

    def error_of_size(self, came_bytes: int) -> TensorError:
        """Gives the error of both sides when another size comes than is waited for."""
        here_bytes = 0 if self.into is None else self.into.nbytes
        return TensorError(
            f"rank {self.sender} sent {came_bytes:,} bytes as {self.key}, for which there are {here_bytes:,} "
            "here.",
            cause="the workers disagree on a tensor's shape or dtype.",
            next_step="call the same operations with equal shapes on all workers.",
        )


class Mailbox:
    """Everything that was sent to this worker and is not taken yet, and everything that it waits for."""

    def __init__(self, max_unclaimed_bytes: int) -> None:
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self._pool = BufferPool()
        self._lock = threading.RLock()
        self._lines: dict[Key, list[Delivery]] = {}
        """What was asked for, or began to arrive, first comes first."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing lies here, and nothing is waited for."""
        return not self._lines

    def want(self, wanted: Delivery) -> None:
        """Finishes the handle with this tensor, now or later."""
        with self._lock:
            is_here = self._join(wanted)
        if is_here:
            wanted.give_content()

    def has_room(self, source: int, key: Key, size_bytes: int) -> bool:
        """Tells whether a tensor may be sent: somebody waits for it, or the bound leaves room."""
        with self._lock:
            if self._find_wanted(source, key) is not None:
                return True
            early = [each.content for each in self._all() if not each.is_wanted]
            unclaimed_bytes = sum(content.nbytes for content in early if content is not None)
            return unclaimed_bytes + size_bytes <= self._max_unclaimed_bytes

    def expect(self, source: int, key: Key, size_bytes: int) -> memoryview:
        """Gives memory for a tensor that begins to arrive.

        PeerBusy when it must wait at its sender; TensorError when it is not of the size that is wanted.
        """
        with self._lock:
            if not self.has_room(source, key, size_bytes):
                raise PeerBusy("there is no room for this tensor until it is asked for.")
            found = self._find_wanted(source, key)
            if found is None:
                found = Delivery(key, is_wanted=False)
                self._lines.setdefault(key, []).append(found)
            found.sender = source
            if found.into is None:
                room = self._pool.allocate(size_bytes)
                found.content = tensor_over(room) if size_bytes else torch.empty(0, dtype=torch.uint8)
            elif found.into.nbytes == size_bytes:
                found.content = flat_bytes(found.into)
            else:
                error = found.error_of_size(size_bytes)
                self._remove(found)
                found.finish(error)
                raise error
            return view_of(found.content)

    def complete(self, source: int, key: Key) -> bool:
        """Takes note that all bytes of a tensor are here; tells whether somebody waited for it."""
        with self._lock:
            # a key names one tensor of a sender at a time
            found = self._find(key, lambda each: each.sender == source and not each.is_here)
            assert found is not None
            found.is_here = True
            if not found.is_wanted:
                return False
            self._remove(found)
        found.give_content()
        return True

    def forget(self, wanted: Delivery) -> bool:
        """Waits no more for this; False when it has come, or is coming."""
        with self._lock:
            if wanted.content is not None or wanted not in self._lines.get(wanted.key, ()):
                return False
            self._remove(wanted)
            return True

    def give_up(self, is_hopeless: Callable[[int | None], bool]) -> list[Delivery]:
        """Waits no more for what comes from sources of which `is_hopeless` is true; gives what that was.

        What has arrived from them stays.
        """
        with self._lock:
            while broken_off := [
                each
                for each in self._all()
                if not (each.sender is None or each.is_here) and is_hopeless(each.sender)
            ]:
                each = broken_off[0]
                self._remove(each)
                if each.is_wanted:  # somebody else may send it, or has
                    each.sender = each.content = None
                    if self._join(each):
                        each.give_content()
            hopeless = [each for each in self._all() if each.content is None and is_hopeless(each.source)]
            for each in hopeless:
                self._remove(each)
        return hopeless

    def _join(self, wanted: Delivery) -> bool:
        """Takes what has come early, or begun to; unless all of it is here, the wait goes on."""
        source = wanted.source
        early = self._find(wanted.key, lambda each: not each.is_wanted and source in (None, each.sender))
        if early is not None:
            self._remove(early)
            wanted.sender, wanted.content, wanted.is_here = early.sender, early.content, early.is_here
        if not wanted.is_here:
            self._lines.setdefault(wanted.key, []).append(wanted)
        return wanted.is_here

    def _all(self) -> list[Delivery]:
        return [each for line in self._lines.values() for each in line]

    def _find(self, key: Key, is_it: Callable[[Delivery], bool]) -> Delivery | None:
        return next((each for each in self._lines.get(key, ()) if is_it(each)), None)

    def _find_wanted(self, source: int, key: Key) -> Delivery | None:
        return self._find(key, lambda each: each.content is None and each.source in (None, source))

    def _remove(self, delivery: Delivery) -> None:
        line = self._lines[delivery.key]
        line.remove(delivery)
        if not line:
            del self._lines[delivery.key]


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Gives the bytes of a contiguous tensor of this machine's own memory; TensorError for any other."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TensorError(
            f"A tensor on {tensor.device} of strides {list(tensor.stride())} cannot travel as it is.",
            next_step="give a contiguous tensor on the CPU.",
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def view_of(flat: torch.Tensor) -> memoryview:
    """Gives the memory of a flat uint8 tensor."""
    return byte_view(cast("Buffer", flat.numpy()))


async def poll_until(is_done: Callable[[], bool]) -> None:
    """Looks again and again, ever more rarely: what is waited for happens in another thread."""
    nap_s = _LOOK_S
    while not is_done():
        await asyncio.sleep(nap_s)
        nap_s = min(1.25 * nap_s, _SLOWEST_LOOK_S)


class Mesh:
    """One worker's streams to those of other machines; it can be used after `listen` and `connect`.

    `secret` is the run's, of 32 characters or more, `host` an address of this machine that the others reach.
    Tensors that have come and nobody has asked for take up to `max_unclaimed_bytes`.
    """

    def __init__(
        self,
        rank: int,
        secret: str,
        *,
        host: str = LOOPBACK,
        silence_s: float = SILENCE_S,
        max_unclaimed_bytes: int = 256 << 20,
        is_encrypted: bool = True,
    ) -> None:
        self.rank = rank
        self.is_encrypted = is_encrypted
        """Whether tensors go encrypted (TLS) to other machines; control messages do in any case."""
        self.loop = LoopThread("shoal-mesh")
        self.sent_bytes: collections.Counter[int] = collections.Counter()
        """Buffers and heads of messages by rank, without beats; written by the loop's thread alone."""
        self.received_bytes: collections.Counter[int] = collections.Counter()
        self._host = host
        self._silence_s = silence_s
        self._membership = Membership(Identity.generate(), SwarmSecret.parse(secret))
        limits = Limits(
            max_connections=4096,
            max_calls=4096,
            max_message_bytes=_ANY_SIZE,
            max_bytes_in_flight=_ANY_SIZE,
            frame_s=max(10.0, 2 * silence_s),  # silence is noticed by beats, before this
            idle_s=3600.0,
        )
        self._transport = StreamTransport(membership=self._membership, limits=limits)
        self._standing = StandingScope("mesh")
        self._mailbox = Mailbox(max_unclaimed_bytes)
        self._peers: dict[int, Peer] = {}
        self._listeners: list[Callable[[], None]] = []
        self._num_sending = 0
        self._departure = Departure("failed")
        """How this worker goes when it is closed and what it sends is there."""
        self.monitor: HeartbeatMonitor
        """Knows who of the other machines' workers is there, from `listen` on."""
        self._is_open = False

    # --- its life ---

    def listen(self) -> Peer:
        """Gives where this worker can be reached, for the others to `connect`."""
        self.loop.__enter__()
        try:
            peer = self.loop.run(self._listen())
        except BaseException:
            self.loop.__exit__(None, None, None)
            raise
        self._is_open = True
        return peer

    async def _listen(self) -> Peer:
        scope = await self._standing.open()
        await self._transport.__aenter__()
        self.monitor = HeartbeatMonitor(self.rank, self._transport, scope, self._silence_s, self._give_up)
        self._transport.handle(_SEND, self._take, allocate=self._place, payload_type=tuple[int | str, ...])
        self.handle(_ROOM, self._wait_for_room, payload_type=tuple[tuple[int | str, ...], int])
        address = await self._transport.listen(Address(self._host, 0))
        return Peer(address, self._membership.peer_id)

    def connect(
        self,
        peers: Mapping[int, Peer],
        names: Mapping[int, str] | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Connects with the workers of all other machines, by rank; returns when all of them have begun to.

        `names` say who they are ('process 4711 on node2') where one is lost. PeerLost names one that cannot
        be reached.
        """
        self._peers.update(peers)
        deadline = deadline or Deadline.after(CONNECTING_S)
        self.loop.run(self.monitor.open(peers, names or {}, deadline))

    def leave(self, after: int) -> None:
        """Tells all that this worker takes part in operations up to this number, once what it sends is there.

        It may send nothing after that.
        """
        self._departure = Departure("left", after)

        async def leave() -> None:
            await poll_until(lambda: not self._num_sending)
            self.monitor.tell(self._departure)

        self._start("leaving", leave)

    def fail(self, culprit: int | None = None) -> None:
        """Tells all that this worker takes part in nothing more, without having left; it can still ask.

        The others blame the lost `culprit`, if that is why, and not this worker.
        """

        async def fail() -> None:
            loss = None if culprit is None else self.monitor.lost.get(culprit)
            reason = "it failed" if loss is None else loss.reason
            self.monitor.tell(Departure("failed", reason=reason, culprit=culprit))

        self._start("failing", fail)

    def close(self, error: BaseException | None = None) -> None:
        """Ends, in order when `leave` was called; otherwise the others find this worker failed. Idempotent.

        With an error it ends at once, and waits for nobody to take what it has sent.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self.loop.run(self._close(is_patient=error is None))
        finally:
            self.loop.__exit__(None, None, None)

    async def _close(self, *, is_patient: bool) -> None:
        if is_patient:
            try:
                async with asyncio.timeout(_FAREWELL_S + self._silence_s):
                    await poll_until(lambda: not self._num_sending)
                self.monitor.tell(self._departure)
            except TimeoutError:
                log.warning("rank %d ends while others have not taken what it sent", self.rank)
        self.monitor.tell(Departure("failed"))
        if is_patient:
            await self.monitor.say_farewell(Deadline.after(_FAREWELL_S))
        else:
            await asyncio.sleep(0)
        await self._standing.close()
        await self._transport.__aexit__(None, None, None)
        for wanted in self._mailbox.give_up(lambda source: True):
            wanted.finish(_closed(f"receiving {wanted.key}"))

    def add_listener(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, on any thread, whenever a handle is over or a peer is lost or has left.

        It must be quick, and may look at handles only.
        """
        self._listeners.append(wake)

    def rank_of(self, head: Head) -> int:
        """Tells who has sent a call; PeerRefused for one that is not of this mesh."""
        return self.monitor.rank_of(head)

    # --- tensors ---

    def send(self, to: int, key: Key, tensor: torch.Tensor) -> MeshHandle[None]:
        """Sends a tensor of this machine's memory, which must not be written until that is done.

        It is done when `to` has it in its memory. A key names one tensor at a time: it may be used again to
        the same peer when the send before is done. PeerLost when the peer is gone.
        """
        self._check_peer(to)
        view = view_of(flat_bytes(tensor))
        return self._start(f"sending {key} to rank {to}", lambda: self._send(to, key, view))

    async def _send(self, to: int, key: Key, view: memoryview) -> None:
        self._num_sending += 1
        try:
            while True:
                try:
                    await self._ask(to, _SEND, key, (view,))
                    return
                except PeerBusy:
                    # it takes no calls just now, or has no room: the answer to this comes when it has
                    await asyncio.sleep(_BUSY_S)
                    with contextlib.suppress(PeerBusy):
                        await self._ask(to, _ROOM, (key, view.nbytes))
        finally:
            self._num_sending -= 1

    def receive(self, source: int | None, key: Key, into: torch.Tensor | None = None) -> Delivery:
        """Gives what was or will be sent under this key, by `source` or, where that is None, by anybody.

        It comes straight into `into` when it was asked for before it came; without `into` it is a flat uint8
        tensor of memory of its own. From a source that has left without sending it comes None, from one that
        is lost PeerLost.
        """
        if source is not None:
            self._check_peer(source)
        if into is not None:
            flat_bytes(into)
        wanted = Delivery(key, source, into)
        self._mailbox.want(wanted)
        if not wanted.is_done() and self._is_hopeless(source):
            self._give_up()
        return wanted

    def _is_hopeless(self, source: int | None) -> bool:
        lost, left = self.monitor.lost, self.monitor.left
        return all(rank in lost or rank in left for rank in (self._peers if source is None else [source]))

    def _give_up(self) -> None:
        """Ends all that is received from those who are gone: in None from one that has left in order."""
        for wanted in self._mailbox.give_up(self._is_hopeless):
            lost = self.monitor.lost
            source = max(lost, default=-1) if wanted.source is None else wanted.source
            wanted.finish(self.monitor.why_gone(source) if source in lost else None)
        self.wake()

    def forget(self, wanted: Delivery) -> bool:
        """Waits no more for what a `receive` has asked for; False when it has come, or is coming."""
        return self._mailbox.forget(wanted)

    # --- calls ---

    def call(
        self,
        to: int,
        method: str,
        payload: Any = None,
        buffers: Sequence[Any] = (),
        *,
        into: Sequence[Any] | Allocate | None = None,
    ) -> MeshHandle[Reply]:
        """Asks another machine's worker; PeerLost when it is gone, or goes before it has answered."""
        self._check_peer(to)
        return self._start(f"{method} at rank {to}", lambda: self._ask(to, method, payload, buffers, into))

    def handle(self, method: str, serve: Serve, *, payload_type: Any = Any) -> None:
        """Answers calls of this method, on the loop's thread; `rank_of` tells who calls.

        Calls that come before it is set wait at their callers for a while.
        """

        async def answer(head: Head, buffers: Sequence[memoryview]) -> Reply | None:
            rank = self._count_received(head)
            given: Any = serve(head, buffers)
            reply: Reply | None = await given if inspect.isawaitable(given) else given
            if reply is not None:
                self.sent_bytes[rank] += size_of(reply.payload, reply.buffers)
            return reply

        self._transport.handle(method, answer, payload_type=payload_type)

    async def _ask(
        self,
        to: int,
        method: str,
        payload: Any,
        buffers: Sequence[Any] = (),
        into: Sequence[Any] | Allocate | None = None,
    ) -> Reply:
        if self.monitor.is_gone(to):
            raise self.monitor.why_gone(to)
        unset_until_s = time.monotonic() + _SETTING_S
        while True:
            try:
                reply = await self._transport.call(
                    self._peers[to], method, payload, buffers, deadline=Deadline.never(), into=into
                )
                break
            except (PeerLost, PeerUnreachable, PeerLeaving) as error:
                await asyncio.sleep(_BUSY_S)  # in which the monitor learns how it went, if that was said
                self.monitor.lose(Loss(to, error.what))
                raise self.monitor.why_gone(to) from None
            except PeerError as error:
                # all run the same version: a method that is not there is not there yet
                is_unset = isinstance(error, PeerRefused) and f"no method {method!r}" in error.what
                if not is_unset or time.monotonic() > unset_until_s:
                    error.peer = to
                    raise
                await asyncio.sleep(_BUSY_S)
        self.sent_bytes[to] += size_of(payload, buffers)
        self.received_bytes[to] += size_of(reply.payload, reply.buffers)
        return reply

    # --- on the loop ---

    def _place(self, head: Head) -> list[memoryview]:
        """Gives memory for a tensor that begins to arrive."""
        return [self._mailbox.expect(self.rank_of(head), head.payload, head.total_bytes)]

    def _take(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """Takes a tensor that has come."""
        if self._mailbox.complete(self._count_received(head), head.payload):
            self.wake()

    async def _wait_for_room(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """Answers a sender when its tensor may come, or when this worker goes, which it learns elsewhere."""
        rank, (key, size_bytes) = self.rank_of(head), head.payload
        await poll_until(
            lambda: self.monitor.ending is not None or self._mailbox.has_room(rank, key, size_bytes)
        )

    def _start(self, what: str, work: Callable[[], Coroutine[Any, Any, T]]) -> MeshHandle[T]:
        """Does some work on the loop, and finishes a handle with what comes of it."""
        handle: MeshHandle[T] = MeshHandle(what)

        async def do() -> None:
            end: T | Exception = _closed(what)  # if it is cancelled
            try:
                end = await work()
            except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the handle
                end = error
            finally:
                handle.finish(end)
                self.wake()

        def start() -> None:
            with contextlib.suppress(UsageError):  # closing
                self._standing.scope.start_soon(do())
                return
            handle.finish(_closed(what))

        try:
            self.loop.loop.call_soon_threadsafe(start)
        except (RuntimeError, UsageError):  # the loop is closed
            handle.finish(_closed(what))
        return handle

    def wake(self) -> None:
        """Lets all who wait for something of the mesh look again."""
        for wake in self._listeners:
            wake()

    def _count_received(self, head: Head) -> int:
        """Takes note of what has come; gives the rank that has sent it."""
        rank = self.rank_of(head)
        self.monitor.heard(rank)
        self.received_bytes[rank] += size_of(head.payload, ()) + head.total_bytes
        return rank

    def _check_peer(self, rank: int) -> None:
        if rank not in self._peers:
            raise UsageError(
                f"rank {rank} is not on another machine, or is not there at all.",
                next_step=f"name one of {sorted(self._peers)}.",
            )


def size_of(payload: Any, buffers: Sequence[Any]) -> int:
    """Gives the bytes of a message as it travels, but for its frames."""
    head_bytes = 0 if payload is None else len(msgspec.msgpack.encode(payload))
    return head_bytes + sum(memoryview(buffer).nbytes for buffer in buffers)


def _closed(what: str) -> PeerLost:
    return PeerLost(f"{what}: the mesh was closed before that was over.")
