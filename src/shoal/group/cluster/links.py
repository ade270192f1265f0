"""Tensors on their way between workers of different machines: a mailbox, and the connections that carry them.

Each worker that has something for another makes one connection to it, and a thread sends over it; the other
side receives in a thread. Blocking sockets copy without the interpreter's lock, straight out of the memory
where a tensor lies and into the memory where it was asked for. A frame is a head, the tensor's key and its
bytes; a connection goes one way, so that nothing but this is ever read from it.

What waits to be taken lies in the `Mailbox`, where each tensor that has come and each that is waited for
finds its counterpart by its key. What was asked for before it came is received where it belongs. What nobody
has asked for yet lies in memory of the mailbox. Of tensors that are sent unasked (`is_bounded`) a sender
keeps back what would be too much, until it is told that others were claimed; all other tensors are sent by
operations that their receiver has begun, too. Mailbox and handles are for any thread.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import queue
import secrets
import select
import socket
import ssl
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec
import torch

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    PeerId,
    PeerLost,
    PeerRefused,
    ShoalError,
    TensorError,
)
from shoal.core.fork import close_in_children, keep_in_children
from shoal.core.threads import ByteThreads
from shoal.group.base import Handle
from shoal.tensors.memory import copy_into, tensor_over
from shoal.transport import BufferPool, Membership, byte_view
from shoal.transport.trust.certificates import peer_id_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
log = logging.getLogger(__name__)
Key = tuple[int | str, ...]
_CONNECTING_S = 60.0
_MAGIC = b"SHLK\x01"
_NONCE_BYTES, _PROOF_BYTES = 16, 32
_HELLO = struct.Struct(f"<{len(_MAGIC)}sI{_NONCE_BYTES}s")
_HEAD = struct.Struct("<BxHxxxxQ")
"""The kind of a frame, the length of its key, and the tensor's bytes."""
_TENSOR, _BOUNDED, _ROOM = 1, 2, 3
_ROOM_PARTS = 8
"""A sender is told of room when this part of its room was claimed."""
_NOW_BYTES = 1 << 20
"""Up to this size a tensor leaves in the thread that sends it, if nothing is before it."""
_TLS_NOW_BYTES = 16 << 10
_JOINED_BYTES = 64 << 10
"""Up to this size a tensor is copied behind its head, so that both leave at once."""
_FAST_BYTES_PER_US = 5000
"""A network of 40 Gbit/s. What it carries in a round trip is as much as the system must hold of a connection
that is as fast; where more is under way, the processor's caches lose it before it is copied a second time,
and all takes 40 % longer between processes of one machine. On longer ways the system finds its own size."""
_MIN_BUFFER_BYTES, _MAX_BUFFER_BYTES = 256 << 10, 1 << 20
_RTT_OFFSET = 68
"""Of `tcpi_rtt`, microseconds, in Linux's `struct tcp_info`."""


