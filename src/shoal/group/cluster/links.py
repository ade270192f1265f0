"""Tensors on their way between workers of different machines: a mailbox, and the connections that carry them.

Each worker that has something for another makes one connection to it, and a thread sends over it; the other
side receives in a thread (`transport.streams.one_way`), straight into the memory where a tensor was asked
for. A frame is a head, the tensor's key and its bytes; a connection goes one way, so that nothing but this is
ever read from it. Both sides prove who they are by TLS 1.3 (`Handshake`). Through it goes a key, with which
all that follows is sealed where tensors are encrypted.

What waits to be taken lies in the `Mailbox`, where each tensor that has come and each that is waited for
finds its counterpart by its key. What was asked for before it came is received where it belongs. What nobody
has asked for yet lies in memory of the mailbox. Of tensors that are sent unasked (`is_bounded`) a sender
keeps back what would be too much, until it is told that others were claimed; all other tensors are sent by
operations that their receiver has begun, too. Mailbox and handles are for any thread.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import secrets
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, cast

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
from shoal.core.loop import ByteThreads
from shoal.group.base import Handle
from shoal.tensors.memory import copy_into, tensor_over
from shoal.transport import BufferPool, Membership, byte_view
from shoal.transport.streams.one_way import KEY_BYTES, OneWayConnection, prepare, read_exactly
from shoal.transport.trust.tls import peer_id_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")
log = logging.getLogger(__name__)
Key = tuple[int | str, ...]
_CONNECTING_S, _AGAIN_S, _GREETING_S = 60.0, 0.2, 10.0
_MAGIC = b"SHLK\x02"
_HELLO = struct.Struct(f"<{len(_MAGIC)}sI{KEY_BYTES}s")
_NOTHING = memoryview(b"")
_HEAD = struct.Struct("<BxHxxxxQ")
"""The kind of a frame, the length of its key, and the tensor's bytes, or those for which there is room."""
_TENSOR, _BOUNDED, _ROOM = 1, 2, 3
_ROOM_PARTS = 8
"""A sender is told of room when this part of its room was claimed."""


class MeshHandle(Handle[T]):
    """A result or an error, once there is one; the first that is given counts."""

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


@dataclass(eq=False)
class Delivery(MeshHandle[torch.Tensor | None]):
    """A tensor that somebody waits for, by this handle, or that is arriving or has arrived, or both.

    `on_arrival` is called with the tensor when it is there, by the thread that has received it, or by the one
    that asks for it after it has come.
    """

    key: Key
    source: int | None = None
    """Who shall send it; None for anybody."""
    into: torch.Tensor | None = None
    on_arrival: Callable[[torch.Tensor], None] | None = None
    is_wanted: bool = True
    sender: int | None = None
    content: torch.Tensor | None = None
    """Flat, uint8, from when its bytes begin to arrive; of the memory of `into` where that was known."""
    is_here: bool = False
    """Whether all bytes have arrived."""
    is_bounded: bool = False
    """Whether it was sent unasked, and its sender is to be told that it was claimed."""

    def __post_init__(self) -> None:
        super().__init__("receiving")

    def give_content(self) -> None:
        """Gives the tensor to whoever waits for it, copied if it did not come into its place."""
        assert self.content is not None
        given = self.content
        if self.into is not None:
            if self.into.nbytes != given.nbytes:
                self.finish(
                    TensorError(
                        f"rank {self.sender} sent {given.nbytes:,} bytes as {self.key}, for which there are "
                        f"{self.into.nbytes:,} here.",
                        cause="the workers disagree on a tensor's shape or dtype.",
                        next_step="call the same operations with equal shapes on all workers.",
                    )
                )
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
            found = self._find(key, lambda each: each.content is None and each.source in (None, source))
            if found is not None and found.into is not None and found.into.nbytes == size_bytes:
                content = flat_bytes(found.into)
            else:
                room = self._pool.allocate(size_bytes)
                content = tensor_over(room) if size_bytes else torch.empty(0, dtype=torch.uint8)
            if found is None:
                found = Delivery(key, is_wanted=False)
                self._lines.setdefault(key, []).append(found)
            found.sender, found.is_bounded, found.content = source, is_bounded, content
            return view_of(content)

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

    def _remove(self, delivery: Delivery) -> None:
        line = self._lines[delivery.key]
        line.remove(delivery)
        if not line:
            del self._lines[delivery.key]


