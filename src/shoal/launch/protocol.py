"""How the head of a run and its agents speak: MessagePack, with the length before each message.

The head decides, agents do: an agent starts processes, passes on what they write and how they end, and sends
signals. Whether the bytes go through ssh, a pipe or Ray is the business of an `AgentChannel`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Generic

import msgspec

from shoal.core.board import Sighting
from shoal.core.elastic import M, MessageReader, encode_message
from shoal.core.errors import PeerRefused, ProtocolError, ShoalError
from shoal.core.status import Status
from shoal.launch.output import Stream
from shoal.launch.polling import ByteStream, Interest

MAGIC = b"\xf5SHOAL\x01\n"
"""Before an agent's first message: what a login shell prints on its own comes before it, and is skipped."""
MAX_PREAMBLE_BYTES = 1 << 16
"""A login shell may print so much."""
BEAT_S = 1.0
"""The time from one beat to the next, in both directions."""
AGENT = ("-P", "-m", "shoal.launch.agent")
"""Arguments of Python; -P: a file in the folder where it starts must not be taken for a module."""
_MAX_COMPLAINT_BYTES = 1 << 14
ENDING_S = 2.0
"""The child of a channel has so long to end."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """A message between a head and an agent, or between a head and its bridge to Ray."""


class AgentHello(Message, frozen=True, tag="Hello"):
    """Up, first: who the agent is.

    Unknown fields are passed over and the tag stays, so that other versions can be named.
    """

    version: str
    """The version of Shoal; head and agents must have the same."""
    host: str
    addresses: dict[str, list[str]] = {}
    """The addresses by the name of the interface; the loopback's too."""
    boot_id: str = ""
    """The same on machines that are one, which then have one clock too."""
    clock_s: float = 0.0
    """The clock of that machine, when it said this."""
    free_port: int = 0
    """One that nobody listens on, for the run's store if rank 0 comes here."""
    reached_at: str = ""
    """The address of this machine by which others reach it, as ssh or Ray says; empty for a local child."""
    head_address: str = ""
    """The address of the head, seen from here."""
    python: str = ""
    """The interpreter that runs the agent; it takes the place of the head's own in the command."""
    machine: str = ""
    """The machine where it is, if whoever started it there has chosen that (Ray)."""


class Post(msgspec.Struct, frozen=True):
    """One worker to start."""

    rank: int
    variables: dict[str, str]
    """SHOAL_RANK, SHOAL_LOCAL_RANK and the like: what is its own."""


class WorkerJob(Message, frozen=True):
    """Down, after AgentHello: what to start. The agent answers Started for each post, or JobFailed.

    An elastic run sends it again, with the workers that come later.
    """

    command: list[str]
    cwd: str
    variables: dict[str, str]
    """The variables of all workers here, over those of the agent's own environment."""
    posts: list[Post]
    timeline: str | None = None
    """Where workers write their parts of it, if these are to be sent: the head has other disks."""
    has_stdin: bool = False
    """Whether its first worker reads what was piped in to the head; only for children of the head itself."""
    is_elastic: bool = False
    """Whether workers get a way to the coordinator of the run."""
    patience: float = 1.0
    """An agent that hears nothing of its head for HEAD_SILENCE_S times this ends its workers."""


class Signal(Message, frozen=True):
    """Down: send a signal to the process groups of these ranks."""

    ranks: list[int]
    number: int


class Beat(Message, frozen=True):
    """Up and down: the sender is still here. The head also says at once what has changed for agents."""

    is_held: bool = False
    """Down: whether to leave unread what workers write; their pipes fill, and they wait."""
    is_paused: bool = False
    """Down: whether the head is about to be stopped with its workers, and will beat no more."""


class HostLeaves(Message, frozen=True):
    """Up: this machine has joined by itself and wants to leave; its workers are to leave in order first."""


class Seen(Message, frozen=True):
    """Up, with a beat: how far workers there are, all that have noted it."""

    sightings: list[Sighting]


class OfWorker(Message, frozen=True):
    """Up: something about one worker."""

    rank: int


