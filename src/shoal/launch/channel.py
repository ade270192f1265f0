"""The head's end of the way to an agent, and where agents come from.

`PipeChannel` speaks with a child process: an agent on this machine, or an ssh that leads to one (`ssh`).
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from shoal.core.errors import PeerRefused, ProtocolError, ShoalError
from shoal.launch.messages import Decoder, Down, Up, encode

AGENT = ("-P", "-m", "shoal.launch.agent")
"""Arguments of Python; -P: a file in the folder where it starts must not be taken for a module."""
Interest = tuple[int, int, Callable[[], object]]
"""A descriptor, poll's event (POLLIN, POLLOUT), and what to do when that is there."""
_READ_BYTES = 1 << 18
_MAX_COMPLAINT_BYTES = 1 << 14
_ENDING_S = 2.0


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


@dataclass(frozen=True)
class Station:
    """A place where workers can be started."""

    channel: Channel
    slots: int
    machine: str
    """Stations with the same one are on the same machine, where local ranks are counted."""
    python: str = sys.executable
    """Takes the place of this process's own interpreter in the command."""
    cwd: str | None = None
    """By default the head's."""
    has_own_disks: bool = True
    """Whether files that workers write there may not be seen here."""
    address: str = ""
    """By which the other machines reach it, where that is known."""


class Engine(ABC):
    """Where stations come from."""

    @abstractmethod
    def open(self, min_processes: int, max_processes: int, *, is_restart: bool) -> list[Station]:
        """Stations for so many workers and servers, or a UsageError that says how many slots there are.

        Ranks are given in their order; those of one machine follow each other. Called again for each restart;
        what an earlier call gave has been closed. A station that cannot be reached is one whose channel ends
        before its agent has said Hello.
        """


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
