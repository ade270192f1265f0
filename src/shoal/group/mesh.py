"""Streams to the workers of other machines: tagged tensors, small calls, and who of them is there.

Every pair of workers on different machines is connected from the start, by TLS with the secret of the run. A
tensor travels as one message out of the memory where it lies into the memory where it was asked for. What the
messages mean is the business of others, as are workers of one's own machine; what waits to be taken lies in
the `mailbox`, and the `vigil` knows who is there. The file is long because tensors and calls begin and end in
the same ways, best seen in one place.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Collection, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
import torch

from shoal.core import (
    Address,
    Deadline,
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
    UsageError,
)
from shoal.core.identity import Identity
from shoal.group.addresses import LOOPBACK
from shoal.group.base import Loss
from shoal.group.mailbox import NO_ROOM, Key, Mailbox, NoRoom, flat_bytes, view_of
from shoal.group.mesh_handle import MeshHandle, Wake
from shoal.group.mesh_traffic import MeshTraffic, size_of
from shoal.group.vigil import Ending, Vigil
from shoal.transport import (
    Allocate,
    Head,
    Limits,
    Membership,
    Reply,
    Serve,
    StreamTransport,
    SwarmSecret,
)

if TYPE_CHECKING:
    from shoal.group.base import GroupSettings
    from shoal.group.rendezvous import Rendezvous, Seat

__all__ = ["Mesh", "MeshHandle", "MeshSettings", "MeshTraffic"]
log = logging.getLogger(__name__)
_SEND, _AGAIN = "mesh.send", "mesh.again"
_CONNECTING_S = 60.0
_FAREWELL_S = 2.0
_BUSY_S = 0.02
_SETTING_S = 30.0
"""How much later than one worker another may set its handlers."""
_ANY_SIZE = 1 << 50  # what is in flight is bounded by the mailbox, and by memory that others have given


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
