"""How the head of a run and its agents speak: MessagePack, with the length before each message.

The head decides, agents do: an agent starts processes, passes on what they write and how they end, and sends
signals. Whether the bytes go through ssh, a pipe or Ray is the business of a `Channel`.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO, Any, Generic, TypeVar

import msgspec

from shoal.core.board import Sighting
from shoal.core.errors import PeerRefused, ProtocolError, ShoalError
from shoal.core.status import Status
from shoal.launch.output import Stream
from shoal.launch.polling import Interest

MAGIC = b"\xf5SHOAL\x01\n"
"""Before an agent's first message: what a login shell prints on its own comes before it, and is skipped."""
MAX_MESSAGE_BYTES = 1 << 24
MAX_PREAMBLE_BYTES = 1 << 16
"""Of what a login shell may print."""
BEAT_S = 1.0
"""From one beat to the next, in both directions."""
_LENGTH = struct.Struct(">I")
M = TypeVar("M")
AGENT = ("-P", "-m", "shoal.launch.agent")
"""Arguments of Python; -P: a file in the folder where it starts must not be taken for a module."""
_READ_BYTES = 1 << 18
_MAX_COMPLAINT_BYTES = 1 << 14
_ENDING_S = 2.0


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


class Channel(ABC):
    """To one agent. All is called in the head's thread; nothing blocks but `close`, and that shortly."""

    host: str
    """As the user named it."""

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether more may come; when not, and `take` gives nothing more, the agent has gone."""

    @abstractmethod
    def interests(self) -> list[Interest]:
        """What the head's poll should wait for."""

    @abstractmethod
    def take(self) -> list[Up]:
        """Messages that have come, in order; ProtocolError for what is none."""

    @abstractmethod
    def send(self, message: Down) -> None:
        """Queue it; to an agent that has gone it goes nowhere."""

    @abstractmethod
    def explain(self) -> ShoalError:
        """Why it ended, or does not answer, and what to do about it."""

    def hang_up(self) -> None:  # noqa: B027
        """Begin to close, where that takes time; `close` follows."""

    @abstractmethod
    def close(self) -> None:
        """The agent ends what is left of its workers, and itself; idempotent."""

    def abandon(self) -> None:
        """Close without waiting for an agent that tells nothing any more."""
        self.close()


class PipeChannel(Channel):
    """Over standard input and output of a child process."""

    def __init__(
        self, host: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        self.host = host
        # a session of its own: Ctrl-C is the head's to understand
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env=environment,
        )
        self._pipes = [_need(self._process.stdin), _need(self._process.stdout), _need(self._process.stderr)]
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)
        self._stdin, self._stdout, self._stderr = self._pipes
        self._decoder: Decoder[Up] = Decoder(Up, expects_magic=True)
        self._queue = bytearray()
        self._came: list[Up] = []
        self._broken: ProtocolError | None = None
        self._complaint = bytearray()

    @property
    def is_open(self) -> bool:
        """Whether its standard output is."""
        return not self._stdout.closed and self._broken is None

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._process.pid

    @property
    def complaint(self) -> str:
        """The end of what it wrote to stderr."""
        return self._complaint.decode(errors="replace").strip()

    def interests(self) -> list[Interest]:
        """Its three pipes."""
        wanted: list[Interest] = []
        if not self._stdout.closed:
            wanted.append((self._stdout.fileno(), select.POLLIN, self._read))
        if not self._stderr.closed:
            wanted.append((self._stderr.fileno(), select.POLLIN, self._read_complaint))
        if self._queue and not self._stdin.closed:
            wanted.append((self._stdin.fileno(), select.POLLOUT, self._write))
        return wanted

    def take(self) -> list[Up]:
        """Those that have been read."""
        if self._broken is not None and not self._came:
            raise self._broken
        came, self._came = self._came, []
        return came

    def send(self, message: Down) -> None:
        """Queue it, and write what goes at once."""
        if not self._stdin.closed:
            self._queue += encode(message)
            self._write()

    def explain(self) -> ShoalError:
        """By its exit code and its last words."""
        code = self._wait(_ENDING_S)
        self._read_complaint()
        end = "does not answer" if code is None else f"ended with exit code {code}"
        return PeerRefused(
            f"The agent on {self.host} {end}{f': {self.complaint}' if self.complaint else ''}.",
            peer=self.host,
            next_step="look at what it wrote, or at the memory of that machine.",
        )

    def hang_up(self) -> None:
        """Its input ends, by which it ends."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def close(self) -> None:
        """One that takes long is killed."""
        self.hang_up()
        if self._wait(_ENDING_S) is None:
            self._process.kill()
            self._process.wait()
        for pipe in self._pipes:
            pipe.close()

    def abandon(self) -> None:
        """Kill the child."""
        self._process.kill()
        self.close()

    def exit_code(self) -> int | None:
        """Of the child, waiting for a moment: its pipes end first."""
        return self._wait(_ENDING_S)

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _read(self) -> None:
        data = _read_some(self._stdout)
        if data is None:
            return
        if not data:
            self._stdout.close()
            return
        try:
            self._came += self._decoder.feed(data)
        except ProtocolError as error:
            self._broken = error
            self._stdout.close()

    def _read_complaint(self) -> None:
        if self._stderr.closed:
            return
        data = _read_some(self._stderr)
        if data is None:
            return
        if not data:
            self._stderr.close()
        self._complaint += data
        del self._complaint[:-_MAX_COMPLAINT_BYTES]

    def _write(self) -> None:
        try:
            while self._queue:
                del self._queue[: os.write(self._stdin.fileno(), self._queue)]
        except BlockingIOError:
            return
        except OSError:  # it has gone; its output tells
            self._queue.clear()
            with contextlib.suppress(OSError):
                self._stdin.close()


def _need(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _read_some(pipe: IO[bytes]) -> bytes | None:
    """None: nothing now; empty: nothing ever."""
    try:
        return os.read(pipe.fileno(), _READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""
