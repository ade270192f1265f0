"""How the workers of one machine find each other: through a Unix socket of rank 0, with open descriptors.

Shared memory travels as open descriptors of files that have no name any more, so nothing is left behind
however a worker ends. Once everybody has met, the sockets are closed. When the meeting fails, rank 0 tells
the others why, and all that was received is closed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    LimitExceeded,
    PeerError,
    PeerLost,
    PeerRefused,
    ShoalError,
    UsageError,
)
from shoal.core.processes import is_own_user, own_socket_address
from shoal.group.base import WaitReport, rank_to_blame
from shoal.group.host.memory import MemoryRange

log = logging.getLogger(__name__)
_PROTOCOL = 1
_FRAME = struct.Struct("<I")
_MAX_BYTES = 1 << 16
MAX_WORKERS = 250
"""Of one machine: the kernel passes 253 descriptors at once, and the shared files are among them."""
_RETRY_S = 0.005
_LOOK_S = 0.05
_SPEAKING_S = 10.0
"""For one who has begun to speak, or should at once: longer means that it is stopped."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS)
_ACK = b"\1"


class JoinRequest(msgspec.Struct, frozen=True, array_like=True):
    """Says who a worker is that wants to join; its pipe comes with it."""

    rank: int
    size: int
    pid: int
    protocol: int = _PROTOCOL


class SharedFiles(msgspec.Struct, frozen=True):
    """The open files that rank 0 has for all, and where in them the first segments lie."""

    files: list[int]
    """Descriptors of the files that hold shared memory, best first."""
    places: list[MemoryRange]


class MeetingWelcome(msgspec.Struct, frozen=True, tag=True):
    """All workers, in rank order, and what they share."""

    pids: list[int]
    pipes: list[int]
    """For each rank a descriptor; writing to it wakes that rank."""
    shared: SharedFiles


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Says that all have what they need; before that nobody may count on the others."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Says why there will be no group."""

    what: str
    lost: int | None = None
    """The rank that ended, if that is why."""

    def error(self) -> PeerError:
        """Makes the error that rank 0 has met with, for another rank."""
        if self.lost is None:
            return PeerRefused(self.what, peer=0)
        return PeerLost(self.what, peer=self.lost)


def send(to: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Sends a message, and descriptors with its first byte."""
    body = msgspec.msgpack.encode(message)
    socket.send_fds(to, [_FRAME.pack(len(body))], list(descriptors))
    to.sendall(body)


def receive(source: socket.socket, kind: Any, received: contextlib.ExitStack) -> tuple[Any, list[int]]:
    """Receives a message and the descriptors that came with it, which `received` will close.

    EOFError when the other has ended, DecodeError for bytes that no worker of this version sends.
    """
    head, descriptors, _, _ = socket.recv_fds(source, _FRAME.size, 1024)
    for descriptor in descriptors:
        received.callback(os.close, descriptor)
        os.set_inheritable(descriptor, False)
    if len(head) < _FRAME.size:
        raise EOFError
    (length,) = _FRAME.unpack(head)
    if length > _MAX_BYTES:
        raise msgspec.DecodeError
    body = bytearray()
    while len(body) < length:
        part = source.recv(length - len(body))
        if not part:
            raise EOFError
        body += part
    return msgspec.msgpack.decode(body, type=kind), descriptors


def meet(
    key: str, request: JoinRequest, pipe: int, shared: SharedFiles | None, deadline: Deadline
) -> MeetingWelcome:
    """Waits for all workers that share `key`, with a line every ten seconds; rank 0 gives what all share.

    DeadlineExceeded names who has not come, PeerLost who came and ended.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "send_fds"):
        raise UsageError(
            "Workers of one machine share memory through Unix sockets, which this system does not have.",
            next_step="run one worker, or use Linux or macOS.",
        )
    if request.size > MAX_WORKERS:
        raise UsageError(
            f"{request.size} workers on one machine are more than the {MAX_WORKERS} that can share memory.",
            next_step=f"start {MAX_WORKERS} or fewer.",
        )
    address = own_socket_address(key)
    if shared is None:
        return _join(address, request, pipe, _Wait(deadline))
    with _listen(address, request.size) as listener:
        return _gather(listener, request, pipe, shared, _Wait(deadline))


