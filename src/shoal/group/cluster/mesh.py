"""Streams to the workers of other machines: tagged tensors, small calls, and who of them is there.

Every pair of workers on different machines is connected from the start, by TLS with the secret of the run. A
tensor travels as one message out of the memory where it lies into the memory where it was asked for. What the
messages mean is the business of others, as are workers of one's own machine; the `Vigil` knows who is there.

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
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, cast

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
from shoal.group.base import GroupSettings, Loss
from shoal.group.cluster.heartbeat import Ending, Vigil
from shoal.group.cluster.rendezvous import LOOPBACK, Rendezvous, Seat
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


class MeshHandle(Generic[T]):
    """A result or an error, once there is one; the first that is given counts."""

    __slots__ = ("_ended", "_is_done", "_result", "error", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.error: Exception | None = None
        self._result: T | None = None
        self._is_done = False
        self._ended: threading.Event | None = None

    def is_done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._is_done

    def result(self) -> T:
        """What has come of it; DeadlineExceeded when nothing has yet."""
        if not self._is_done:
            raise DeadlineExceeded(f"{self.what} is not over yet.", next_step="wait for it first.")
        if self.error is not None:
            raise self.error
        return cast("T", self._result)

    def wait(self, deadline: Deadline | None = None) -> T:
        """The result, when there is one; not for the mesh's own loop, which it would block."""
        if not self._is_done:
            with _waiting:
                ended = self._ended = self._ended or threading.Event()
            # a result that came in this moment may not have seen the event
            if not self._is_done and not ended.wait(None if deadline is None else deadline.timeout_s):
                raise DeadlineExceeded(f"{self.what} was not over before its deadline.")
        return self.result()

    def finish(self, result: T | Exception) -> bool:
        """Give it its end; False when it had one."""
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


Wake = Callable[[], None]
"""Called on the mesh's loop: must be quick, and may look at handles only."""


class MeshTraffic:
    """What has passed over the mesh, by rank: buffers and heads, without beats. Read it from any thread."""

    def __init__(self) -> None:
        self.sent_bytes: dict[int, int] = {}
        self.received_bytes: dict[int, int] = {}
        self.num_sent: dict[int, int] = {}
        self.num_received: dict[int, int] = {}
        self._lock = threading.Lock()

    def sent(self, to: int, size_bytes: int) -> None:
        """A message has left."""
        with self._lock:
            self.sent_bytes[to] = self.sent_bytes.get(to, 0) + size_bytes
            self.num_sent[to] = self.num_sent.get(to, 0) + 1

    def received(self, source: int, size_bytes: int) -> None:
        """A message has come."""
        with self._lock:
            self.received_bytes[source] = self.received_bytes.get(source, 0) + size_bytes
            self.num_received[source] = self.num_received.get(source, 0) + 1


def size_of(payload: Any, buffers: Sequence[Any]) -> int:
    """Bytes of a message as it travels, but for its frames."""
    head_bytes = 0 if payload is None else len(msgspec.msgpack.encode(payload))
    return head_bytes + sum(memoryview(buffer).nbytes for buffer in buffers)


class NoRoom(ShoalError):
    """The tensor must wait at its sender until somebody asks for it."""


class Wanted(msgspec.Struct, eq=False):
    """A tensor that somebody waits for."""

    source: int | None
    into: torch.Tensor | None
    handle: MeshHandle[torch.Tensor | None]

    def takes(self, source: int) -> bool:
        """Whether one from there will do."""
        return self.source is None or self.source == source


class Coming(msgspec.Struct, eq=False):
    """A tensor whose bytes are arriving."""

    message: object
    """What it comes with, kept because its id names it."""
    source: int
    key: Key
    tensor: torch.Tensor
    """Flat, uint8."""
    wanted: Wanted | None


