"""Streams to the workers of other machines: tagged tensors, small calls, and who of them is there.

Every pair of workers on different machines is connected from the start, by TLS with the secret of the run. A
tensor travels as one message out of the memory where it lies into the memory where it was asked for. What the
messages mean is the business of others, as are workers of one's own machine; the `HeartbeatMonitor` knows who
is there.

What waits to be taken lies in the `Mailbox`, where each tensor that has come and each that is waited for
finds its counterpart by its key. What was asked for before it came is received where it belongs. What nobody
has asked for yet lies in memory of the mailbox, up to a bound; beyond it a sender is told to keep its tensor
until it is asked for. The mailbox, and the handles of what is under way, are for any thread.
"""

from __future__ import annotations

import asyncio
import collections
import inspect
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
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
    PeerId,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ShoalError,
    StandingScope,
    TensorError,
    UsageError,
)
from shoal.core.identity import Identity
from shoal.group.base import GroupSettings, Handle
from shoal.group.cluster.members import Ending, HeartbeatMonitor
from shoal.group.cluster.rendezvous import LOOPBACK, Rendezvous, WorkerAddress
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
_waiting = threading.Lock()
Key = tuple[int | str, ...]
_Lines = dict[Key, collections.deque[T]]
_SEND, _AGAIN = "mesh.send", "mesh.again"
_CONNECTING_S = 60.0
_FAREWELL_S = 2.0
_BUSY_S = 0.02
_SETTING_S = 30.0
"""How much later than one worker another may set its handlers."""
_ANY_SIZE = 1 << 50  # what is in flight is bounded by the mailbox, and by memory that others have given
_NO_ROOM = "there is no room for this tensor until it is asked for."