@contextlib.contextmanager
def _listen(address: str, size: int) -> Iterator[socket.socket]:
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise UsageError(f"Rank 0 cannot open this run's socket: {error.strerror}.") from None
            raise UsageError(
                "Another process holds the socket of this run.",
                cause="two workers say that they are rank 0, or two runs have one name and port.",
                next_step="start the program through its launcher, or end the other run.",
            ) from None
        if address[0] != "\0":
            stack.callback(Path(address).unlink, missing_ok=True)
        listener.listen(size + 8)
        listener.setblocking(False)
        yield listener


class _Wait:
    """Waits until a deadline, with a line now and then that says for whom."""

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = deadline
        self._whom = ""
        self._report = WaitReport(lambda waited_s: f"waiting for {self._whom}, {waited_s:.0f} s")

    def look(self, whom: str) -> None:
        """Says now and then who is being waited for."""
        self._whom = whom
        self._report.look()

    def until_readable(self, sources: Iterable[socket.socket], whom: str, late: ShoalError) -> list[int]:
        """Finds the descriptors of those that have something to say, or have ended; raises `late`."""
        poll = select.poll()
        for source in sources:
            poll.register(source, select.POLLIN)
        while True:
            ready = poll.poll(1000 * min(self.deadline.remaining_s, _LOOK_S) + 1)
            if ready:
                return [descriptor for descriptor, _ in ready]
            self.look(whom)
            if self.deadline.is_past:
                raise late


def _gather(
    listener: socket.socket, request: JoinRequest, pipe: int, shared: SharedFiles, wait: _Wait
) -> MeetingWelcome:
    """Waits at rank 0 until everybody has come, and gives everybody everything; tells them when it fails."""
    size, pids, pipes = request.size, {0: request.pid}, {0: pipe}
    workers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as received, contextlib.ExitStack() as connected:
        try:
            while len(pids) < size:
                missing = ", ".join(str(rank) for rank in range(size) if rank not in pids)
                late = DeadlineExceeded(
                    f"{len(pids)} of {size} workers have come; rank {missing} is missing.",
                    next_step="see why it did not start, or did not call shoal.init().",
                )
                ready = wait.until_readable([listener, *workers.values()], f"rank {missing} to come", late)
                for rank, worker in workers.items():
                    if worker.fileno() in ready:  # they have nothing to say before all have come
                        raise _lost(rank)
                came = _welcome(listener, request, pids)
                if came is not None:
                    worker, said, descriptor = came
                    workers[said.rank] = connected.enter_context(worker)
                    received.callback(os.close, descriptor)
                    pids[said.rank], pipes[said.rank] = said.pid, descriptor
            ranks = range(size)
            met = MeetingWelcome([pids[rank] for rank in ranks], [pipes[rank] for rank in ranks], shared)
            for rank, worker in workers.items():  # one after the other: the kernel limits what is on its way
                _hand_over(worker, rank, met, wait)
        except ShoalError as error:
            for worker in workers.values():
                with contextlib.suppress(OSError):
                    send(worker, Failed(error.what, rank_to_blame(error, 0)))
            raise
        for worker in workers.values():
            with contextlib.suppress(OSError):  # who ends from now on is lost to the group
                send(worker, Ready())
        received.pop_all()
    return met


def _welcome(
    listener: socket.socket, own: JoinRequest, known: Collection[int]
) -> tuple[socket.socket, JoinRequest, int] | None:
    """Takes in one more, and its pipe; one that ends before it has said who it is has not come."""
    with contextlib.ExitStack() as stack:
        peer = None
        try:
            worker = stack.enter_context(listener.accept()[0])
            worker.settimeout(_SPEAKING_S)
            if not is_own_user(worker):
                return None
            said, descriptors = receive(worker, JoinRequest, stack)
            peer, refusal = said.rank, _refusal(said, own, known)
        except BlockingIOError:
            return None
        except msgspec.DecodeError:
            refusal = "a worker runs another version of Shoal than rank 0."
        except (OSError, EOFError) as error:
            if getattr(error, "errno", None) in _SHORTAGES:
                raise _too_few_files(0) from None
            log.warning("a worker connected, and ended before it said who it is")
            return None
        if refusal:
            with contextlib.suppress(OSError):
                send(worker, Failed(refusal))
            raise PeerRefused(refusal, peer=peer, next_step="start all workers in one run.")
        if len(descriptors) != 1:
            raise _too_few_files(0)
        stack.pop_all()
    return worker, said, descriptors[0]


