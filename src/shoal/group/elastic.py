"""A group whose workers come and go: one object for the whole run, around the group of each generation.

The coordinator of the run (`core.elastic`) says who is in the next generation and after which step the
present one ends. A session asks `is_due` after each step, and calls `regroup` when it is, or when an
operation has failed because of a loss: this worker leaves the present group, waits until all others have done
so, and forms the next one with them. What the new members must know, and in which order they start, is the
session's business.

torchrun ends all workers and starts them anew when one is lost or others come, and tells them nothing of
that: they get SIGTERM, and SIGKILL half a minute later. The machines stay. So a worker that has to end leaves
its state in the memory of its machine, and the one that is started in its place finds it there
(`tensors.restart_memory`). Together those that have found something go on as a next generation does
(`RestartedGroup`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakMethod

import msgspec

from shoal.core import (
    Deadline,
    DeadlineExceeded,
    PeerLost,
    Placement,
)
from shoal.core.elastic import (
    CoordinatorLink,
    DownMessage,
    Form,
    Formed,
    FormingFailed,
    Gather,
    Gathered,
    Leave,
    LeavingRun,
    MessageReader,
    UpMessage,
    Waiting,
    WorkerPlace,
    encode_message,
)
from shoal.core.errors import PeerError, ShoalError, UsageError
from shoal.core.fork import close_in_children, keep_in_children
from shoal.core.loop import ByteThreads
from shoal.core.run_options import TORCHRUN_ID_VARIABLE
from shoal.group.base import Group
from shoal.group.functions import share
from shoal.group.operations import GroupWrapper
from shoal.tensors.restart_memory import RestartMemory
from shoal.transport import StreamTransport

log = logging.getLogger(__name__)
T = TypeVar("T")
_FIRST_FORMING_S, _LONGEST_FORMING_S = 3.0, 60.0
"""So long a group may take to form, doubled after each time that it did not."""
_READ_BYTES = 1 << 16
_MAX_RESTARTS_VARIABLE = "TORCHELASTIC_MAX_RESTARTS"


class LauncherLink(CoordinatorLink):
    """The link over a socket that the launcher has given to this process; read by a thread of its own."""

    def __init__(self, number: int, descriptor: int) -> None:
        super().__init__(number)
        self._socket = socket.socket(fileno=descriptor)
        self._socket.setblocking(True)
        os.set_inheritable(descriptor, False)
        close_in_children(descriptor)
        self._sending = threading.Lock()
        self._inbox: queue.SimpleQueue[DownMessage | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._is_open = True
        self._threads = ByteThreads()
        self._threads.start("shoal-elastic", self._read)

    def send(self, message: UpMessage) -> None:
        """Writes the message; to a launcher that has gone it goes nowhere."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(encode_message(message))

    def begin(self, form: Form, steps: int) -> None:
        """Begins a generation; the reading thread answers for the one before or for this one."""
        with self._changed:
            super().begin(form, steps)

    def receive(self, deadline: Deadline | None = None) -> DownMessage | None:
        """Waits for the next message; PeerLost when the launcher has gone."""
        timeout_s = None if deadline is None else deadline.timeout_s
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is None:
            self._inbox.put(None)
            raise _no_launcher()
        return message

    def wait_until_due(self) -> None:
        """Waits for the message that says so; PeerLost when the launcher has gone."""
        with self._changed:
            self._changed.wait_for(lambda: self.due_step is not None or not self._is_open)
        if not self._is_open:
            raise _no_launcher()

    def close(self) -> None:
        """Ends the link. Idempotent."""
        if self._socket.fileno() >= 0:
            keep_in_children(self._socket.fileno())
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._threads.join(Deadline.after(1.0))
            self._socket.close()

    def _read(self) -> None:
        reader: MessageReader[DownMessage] = MessageReader(DownMessage)
        try:
            while data := self._socket.recv(_READ_BYTES):
                for message in reader.feed(data):
                    with self._changed:
                        is_handled = self.handle(message)
                        self._changed.notify_all()
                    if not is_handled:
                        self._inbox.put(message)
        except OSError:
            pass
        finally:
            with self._changed:
                self._is_open = False
                self._changed.notify_all()
            self._inbox.put(None)