class Sending(MeshHandle[None]):
    """One frame to be sent, which is done when it has left; its memory must not be written until then."""

    def __init__(self, kind: int, size_bytes: int, key: bytes = b"", view: memoryview = _NOTHING) -> None:
        super().__init__("sending a tensor")
        self.kind = kind
        self.head = _HEAD.pack(kind, len(key), size_bytes) + key
        self.view = view


class _Link:
    """One worker of another machine: what goes there, in order, and what has come from there.

    A thread sends, or, if it is small, whoever gives it. Another one receives.
    """

    def __init__(self, rank: int, on_empty: Callable[[], None]) -> None:
        self.rank = rank
        self.address: Address
        """Where it takes connections, once that is known."""
        self.room_bytes = 0
        """What it has room for of what this worker sends unasked."""
        self.claimed_bytes = 0
        """What it has sent unasked, and was claimed here, and it was not told of yet."""
        self.num_sent = self.sent_bytes = self.num_received = self.received_bytes = 0
        self.lock = threading.Lock()  # law: between the threads that send, and those that serve
        self._on_empty = on_empty
        self._unclaimed_bytes = 0
        self._queue: deque[Sending] = deque()
        self._without_room: deque[Sending] = deque()
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._outgoing: OneWayConnection | None = None
        self._incoming: OneWayConnection | None = None
        self._dialed: socket.socket | None = None
        """What has connected and is not served yet."""
        self._has_thread = False
        self._is_busy = True
        """Whether somebody is sending what is in the queue, and will look at it again."""
        self._rest = _NOTHING
        """What is left of the first one in the queue, where some of it has left."""
        self._error: PeerLost | None = None
        """Why nothing more is sent."""
        self._is_cut = False
        """Whether nothing more is received."""

    @property
    def num_unsent(self) -> int:
        """How many frames have not left yet."""
        with self.lock:
            return len(self._queue) + len(self._without_room)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is sent."""
        return self._error is not None

    def must_connect(self) -> bool:
        """Tells the first one who wants to send something that a thread must be started for it."""
        if self._has_thread:
            return False
        with self.lock:
            is_first, self._has_thread = not self._has_thread and self._error is None, True
            return is_first

    def put(self, sending: Sending) -> None:
        """Sends after all that was put before, bounded ones when there is room."""
        with self.lock:
            if self._error is not None:
                sending.finish(self._error)
                return
            if sending.kind == _BOUNDED:
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
        with self.lock:
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
        is_alone = self._unclaimed_bytes <= self.room_bytes // _ROOM_PARTS
        return is_alone or self._unclaimed_bytes + sending.view.nbytes <= self.room_bytes

    def dialed(self, connected: socket.socket) -> None:
        """Has `close` end a connection before it is served, too: a peer behind a cut never greets."""
        with self.lock:
            self._dialed = connected
            if self._error is not None:
                raise OSError("The worker that connects is closed.")

    def serve(self, wire: OneWayConnection) -> None:
        """Sends all that comes, until it is closed."""
        with self.lock:
            self._outgoing, self._dialed = wire, None
        while self._error is None:
            while (sending := self._next()) is not None:
                if len(self._rest):
                    wire.socket.sendall(self._rest)
                    self._rest = _NOTHING
                else:
                    wire.send(sending.head, sending.view)
                self._left(sending)
            self._on_empty()
            self._wakes.get()

    def take_from(self, wire: OneWayConnection) -> bool:
        """Receives by this connection from now on; False when nothing is received any more."""
        with self.lock:
            if not self._is_cut:
                self._incoming = wire
            return not self._is_cut

    def is_taking(self, wire: OneWayConnection) -> bool:
        """Tells whether what comes by a connection counts: it does not when its sender was given up."""
        return self._incoming is wire

    def close(self, error: PeerLost, *, should_cut: bool) -> None:
        """Sends nothing more, and what has not left ends in an error; nor receives, if it `should_cut`."""
        with self.lock:
            self._error = self._error or error
            unsent = [*self._queue, *self._without_room]
            self._queue.clear()
            self._without_room.clear()
            wires = [self._outgoing]
            if self._dialed is not None:
                with contextlib.suppress(OSError):  # not TLS's own, which the thread that dials still needs
                    socket.socket.shutdown(self._dialed, socket.SHUT_RDWR)
            if should_cut:
                self._is_cut = True
                wires.append(self._incoming)
                self._incoming = None
        for sending in unsent:
            sending.finish(self._error)
        for wire in wires:
            if wire is not None:
                wire.shut()
        self._wakes.put(None)

    def _next(self) -> Sending | None:
        with self.lock:
            if not self._queue:
                self._is_busy = False
                return None
            return self._queue[0]

    def _left(self, sending: Sending) -> None:
        with self.lock:
            # first of all: whoever sees that nothing is left must see all that was sent
            self.num_sent += sending.kind != _ROOM
            self.sent_bytes += len(sending.head) - _HEAD.size + sending.view.nbytes
            if self._queue and self._queue[0] is sending:
                self._queue.popleft()
        sending.view = _NOTHING
        sending.finish(None)

    def _send_now(self, sending: Sending) -> bool:
        """Sends one that is not large without waiting; False when the thread must go on."""
        wire = self._outgoing
        assert wire is not None
        try:
            rest = wire.send_now(sending.head, sending.view)
        except OSError:  # the thread finds it again
            return False
        if rest is None:
            return False
        if len(rest):
            self._rest = rest
            return False
        self._left(sending)
        return self._next() is None


class Handshake:
    """How two workers prove to each other who they are when they connect: by TLS 1.3, which then ends.

    A key goes through it, by which all that follows is sealed, if it `is_encrypted`.
    """

    def __init__(self, rank: int, membership: Membership, *, is_encrypted: bool) -> None:
        self.rank = rank
        self._membership = membership
        self._is_encrypted = is_encrypted

    def dial(
        self, rank: int, address: Address, peer_id: PeerId | None, opened: Callable[[socket.socket], None]
    ) -> OneWayConnection:
        """Connects with a rank; PeerRefused where somebody else answers, OSError where nobody does.

        `opened` is given what has connected, before the other side has greeted.
        """
        connected = socket.create_connection((address.host, address.port), _CONNECTING_S)
        try:
            prepare(connected)
            tls = connected = self._membership.client_tls().wrap_socket(
                connected, do_handshake_on_connect=False
            )
            opened(tls)
            tls.do_handshake()
            if peer_id is not None and _id_of(tls) != peer_id:
                raise PeerRefused(f"The process at {address} is not rank {rank} of this run.")
            key = secrets.token_bytes(KEY_BYTES)
            tls.sendall(_HELLO.pack(_MAGIC, self.rank, key))
            return self._begin(tls, key)
        except ssl.SSLCertVerificationError:
            connected.close()
            raise PeerRefused(f"The process at {address} is not of this run.") from None
        except BaseException:
            connected.close()
            raise

    def admit(
        self, connected: socket.socket, ids: Mapping[int, PeerId | None]
    ) -> tuple[int, OneWayConnection]:
        """Finds out which of some ranks has connected; PeerRefused when it does not prove it."""
        connected.settimeout(_GREETING_S)
        prepare(connected)
        tls = self._membership.server_tls().wrap_socket(connected, server_side=True)
        try:
            magic, rank, key = _HELLO.unpack(read_exactly(tls, _HELLO.size))
            if magic != _MAGIC or rank not in ids:
                raise PeerRefused("it is no worker of another machine, or speaks another version.")
            if ids[rank] is not None and _id_of(tls) != ids[rank]:
                raise PeerRefused(f"it is not rank {rank}.")
            return rank, self._begin(tls, key)
        except BaseException:
            tls.close()
            raise

    def _begin(self, tls: ssl.SSLSocket, key: bytes) -> OneWayConnection:
        """Ends TLS on both sides of a connection, and gives it for what comes after."""
        tls.unwrap()
        connected = socket.socket(fileno=tls.detach())
        connected.settimeout(None)
        return OneWayConnection(connected, key if self._is_encrypted else None)


class TensorLinks:
    """One worker's connections that carry tensors to and from the workers of other machines."""

    def __init__(
        self,
        mailbox: Mailbox,
        handshake: Handshake,
        *,
        on_arrival: Callable[[int, bool], None],
        on_sent: Callable[[], None],
        on_broken: Callable[[int, str, bool], None],
    ) -> None:
        self._mailbox = mailbox
        mailbox.on_claim = self._give_room
        self._handshake = handshake
        self._on_arrival = on_arrival
        self._on_sent = on_sent
        self._on_broken = on_broken
        self._threads = ByteThreads()
        self._ids: Mapping[int, PeerId | None] = {}
        self._links: dict[int, _Link] = {}

    def expect(self, ids: Mapping[int, PeerId | None]) -> None:
        """Says who may connect, by rank; before anybody knows where."""
        self._ids = ids
        self._links = {rank: _Link(rank, self._on_sent) for rank in ids}

    def set_address(self, rank: int, address: Address, num_peers: int) -> None:
        """Says where a worker takes connections, and from how many; one is made when something is to be sent.

        Its senders share the room that it has for what is sent unasked.
        """
        self._links[rank].address = address
        self._links[rank].room_bytes = self._room_bytes(num_peers)

    # --- sending ---

    def send(self, to: int, key: Key, view: memoryview, *, is_bounded: bool) -> Sending:
        """Sends one tensor after those that were given before; what it gives is done when it has left."""
        sending = Sending(_BOUNDED if is_bounded else _TENSOR, view.nbytes, msgspec.msgpack.encode(key), view)
        self._send(self._links[to], sending)
        return sending

    def _send(self, link: _Link, sending: Sending) -> None:
        if link.must_connect():
            self._threads.start(f"shoal-send-{link.rank}", lambda: self._connect_and_send(link))
        link.put(sending)

    def count(
        self, what: Literal["num_unsent", "num_sent", "sent_bytes", "num_received", "received_bytes"]
    ) -> collections.Counter[int]:
        """Counts the tensors, or bytes, that have not left yet, have left or have come, by rank."""
        return collections.Counter({rank: getattr(link, what) for rank, link in self._links.items()})

    def _connect_and_send(self, link: _Link) -> None:
        give_up, wire = Deadline.after(_CONNECTING_S), None
        while wire is None:
            try:
                wire = self._handshake.dial(link.rank, link.address, self._ids[link.rank], link.dialed)
            except (OSError, ShoalError) as error:
                if link.is_closed:
                    return
                is_certain = isinstance(error, ShoalError)
                if is_certain or give_up.is_past:
                    link.close(_gone(link.rank), should_cut=False)
                    reason = f"its port for tensors, {link.address}, cannot be used: {error}"
                    self._on_broken(link.rank, reason, is_certain)
                    return
                time.sleep(_AGAIN_S)  # a network that is cut is noticed by heartbeats
        try:
            link.serve(wire)
        except Exception as error:  # noqa: BLE001 - who waits must learn of it, whatever it is
            link.close(_gone(link.rank), should_cut=False)
            reason = f"the connection for tensors ended: {error}"
            self._on_broken(link.rank, reason, not isinstance(error, OSError))
        finally:
            wire.close()

    # --- receiving ---

    def accept(self, connected: socket.socket) -> None:
        """Serves a connection that was made with this worker, in a thread of its own."""
        self._threads.start("shoal-receive", lambda: self._receive(connected))

    def _receive(self, connected: socket.socket) -> None:
        try:
            rank, wire = self._handshake.admit(connected, self._ids)
            link = self._links[rank]
        except (OSError, ShoalError) as error:
            log.warning("a connection for tensors was refused: %s", error)
            connected.close()
            return
        try:
            is_open = link.take_from(wire)
            while is_open:
                is_open = self._take(link, wire)
        except Exception as error:  # noqa: BLE001 - what came may be anything; the others must learn of it
            if link.is_taking(wire):
                is_certain = not isinstance(error, OSError)
                self._on_broken(link.rank, f"the connection for tensors ended: {error}", is_certain)
        finally:
            wire.close()

    def _take(self, link: _Link, wire: OneWayConnection) -> bool:
        """Receives one frame; False at the end of the connection."""
        head = bytearray(_HEAD.size)
        if not wire.fill(memoryview(head), is_first=True):
            return False
        kind, key_bytes, size_bytes = _HEAD.unpack(head)
        if kind == _ROOM:
            link.regain(size_bytes)
            return True
        packed = bytearray(key_bytes)
        wire.fill(memoryview(packed))
        key = msgspec.msgpack.decode(packed, type=tuple[int | str, ...])
        if not link.is_taking(wire):  # what is still in the system's memory is void
            return False
        wire.fill(self._mailbox.expect(link.rank, key, size_bytes, is_bounded=kind == _BOUNDED))
        link.received_bytes += key_bytes + size_bytes
        is_wanted = self._mailbox.complete(link.rank, key)
        link.num_received += 1  # only now: of one that has left nothing is waited for any more then
        self._on_arrival(link.rank, is_wanted)
        return True

    def _room_bytes(self, num_peers: int) -> int:
        return self._mailbox.max_unclaimed_bytes // max(1, num_peers)

    def _give_room(self, rank: int, size_bytes: int) -> None:
        """Tells a sender, not after every tensor, that those which it sent unasked were claimed."""
        link = self._links[rank]
        with link.lock:
            claimed_bytes = link.claimed_bytes + size_bytes
            is_due = claimed_bytes >= self._room_bytes(len(self._links)) // _ROOM_PARTS
            link.claimed_bytes = 0 if is_due else claimed_bytes
        if is_due:
            self._send(link, Sending(_ROOM, claimed_bytes))

    # --- their end ---

    def drop(self, rank: int, error: PeerLost, *, has_left: bool = False) -> None:
        """Sends nothing more to a worker that is gone; what one that `has_left` has sent still comes."""
        self._links[rank].close(error, should_cut=not has_left)

    def close(self, deadline: Deadline) -> None:
        """Ends all connections; what has not left by now does not leave."""
        for rank in self._links:
            self.drop(rank, _gone(rank))
        self._threads.join(deadline)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Gives the bytes of a contiguous tensor of this machine's own memory; TensorError for any other."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise TensorError(
            f"Cannot send a tensor on {tensor.device} with strides {list(tensor.stride())} as it is.",
            next_step="give a contiguous tensor on the CPU.",
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def view_of(flat: torch.Tensor) -> memoryview:
    """Gives the memory of a flat uint8 tensor."""
    return byte_view(cast("Buffer", flat.numpy()))


def _id_of(connected: ssl.SSLSocket) -> PeerId | None:
    certificate = connected.getpeercert(binary_form=True)
    return None if certificate is None else peer_id_of(certificate)


def _gone(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} is gone.", peer=rank)