class Started(OfWorker, frozen=True):
    """Up: a worker runs."""

    pid: int


class JobFailed(Message, frozen=True):
    """Up, instead of all others: the job cannot be started; what was started of it is ended."""

    what: str
    cause: str = ""
    next_step: str = ""
    ranks: list[int] = []
    """The workers of the job that were not started; the others of an elastic run go on."""


class Wrote(OfWorker, frozen=True):
    """Up: a piece of what a worker wrote, as it came."""

    stream: Stream
    data: bytes


class TimelinePart(OfWorker, frozen=True):
    """Up, before WorkerEnded: a piece of what a worker wrote to its timeline."""

    data: bytes


class WorkerTold(OfWorker, frozen=True):
    """Up: what a worker told its launcher by `core.status`."""

    status: Status


class LinkData(OfWorker, frozen=True):
    """Up and down: bytes between a worker of an elastic run and its coordinator (`core.elastic`)."""

    data: bytes


class Stopped(OfWorker, frozen=True):
    """Up: a worker was stopped by this signal, or, with None, goes on."""

    signal: int | None


class Exited(OfWorker, frozen=True):
    """Up: a worker's process has ended; more of what it wrote may follow, since others may hold its pipes."""

    code: int
    """Exit code, or minus a signal's number."""


class WorkerEnded(OfWorker, frozen=True):
    """Up, last of a rank: it has exited, and all that it wrote has been passed on."""

    code: int


_OfWorker = Started | Wrote | TimelinePart | WorkerTold | LinkData | Stopped | Exited | WorkerEnded
Up = AgentHello | Beat | HostLeaves | Seen | JobFailed | _OfWorker
Down = WorkerJob | Signal | Beat | LinkData


class Decoder(MessageReader[M]):
    """Finds messages in a stream of bytes; `expects_magic` at the head's end."""

    def __init__(self, kind: Any, *, expects_magic: bool = False) -> None:
        super().__init__(kind)
        self._expects_magic = expects_magic

    def feed(self, data: bytes) -> list[M]:
        """Return the messages that are whole now; ProtocolError for what is none."""
        if self._expects_magic:
            self._rest += data
            preamble, magic, data = bytes(self._rest).partition(MAGIC)
            if not magic and len(preamble) > MAX_PREAMBLE_BYTES:
                raise ProtocolError(
                    "What was started there prints too much and does not answer as an agent of Shoal.",
                    cause="the login shell there prints something without end.",
                )
            if not magic:
                return []
            self._rest, self._expects_magic = bytearray(), False
        return super().feed(data)


class MessageStream(ByteStream, Generic[M]):
    """Messages both ways over two descriptors, or one.

    When it is not open any more, and `take` gives nothing, the other side has gone.
    """

    def __init__(self, source: int, sink: int, decoder: Decoder[M]) -> None:
        super().__init__(source, sink)
        self._decoder = decoder
        self._came: list[M] = []
        self._broken: ProtocolError | None = None

    def interests(self) -> list[Interest]:
        """Say what a poll should wait for."""
        return self.events(self.receive)

    def receive(self) -> None:
        """Read some of what is there."""
        try:
            self._came += self._decoder.feed(self.read())
        except ProtocolError as error:
            self._broken, self.is_open = error, False

    def take(self) -> list[M]:
        """Return the messages that have been read, in order; ProtocolError for what is none."""
        if self._broken is not None and not self._came:
            raise self._broken
        came, self._came = self._came, []
        return came

    def send(self, message: Message) -> None:
        """Queue a message; to one that has gone it goes nowhere."""
        self.write(encode_message(message))


