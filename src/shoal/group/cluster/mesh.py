"""Streams to the workers of other machines: tagged tensors, small calls, and who of them is there.

Every pair of workers on different machines is connected from the start, by TLS with the secret of the run:
calls, heartbeats and farewells go that way. Tensors travel over connections of their own (`links`). What the
messages mean is the business of others, as are workers of one's own machine; the `HeartbeatMonitor` knows who
is there.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import inspect
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import torch

from shoal.core import (
    Address,
    Deadline,
    LoopThread,
    Peer,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ShoalError,
    StandingScope,
    UsageError,
)
from shoal.core.fork import close_in_children, keep_in_children
from shoal.core.identity import Identity
from shoal.core.run_options import SILENCE_S
from shoal.group.base import Loss
from shoal.group.cluster.links import (
    Delivery,
    Handshake,
    Key,
    Mailbox,
    MeshHandle,
    TensorLinks,
    flat_bytes,
    view_of,
)
from shoal.group.cluster.members import Departure, HeartbeatMonitor
from shoal.group.cluster.rendezvous import LOOPBACK
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

T = TypeVar("T")
log = logging.getLogger(__name__)
CONNECTING_S = 60.0
_FAREWELL_S = 2.0
_BUSY_S = 0.02
_BACKLOG = 128
_ARRIVING_S = 5.0
_SETTING_S = 30.0
"""How much later than one worker another may set its handlers."""
_LOOK_S, _SLOWEST_LOOK_S = 2e-4, 5e-3
_ANY_SIZE = 1 << 50  # what is in flight is bounded by the mailbox, and by memory that others have given


async def poll_until(is_done: Callable[[], bool]) -> None:
    """Looks again and again, ever more rarely: what is waited for happens in another thread."""
    nap_s = _LOOK_S
    while not is_done():
        await asyncio.sleep(nap_s)
        nap_s = min(1.25 * nap_s, _SLOWEST_LOOK_S)


async def _wait_readable(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_ready = asyncio.Event()
    loop.add_reader(listener, is_ready.set)
    try:
        await is_ready.wait()
    finally:
        loop.remove_reader(listener)


class Mesh:
    """One worker's streams to those of other machines; it can be used after `listen` and `connect`.

    `secret` is the run's, of 32 characters or more, `host` an address of this machine that the others reach.
    Tensors that were sent unasked, and nobody has asked for yet, take up to `max_unclaimed_bytes`.
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
        """Whether tensors are encrypted on their way; calls always are."""
        self.loop = LoopThread("shoal-mesh")
        self._called_bytes: collections.Counter[int] = collections.Counter()
        """What was sent in calls and replies by rank, without beats; written by the loop's thread alone."""
        self._answered_bytes: collections.Counter[int] = collections.Counter()
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
        self._links = TensorLinks(
            self._mailbox,
            Handshake(rank, self._membership, is_encrypted=is_encrypted),
            on_arrival=self._arrived,
            on_sent=self.wake,
            on_broken=self._link_broke,
        )
        self._peers: dict[int, Peer] = {}
        self._receiving: dict[int | str, list[Delivery]] = {}
        """What was asked for, by the first part of its key: the number of an operation."""
        self.on_change: Callable[[], None] = lambda: None
        """Is called, on any thread, whenever a handle is over or a peer is lost or has left.

        It must be quick, and may look at handles only.
        """
        self._departure = Departure("failed")
        """How this worker goes when it is closed and what it sends is there."""
        self.monitor: HeartbeatMonitor
        """Knows who of the other machines' workers is there, from `listen` on."""
        self._is_open = False
        self._port = 0
        """Where tensors come."""

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
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        close_in_children(listener.fileno())
        self._port = listener.getsockname()[1]
        self.monitor = HeartbeatMonitor(self.rank, self._transport, scope, self._silence_s, self._give_up)
        scope.start_soon(self._accept(listener), name="accept connections for tensors")
        address = await self._transport.listen(Address(self._host, 0))
        return Peer(address, self._membership.peer_id)

    async def _accept(self, listener: socket.socket) -> None:
        """Hands connections for tensors to threads of their own.

        Not by `sock_accept`: what that has accepted when this task is cancelled, nobody would close.
        """
        try:
            while True:
                await _wait_readable(listener)
                try:
                    connected, _ = listener.accept()
                except BlockingIOError:  # whoever it was has gone
                    continue
                except OSError as error:
                    log.warning("cannot accept connections for tensors right now: %s", error)
                    await asyncio.sleep(_BUSY_S)
                    continue
                self._links.accept(connected)
        finally:
            keep_in_children(listener.fileno())
            listener.close()

    def connect(
        self,
        peers: Mapping[int, Peer],
        names: Mapping[int, str] | None = None,
        deadline: Deadline | None = None,
        route: Callable[[int, Address], Address] = lambda rank, address: address,
    ) -> None:
        """Connects with the workers of all other machines, by rank; returns when all of them have begun to.

        `names` say who they are ('process 4711 on node2') where one is lost. PeerLost names one that cannot
        be reached. Tests give a `route` by which a rank's address for tensors is reached.
        """
        self._peers.update(peers)
        self._links.expect({rank: peer.id for rank, peer in peers.items()})
        self.monitor.greeting = (self._port, self.is_encrypted, len(peers))
        deadline = deadline or Deadline.after(CONNECTING_S)
        greetings = self.loop.run(self.monitor.open(peers, names or {}, deadline))
        for rank, greeting in greetings.items():
            port, is_encrypted, num_peers = msgspec.convert(greeting, tuple[int, bool, int])
            if is_encrypted != self.is_encrypted:
                plain, other = (rank, self.rank) if self.is_encrypted else (self.rank, rank)
                raise UsageError(
                    f"rank {plain} sends tensors without encryption, and rank {other} encrypts them.",
                    next_step="give all workers the same encrypt= in shoal.init(), or leave it out.",
                )
            self._links.set_address(rank, route(rank, Address(peers[rank].address.host, port)), num_peers)

    def leave(self, after: int) -> None:
        """Tells all that this worker takes part in operations up to this number, once what it sends is there.

        It may send nothing after that.
        """
        self._departure = Departure("left", after)

        async def leave() -> None:
            await poll_until(self._has_sent_all)
            self.monitor.tell(self._told_departure())

        self._start("leaving", leave)

    def fail(self, culprit: int | None = None, error: BaseException | None = None) -> None:
        """Tells all that this worker takes part in nothing more, without having left; it can still ask.

        The others blame the lost `culprit`, if that is why, and not this worker. What was wrong with the
        call, where the error says that, may be theirs to mend: they are told it.
        """

        async def fail() -> None:
            loss = None if culprit is None else self.monitor.lost.get(culprit)
            reason = "it failed" if loss is None else loss.reason
            if isinstance(error, UsageError):
                reason = f"it failed: {error.what.rstrip('.')}"
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
                    await poll_until(self._has_sent_all)
                self.monitor.tell(self._told_departure())
            except TimeoutError:
                log.warning("rank %d ends while others have not taken what it sent", self.rank)
        self.monitor.tell(Departure("failed"))
        if is_patient:
            await self.monitor.say_farewell(Deadline.after(_FAREWELL_S))
        else:
            await asyncio.sleep(0)
        await self._standing.close()
        await self._transport.__aexit__(None, None, None)
        self._links.close(Deadline.after(_FAREWELL_S))
        for wanted in self._mailbox.give_up(lambda source: True):
            wanted.finish(_closed(f"receiving {wanted.key}"))

    @property
    def sent_bytes(self) -> Mapping[int, int]:
        """What has gone to each rank, tensors and calls with their heads, without beats."""
        return collections.Counter(self._called_bytes) + self._links.count("sent_bytes")

    @property
    def received_bytes(self) -> Mapping[int, int]:
        """What has come from each rank, likewise."""
        return collections.Counter(self._answered_bytes) + self._links.count("received_bytes")

    # --- tensors ---

    def send(self, to: int, key: Key, tensor: torch.Tensor, *, is_bounded: bool = False) -> MeshHandle[None]:
        """Sends a tensor of this machine's memory, which must not be written until that is done.

        It is done when all bytes have left this process. A key names one tensor at a time: it may be used
        again to the same peer when the one before has arrived. One that `is_bounded` may be sent before its
        receiver has begun the operation, and waits here where too much lies unclaimed there. PeerLost when
        the peer is gone.
        """
        self._check_peer(to)
        if self.monitor.is_gone(to):
            handle: MeshHandle[None] = MeshHandle("sending a tensor")
            handle.finish(self.monitor.why_gone(to))
            return handle
        return self._links.send(to, key, view_of(flat_bytes(tensor)), is_bounded=is_bounded)

    def receive(
        self,
        source: int | None,
        key: Key,
        into: torch.Tensor | None = None,
        on_arrival: Callable[[torch.Tensor], None] | None = None,
    ) -> Delivery:
        """Gives what was or will be sent under this key, by `source` or, where that is None, by anybody.

        It comes straight into `into` when it was asked for before it came; without `into` it is a flat uint8
        tensor of memory of its own. `on_arrival` is called with it, often in the thread that receives it, and
        must be quick. From a source that has left without sending it comes None, from one that is lost
        PeerLost.
        """
        if source is not None:
            self._check_peer(source)
        if into is not None:
            flat_bytes(into)
        wanted = Delivery(key, source, into, on_arrival)
        self._receiving.setdefault(key[0], []).append(wanted)
        self._mailbox.want(wanted)
        if not wanted.is_done() and self._is_hopeless(source):
            self._give_up()
        return wanted

    def _is_hopeless(self, source: int | None) -> bool:
        return all(self._is_silent(rank) for rank in (self._peers if source is None else [source]))

    def _is_silent(self, rank: int) -> bool:
        """Tells whether nothing more comes from a rank: it is lost, or has left and all of it is here."""
        if rank in self.monitor.lost:
            return True
        num_sent = self.monitor.num_sent_by.get(rank, 0)
        return rank in self.monitor.left and self._links.count("num_received")[rank] >= num_sent

    def _give_up(self) -> None:
        """Ends all that is received from those who are gone: in None from one that has left in order."""
        for rank in (*self.monitor.lost, *self.monitor.left):
            has_left = rank not in self.monitor.lost
            self._links.drop(rank, self.monitor.why_gone(rank), has_left=has_left)
        for wanted in self._mailbox.give_up(self._is_hopeless):
            lost = self.monitor.lost
            source = max(lost, default=-1) if wanted.source is None else wanted.source
            wanted.finish(self.monitor.why_gone(source) if source in lost else None)
        self.wake()

    def forget(self, operation: int | str) -> None:
        """Lets nothing be written any more that an operation, which is over, has asked for."""
        for wanted in self._receiving.pop(operation, ()):
            if not wanted.is_done() and not self._mailbox.forget(wanted):
                with contextlib.suppress(ShoalError):  # it is just arriving, into memory of the operation
                    wanted.wait(Deadline.after(_ARRIVING_S))

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
        """Answers calls of this method, on the loop's thread; `monitor.rank_of` tells who calls.

        Calls that come before it is set wait at their callers for a while.
        """

        async def answer(head: Head, buffers: Sequence[memoryview]) -> Reply | None:
            rank = self.monitor.rank_of(head)
            self.monitor.heard(rank)
            self._answered_bytes[rank] += size_of(head.payload, ()) + head.total_bytes
            given: Any = serve(head, buffers)
            reply: Reply | None = await given if inspect.isawaitable(given) else given
            if reply is not None:
                self._called_bytes[rank] += size_of(reply.payload, reply.buffers)
            return reply

        self._transport.handle(method, answer, payload_type=payload_type)

    def _told_departure(self) -> Departure:
        """Gives how this worker goes, and what the others shall have received of it by then."""
        return msgspec.structs.replace(self._departure, num_sent=dict(self._links.count("num_sent")))

    def _has_sent_all(self) -> bool:
        return not any(self._links.count("num_unsent").values())

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
        self._called_bytes[to] += size_of(payload, buffers)
        self._answered_bytes[to] += size_of(reply.payload, reply.buffers)
        return reply

    # --- on the loop ---

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

    # --- in threads that receive tensors ---

    def _arrived(self, rank: int, is_wanted: bool) -> None:
        self.monitor.heard(rank)
        if rank in self.monitor.left and self._is_silent(rank):
            self._give_up()
        elif is_wanted:
            self.wake()

    def _link_broke(self, rank: int, reason: str, is_certain: bool) -> None:
        """Takes a worker for lost whose connection for tensors failed.

        Unless that `is_certain`, the monitor has the time to learn by itself how it went: it may have ended,
        or the network may be cut.
        """

        async def lose() -> None:
            await asyncio.sleep(_BUSY_S if is_certain else 1.5 * self._silence_s)
            self.monitor.lose(Loss(rank, reason))

        self._start("a broken connection", lose)

    def wake(self) -> None:
        """Lets whoever waits for something of the mesh look again."""
        self.on_change()

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