class MeshHandle(Handle[T]):
    """A result or an error, once there is one; the first that is given counts."""

    __slots__ = ("_ended", "_is_done", "_result", "error", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.error: Exception | None = None
        self._result: T | None = None
        self._is_done = False
        self._ended: threading.Event | None = None

    def is_done(self) -> bool:
        """Tells whether `wait` would return, or raise, at once."""
        return self._is_done

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result, when there is one; not for the mesh's own loop, which it would block."""
        if not self._is_done:
            with _waiting:
                ended = self._ended = self._ended or threading.Event()
            # a result that came in this moment may not have seen the event
            if not self._is_done and not ended.wait(None if deadline is None else deadline.timeout_s):
                raise DeadlineExceeded(f"{self.what} was not over before its deadline.")
        if self.error is not None:
            raise self.error
        return cast("T", self._result)

    def finish(self, result: T | Exception) -> bool:
        """Gives it its end; False when it had one."""
        with _waiting:
            if self._is_done:
                return False
            if isinstance(result, Exception):
                self.error = result
            else:
                self._result = result
            self._is_done = True
            ended = self._ended
        if ended is not None:
            ended.set()
        return True


class Wanted(msgspec.Struct, eq=False):
    """A tensor that somebody waits for."""

    source: int | None
    into: torch.Tensor | None
    handle: MeshHandle[torch.Tensor | None]

    def takes(self, source: int) -> bool:
        """Tells whether one from there will do."""
        return self.source is None or self.source == source

    def take(self, came: Coming) -> None:
        """Finishes the handle with a tensor, which is copied if it did not come into its place."""
        if self.into is None:
            self.handle.finish(came.tensor)
        elif self.into.nbytes != came.tensor.nbytes:
            self.handle.finish(_other_size(came.source, came.key, came.tensor.nbytes, self.into.nbytes))
        else:
            if came.wanted is not self:
                copy_into(flat_bytes(self.into), came.tensor)
            self.handle.finish(self.into)


class Coming(msgspec.Struct, eq=False):
    """A tensor whose bytes are arriving, or have arrived."""

    message: object
    """What it comes with, kept because its id names it."""
    source: int
    key: Key
    tensor: torch.Tensor
    """Flat, uint8."""
    wanted: Wanted | None
    """What it was placed for, if somebody had asked for it."""


class Mailbox:
    """Everything that was sent to this worker and is not taken yet, and everything that it waits for."""

    def __init__(self, max_unclaimed_bytes: int) -> None:
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self.unclaimed_bytes = 0
        self._pool = BufferPool()
        self._lock = threading.Lock()
        self._wanted: _Lines[Wanted] = {}
        self._arrived: _Lines[Coming] = {}
        self._kept: _Lines[int] = {}
        """Who keeps a tensor of this key until it is asked for."""
        self._coming: dict[int, Coming] = {}

    @property
    def num_wanted(self) -> int:
        """How many tensors are waited for."""
        return sum(map(len, self._wanted.values()))

    def want(self, wanted: Wanted, key: Key) -> int | None:
        """Finishes the handle with this tensor, now or later; gives who keeps it and must be asked."""
        with self._lock:
            arrived = _take(self._arrived, key, lambda coming: wanted.takes(coming.source))
            if arrived is None:
                self._wanted.setdefault(key, collections.deque()).append(wanted)
                return _take(self._kept, key, wanted.takes)
            self.unclaimed_bytes -= arrived.tensor.nbytes
        wanted.take(arrived)
        return None

    def expect(self, message: object, source: int, key: Key, size_bytes: int) -> memoryview:
        """Gives memory for a tensor that begins to arrive; `message` names it to `complete`.

        PeerBusy when it must wait at its sender; TensorError when it is not of the size that is wanted.
        """
        with self._lock:
            wanted = _take(self._wanted, key, lambda wanted: wanted.takes(source))
            into = None if wanted is None else wanted.into
            if wanted is not None and into is not None and into.nbytes != size_bytes:
                error = _other_size(source, key, size_bytes, into.nbytes)
                wanted.handle.finish(error)
                raise error
            if wanted is None:
                if self.unclaimed_bytes + size_bytes > self._max_unclaimed_bytes:
                    self._kept.setdefault(key, collections.deque()).append(source)
                    raise PeerBusy(_NO_ROOM)
                self.unclaimed_bytes += size_bytes
            if into is not None:
                tensor = flat_bytes(into)
            elif size_bytes:
                tensor = tensor_over(self._pool.allocate(size_bytes))
            else:
                tensor = torch.empty(0, dtype=torch.uint8)
            self._coming[id(message)] = Coming(message, source, key, tensor, wanted)
        return view_of(tensor)

    def complete(self, message: object) -> bool:
        """Takes note that all bytes of a tensor are here; tells whether somebody waited for it."""
        with self._lock:
            coming = self._coming.pop(id(message))
            wanted = coming.wanted
            if wanted is None:
                wanted = _take(self._wanted, coming.key, lambda wanted: wanted.takes(coming.source))
                if wanted is None:
                    self._arrived.setdefault(coming.key, collections.deque()).append(coming)
                    return False
                self.unclaimed_bytes -= coming.tensor.nbytes
        wanted.take(coming)
        return True

    def forget(self, handle: MeshHandle[torch.Tensor | None]) -> bool:
        """Waits no more for this; False when it has come, or is coming."""
        with self._lock:
            before = self.num_wanted
            self._wanted = _without(self._wanted, lambda wanted: wanted.handle is handle)
            return self.num_wanted < before

    def give_up(self, is_hopeless: Callable[[int | None], bool]) -> list[Wanted]:
        """Waits no more for what comes from sources of which `is_hopeless` is true; gives what that was.

        What has arrived from them stays.
        """
        with self._lock:
            hopeless = [
                wanted for line in self._wanted.values() for wanted in line if is_hopeless(wanted.source)
            ]
            self._wanted = _without(self._wanted, lambda wanted: is_hopeless(wanted.source))
            self._kept = _without(self._kept, is_hopeless)
            for token, coming in tuple(self._coming.items()):
                if not is_hopeless(coming.source):
                    continue
                del self._coming[token]
                if coming.wanted is None:
                    self.unclaimed_bytes -= coming.tensor.nbytes
                elif is_hopeless(coming.wanted.source):
                    hopeless.append(coming.wanted)
                else:  # somebody else may send it
                    self._wanted.setdefault(coming.key, collections.deque()).appendleft(coming.wanted)
        return hopeless


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


def _other_size(source: int, key: Key, size_bytes: int, into_bytes: int) -> TensorError:
    return TensorError(
        f"rank {source} sent {size_bytes:,} bytes as {key}, for which there are {into_bytes:,} here.",
        cause="the workers disagree on a tensor's shape or dtype.",
        next_step="call the same operations with equal shapes on all workers.",
    )


def _take(lines: _Lines[T], key: Key, is_it: Callable[[T], bool]) -> T | None:
    line = lines.get(key, ())
    for index, item in enumerate(line):
        if is_it(item):
            del lines[key][index]
            if not line:
                del lines[key]
            return item
    return None


def _without(lines: _Lines[T], is_out: Callable[[T], bool]) -> _Lines[T]:
    kept = {key: collections.deque(item for item in line if not is_out(item)) for key, line in lines.items()}
    return {key: line for key, line in kept.items() if line}


class MeshSettings(msgspec.Struct, frozen=True):
    """What one worker's mesh is opened with."""

    rank: int
    secret: str
    """The run's; 32 characters or more."""
    host: str = LOOPBACK
    """An address of this machine that the other machines reach."""
    silence_s: float = 5.0
    max_unclaimed_bytes: int = 256 << 20
    """Tensors that have come and nobody has asked for yet; beyond it they wait at their senders."""


class Mesh:
    """One worker's streams to those of other machines; `open` makes it."""

    def __init__(self, settings: MeshSettings) -> None:
        self.rank = settings.rank
        self.loop = LoopThread("shoal-mesh")
        self.sent_bytes: collections.Counter[int] = collections.Counter()
        """Buffers and heads of messages by rank, without beats; written by the loop's thread alone."""
        self.received_bytes: collections.Counter[int] = collections.Counter()
        self._settings = settings
        self._membership = Membership(Identity.generate(), SwarmSecret.parse(settings.secret))
        self._transport = StreamTransport(membership=self._membership, limits=_limits(settings.silence_s))
        self._standing = StandingScope("mesh")
        self._mailbox = Mailbox(settings.max_unclaimed_bytes)
        self._peers: dict[int, Peer] = {}
        self._listeners: list[Callable[[], None]] = []
        self._sending: dict[tuple[int, Key], asyncio.Event] = {}
        """Tensors on their way; each is kept for now if its receiver has no room, until it asks for it."""
        self._is_idle = asyncio.Event()
        self.monitor: HeartbeatMonitor
        """Knows who of the other machines' workers is there, from `listen` on."""
        self._is_open = False

    # --- its life ---

    @classmethod
    def open(
        cls,
        rank: int,
        addresses: Sequence[WorkerAddress],
        own: Collection[int],
        settings: GroupSettings,
        rendezvous: Rendezvous,
    ) -> Mesh:
        """Connects with all whose ranks are not in `own`, those of this machine. Collective."""
        deadline = Deadline.after(settings.timeout_s or _CONNECTING_S)
        is_one_host = all(address.host_id == addresses[rank].host_id for address in addresses)
        host = LOOPBACK if is_one_host else addresses[rank].address
        mesh = cls(MeshSettings(rank, rendezvous.secret(deadline), host, settings.silence_s))
        listening = mesh.listen()
        try:
            told = rendezvous.share("mesh", (str(listening.address), str(listening.id)), deadline)
            peers = {
                other: Peer(Address.parse(address), PeerId.parse(peer_id))
                for other, (address, peer_id) in enumerate(told)
                if other not in own
            }
            names = {address.rank: f"process {address.pid} on {address.host}" for address in addresses}
            mesh.connect(peers, names, deadline)
        except BaseException as error:
            mesh.close(error)
            raise
        return mesh

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
        silence_s = self._settings.silence_s
        self.monitor = HeartbeatMonitor(self.rank, self._transport, scope, silence_s, self._on_change)
        self._transport.handle(_SEND, self._take, allocate=self._place, payload_type=tuple[int | str, ...])
        self._transport.handle(_AGAIN, self._send_again, payload_type=tuple[int | str, ...])
        address = await self._transport.listen(Address(self._settings.host, 0))
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
        deadline = deadline or Deadline.after(_CONNECTING_S)
        self.loop.run(self.monitor.open(peers, names or {}, deadline))

    def leave(self, after: int) -> None:
        """Tells all that this worker takes part in operations up to this number, once what it sends is there.

        It may send nothing after that.
        """
        self._cross(self._leave(after))

    async def _leave(self, after: int) -> None:
        await self._until_idle()
        self.monitor.tell(Ending("left", after))

    def fail(self, culprit: int | None = None) -> None:
        """Tells all that this worker takes part in nothing more, without having left; it can still ask.

        The others blame the lost `culprit`, if that is why, and not this worker.
        """
        self._cross(self._fail(culprit))

    async def _fail(self, culprit: int | None) -> None:
        loss = self.monitor.lost.get(culprit) if culprit is not None else None
        self.monitor.tell(Ending("failed", reason=loss.reason if loss else "it failed", culprit=culprit))

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
                async with asyncio.timeout(_FAREWELL_S + self._settings.silence_s):
                    await self._until_idle()
            except TimeoutError:
                log.warning("rank %d ends while others have not taken what it sent", self.rank)
        self.monitor.tell(Ending("failed"))
        if is_patient:
            await self.monitor.say_farewell(Deadline.after(_FAREWELL_S))
        else:
            await asyncio.sleep(0)
        await self._standing.close()
        await self._transport.__aexit__(None, None, None)
        for wanted in self._mailbox.give_up(lambda source: True):
            wanted.handle.finish(_closed(wanted.handle.what))

    async def _until_idle(self) -> None:
        while self._sending:
            self._is_idle.clear()
            await self._is_idle.wait()

    def add_listener(self, wake: Callable[[], None]) -> None:
        """Has `wake` called, on the loop, whenever a handle is over or a peer is lost or has left.

        It must be quick, and may look at handles only.
        """
        self._listeners.append(wake)

    def rank_of(self, head: Head) -> int:
        """Tells who has sent a call; PeerRefused for one that is not of this mesh."""
        rank = self.monitor.rank_of(head)
        if rank is None:
            raise PeerRefused(f"{head.peer} is not of this group.")
        return rank

    # --- tensors ---

    def send(self, to: int, key: Key, tensor: torch.Tensor) -> MeshHandle[None]:
        """Sends a tensor of this machine's memory, which must not be written until that is done.

        It is done when `to` has it in its memory. A key names one tensor at a time: it may be used again to
        the same peer when the send before is done. PeerLost when the peer is gone.
        """
        handle: MeshHandle[None] = MeshHandle(f"sending {key} to rank {to}")
        self._check_peer(to)
        self._cross(self._finish_with(handle, self._send, to, key, view_of(flat_bytes(tensor))), handle)
        return handle

    async def _send(self, to: int, key: Key, view: memoryview) -> None:
        is_asked_for = self._sending[to, key] = asyncio.Event()
        try:
            while True:
                try:
                    await self._ask(to, _SEND, key, (view,))
                    return
                except PeerBusy as error:
                    if _NO_ROOM not in error.what:
                        await asyncio.sleep(_BUSY_S)
                    elif not self.monitor.is_gone(to):
                        await is_asked_for.wait()  # it may have asked already
                        is_asked_for.clear()
        finally:
            if self._sending.get((to, key)) is is_asked_for:
                del self._sending[to, key]
            if not self._sending:
                self._is_idle.set()

    def receive(
        self, source: int | None, key: Key, into: torch.Tensor | None = None
    ) -> MeshHandle[torch.Tensor | None]:
        """Gives what was or will be sent under this key, by `source` or, where that is None, by anybody.

        It comes straight into `into` when it was asked for before it came; without `into` it is a flat uint8
        tensor of memory of its own. From a source that has left without sending it comes None, from one that
        is lost PeerLost.
        """
        handle: MeshHandle[torch.Tensor | None] = MeshHandle(f"receiving {key} from rank {source}")
        if source is not None:
            self._check_peer(source)
        if into is not None:
            flat_bytes(into)
        keeper = self._mailbox.want(Wanted(source, into, handle), key)
        if keeper is not None:
            self.call(keeper, _AGAIN, key)
        elif not handle.is_done() and self._is_hopeless(source):
            self._cross(self._give_up(source))
        return handle

    async def _give_up(self, source: int | None) -> None:
        for wanted in self._mailbox.give_up(lambda other: other == source and self._is_hopeless(other)):
            self._finish(wanted.handle, self._without(wanted.source))

    def _is_hopeless(self, source: int | None) -> bool:
        lost, left = self.monitor.lost, self.monitor.left
        return all(rank in lost or rank in left for rank in (self._peers if source is None else [source]))

    def _without(self, source: int | None) -> PeerLost | None:
        """Gives what a receive ends in for which nobody is left."""
        if source is None:
            source = max(self.monitor.lost, default=None)
        return self.monitor.why_gone(source) if source is not None and source in self.monitor.lost else None

    def forget(self, handle: MeshHandle[torch.Tensor | None]) -> bool:
        """Waits no more for what a `receive` has asked for; False when it has come, or is coming."""
        return self._mailbox.forget(handle)

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
        handle: MeshHandle[Reply] = MeshHandle(f"{method} at rank {to}")
        self._check_peer(to)
        self._cross(self._finish_with(handle, self._ask, to, method, payload, buffers, into), handle)
        return handle

    def handle(self, method: str, serve: Serve, *, payload_type: Any = Any) -> None:
        """Answers calls of this method, on the loop's thread; `rank_of` tells who calls.

        Calls that come before it is set wait at their callers for a while.
        """

        async def answer(head: Head, buffers: Sequence[memoryview]) -> Reply | None:
            self._count_received(head)
            given: Any = serve(head, buffers)
            reply: Reply | None = await given if inspect.isawaitable(given) else given
            if reply is not None:
                self.sent_bytes[self.rank_of(head)] += size_of(reply.payload, reply.buffers)
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
                self.monitor.lose(to, error.what)
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
        return [self._mailbox.expect(head, self.rank_of(head), head.payload, head.total_bytes)]

    def _take(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """Takes a tensor that has come."""
        self._count_received(head)
        if self._mailbox.complete(head):
            self._wake()

    def _send_again(self, head: Head, buffers: Sequence[memoryview]) -> None:
        is_asked_for = self._sending.get((self.rank_of(head), head.payload))
        if is_asked_for is not None:
            is_asked_for.set()

    def _on_change(self, rank: int) -> None:
        """Looks at all that depends on one that is gone."""
        for is_asked_for in self._sending.values():
            is_asked_for.set()
        for wanted in self._mailbox.give_up(self._is_hopeless):
            wanted.handle.finish(self._without(wanted.source))
        self._wake()

    async def _finish_with(
        self, handle: MeshHandle[T], work: Callable[..., Coroutine[Any, Any, T]], *given: Any
    ) -> None:
        """Does some work, and finishes a handle with what comes of it."""
        try:
            self._finish(handle, await work(*given))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the handle
            self._finish(handle, error)
        finally:
            self._finish(handle, _closed(handle.what))

    def _finish(self, handle: MeshHandle[Any], result: Any) -> None:
        if handle.finish(result):
            self._wake()

    def _wake(self) -> None:
        for wake in self._listeners:
            wake()

    def _count_received(self, head: Head) -> None:
        rank = self.rank_of(head)
        self.monitor.heard(rank)
        self.received_bytes[rank] += size_of(head.payload, ()) + head.total_bytes

    def _cross(self, work: Coroutine[Any, Any, None], handle: MeshHandle[Any] | None = None) -> None:
        """Starts work on the loop; on a mesh that is closed its handle ends at once."""

        def start() -> None:
            try:
                self._standing.scope.start_soon(work)
            except UsageError:  # closing
                if handle is not None:
                    handle.finish(_closed(handle.what))

        try:
            self.loop.loop.call_soon_threadsafe(start)
        except (RuntimeError, UsageError):  # the loop is closed
            work.close()
            if handle is not None:
                handle.finish(_closed(handle.what))

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


def _limits(silence_s: float) -> Limits:
    return Limits(
        max_connections=4096,
        max_calls=4096,
        max_message_bytes=_ANY_SIZE,
        max_bytes_in_flight=_ANY_SIZE,
        frame_s=max(10.0, 2 * silence_s),  # silence is noticed by beats, before this
        idle_s=3600.0,
    )


def _closed(what: str) -> ShoalError:
    return PeerLost(f"{what}: the mesh was closed before that was over.")
