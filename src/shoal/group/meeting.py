"""How the workers of one machine find each other: a Unix socket of rank 0, where descriptors change hands.

Shared memory travels as open descriptors of files that have no name any more, so nothing is left behind
however a worker ends. Once everybody has met, the sockets are closed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.core import Deadline, DeadlineExceeded, PeerLost, PeerRefused, UsageError

T = TypeVar("T")
_PROTOCOL = 1
_HAS_NAMES_WITHOUT_FILES = platform.system() == "Linux"
_FRAME = struct.Struct("<I")
_RETRY_S = 0.005
_HELLO_BYTES = 1 << 16


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of itself."""

    rank: int
    size: int
    pid: int
    protocol: int = _PROTOCOL


class Gift(msgspec.Struct, frozen=True):
    """What rank 0 has for all: open files, and where in them things lie."""

    files: list[int]
    """Descriptors of the files that hold shared memory, best first."""
    places: list[tuple[int, int, int]]


class Met(msgspec.Struct, frozen=True):
    """Everybody, in rank order, and what rank 0 had to give."""

    pids: list[int]
    bells: list[int]
    """For each rank a descriptor; writing to it wakes that rank."""
    gift: Gift


def meet(key: str, hello: Hello, bell: int, gift: Gift | None, deadline: Deadline) -> Met:
    """Wait for all workers that share `key`; the gift is rank 0's to give.

    DeadlineExceeded names who has not come.
    """
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "send_fds"):
        raise UsageError(
            "Workers of one machine share memory through Unix sockets, which this system does not have.",
            next_step="run one worker, or use Linux or macOS.",
        )
    address = _address(key)
    if gift is not None:
        return _host(address, hello, bell, gift, deadline)
    return _join(address, hello, bell, deadline)


def _address(key: str) -> str:
    digest = hashlib.blake2b(f"{os.getuid()} {key}".encode(), digest_size=16).hexdigest()
    if _HAS_NAMES_WITHOUT_FILES:
        return f"\0shoal-{digest}"  # no file: nothing to clean up
    return str(Path(tempfile.gettempdir()) / f"shoal-{digest}")


def _host(address: str, hello: Hello, bell: int, gift: Gift, deadline: Deadline) -> Met:
    hellos = {0: hello}
    bells = {0: bell}
    guests: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            listener.bind(address)
        except OSError as error:
            raise UsageError(
                "Two workers say that they are rank 0 of one run.",
                cause=f"another process holds this run's socket: {error.strerror}.",
                next_step="start the program through its launcher, or end the other run.",
            ) from None
        if address[0] != "\0":
            stack.callback(Path(address).unlink, missing_ok=True)
        listener.listen(hello.size + 8)
        while len(hellos) < hello.size:
            listener.settimeout(_left(deadline, hello.size, hellos))
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                continue
            stack.enter_context(guest)
            if not _is_own_user(guest):
                continue
            guest.settimeout(_left(deadline, hello.size, hellos))
            said, descriptors = _receive(guest, Hello)
            refusal = _refusal(said, hello, hellos)
            if refusal:
                _send(guest, refusal)
                raise PeerRefused(refusal, peer=said.rank, next_step="start all workers in one run.")
            hellos[said.rank], bells[said.rank], guests[said.rank] = said, descriptors[0], guest
        met = Met([hellos[rank].pid for rank in range(hello.size)], [], gift)
        ordered = [bells[rank] for rank in range(hello.size)]
        for guest in guests.values():
            _send(guest, met, [*ordered, *gift.files])
        for rank, guest in guests.items():
            if guest.recv(1) != b"\1":
                raise PeerLost(f"rank {rank} ended while the group was made.", peer=rank)
        # only now may anybody go on: a worker that was told 'met' counts on all the others
        for guest in guests.values():
            guest.sendall(b"\1")
    return Met(met.pids, ordered, gift)


def _join(address: str, hello: Hello, bell: int, deadline: Deadline) -> Met:
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
            host.settimeout(deadline.timeout_s)
            try:
                host.connect(address)
            except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
                if deadline.is_past:
                    raise DeadlineExceeded(
                        f"rank {hello.rank} did not find rank 0 in time.",
                        cause="rank 0 has not called shoal.init(), or is in another run.",
                    ) from None
                time.sleep(_RETRY_S)
                continue
            try:
                _send(host, hello, [bell])
                met, descriptors = _receive(host, Met)
                host.sendall(b"\1")
                if host.recv(1) != b"\1":
                    raise ConnectionResetError
            except (ConnectionError, EOFError):
                raise PeerLost("rank 0 ended while the group was made.", peer=0) from None
            except TimeoutError:
                raise DeadlineExceeded(
                    f"rank {hello.rank} waited for the other workers in vain.",
                    next_step="see which rank has not called shoal.init().",
                ) from None
        gift = Gift(descriptors[hello.size :], met.gift.places)
        return Met(met.pids, descriptors[: hello.size], gift)


def _left(deadline: Deadline, size: int, hellos: dict[int, Hello]) -> float | None:
    if deadline.is_past:
        missing = ", ".join(str(rank) for rank in range(size) if rank not in hellos)
        raise DeadlineExceeded(
            f"{len(hellos)} of {size} workers have come; rank {missing} is missing.",
            next_step="see why it did not start, or did not call shoal.init().",
        )
    return deadline.timeout_s


def _refusal(said: Hello, own: Hello, hellos: dict[int, Hello]) -> str:
    if said.protocol != own.protocol:
        return f"rank {said.rank} runs another version of Shoal than rank 0."
    if said.size != own.size:
        return f"rank {said.rank} expects {said.size} workers, rank 0 expects {own.size}."
    if said.rank in hellos or not 0 < said.rank < own.size:
        return f"two workers say that they are rank {said.rank} of {own.size}."
    return ""


def _is_own_user(guest: socket.socket) -> bool:
    """An abstract name has no file permissions: look at who it is."""
    if not _HAS_NAMES_WITHOUT_FILES:
        return True
    credentials = guest.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def _send(to: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    body = msgspec.msgpack.encode(message)
    socket.send_fds(to, [_FRAME.pack(len(body))], list(descriptors))
    to.sendall(body)


def _receive(source: socket.socket, kind: type[T]) -> tuple[T, list[int]]:
    head, descriptors, _, _ = socket.recv_fds(source, _FRAME.size, 1024)
    if len(head) < _FRAME.size:
        raise EOFError
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    (length,) = _FRAME.unpack(head)
    body = bytearray()
    while len(body) < min(length, _HELLO_BYTES):
        part = source.recv(length - len(body))
        if not part:
            raise EOFError
        body += part
    try:
        return msgspec.msgpack.decode(body, type=kind), descriptors
    except msgspec.ValidationError:
        raise PeerRefused(str(msgspec.msgpack.decode(body)), peer=0) from None
