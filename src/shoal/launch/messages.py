"""What the head of a run and its agents tell each other: MessagePack, with the length before each message.

The head decides, agents do: an agent starts processes, passes on what they write and how they end, and sends
signals. Whether the bytes go through ssh, a pipe or Ray is the business of a `Channel`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from shoal.core.board import Sighting
from shoal.core.errors import ProtocolError
from shoal.core.status import Status
from shoal.launch.output import Stream

MAGIC = b"\xf5SHOAL\x01\n"
"""Before an agent's first message: what a login shell prints on its own comes before it, and is skipped."""
MAX_MESSAGE_BYTES = 1 << 24
MAX_PREAMBLE_BYTES = 1 << 16
"""Of what a login shell may print."""
BEAT_S = 1.0
"""From one beat to the next, in both directions."""
_LENGTH = struct.Struct(">I")

M = TypeVar("M")


class Message(msgspec.Struct, frozen=True, tag=True):
    """Any of them."""


class Hello(Message, frozen=True):
    """Up, first: who the agent is. Unknown fields are passed over, so that other versions can be named."""

    version: str
    """Of Shoal; head and agents must have the same."""
    host: str
    addresses: dict[str, list[str]] = {}
    """By the name of the interface; the loopback's too."""
    num_cores: int = 1
    boot_id: str = ""
    """The same on machines that are one, which then have one clock too."""
    clock_s: float = 0.0
    """Of that machine, when it said this."""
    free_port: int = 0
    """One that nobody listens on, for the run's store if rank 0 comes here."""
    reached_at: str = ""
    """The address of this machine by which the head reached it, as ssh says; empty for a local child."""
    head_address: str = ""
    """The address of the head, seen from here."""


class Post(msgspec.Struct, frozen=True):
    """One worker to start."""

    rank: int
    variables: dict[str, str]
    """SHOAL_RANK, SHOAL_LOCAL_RANK and the like: what is its own."""


class Job(Message, frozen=True):
    """Down, once, after Hello: what to start. The agent answers Started for each post, or Failed."""

    command: list[str]
    cwd: str
    variables: dict[str, str]
    """For all workers here, over those that the agent finds in its own environment."""
    posts: list[Post]
    timeline: str | None = None
    """Where workers write their parts of it, if these are to be sent: the head has other disks."""
    patience: float = 1.0
    """An agent that hears nothing of its head for HEAD_SILENCE_S times this ends its workers."""


class Signal(Message, frozen=True):
    """Down: to the process groups of these ranks."""

    ranks: list[int]
    number: int


class Hold(Message, frozen=True):
    """Down: do not read what workers write (their pipes fill, and they wait), or do again."""

    is_held: bool


class Pause(Message, frozen=True):
    """Down: the head will be stopped and beat no more (its workers have been stopped), or is back."""

    is_paused: bool


class Beat(Message, frozen=True):
    """Up and down: still here."""


class Seen(Message, frozen=True):
    """Up, with a beat: how far workers there are, all that have noted it."""

    sightings: list[Sighting]


class Started(Message, frozen=True):
    """Up."""

    rank: int
    pid: int


class Failed(Message, frozen=True):
    """Up, instead of all others: the job cannot be started; what was started of it is ended."""

    what: str
    cause: str = ""
    next_step: str = ""


class Wrote(Message, frozen=True):
    """Up: a piece of what a worker wrote, as it came."""

    rank: int
    stream: Stream
    data: bytes


class Part(Message, frozen=True):
    """Up, before Ended: a piece of what a worker wrote to its timeline."""

    rank: int
    data: bytes


class Told(Message, frozen=True):
    """Up: what a worker told its launcher by `core.status`."""

    rank: int
    status: Status


class Stopped(Message, frozen=True):
    """Up: a worker was stopped by this signal, or, with None, goes on."""

    rank: int
    signal: int | None


class Ended(Message, frozen=True):
    """Up, last of a rank: exit code or minus a signal's number; all that it wrote has been passed on."""

    rank: int
    code: int


Up = Hello | Beat | Seen | Started | Failed | Wrote | Part | Told | Stopped | Ended
Down = Job | Signal | Hold | Pause | Beat


def encode(message: Message) -> bytes:
    """A message with its length."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


class Decoder(Generic[M]):
    """Messages out of a stream of bytes; `expects_magic` at the head's end."""

    def __init__(self, kind: Any, *, expects_magic: bool = False) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._rest = bytearray()
        self._expects_magic = expects_magic

    def feed(self, data: bytes) -> list[M]:
        """Those that are whole now; ProtocolError for what is none."""
        self._rest += data
        if self._expects_magic and not self._skip_preamble():
            return []
        messages: list[M] = []
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(f"A message of {length} bytes is none of Shoal's.")
            end = _LENGTH.size + length
            if len(self._rest) < end:
                break
            messages.append(self._decode(bytes(self._rest[_LENGTH.size : end])))
            del self._rest[:end]
        return messages

    def _decode(self, data: bytes) -> M:
        try:
            return self._decoder.decode(data)
        except msgspec.DecodeError as error:
            raise ProtocolError(
                f"A message between the head of the run and an agent cannot be read: {error}.",
                cause="they have different versions of Shoal.",
            ) from None

    def _skip_preamble(self) -> bool:
        start = self._rest.find(MAGIC)
        if start < 0:
            if len(self._rest) > MAX_PREAMBLE_BYTES:
                raise ProtocolError(
                    "What was started there prints too much and does not answer as an agent of Shoal.",
                    cause="the login shell there prints something without end.",
                )
            return False
        del self._rest[: start + len(MAGIC)]
        self._expects_magic = False
        return True


def all_addresses(hello: Hello) -> Sequence[str]:
    """Of all interfaces, in order."""
    return [address for found in hello.addresses.values() for address in found]