def _refusal(said: JoinRequest, own: JoinRequest, known: Collection[int]) -> str:
    if said.protocol != own.protocol:
        return f"rank {said.rank} runs another version of Shoal than rank 0."
    if said.size != own.size:
        return f"rank {said.rank} expects {said.size} workers, rank 0 expects {own.size}."
    if said.rank in known or not 0 < said.rank < own.size:
        return f"two workers say that they are rank {said.rank} of {own.size}."
    return ""


def _hand_over(worker: socket.socket, rank: int, met: MeetingWelcome, wait: _Wait) -> None:
    """Gives a worker everything, and waits until it has it."""
    late = DeadlineExceeded(f"rank {rank} came, but did not answer in time.")
    try:
        send(worker, met, [*met.pipes, *met.shared.files])
        wait.until_readable([worker], f"rank {rank} to answer", late)
        if worker.recv(1) != _ACK:
            raise _lost(rank)
    except OSError as error:
        raise _broken_off(error, 0, rank) from None


def _join(address: str, request: JoinRequest, pipe: int, wait: _Wait) -> MeetingWelcome:
    late = DeadlineExceeded(
        f"rank {request.rank} has joined, and the other workers have not come in time.",
        next_step="see which rank has not called shoal.init().",
    )
    with contextlib.ExitStack() as received, _connect(address, request, wait) as host:

        def hear(kind: Any) -> tuple[Any, list[int]]:
            wait.until_readable([host], "the other workers to come; rank 0 knows which", late)
            said, descriptors = receive(host, kind | Failed, received)
            if isinstance(said, Failed):
                raise said.error()
            return said, descriptors

        try:
            send(host, request, [pipe])
            met, descriptors = hear(MeetingWelcome)
            if len(descriptors) != request.size + len(met.shared.files):
                raise _too_few_files(request.rank)
            host.sendall(_ACK)
            hear(Ready)
        except msgspec.DecodeError:
            raise PeerRefused("rank 0 runs another version of Shoal.", peer=0) from None
        except (OSError, EOFError) as error:
            raise _broken_off(error, request.rank, 0) from None
        received.pop_all()
    return MeetingWelcome(
        met.pids, descriptors[: request.size], SharedFiles(descriptors[request.size :], met.shared.places)
    )


def _connect(address: str, request: JoinRequest, wait: _Wait) -> socket.socket:
    while True:
        host = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        host.settimeout(_SPEAKING_S)
        try:
            host.connect(address)
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError, TimeoutError):
            host.close()
        else:
            break
        if wait.deadline.is_past:
            raise DeadlineExceeded(
                f"rank {request.rank} did not find rank 0 in time.",
                cause="rank 0 has not called shoal.init(), or is in another run.",
            )
        wait.look("rank 0 to come")
        time.sleep(_RETRY_S)
    if not is_own_user(host):
        host.close()
        raise PeerRefused(
            "A process of another user holds the socket of this run.",
            peer=0,
            next_step="look who else works on this machine, and start the run again.",
        )
    return host


def _lost(rank: int) -> PeerLost:
    return PeerLost(f"rank {rank} ended while the group was made.", peer=rank)


def _broken_off(error: OSError | EOFError, here: int, there: int) -> ShoalError:
    """Tells why a conversation could not go on: too late, too few files here, or the other has ended."""
    if isinstance(error, ShoalError):
        return error
    return _too_few_files(here) if getattr(error, "errno", None) in _SHORTAGES else _lost(there)


def _too_few_files(rank: int) -> LimitExceeded:
    return LimitExceeded(
        f"rank {rank} cannot hold open what the workers share: it has too many open files.",
        next_step="raise the limit that `ulimit -n` shows, for instance by `ulimit -n 4096`.",
    )