class ElasticGroup(GroupWrapper):
    """The group of the present generation; `regroup` makes it that of the next one.

    `open_generation` opens the group of a generation. Before the first one, and in a worker that has come to
    a run that trains (`is_pending`), it is a group of one with the rank that its launcher guesses.
    """

    is_elastic = True
    is_restarted = False
    """Whether the launcher ends all workers between two generations, and starts them anew."""

    def __init__(
        self,
        link: CoordinatorLink,
        provisional: Group,
        open_generation: Callable[[Form, ElasticGroup, Deadline], Group],
        make_transport: Callable[[], tuple[StreamTransport, str]] | None = None,
    ) -> None:
        self.link = link
        self.make_transport = make_transport
        """Gives a transport, to be opened, by which workers give each other their states, and the address to
        listen on; None where only the group carries anything."""
        self.form: Form | None = None
        """The generation that this worker is in, or was in last."""
        self.left_notes: dict[int, bytes] = {}
        """By number: the notes of workers that have left in order; whoever has used them clears them."""
        self.lost_notes: dict[int, bytes] = {}
        """By number: what lost workers had said last."""
        self._open_generation = open_generation
        self._watchers: list[WeakMethod[Callable[[], None]]] = []
        super().__init__(provisional)

    @property
    def is_pending(self) -> bool:
        """Whether this worker is in no generation yet."""
        return self.form is None

    def on_change(self, watcher: Callable[[], None]) -> None:
        """Calls a method whenever the group has become another one; it does not keep its object alive."""
        self._watchers.append(WeakMethod(watcher))

    def is_due(self, steps: int) -> bool:
        """Tells whether this generation ends after so many steps; waits if that is not known yet."""
        link = self.link
        link.stepped(steps)
        if link.last_step is None:
            return False
        if link.due_step is None and steps >= link.last_step:
            link.wait_until_due()
        if not link.is_lockstep:
            return link.due_step is not None
        return link.due_step is not None and steps >= link.due_step

    def regroup(
        self, steps: int, *, is_fresh: bool, error: BaseException | None = None, note: bytes = b""
    ) -> None:
        """Leaves this generation, and returns in the next one.

        The others are given the note if this worker is in no generation any more. With an error this worker
        does not leave in order, and the others learn of it. LeavingRun when it is in no generation any more.
        """
        lost, old, forming_s = self._numbers_behind(error), self.inner, _FIRST_FORMING_S
        with contextlib.suppress(ShoalError):
            if error is None:
                old.leave()
            else:
                old.close(error)
        while True:
            self.link.send(Waiting(is_fresh, lost, note))
            form = self._wait_for_form()
            self.left_notes.update(form.left)
            self.lost_notes.update(form.lost)
            self.link.begin(form, steps)
            try:
                inner = self._open_generation(form, self, Deadline.after(forming_s))
                break
            except (PeerError, DeadlineExceeded) as failure:
                log.info("generation %d did not form: %s", form.generation, failure)
                lost, forming_s = self._numbers_in(form, failure), min(2 * forming_s, _LONGEST_FORMING_S)
        with contextlib.suppress(ShoalError):
            old.close()  # now nobody reads its memory any more
        self.form = form
        self._become(inner)
        self.link.send(Formed(form.generation))

    def gather(
        self, form: Form, name: str, value: T, deadline: Deadline, *, is_of_workers: bool = False
    ) -> list[T]:
        """Collects everybody's value while a generation forms, by rank, through the coordinator.

        Parameter servers have no part in what is `is_of_workers`.
        """
        self.link.send(Gather(form.generation, name, msgspec.msgpack.encode(value), is_of_workers))
        while (message := self.link.receive(deadline)) is not None:
            match message:
                case Gathered(generation=form.generation, name=name_, values=values) if name_ == name:
                    return [msgspec.msgpack.decode(each, type=type(value)) for each in values]
                case FormingFailed(generation=form.generation):
                    rank = [place.number for place in form.places].index(message.number)
                    raise PeerLost(f"rank {rank} has gone while the group formed.", peer=rank)
        raise DeadlineExceeded("the other workers did not come in time to form a group.")

    def _become(self, inner: Group) -> None:
        inner.run, inner.local_rank = self.run, self.local_rank
        self._adopt(inner)
        for watcher in list(self._watchers):
            method = watcher()
            if method is None:
                self._watchers.remove(watcher)
            else:
                method()

    def _wait_for_form(self) -> Form:
        while True:
            message = self.link.receive()
            if isinstance(message, Leave):
                raise LeavingRun(message.reason)
            if isinstance(message, Form):
                return message

    def _numbers_behind(self, error: BaseException | None) -> tuple[int, ...]:
        if self.form is None or error is None:
            return ()
        numbers, everybody = [place.number for place in self.form.places], self.inner.everybody
        if everybody is not None:  # the error may speak of ranks among workers, or among all
            return tuple(numbers[rank] for rank in everybody.lost)
        return tuple(numbers[rank] for rank in self.inner.lost) or self._numbers_in(self.form, error)

    @staticmethod
    def _numbers_in(form: Form, error: BaseException) -> tuple[int, ...]:
        rank = getattr(error, "peer", None)
        if isinstance(rank, int) and 0 <= rank < len(form.places):
            return (form.places[rank].number,)
        return ()