class Mailbox:
    """Everything that was sent to this worker and is not taken yet, and everything that it waits for."""

    def __init__(self, max_unclaimed_bytes: int) -> None:
        self._max_unclaimed_bytes = max_unclaimed_bytes
        self.unclaimed_bytes = 0
        self._pool = BufferPool()
        self._lock = threading.Lock()
        self._wanted: dict[Key, collections.deque[Wanted]] = {}
        self._arrived: dict[Key, collections.deque[Coming]] = {}
        self._kept: dict[Key, collections.deque[int]] = {}
        """Who keeps a tensor of this key until it is asked for."""
        self._coming: dict[int, Coming] = {}

    def want(
        self, source: int | None, key: Key, into: torch.Tensor | None, handle: MeshHandle[torch.Tensor | None]
    ) -> int | None:
        """Finish the handle with this tensor, now or when it comes; who keeps it and must be asked."""
        wanted = Wanted(source, into, handle)
        with self._lock:
            arrived = _take(self._arrived, key, lambda coming: wanted.takes(coming.source))
            if arrived is None:
                self._wanted.setdefault(key, collections.deque()).append(wanted)
                return _take(self._kept, key, wanted.takes)
            self.unclaimed_bytes -= arrived.tensor.nbytes
        if into is None:
            handle.finish(arrived.tensor)
        elif into.nbytes != arrived.tensor.nbytes:
            handle.finish(_other_size(arrived.source, key, arrived.tensor.nbytes, into.nbytes))
        else:
            copy_into(flat_bytes(into), arrived.tensor)
            handle.finish(into)
        return None

    def expect(self, message: object, source: int, key: Key, size_bytes: int) -> memoryview:
        """Memory for a tensor that begins to arrive; `message` names it to `complete`.

        NoRoom when it must wait at its sender; TensorError when it is not of the size that is wanted.
        """
        with self._lock:
            wanted = _take(self._wanted, key, lambda wanted: wanted.takes(source))
            into = None if wanted is None else wanted.into
            if into is not None and into.nbytes != size_bytes:
                assert wanted is not None
                error = _other_size(source, key, size_bytes, into.nbytes)
                wanted.handle.finish(error)
                raise error
            if wanted is None:
                if self.unclaimed_bytes + size_bytes > self._max_unclaimed_bytes:
                    self._kept.setdefault(key, collections.deque()).append(source)
                    raise NoRoom(NO_ROOM)
                self.unclaimed_bytes += size_bytes
            tensor = self._memory(size_bytes) if into is None else flat_bytes(into)
            self._coming[id(message)] = Coming(message, source, key, tensor, wanted)
        return view_of(tensor)

    def complete(self, message: object) -> MeshHandle[torch.Tensor | None] | None:
        """All bytes of a tensor are here; the handle that this has finished."""
        with self._lock:
            coming = self._coming.pop(id(message))
            wanted = coming.wanted
            if wanted is None:
                wanted = _take(self._wanted, coming.key, lambda wanted: wanted.takes(coming.source))
                if wanted is None:
                    self._arrived.setdefault(coming.key, collections.deque()).append(coming)
                    return None
                self.unclaimed_bytes -= coming.tensor.nbytes
        if wanted.into is None:
            wanted.handle.finish(coming.tensor)
        elif wanted.into.nbytes != coming.tensor.nbytes:
            size_bytes = coming.tensor.nbytes
            wanted.handle.finish(_other_size(coming.source, coming.key, size_bytes, wanted.into.nbytes))
        else:
            if coming.wanted is None:
                copy_into(flat_bytes(wanted.into), coming.tensor)
            wanted.handle.finish(wanted.into)
        return wanted.handle

    def forget(self, handle: MeshHandle[torch.Tensor | None]) -> bool:
        """Wait no more for this; False when it has come, or is coming."""
        with self._lock:
            before = sum(map(len, self._wanted.values()))
            self._wanted = _without(self._wanted, lambda wanted: wanted.handle is handle)
            return sum(map(len, self._wanted.values())) < before

    def give_up(self, is_hopeless: Callable[[int | None], bool]) -> list[Wanted]:
        """Wait no more for what comes from sources of which `is_hopeless` is true; what was waited for.

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

    def _memory(self, size_bytes: int) -> torch.Tensor:
        return (
            tensor_over(self._pool.allocate(size_bytes)) if size_bytes else torch.empty(0, dtype=torch.uint8)
        )


NO_ROOM = "there is no room for this tensor until it is asked for."


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor of this machine's own memory; TensorError for any other."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TensorError(
            f"A tensor on {tensor.device} of strides {list(tensor.stride())} cannot travel as it is.",
            next_step="give a contiguous tensor on the CPU.",
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def view_of(flat: torch.Tensor) -> memoryview:
    """The memory of a flat uint8 tensor."""
    return byte_view(cast("Buffer", flat.numpy()))


def _other_size(source: int, key: Key, size_bytes: int, into_bytes: int) -> TensorError:
    return TensorError(
        f"rank {source} sent {size_bytes:,} bytes as {key}, for which there are {into_bytes:,} here.",
        cause="the workers disagree on a tensor's shape or dtype.",
        next_step="call the same operations with equal shapes on all workers.",
    )


def _take(lines: _Lines[T], key: Key, is_it: Callable[[T], bool]) -> T | None:
    line = lines.get(key)
    if line is None:
        return None
    for index, item in enumerate(line):
        if is_it(item):
            del line[index]
            if not line:
                del lines[key]
            return item
    return None


def _without(
    lines: dict[Key, collections.deque[T]], is_out: Callable[[T], bool]
) -> dict[Key, collections.deque[T]]:
    kept = {key: collections.deque(item for item in line if not is_out(item)) for key, line in lines.items()}
    return {key: line for key, line in kept.items() if line}


class MeshSettings(msgspec.Struct, frozen=True):
    """Of one worker's mesh."""

    rank: int
    secret: str
    """The run's; 32 characters or more."""
    host: str = LOOPBACK
    """An address of this machine that the other machines reach."""
    silence_s: float = 5.0
    max_unclaimed_bytes: int = 256 << 20
    """Tensors that have come and nobody has asked for yet; beyond it they wait at their senders."""


