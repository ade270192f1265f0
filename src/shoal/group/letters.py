"""What workers say to each other in a meeting, and how descriptors travel with it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.core import PeerError, PeerLost, PeerRefused, ShoalError

_PROTOCOL = 1
_FRAME = struct.Struct("<I")
_MAX_BYTES = 1 << 16


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


class Met(msgspec.Struct, frozen=True, tag=True):
    """Everybody, in rank order, and what rank 0 had to give."""

    pids: list[int]
    bells: list[int]
    """For each rank a descriptor; writing to it wakes that rank."""
    gift: Gift


class Ready(msgspec.Struct, frozen=True, tag=True):
    """All have what they need; before that nobody may count on the others."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Why there will be no group."""

    what: str
    lost: int | None = None
    """The rank that ended, if that is why."""

    @classmethod
    def because(cls, error: ShoalError) -> Failed:
        """What rank 0 met with."""
        if isinstance(error, PeerLost) and isinstance(error.peer, int):
            return cls(error.what, error.peer)
        return cls(error.what)

    def error(self) -> PeerError:
        """The same for another rank."""
        if self.lost is None:
            return PeerRefused(self.what, peer=0)
        return PeerLost(self.what, peer=self.lost)


class UnknownLetterError(Exception):
    """Bytes that no worker of this version sends."""


def send(to: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """A message, and descriptors with its first byte."""
    body = msgspec.msgpack.encode(message)
    socket.send_fds(to, [_FRAME.pack(len(body))], list(descriptors))
    to.sendall(body)


def receive(source: socket.socket, kind: Any, received: contextlib.ExitStack) -> tuple[Any, list[int]]:
    """A message and the descriptors that came with it, which `received` will close."""
    head, descriptors, _, _ = socket.recv_fds(source, _FRAME.size, 1024)
    for descriptor in descriptors:
        received.callback(os.close, descriptor)
        os.set_inheritable(descriptor, False)
    if len(head) < _FRAME.size:
        raise EOFError
    (length,) = _FRAME.unpack(head)
    if length > _MAX_BYTES:
        raise UnknownLetterError
    body = bytearray()
    while len(body) < length:
        part = source.recv(length - len(body))
        if not part:
            raise EOFError
        body += part
    try:
        return msgspec.msgpack.decode(body, type=kind), descriptors
    except msgspec.DecodeError:
        raise UnknownLetterError from None