def elastic_of(group: Group | None) -> ElasticGroup | None:
    """Finds the elastic group that this one is, or is wrapped around; None where there is none."""
    while group is not None and not isinstance(group, ElasticGroup):
        group = getattr(group, "inner", None)
    return group


def _no_launcher() -> PeerLost:
    return PeerLost(
        "The launcher of this run has gone.",
        cause="it was killed, or its machine has gone.",
        next_step="start the run again; with --checkpoint it goes on from the last one.",
    )


class RestartedGroup(ElasticGroup):
    """One generation of a run whose workers are ended between two generations.

    It forms before any session is there, and `regroup` ends this worker's part in the run.
    """

    is_restarted = True

    def __init__(self, inner: Group, memory: RestartMemory) -> None:
        self.memory = memory
        self._previous: Any = None
        """What was to be done at SIGTERM before; None while that is as it was."""
        self._pid = os.getpid()
        link = RestartLink(inner.rank, has_restarts_left())
        super().__init__(link, inner, _open_nothing)
        self.restart_link = link
        generation = 1 + max(share(inner, memory.generation))
        places = (WorkerPlace(rank, inner.machines[rank]) for rank in range(inner.size))
        self.form = Form(generation, tuple(places))

    def listen(self, end: Callable[[], None]) -> None:
        """Has SIGTERM end this worker between two steps, once. Only in the main thread; idempotent.

        Where that is now, `end` does it at once; otherwise `is_due` tells of it.
        """
        previous = signal.getsignal(signal.SIGTERM)
        is_heard = previous not in (signal.SIG_IGN, None)
        if threading.current_thread() is not threading.main_thread() or not is_heard or self._previous:
            return
        self._previous = previous

        def stop(number: int, frame: FrameType | None) -> None:
            if os.getpid() != self._pid:  # a process that loads data has inherited this
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
                return
            self.restart_link.stop()
            end()

        signal.signal(signal.SIGTERM, stop)

    def stop_listening(self) -> None:
        """Has SIGTERM do again what it did before. Idempotent."""
        previous, self._previous = self._previous, None
        if previous is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)

    def regroup(
        self, steps: int, *, is_fresh: bool, error: BaseException | None = None, note: bytes = b""
    ) -> None:
        """Leaves this generation for good. Raises the error; after SIGTERM does what was to be done then.

        Returns where a handler of the user's returns: then the program goes on alone until it ends.
        """
        ended = error or PeerLost("torchrun ends this worker, to start it anew.")
        with contextlib.suppress(ShoalError):
            self.inner.close(ended)  # the others hear of it at once
        has_heard = self._previous is not None and self.restart_link.is_stopping
        self.stop_listening()
        if has_heard:
            signal.raise_signal(signal.SIGTERM)
        if error is not None or not has_heard:
            raise ended


class RestartLink(CoordinatorLink):
    """Stands in for a coordinator, which torchrun has none of: all that is heard is the signal to end."""

    def __init__(self, number: int, has_restarts_left: bool) -> None:
        super().__init__(number)
        self.has_restarts_left = has_restarts_left
        """Whether torchrun starts the workers anew when one of them fails."""
        self.is_stopping = False
        """Whether this worker was told to end."""

    def stop(self) -> None:
        """Takes note of the signal: this worker stops after the step that it is in."""
        self.is_stopping = True
        self.last_step = self.due_step = 0

    def send(self, message: UpMessage) -> None:
        """Does nothing: nobody listens."""

    def receive(self, deadline: Deadline | None = None) -> DownMessage | None:
        """Gives nothing: nobody speaks."""

    def wait_until_due(self) -> None:
        """Does not wait: what is due is known at once."""


def open_restarted(group: Group, placement: Placement, environ: Mapping[str, str] = os.environ) -> Group:
    """Puts a group that torchrun may start anew into one that goes on then; others stay what they are."""
    max_restarts = environ.get(_MAX_RESTARTS_VARIABLE, "")
    if placement.source != "torchrun" or not max_restarts.isdecimal() or int(max_restarts) < 1:
        return group
    if not environ.get(TORCHRUN_ID_VARIABLE) or os.name != "posix":
        return group
    return RestartedGroup(group, RestartMemory.of_torchrun(environ, placement.local_rank))


def has_restarts_left(environ: Mapping[str, str] = os.environ) -> bool:
    """Tells whether torchrun starts all workers anew when one of this machine's fails."""
    count, most = (environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count.isdecimal() and most.isdecimal() and int(count) < int(most)


def _open_nothing(form: Form, group: ElasticGroup, deadline: Deadline) -> Group:
    raise UsageError("a group that is started anew by its launcher forms once.")