class Mesh:
    """One worker's streams to those of other machines; a context manager, which `open` makes.

    Leaving its block in an exception abandons it.
    """

    def __init__(self, settings: MeshSettings) -> None:
        self.rank = settings.rank
        self.loop = LoopThread("shoal-mesh")
        self.traffic = MeshTraffic()
        self._settings = settings
        self._membership = Membership(Identity.generate(), SwarmSecret.parse(settings.secret))
        self._transport = StreamTransport(membership=self._membership, limits=_limits(settings.silence_s))
        self._standing = StandingScope("mesh")
        self._mailbox = Mailbox(settings.max_unclaimed_bytes)
        self._peers: dict[int, Peer] = {}
        self._listeners: list[Wake] = []
        self._sending: dict[tuple[int, Key], _Sending] = {}
        self._is_idle = asyncio.Event()
        self._vigil: Vigil
        self._is_open = False

    # --- its life ---

    @classmethod
    def open(
        cls,
        rank: int,
        seats: Sequence[Seat],
        own: Collection[int],
        settings: GroupSettings,
        rendezvous: Rendezvous,
    ) -> Mesh:
        """Connect with all whose ranks are not in `own`, those of this machine. Collective."""
        deadline = Deadline.after(settings.timeout_s or _CONNECTING_S)
        is_one_host = all(seat.host_id == seats[rank].host_id for seat in seats)
        mesh = cls(
            MeshSettings(
                rank,
                rendezvous.secret(deadline),
                LOOPBACK if is_one_host else seats[rank].address,
                settings.silence_s,
            )
        )
        listening = mesh.listen()
        try:
            assert listening.id is not None
            places = rendezvous.share("mesh", (str(listening.address), str(listening.id)), deadline)
            peers = {
                other: Peer(Address.parse(address), PeerId.parse(peer_id))
                for other, (address, peer_id) in enumerate(places)
                if other not in own
            }
            mesh.connect(peers, {seat.rank: f"process {seat.pid} on {seat.host}" for seat in seats}, deadline)
        except BaseException:
            mesh.abandon()
            raise
        return mesh

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def listen(self) -> Peer:
        """Where this worker can be reached, for the others to `connect`."""
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
        self._vigil = Vigil(self.rank, self._transport, scope, self._settings.silence_s, self._on_change)
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
        """Connect with the workers of all other machines, by rank; returns when all of them have begun to.

        `names` say who they are ('process 4711 on node2') where one is lost. PeerLost names one that cannot
        be reached.
        """
        self._peers.update(peers)
        deadline = deadline or Deadline.after(_CONNECTING_S)
        self.loop.run(self._vigil.open(peers, names or {}, deadline))

    def leave(self, after: int) -> None:
        """Tell all that this worker takes part in operations up to this number, once what it sends is there.

        It may send nothing after that.
        """
        self._cross(self._leave(after))

    async def _leave(self, after: int) -> None:
        while self._sending:
            self._is_idle.clear()
            await self._is_idle.wait()
        self._vigil.tell(Ending("left", after))

    def fail(self, culprit: int | None = None) -> None:
        """Tell all that this worker takes part in nothing more, without having left; it can still ask.

        The others blame the lost `culprit`, if that is why, and not this worker.
        """
        self._cross(self._fail(culprit))

    async def _fail(self, culprit: int | None) -> None:
        loss = self.lost.get(culprit) if culprit is not None else None
        self._vigil.tell(Ending("failed", reason=loss.reason if loss else "it failed", culprit=culprit))

    def close(self) -> None:
        """End, in order when `leave` was called; otherwise the others find this worker failed. Idempotent."""
        self._end(self._close())

    async def _close(self) -> None:
        deadline = Deadline.after(_FAREWELL_S + self._settings.silence_s)
        try:
            async with asyncio.timeout(deadline.timeout_s):
                while self._sending:
                    self._is_idle.clear()
                    await self._is_idle.wait()
        except TimeoutError:
            log.warning("rank %d ends while others have not taken what it sent", self.rank)
        self._vigil.tell(Ending("failed"))
        await self._vigil.say_farewell(Deadline.after(_FAREWELL_S))
        await self._stop()

    def abandon(self) -> None:
        """End at once: the others find this worker failed. Idempotent."""
        self._end(self._abandon())

    async def _abandon(self) -> None:
        self._vigil.tell(Ending("failed"))
        await asyncio.sleep(0)
        await self._stop()

    def _end(self, ending: Coroutine[Any, Any, None]) -> None:
        if not self._is_open:
            ending.close()
            return
        self._is_open = False
        try:
            self.loop.run(ending)
        finally:
            self.loop.__exit__(None, None, None)

    async def _stop(self) -> None:
        await self._standing.close()
        await self._transport.__aexit__(None, None, None)
        for wanted in self._mailbox.give_up(lambda source: True):
            wanted.handle.finish(_closed(wanted.handle.what))

    # --- who is there ---

    @property
    def lost(self) -> Mapping[int, Loss]:
        """Workers of other machines that went without having said so, in the order noticed."""
        return self._vigil.lost

    @property
    def left(self) -> Mapping[int, int]:
        """Workers of other machines that have left, and the last operation in which each takes part."""
        return self._vigil.left

    @property
    def left_at_s(self) -> Mapping[int, float]:
        """When those have left that have, by the monotonic clock."""
        return self._vigil.left_at_s

    def silent_s(self, rank: int) -> float:
        """Seconds since something came from a rank, to within a beat."""
        return self._vigil.silent_s(rank)

    def describe(self, rank: int) -> str:
        """Who a rank is and when it was last heard, for people."""
        return f"rank {rank} ({self._vigil.name_of(rank)}), last beat {self._vigil.silent_s(rank):.1f} s ago"

    def add_listener(self, wake: Wake) -> None:
        """Have it called, on the loop, whenever a handle is over or a peer is lost or has left."""
        self._listeners.append(wake)

    def rank_of(self, head: Head) -> int:
        """Who has sent a call; PeerRefused for one that is not of this mesh."""
        rank = self._vigil.rank_of(head)
        if rank is None:
            raise PeerRefused(f"{head.peer} is not of this group.")
        return rank

    # --- tensors ---

    def send(self, to: int, key: Key, tensor: torch.Tensor) -> MeshHandle[None]:
        """Send a tensor of this machine's memory, which must not be written until that is done.

        It is done when `to` has it in its memory. A key names one tensor at a time: it may be used again to
        the same peer when the send before is done. PeerLost when the peer is gone.
        """
        handle: MeshHandle[None] = MeshHandle(f"sending {key} to rank {to}")
        self._check_peer(to)
        self._cross(self._send(to, key, flat_bytes(tensor), handle), handle)
        return handle

    async def _send(self, to: int, key: Key, flat: torch.Tensor, handle: MeshHandle[None]) -> None:
        sending = self._sending[to, key] = _Sending()
        try:
            view = view_of(flat)
            while True:
                try:
                    await self._ask(to, _SEND, key, (view,))
                    break
                except PeerBusy as error:
                    if NO_ROOM in error.what:
                        await sending.until_asked(self._vigil, to)
                    else:
                        await asyncio.sleep(_BUSY_S)
            self._finish(handle, None)
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the handle
            self._finish(handle, error)
        finally:
            self._finish(handle, _closed(handle.what))
            if self._sending.get((to, key)) is sending:
                del self._sending[to, key]
            if not self._sending:
                self._is_idle.set()

    def receive(
        self, source: int | None, key: Key, into: torch.Tensor | None = None
    ) -> MeshHandle[torch.Tensor | None]:
        """What was or will be sent under this key, by `source` or, where that is None, by anybody.

        It comes straight into `into` when it was asked for before it came; without `into` it is a flat uint8
        tensor of memory of its own. From a source that has left without sending it comes None, from one that
        is lost PeerLost.
        """
        handle: MeshHandle[torch.Tensor | None] = MeshHandle(f"receiving {key} from rank {source}")
        if source is not None:
            self._check_peer(source)
        if into is not None:
            flat_bytes(into)
        keeper = self._mailbox.want(source, key, into, handle)
        if keeper is not None:
            self.call(keeper, _AGAIN, key)
        elif not handle.is_done() and self._is_hopeless(source):
            self._cross(self._give_up(source))
        return handle

    async def _give_up(self, source: int | None) -> None:
        for wanted in self._mailbox.give_up(lambda other: other == source and self._is_hopeless(other)):
            self._finish(wanted.handle, self._without(wanted.source))

    def _is_hopeless(self, source: int | None) -> bool:
        if source is None:
            return all(rank in self.lost or rank in self.left for rank in self._peers)
        return source in self.lost or source in self.left

    def _without(self, source: int | None) -> PeerLost | None:
        """What a receive ends in for which nobody is left."""
        if source is None:
            source = max(self.lost, default=None)
        return self._vigil.why_gone(source) if source is not None and source in self.lost else None

    def forget(self, handle: MeshHandle[torch.Tensor | None]) -> bool:
        """Wait no more for what a `receive` has asked for; False when it has come, or is coming."""
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
        deadline: Deadline | None = None,
    ) -> MeshHandle[Reply]:
        """Ask another machine's worker; PeerLost when it is gone, or goes before it has answered."""
        handle: MeshHandle[Reply] = MeshHandle(f"{method} at rank {to}")
        self._check_peer(to)
        self._cross(self._call(handle, to, method, payload, buffers, into, deadline), handle)
        return handle

    async def _call(self, handle: MeshHandle[Reply], to: int, *request: Any) -> None:
        try:
            self._finish(handle, await self._ask(to, *request))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits for the handle
            self._finish(handle, error)
        finally:
            self._finish(handle, _closed(handle.what))

    def handle(
        self, method: str, serve: Serve, *, allocate: Allocate | None = None, payload_type: Any = Any
    ) -> None:
        """Answer calls of this method, on the loop's thread; `rank_of` tells who calls.

        Calls that come before it is set wait at their callers for a while.
        """
        if inspect.iscoroutinefunction(serve):

            async def answer_later(head: Head, buffers: Sequence[memoryview]) -> Reply | None:
                self._count_received(head)
                reply: Reply | None = await serve(head, buffers)
                self._count_answer(head, reply)
                return reply

            answer: Serve = answer_later
        else:

            def answer_now(head: Head, buffers: Sequence[memoryview]) -> Any:
                self._count_received(head)
                reply: Any = serve(head, buffers)
                if not isinstance(reply, asyncio.Future):
                    self._count_answer(head, reply)
                return reply

            answer = answer_now
        self._transport.handle(method, answer, allocate=allocate, payload_type=payload_type)

    async def _ask(
        self,
        to: int,
        method: str,
        payload: Any,
        buffers: Sequence[Any] = (),
        into: Sequence[Any] | Allocate | None = None,
        deadline: Deadline | None = None,
    ) -> Reply:
        if self._vigil.is_gone(to):
            raise self._vigil.why_gone(to)
        deadline = deadline or Deadline.never()
        unset_until_s = time.monotonic() + _SETTING_S
        try:
            while True:
                try:
                    reply = await self._transport.call(
                        self._peers[to], method, payload, buffers, deadline=deadline, into=into
                    )
                    break
                except PeerRefused as error:
                    # all run the same version: a method that is not there is not there yet
                    if f"no method {method!r}" not in error.what or time.monotonic() > unset_until_s:
                        raise
                    await asyncio.sleep(_BUSY_S)
        except (PeerLost, PeerUnreachable, PeerLeaving) as error:
            await asyncio.sleep(_BUSY_S)  # in which the vigil learns how it went, if that was said
            self._vigil.lose(to, error.what)
            raise self._vigil.why_gone(to) from None
        except PeerError as error:
            error.peer = to
            raise
        self.traffic.sent(to, size_of(payload, buffers))
        self.traffic.received(to, size_of(reply.payload, reply.buffers))
        return reply

    # --- on the loop ---

    def _place(self, head: Head) -> list[memoryview]:
        """Memory for a tensor that begins to arrive."""
        try:
            return [self._mailbox.expect(head, self.rank_of(head), head.payload, head.total_bytes)]
        except NoRoom as error:
            raise PeerBusy(error.what) from None

    def _take(self, head: Head, buffers: Sequence[memoryview]) -> None:
        """A tensor has come."""
        self._count_received(head)
        if self._mailbox.complete(head) is not None:
            self._wake()

    def _send_again(self, head: Head, buffers: Sequence[memoryview]) -> None:
        sending = self._sending.get((self.rank_of(head), head.payload))
        if sending is not None:
            sending.ask()

    def _on_change(self, rank: int) -> None:
        for sending in self._sending.values():
            sending.ask()
        for wanted in self._mailbox.give_up(self._is_hopeless):
            self._finish(wanted.handle, self._without(wanted.source), should_wake=False)
        self._wake()

    def _finish(self, handle: MeshHandle[Any], result: Any, *, should_wake: bool = True) -> None:
        if handle.finish(result) and should_wake:
            self._wake()

    def _wake(self) -> None:
        for wake in self._listeners:
            wake()

    def _count_received(self, head: Head) -> None:
        rank = self.rank_of(head)
        self._vigil.heard(rank)
        self.traffic.received(rank, size_of(head.payload, ()) + head.total_bytes)

    def _count_answer(self, head: Head, reply: Reply | None) -> None:
        if reply is not None:
            self.traffic.sent(self.rank_of(head), size_of(reply.payload, reply.buffers))

    def _cross(self, work: Coroutine[Any, Any, None], handle: MeshHandle[Any] | None = None) -> None:
        """Start work on the loop; on a mesh that is closed its handle ends at once."""
        try:
            self.loop.loop.call_soon_threadsafe(self._start, work, handle)
        except (RuntimeError, UsageError):  # the loop is closed
            work.close()
            if handle is not None:
                handle.finish(_closed(handle.what))

    def _start(self, work: Coroutine[Any, Any, None], handle: MeshHandle[Any] | None) -> None:
        try:
            self._standing.scope.start_soon(work)
        except UsageError:  # closing
            if handle is not None:
                handle.finish(_closed(handle.what))

    def _check_peer(self, rank: int) -> None:
        if rank not in self._peers:
            raise UsageError(
                f"rank {rank} is not on another machine, or is not there at all.",
                next_step=f"name one of {sorted(self._peers)}.",
            )


class _Sending:
    """A tensor on its way, which its receiver may have asked to keep for now."""

    def __init__(self) -> None:
        self._is_asked = asyncio.Event()

    def ask(self) -> None:
        """The receiver asks for it, or it is gone."""
        self._is_asked.set()

    async def until_asked(self, vigil: Vigil, to: int) -> None:
        """Wait until the receiver wants it, which it may have said already."""
        if not vigil.is_gone(to):
            await self._is_asked.wait()
        self._is_asked.clear()


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
