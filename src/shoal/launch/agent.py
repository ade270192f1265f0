"""`python -m shoal.launch.agent`: starts the workers of one machine for the head of a run, and tells of them.

It speaks by standard input and output (`protocol`). It decides nothing, but for the end: when its input
ends, when it is told nothing for too long or gets a signal, it ends its workers and itself. Should it be
killed, its guard ends the workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Collection

from shoal._version import __version__
from shoal.core import SYSTEM_CLOCK, board
from shoal.core.board import Sighting, name_of_run
from shoal.core.errors import ProtocolError, ShoalError
from shoal.core.processes import boot_id, own_addresses
from shoal.core.run_options import RUN_ID_VARIABLE
from shoal.launch.polling import SignalInbox, poll_once
from shoal.launch.protocol import (
    BEAT_S,
    MAGIC,
    AgentHello,
    Beat,
    Decoder,
    Down,
    HostLeaves,
    JobFailed,
    MessageStream,
    Seen,
    WorkerJob,
)
from shoal.launch.settings import free_port
from shoal.launch.worker_process import LocalChannel

HEAD_SILENCE_S = 30.0
"""A head that is silent for so long, times the patience, has gone with its machine."""
GRACE_S = 3.0
"""A worker that was asked to end because the head has gone has so long for it."""
MAX_QUEUED_BYTES = 1 << 20
"""No more is read of what workers write while the head has not taken so much of it."""
_LAST_FLUSH_S = 2.0


class Agent:
    """The agent of one start of a run; `run` ends when nothing of it is left here."""

    def __init__(
        self, source: int, sink: int, hello: AgentHello | None = None, *, is_guest: bool = False
    ) -> None:
        self._is_guest = is_guest
        """Whether this machine has come by itself: asked to end, it lets its workers leave first."""
        self._stream: MessageStream[Down] = MessageStream(source, sink, Decoder(Down))
        self._stream.queue += MAGIC
        self._workers = LocalChannel(hello or introduce())
        self._is_ending = self._is_paused = False
        self._heard_s = self._beat_s = SYSTEM_CLOCK.now_s()
        self._patience = 1.0
        self._run_id = ""
        self._has_seen = False

    def run(self) -> None:
        """Serve until the head has closed the way, or has gone."""
        with SignalInbox() as self._inbox, contextlib.closing(self._workers):
            self._pass_on()
            while not self._is_ending:
                self._turn()
            self._end()

    def _turn(self) -> None:
        self._wait()
        now_s = SYSTEM_CLOCK.now_s()
        if any(number != signal.SIGTSTP for number in self._inbox.take()):
            self._is_ending = not self._is_guest
            if self._is_guest:
                self._is_guest = False
                self._stream.send(HostLeaves())
        self._obey(now_s)
        self._pass_on()
        if now_s - self._beat_s >= BEAT_S:
            self._beat_s = now_s
            self._stream.send(Beat())
            self._tell_seen()
        if now_s - self._heard_s > HEAD_SILENCE_S * self._patience and not self._is_paused:
            self._is_ending = True

    def _wait(self) -> None:
        is_full = len(self._stream.queue) >= MAX_QUEUED_BYTES
        workers = self._workers.interests(is_full=is_full)
        poll_once([self._inbox.interest, *self._stream.interests(), *workers])

    def _pass_on(self) -> None:
        for message in self._workers.take():
            self._stream.send(message)

    def _obey(self, now_s: float) -> None:
        posts: list[int] = []
        try:
            came = self._stream.take()
            self._is_ending |= not came and not self._stream.is_open
            for message in came:
                self._heard_s = now_s
                posts = [post.rank for post in message.posts] if isinstance(message, WorkerJob) else []
                if isinstance(message, WorkerJob):
                    self._patience = message.patience
                    self._run_id = name_of_run(message.variables.get(RUN_ID_VARIABLE, ""))
                elif isinstance(message, Beat):
                    self._is_paused = message.is_paused
                self._workers.send(message)
        except ShoalError as error:
            missing = [rank for rank in posts if rank not in self._workers.ranks]
            self._stream.send(JobFailed(error.what, error.cause, error.next_step, missing))
            self._is_ending |= isinstance(error, ProtocolError)

    def _tell_seen(self) -> None:
        """Tell what is seen, and once that nothing is left: the head keeps what it was told last."""
        seen = seen_here(self._run_id, self._workers.ranks)
        if seen or self._has_seen:
            self._stream.send(Seen(seen))
        self._has_seen = bool(seen)

    def _end(self) -> None:
        """Ask, and wait for a moment; what is told of it is told if somebody reads. Who is left is killed."""
        self._workers.signal_all(signal.SIGTERM)
        end_s = SYSTEM_CLOCK.now_s() + GRACE_S
        while self._workers.has_living and SYSTEM_CLOCK.now_s() < end_s:
            self._wait()
            self._pass_on()
        flush_s = SYSTEM_CLOCK.now_s() + _LAST_FLUSH_S
        while self._stream.queue and SYSTEM_CLOCK.now_s() < flush_s:
            self._wait()


def introduce(reached_at: str = "", head_address: str = "", machine: str = "") -> AgentHello:
    """Say whether and how this machine can take part; by default the addresses are those that ssh tells."""
    # 'client address, port, server address, port', as sshd sets it
    words = os.environ.get("SSH_CONNECTION", "").split()
    if not reached_at and not head_address:
        head_address, _, reached_at, _ = words if len(words) == 4 else [""] * 4
    return AgentHello(
        version=__version__,
        host=socket.gethostname(),
        addresses=own_addresses(),
        boot_id=boot_id(),
        clock_s=SYSTEM_CLOCK.now_s(),
        free_port=free_port(),
        reached_at=reached_at,
        head_address=head_address,
        python=sys.executable,
        machine=machine,
    )


def seen_here(run: str, ranks: Collection[int]) -> list[Sighting]:
    """Return what these ranks of a run, as the launcher counts them, have noted on this machine's board.

    Whatever fails is passed over: it must not end the agent.
    """
    with contextlib.suppress(Exception):
        if run and board.is_wanted():
            own = [one for one in board.look() if one.note.run == run and one.note.keeper is None]
            return [one for one in own if one.note.place in ranks]
    return []


def main(reached_at: str = "", machine: str = "") -> None:
    """Keep the way to the head to oneself: what anything else prints goes to stderr."""
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    with contextlib.suppress(KeyboardInterrupt):
        Agent(source, sink, introduce(reached_at, machine=machine)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