class MeshHandle(Handle[T]):
    """A result or an error, once there is one; the first that is given counts."""

    __slots__ = ("_end", "_event", "_lock", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._end: tuple[T | None, Exception | None] | None = None
        self._event: threading.Event | None = None
        self._lock = threading.Lock()  # law: between whoever waits and whoever finishes

    def is_done(self) -> bool:
        """Tells whether `wait` would return, or raise, at once."""
        return self._end is not None

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result, when there is one; not for the mesh's own loop, which it would block."""
        if not self.is_done():
            with self._lock:
                event = self._event = self._event or threading.Event()  # law: set by whoever finishes it
                if self.is_done():
                    event.set()
            if not event.wait(None if deadline is None else deadline.timeout_s):
                raise DeadlineExceeded(f"{self._what} was not over before its deadline.")
        assert self._end is not None
        result, error = self._end
        if error is not None:
            raise error
        return cast("T", result)

    def finish(self, result: T | Exception) -> None:
        """Gives it its end, unless it has one."""
        with self._lock:
            if self._end is not None:
                return
            self._end = (None, result) if isinstance(result, Exception) else (result, None)
            event = self._event
        if event is not None:
            event.set()


class Delivery(MeshHandle[torch.Tensor | None]):
    """A tensor that somebody waits for, by this handle, or that is arriving or has arrived, or both.

    `on_arrival` is called with the tensor when it is there, by the thread that has received it, or by the one
    that asks for it after it has come.
    """

    __slots__ = (
        "content",
        "into",
        "is_bounded",
        "is_here",
        "is_wanted",
        "key",
        "on_arrival",
        "sender",
        "source",
    )

    def __init__(
        self,
        key: Key,
        source: int | None = None,
        into: torch.Tensor | None = None,
        on_arrival: Callable[[torch.Tensor], None] | None = None,
        *,
        is_wanted: bool = True,
    ) -> None:
        super().__init__("receiving")
        self.key = key
        self.source = source
        """Who shall send it; None for anybody."""
        self.into = into
        self.on_arrival = on_arrival
        self.is_wanted = is_wanted
        self.sender: int | None = None
        self.content: torch.Tensor | None = None
        """Flat, uint8, from when its bytes begin to arrive; of the memory of `into` where that was known."""
        self.is_here = False
        """Whether all bytes have arrived."""
        self.is_bounded = False
        """Whether it was sent unasked, and its sender is to be told that it was claimed."""

    def give_content(self) -> None:
        """Gives the tensor to whoever waits for it, copied if it did not come into its place."""
        assert self.content is not None
        given = self.content
        if self.into is not None:
            if self.into.nbytes != given.nbytes:
                self.finish(self.error_of_size(given.nbytes))
                return
            if self.into.data_ptr() != given.data_ptr():
                copy_into(flat_bytes(self.into), given)
            given = self.into
        if self.on_arrival is not None:
            # its memory serves the next one as soon as it was used, while the processor's cache holds it
            self.content = None
            self.on_arrival(given)
            self.finish(self.into)
            return
        self.finish(given)

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
        self.max_unclaimed_bytes = max_unclaimed_bytes
        """How much may lie here that was sent unasked; a tensor that is larger lies here alone."""
        self.on_claim: Callable[[int, int], None] = lambda rank, size_bytes: None
        """Is called with the sender and the bytes of each tensor that was sent unasked, and claimed."""
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
            self._give(wanted)

    def expect(self, source: int, key: Key, size_bytes: int, *, is_bounded: bool = False) -> memoryview:
        """Gives memory for a tensor that begins to arrive, also where another size is waited for."""
        with self._lock:
            found = self._find_wanted(source, key)
            if found is None:
                found = Delivery(key, is_wanted=False)
                self._lines.setdefault(key, []).append(found)
            found.sender, found.is_bounded = source, is_bounded
            if found.into is not None and found.into.nbytes == size_bytes:
                found.content = flat_bytes(found.into)
            else:
                room = self._pool.allocate(size_bytes)
                found.content = tensor_over(room) if size_bytes else torch.empty(0, dtype=torch.uint8)
            return view_of(found.content)

    def complete(self, source: int, key: Key) -> bool:
        """Takes note that all bytes of a tensor are here; tells whether somebody waits for its handle."""
        with self._lock:
            # a key names one tensor of a sender at a time
            found = self._find(key, lambda each: each.sender == source and not each.is_here)
            if found is None:  # its sender was given up
                return False
            found.is_here = True
            if not found.is_wanted:
                return False
            self._remove(found)
        self._give(found)
        return found.on_arrival is None

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
                        self._give(each)
            hopeless = [each for each in self._all() if each.content is None and is_hopeless(each.source)]
            for each in hopeless:
                self._remove(each)
        return hopeless

    def _give(self, found: Delivery) -> None:
        if found.is_bounded:
            assert found.sender is not None
            assert found.content is not None
            self.on_claim(found.sender, found.content.nbytes)
        found.give_content()

    def _join(self, wanted: Delivery) -> bool:
        """Takes what has come early, or begun to; unless all of it is here, the wait goes on."""
        source = wanted.source
        early = self._find(wanted.key, lambda each: not each.is_wanted and source in (None, each.sender))
        if early is not None:
            self._remove(early)
            wanted.sender, wanted.content, wanted.is_here = early.sender, early.content, early.is_here
            wanted.is_bounded = early.is_bounded
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


class Sending:
    """One frame to be sent, with the handle that is finished when it has left."""

    __slots__ = ("handle", "head", "is_bounded", "view")

    def __init__(self, head: bytes, view: memoryview, handle: MeshHandle[None], *, is_bounded: bool) -> None:
        self.head = head
        self.view = view
        self.handle = handle
        self.is_bounded = is_bounded

    @classmethod
    def of_tensor(
        cls, key: Key, view: memoryview, handle: MeshHandle[None], *, is_bounded: bool = False
    ) -> Sending:
        """Makes the frame of a tensor, which must not be written until the handle is done."""
        packed = msgspec.msgpack.encode(key)
        head = _HEAD.pack(_BOUNDED if is_bounded else _TENSOR, len(packed), view.nbytes) + packed
        return cls(head, view, handle, is_bounded=is_bounded)

    @classmethod
    def of_room(cls, size_bytes: int) -> Sending:
        """Makes the frame that tells a sender of room."""
        return cls(_HEAD.pack(_ROOM, 0, size_bytes), memoryview(b""), MeshHandle("room"), is_bounded=False)


class _Sender:
    """What goes to one worker, in order; one thread sends it, or, if it is small, whoever gives it."""

    def __init__(self, room_bytes: int, on_empty: Callable[[], None]) -> None:
        self._on_empty = on_empty
        self.num_sent = 0
        self.num_unsent = 0
        self.sent_bytes = 0
        self._room_bytes = room_bytes
        self._unclaimed_bytes = 0
        self._queue: deque[Sending] = deque()
        self._without_room: deque[Sending] = deque()
        self._lock = threading.Lock()  # law: between the threads that send, and the one that serves
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._is_busy = True
        """Whether somebody is sending what is in the queue, and will look at it again."""
        self._rest = memoryview(b"")
        """What is left of the first one in the queue, where some of it has left."""
        self._error: PeerLost | None = None

    def put(self, sending: Sending) -> None:
        """Sends after all that was put before, bounded ones when there is room."""
        with self._lock:
            if self._error is not None:
                sending.handle.finish(self._error)
                return
            self.num_unsent += 1
            if sending.is_bounded:
                if self._without_room or not self._has_room(sending):
                    self._without_room.append(sending)
                    return
                self._unclaimed_bytes += sending.view.nbytes
            self._queue.append(sending)
            if self._is_busy:
                return
            self._is_busy = True
        if not self._send_now(sending):
            self._wakes.put(None)

    def regain(self, size_bytes: int) -> None:
        """Takes note that the receiver has claimed so much."""
        with self._lock:
            self._unclaimed_bytes -= size_bytes
            while self._without_room and self._has_room(self._without_room[0]):
                sending = self._without_room.popleft()
                self._unclaimed_bytes += sending.view.nbytes
                self._queue.append(sending)
            if not self._queue or self._is_busy:
                return
            self._is_busy = True
        self._wakes.put(None)

    def _has_room(self, sending: Sending) -> bool:
        # one that is larger than all the room goes alone; what was claimed and not told of may be left
        is_alone = self._unclaimed_bytes <= self._room_bytes // _ROOM_PARTS
        return is_alone or self._unclaimed_bytes + sending.view.nbytes <= self._room_bytes

    def serve(self, connected: socket.socket) -> None:
        """Sends all that comes, until it is closed."""
        with self._lock:
            self._socket = connected
        while self._error is None:
            while (sending := self._next()) is not None:
                _send_all(connected, sending, self._rest)
                self._rest = memoryview(b"")
                self._left(sending)
            self._on_empty()
            self._wakes.get()

    def close(self, error: PeerLost) -> None:
        """Sends nothing more; what has not left ends in an error."""
        with self._lock:
            self._error = self._error or error
            unsent = [*self._queue, *self._without_room]
            self._queue.clear()
            self._without_room.clear()
            self.num_unsent = 0
            connected = self._socket
        for sending in unsent:
            sending.handle.finish(self._error)
        if connected is not None:
            _shut(connected)
        self._wakes.put(None)

    def _next(self) -> Sending | None:
        with self._lock:
            if not self._queue:
                self._is_busy = False
                return None
            return self._queue[0]

    def _left(self, sending: Sending) -> None:
        with self._lock:
            if self._queue and self._queue[0] is sending:
                self._queue.popleft()
                self.num_unsent -= 1
            self.num_sent += bool(len(sending.head) > _HEAD.size)
            self.sent_bytes += len(sending.head) - _HEAD.size + sending.view.nbytes
        sending.handle.finish(None)

    def _send_now(self, sending: Sending) -> bool:
        """Sends a small one without waiting; False when the thread must go on."""
        connected = self._socket
        assert connected is not None
        size_bytes = len(sending.head) + sending.view.nbytes
        try:
            if isinstance(connected, ssl.SSLSocket):
                if size_bytes > _TLS_NOW_BYTES or not _is_writable(connected):
                    return False
                connected.sendall(sending.head + sending.view)
            else:
                if size_bytes > _NOW_BYTES:
                    return False
                sent = connected.sendmsg([sending.head, sending.view], (), socket.MSG_DONTWAIT)
                if sent < len(sending.head):
                    self._rest = memoryview(sending.head + sending.view)[sent:]
                    return False
                if sent < size_bytes:
                    self._rest = sending.view[sent - len(sending.head) :]
                    return False
        except OSError:  # the thread finds it again
            return False
        self._left(sending)
        return self._next() is None


class Links:
    """One worker's connections that carry tensors to and from the workers of other machines.

    `key` is known to the members of the run alone: who connects proves that it knows it, and so does who is
    connected to. With a `membership` all is sent by TLS 1.3, and both sides compare the other's id.
    """

    def __init__(
        self,
        rank: int,
        mailbox: Mailbox,
        key: bytes,
        membership: Membership | None,
        *,
        on_arrival: Callable[[int, bool], None],
        on_sent: Callable[[], None],
        on_broken: Callable[[int, str], None],
    ) -> None:
        self.rank = rank
        self.received_bytes: dict[int, int] = {}
        """By rank; written by the thread that receives from it."""
        self.num_received: dict[int, int] = {}
        """How many tensors have come from each rank."""
        self._mailbox = mailbox
        mailbox.on_claim = self._give_room
        self._key = key
        self._membership = membership
        self._on_arrival = on_arrival
        self._on_sent = on_sent
        self._on_broken = on_broken
        self._threads = ByteThreads()
        self._senders: dict[int, _Sender] = {}
        self._ids: Mapping[int, PeerId | None] = {}
        self._addresses: dict[int, Address] = {}
        self._incoming: dict[int, socket.socket] = {}
        self._claimed_bytes: dict[int, int] = {}
        """What was claimed here, and its sender was not told of yet."""
        self._lock = threading.Lock()  # law: of the maps above, between threads that move bytes
        self._is_open = True

    def expect(self, ids: Mapping[int, PeerId | None]) -> None:
        """Says who may connect, by rank; before anybody knows where."""
        self._ids = ids

    def set_address(self, rank: int, address: Address) -> None:
        """Says where a worker takes connections; one is made when something is to be sent."""
        self._addresses[rank] = address

    # --- sending ---

    def send(self, to: int, sending: Sending) -> None:
        """Sends one tensor after those that were given before; its handle is done when it has left here."""
        sender = self._senders.get(to)
        if sender is None:
            with self._lock:
                is_new = to not in self._senders and self._is_open
                if is_new:
                    self._senders[to] = _Sender(self._room_bytes, self._on_sent)
                sender = self._senders.get(to)
            if sender is None:
                sending.handle.finish(_gone(to))
                return
            if is_new:
                self._threads.start(f"shoal-send-{to}", lambda: self._connect_and_send(to, sender))
        sender.put(sending)

    @property
    def num_unsent(self) -> int:
        """How many tensors have not left yet."""
        return sum(sender.num_unsent for sender in tuple(self._senders.values()))

    @property
    def num_sent(self) -> dict[int, int]:
        """How many tensors have left for each rank."""
        return {rank: sender.num_sent for rank, sender in tuple(self._senders.items())}

    @property
    def sent_bytes(self) -> Counter[int]:
        """How many bytes have left for each rank."""
        return Counter({rank: sender.sent_bytes for rank, sender in tuple(self._senders.items())})

    def _connect_and_send(self, to: int, sender: _Sender) -> None:
        address, peer_id = self._addresses[to], self._ids[to]
        try:
            connected = self._dial(address, peer_id)
        except (OSError, ShoalError) as error:
            sender.close(_gone(to))
            self._on_broken(to, f"its port for tensors, {address}, cannot be used: {error}")
            return
        try:
            sender.serve(connected)
        except OSError as error:
            sender.close(_gone(to))
            self._on_broken(to, f"the connection for tensors ended: {error}")
        finally:
            _close(connected)

    def _dial(self, address: Address, peer_id: PeerId | None) -> socket.socket:
        connected = socket.create_connection((address.host, address.port), _CONNECTING_S)
        try:
            _prepare(connected)
            if self._membership is not None:
                connected = self._membership.client_tls().wrap_socket(connected)
                if peer_id is not None and _id_of(connected) != peer_id:
                    raise PeerRefused(f"{address} is another peer than the one that was told.")
                connected.sendall(_HELLO.pack(_MAGIC, self.rank, bytes(_NONCE_BYTES)))
            else:
                mine = secrets.token_bytes(_NONCE_BYTES)
                connected.sendall(_HELLO.pack(_MAGIC, self.rank, mine))
                answer = _read_exactly(connected, _NONCE_BYTES + _PROOF_BYTES)
                theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
                if not hmac.compare_digest(proof, self._proof(b"callee", self.rank, mine, theirs)):
                    raise PeerRefused(f"{address} is not of this run.")
                connected.sendall(self._proof(b"caller", self.rank, mine, theirs))
            connected.settimeout(None)
        except BaseException:
            connected.close()
            raise
        close_in_children(connected.fileno())
        return connected

    def _proof(self, role: bytes, rank: int, caller: bytes, callee: bytes) -> bytes:
        return hmac.digest(self._key, role + rank.to_bytes(4, "little") + caller + callee, "sha256")

    # --- receiving ---

    def accept(self, connected: socket.socket) -> None:
        """Serves a connection that was made with this worker, in a thread of its own."""
        self._threads.start("shoal-receive", lambda: self._receive(connected))

    def _receive(self, connected: socket.socket) -> None:
        rank = None
        try:
            connected.settimeout(_CONNECTING_S)
            _prepare(connected)
            connected, rank = self._admit(connected)
            connected.settimeout(None)
            close_in_children(connected.fileno())
            with self._lock:
                if not self._is_open:
                    return
                self._incoming[rank] = connected
            self.received_bytes.setdefault(rank, 0)
            self.num_received.setdefault(rank, 0)
            while self._take(rank, connected):
                pass
        except (OSError, ShoalError, msgspec.DecodeError, ValueError) as error:
            if rank is None:
                log.warning("a connection for tensors was refused: %s", error)
            elif self._is_open:
                self._on_broken(rank, f"the connection for tensors ended: {error}")
        finally:
            _close(connected)

    def _admit(self, connected: socket.socket) -> tuple[socket.socket, int]:
        """Finds out which rank has connected; PeerRefused when it does not prove it."""
        if self._membership is not None:
            connected = self._membership.server_tls().wrap_socket(connected, server_side=True)
        magic, rank, theirs = _HELLO.unpack(_read_exactly(connected, _HELLO.size))
        if magic != _MAGIC or rank not in self._ids:
            raise PeerRefused("it is no worker of another machine, or speaks another version.")
        if self._membership is not None:
            peer_id = self._ids[rank]
            if peer_id is not None and _id_of(connected) != peer_id:
                raise PeerRefused(f"it is not rank {rank}.")
            return connected, rank
        mine = secrets.token_bytes(_NONCE_BYTES)
        connected.sendall(mine + self._proof(b"callee", rank, theirs, mine))
        proof = _read_exactly(connected, _PROOF_BYTES)
        if not hmac.compare_digest(proof, self._proof(b"caller", rank, theirs, mine)):
            raise PeerRefused("it does not know the key of this run.")
        return connected, rank

    def _take(self, rank: int, connected: socket.socket) -> bool:
        """Receives one frame; False at the end of the connection."""
        head = bytearray(_HEAD.size)
        if not _fill(connected, memoryview(head), is_first=True):
            return False
        kind, key_bytes, size_bytes = _HEAD.unpack(head)
        if kind == _ROOM:
            sender = self._senders.get(rank)
            if sender is not None:
                sender.regain(size_bytes)
            return True
        key = msgspec.msgpack.decode(_read_exactly(connected, key_bytes), type=tuple[int | str, ...])
        is_bounded = kind == _BOUNDED
        view = self._mailbox.expect(rank, key, size_bytes, is_bounded=is_bounded)
        _fill(connected, view)
        self.received_bytes[rank] += key_bytes + size_bytes
        is_wanted = self._mailbox.complete(rank, key)
        self.num_received[rank] += 1  # only now: of one that has left nothing is waited for any more then
        self._on_arrival(rank, is_wanted)
        return True

    @property
    def _room_bytes(self) -> int:
        return self._mailbox.max_unclaimed_bytes // max(1, len(self._ids))

    def _give_room(self, rank: int, size_bytes: int) -> None:
        """Tells a sender, not after every tensor, that those which it sent unasked were claimed."""
        with self._lock:
            claimed_bytes = self._claimed_bytes.get(rank, 0) + size_bytes
            is_due = claimed_bytes >= self._room_bytes // _ROOM_PARTS
            self._claimed_bytes[rank] = 0 if is_due else claimed_bytes
        if is_due:
            self.send(rank, Sending.of_room(claimed_bytes))

    # --- their end ---

    def drop(self, rank: int, error: PeerLost, *, has_left: bool = False) -> None:
        """Sends nothing more to a worker that is gone; what one that `has_left` has sent still comes."""
        with self._lock:
            incoming = None if has_left else self._incoming.pop(rank, None)
            sender = self._senders.get(rank)
        if sender is not None:
            sender.close(error)
        if incoming is not None:
            _shut(incoming)

    def close(self, deadline: Deadline) -> None:
        """Ends all connections; what has not left by now does not leave."""
        with self._lock:
            self._is_open = False
            ranks = [*self._senders, *self._incoming]
        for rank in ranks:
            self.drop(rank, _gone(rank))
        self._threads.join(deadline)


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


def _prepare(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    buffer_bytes = _round_trip_us(connected) * _FAST_BYTES_PER_US
    if 0 < buffer_bytes <= _MAX_BUFFER_BYTES:
        for name in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connected.setsockopt(socket.SOL_SOCKET, name, max(buffer_bytes, _MIN_BUFFER_BYTES))


def _round_trip_us(connected: socket.socket) -> int:
    """Gives what connecting has shown of the network's delay; 0 where the system does not say."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    with contextlib.suppress(OSError, struct.error):
        info = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RTT_OFFSET + 4)
        return int(struct.unpack_from("=I", info, _RTT_OFFSET)[0])
    return 0


def _send_all(connected: socket.socket, sending: Sending, rest: memoryview) -> None:
    if len(rest):
        connected.sendall(rest)
    elif sending.view.nbytes <= _JOINED_BYTES:
        connected.sendall(sending.head + sending.view)
    else:
        connected.sendall(sending.head)
        connected.sendall(sending.view)


def _fill(connected: socket.socket, view: memoryview, *, is_first: bool = False) -> bool:
    """Receives as much as the memory holds; False where the connection ends before, if it `is_first`."""
    flags = 0 if isinstance(connected, ssl.SSLSocket) else socket.MSG_WAITALL
    while len(view):
        num_bytes = connected.recv_into(view, 0, flags)
        if not num_bytes:
            if is_first:
                return False
            raise ConnectionError("it ended in the middle of a tensor")
        view, is_first = view[num_bytes:], False
    return True


def _read_exactly(connected: socket.socket, num_bytes: int) -> bytes:
    memory = bytearray(num_bytes)
    _fill(connected, memoryview(memory))
    return bytes(memory)


def _is_writable(connected: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLOUT)
    return bool(poll.poll(0))


def _id_of(connected: socket.socket) -> PeerId | None:
    assert isinstance(connected, ssl.SSLSocket)
    certificate = connected.getpeercert(binary_form=True)
    return None if certificate is None else peer_id_of(certificate)


def _shut(connected: socket.socket) -> None:
    """Ends a connection, so that a thread that blocks on it goes on."""
    with contextlib.suppress(OSError):
        # of TLS, too, the socket itself: its own end would be a message
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


def _close(connected: socket.socket) -> None:
    if connected.fileno() >= 0:
        keep_in_children(connected.fileno())
    connected.close()


def _gone(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} is gone.", peer=rank)