class AgentChannel(ABC):
    """The head's end of the way to an agent. Nothing blocks but `explain` and `close`, and these shortly."""

    host: str
    """As the user named it; empty for children of this process, which have no agent."""
    is_open: bool
    """Whether more may come; when not, and `take` gives nothing more, the agent has gone."""

    @abstractmethod
    def interests(self) -> list[Interest]:
        """Say what the head's poll should wait for."""

    @abstractmethod
    def take(self) -> list[Up]:
        """Return the messages that have come, in order; ProtocolError for what is none."""

    @abstractmethod
    def send(self, message: Down) -> None:
        """Queue a message; to an agent that has gone it goes nowhere."""

    @abstractmethod
    def explain(self) -> ShoalError:
        """Say why it ended, or does not answer, and what to do about it."""

    def hang_up(self) -> None:  # noqa: B027
        """Begin to close, where that takes time; `close` follows."""

    @abstractmethod
    def close(self) -> None:
        """Have the agent end what is left of its workers, and itself; idempotent."""

    def abandon(self) -> None:
        """Close without waiting for an agent that tells nothing any more."""
        self.close()


class ChildProcess:
    """A process that is spoken with over its standard input and output; the end of its stderr is kept.

    It has a session of its own: Ctrl-C is the head's to understand.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        # a file: nobody has to read it for the child to go on
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  until it is closed
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
            start_new_session=True,
            env=environment,
            pass_fds=pass_fds,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid = self._process.pid
        self.stdin, self.stdout = self._process.stdin, self._process.stdout

    def exit_code(self, wait_s: float = 0.0) -> int | None:
        """Return its exit code once it has ended, which is waited for; None when it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(wait_s)
        return None

    def last_words(self, wait_s: float = 0.0) -> tuple[int | None, str]:
        """Return its exit code, which is waited for, and the end of what it wrote to stderr."""
        code = self.exit_code(wait_s)
        start = max(0, os.fstat(self._errors.fileno()).st_size - _MAX_COMPLAINT_BYTES)
        end = os.pread(self._errors.fileno(), _MAX_COMPLAINT_BYTES, start)
        return code, end.decode(errors="replace").strip()

    def hang_up(self) -> None:
        """Have its input end, by which it ends; idempotent."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def kill(self) -> None:
        """Kill it at once."""
        self._process.kill()

    def close(self, limit_s: float) -> None:
        """End it; one that takes longer is killed. Idempotent."""
        self.hang_up()
        if self.exit_code(limit_s) is None:
            self.kill()
            self._process.wait()
        self.stdout.close()
        self._errors.close()


class DescriptorChannel(MessageStream[Up], AgentChannel):
    """A channel over descriptors, which belong to whoever makes it: `on_close` closes them."""

    def __init__(
        self,
        host: str,
        source: int,
        sink: int,
        explain: Callable[[str], ShoalError],
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(source, sink, Decoder(Up, expects_magic=True))
        self.host = host
        self._explain, self._on_close = explain, on_close

    def explain(self) -> ShoalError:
        """Say why it ended: whoever made it knows."""
        return self._explain(self.host)

    def close(self) -> None:
        """Neither read nor write any more, by which the agent ends; idempotent."""
        self.is_open = False
        self.stop_writing()
        self._on_close()


class PipeChannel(DescriptorChannel):
    """A channel to a child process: an agent on this machine, or an ssh that leads to one (`hosts`).

    `explain` makes an error of the host, the child's exit code and its last words.
    """

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        explain: Callable[[str, int | None, str], ShoalError] | None = None,
    ) -> None:
        self.child = child = ChildProcess(command, environment)
        tell = explain or _explain_child
        super().__init__(
            host,
            child.stdout.fileno(),
            child.stdin.fileno(),
            lambda host: tell(host, *child.last_words(ENDING_S)),
            lambda: child.close(ENDING_S),
        )

    def hang_up(self) -> None:
        """Have the child's input end, by which it ends."""
        self.stop_writing()
        self.child.hang_up()

    def abandon(self) -> None:
        """Kill the child, and close what leads to it."""
        self.child.kill()
        self.close()


def _explain_child(host: str, code: int | None, complaint: str) -> ShoalError:
    end = "does not answer" if code is None else f"ended with exit code {code}"
    return PeerRefused(
        f"The agent on {host} {end}{f': {complaint}' if complaint else ''}.",
        peer=host,
        next_step="look at what it wrote, or at the memory of that machine.",
    )
