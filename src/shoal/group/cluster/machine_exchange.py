"""What machines say to each other in one operation.

A machine speaks by the first of its workers that has come to the operation. Who that is follows from who has
come there; another machine cannot know that, and greets whom it takes for the speaker. Should that one turn
out to have left before, the next is greeted. A machine whose workers have all left, or are lost, takes no
part. From its greeting on it is known who speaks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import torch

from shoal.core import Deadline, PeerLost, UsageError
from shoal.group.base import Done, Handle, Loss
from shoal.group.cluster.all_reduce import MachineReduction
from shoal.group.cluster.links import Delivery, MeshHandle
from shoal.group.cluster.members import Members
from shoal.group.cluster.mesh import Mesh
from shoal.tensors.dtypes import dtype_name

_MATES_S = 2.0
SMALL_BYTES = 1 << 16
"""Up to this size a tensor comes with its machine's greeting: one delay instead of two."""
FREE: Handle[None] = Done(None)
"""Yielded by an operation whose last step inside the machine is issued."""
Steps = Generator[Handle[Any], Any, Any]
ABSENT = object()
"""Stands for what would have come from a machine that takes no part."""


class PendingStep(Handle[Any]):
    """Something that an operation waits for; `awaited` names the rank that has not come, where it is known.

    Its result is asked for once, when it is done.
    """

    def __init__(
        self,
        is_done: Callable[[], bool],
        result: Callable[[], Any] = lambda: None,
        awaited: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._is_done = is_done
        self._result = result
        self.awaited = awaited

    def is_done(self) -> bool:
        """Tells whether there is a result, or an error."""
        return self._is_done()

    def wait(self, deadline: Deadline | None = None) -> Any:
        """Gives the result, or raises the error."""
        return self._result()


def arrived(handles: Sequence[Handle[Any]]) -> PendingStep:
    """Waits until all that was sent has arrived; who is gone is noticed where something is expected of it."""
    return PendingStep(lambda: all(handle.is_done() for handle in handles))


def describe(kind: str, tensor: torch.Tensor | None = None, rule: str = "") -> str:
    """Says what is done, which must be alike everywhere; short, for it goes before every tensor.

    `rule` is a reduction, or a root. Without a tensor it is on none, or on tensors that differ.
    """
    if tensor is None:
        return kind
    return f"{kind} of {tensor.numel()} elements ({dtype_name(tensor.dtype)}{rule and ', ' + rule})"


class MachineGreeting(msgspec.Struct, frozen=True, array_like=True):
    """The first thing that is said in an operation, by a machine or a rank."""

    action: str
    """What `describe` says of the operation."""
    rank: int
    """Who speaks."""
    num_workers: int = 1
    """For how many workers it speaks."""
    detail: Any = None
    content: bytes = b""
    """A tensor that is so small that it comes with the greeting."""

    @classmethod
    def decode(cls, content: torch.Tensor, own: str, rank: int) -> MachineGreeting:
        """Reads what came; UsageError when it speaks of something else than this worker does."""
        greeting = msgspec.msgpack.decode(content.numpy().tobytes(), type=cls)
        if greeting.action != own:
            raise UsageError(
                f"rank {rank} called {own} where rank {greeting.rank} called {greeting.action}.",
                cause="the workers do not run the same program, or not with the same data.",
                next_step="let all workers issue the same operations in the same order.",
            )
        return greeting

    def encode(self) -> torch.Tensor:
        """Gives it as a tensor of bytes."""
        return torch.frombuffer(bytearray(msgspec.msgpack.encode(self)), dtype=torch.uint8)


class LostMeanwhile(Exception):
    """Somebody was lost since an attempt has begun."""


class MachineExchange:
    """One operation between this machine, for which this worker speaks, and the others.

    `name` tells apart those that are parts of the same operation; `receiving` gets everything that is asked
    for, for whoever ends the operation. An `attempt`, where there is one, is the ranks that were lost when it
    began: when others are lost it ends in `LostMeanwhile`.
    """

    def __init__(
        self,
        mesh: Mesh,
        members: Members,
        seq: int,
        receiving: list[Delivery],
        name: str = "",
        attempt: frozenset[int] | None = None,
    ) -> None:
        self.machine = members.machine
        self._attempt = attempt
        self._mesh = mesh
        self._members = members
        self._seq = seq
        self._receiving = receiving
        self._name = name
        self._mine = MachineGreeting("", mesh.rank)
        self._speakers: dict[int, int] = {}
        """Who was greeted on each other machine, the last one."""
        self._said: dict[int, list[tuple[str, torch.Tensor]]] = {
            machine: [] for machine in range(len(members.ranks_on)) if machine != members.machine
        }
        """All that was said to each machine, for whoever speaks for it in the end."""
        self._lock = threading.Lock()  # law: of both, between the caller's thread and those that receive
        self._sending: list[MeshHandle[None]] = []
        self._gone_before = tuple(mesh.monitor.lost)
        """Those without whom the others have begun this operation, too."""

    def greet(self, action: str, num_workers: int, detail: Any = None, content: bytes = b"") -> Steps:
        """Says what is being done here, and gives what is done elsewhere, by machine.

        UsageError when others do something else; PeerLost when one of them is needed and lost.
        """
        self.announce(action, num_workers, detail, content)
        return (yield from self.hear_greetings())

    def find_machines(self) -> list[int]:
        """Lists the machines that seem to take part, this one included."""
        members = self._members
        return [
            machine
            for machine, ranks in enumerate(members.ranks_on)
            if machine == self.machine or not all(members.is_gone(rank, self._seq) for rank in ranks)
        ]

    def announce(self, action: str, num_workers: int, detail: Any = None, content: bytes = b"") -> None:
        """Says what is being done here to all other machines."""
        self._mine = MachineGreeting(action, self._mesh.rank, num_workers, detail, content)
        greeting = self._mine.encode()
        for machine in range(len(self._members.ranks_on)):
            if machine != self.machine:
                self._said[machine].insert(0, ("greeting", greeting))
                self._find_speaker(machine)

    def hear_greetings(self) -> Steps:
        """Gives what all machines that take part have said of what they do."""
        heard = {self.machine: self._mine}
        for machine in self._said:
            came = yield self.hear(machine, "greeting")
            if came is not ABSENT:
                heard[machine] = MachineGreeting.decode(came, self._mine.action, self._mesh.rank)
                self._speak_to(machine, heard[machine].rank)
        self._members.tell_departures()
        return dict(sorted(heard.items()))

    def agree(self, machines: Sequence[int]) -> Steps:
        """Waits until all machines have said that they have the result."""
        others = [machine for machine in machines if machine != self.machine]
        for machine in others:
            self.say(machine, "have", torch.zeros(1, dtype=torch.uint8))
        for machine in others:
            yield self.hear(machine, "have")

    def say(self, machine: int, topic: str, tensor: torch.Tensor) -> None:
        """Sends; `tensor` may be written again when an answer has come that needs it, or after `told`."""
        with self._lock:
            self._said[machine].append((topic, tensor))
            speaker = self._speakers.get(machine)
        if speaker is not None:
            self._send(speaker, topic, tensor)

    def hear(
        self, machine: int, topic: str, into: torch.Tensor | None = None, *, is_required: bool = False
    ) -> PendingStep:
        """Waits for what a machine says about a topic: bytes, or `into`; ABSENT when it takes no part.

        PeerLost instead of ABSENT where something `is_required`.
        """
        received = self._mesh.receive(None, (self._seq, self._name + topic, machine), into)
        self._receiving.append(received)

        def is_done() -> bool:
            is_over = received.is_done() or self._is_void() or self._final_loss(machine) is not None
            return is_over or self._find_speaker(machine) is None

        def result() -> Any:
            # what came just before its sender went counts
            if received.is_done():
                with contextlib.suppress(PeerLost):
                    came = received.wait()
                    if came is not None:
                        return came
            if self._is_void():
                raise LostMeanwhile
            # somebody may be lost since `is_done` has looked; where all are, that has ended the receive
            loss = self._final_loss(machine)
            if loss is None and is_required:
                loss = self._members.loss_on(machine)
            if loss is not None:
                raise loss.error()
            return ABSENT

        return PendingStep(is_done, result, lambda: self._speakers.get(machine))

    def told(self) -> PendingStep:
        """Waits until all that was said has arrived."""
        return arrived(self._sending)

    def listen(
        self, machine: int, topic: str, into: torch.Tensor | None, on_arrival: Callable[[torch.Tensor], None]
    ) -> None:
        """Has `on_arrival` called with what a machine says about a topic; see `all_reduce.Speaker`."""
        key = (self._seq, self._name + topic, machine)
        self._receiving.append(self._mesh.receive(None, key, into, on_arrival))

    def wake(self) -> None:
        """Lets whoever waits for this operation look again."""
        self._mesh.wake()

    def finish(self, reduction: MachineReduction, machines: Sequence[int]) -> Steps:
        """Waits until a reduction that was started is over, and all that it sends has left."""

        def loss() -> Loss | None:
            """Finds who is lost without whom it cannot end."""
            for machine in machines:
                if machine != self.machine:
                    found = self._final_loss(machine)
                    if found is None and self._find_speaker(machine) is None:
                        found = self._members.loss_on(machine)
                    if found is not None:
                        return found
            return None

        def result() -> None:
            reduction.check()
            if reduction.is_over:
                return
            if self._is_void():
                raise LostMeanwhile
            lost = loss()
            if lost is not None:
                raise lost.error()

        def is_done() -> bool:
            return reduction.is_over or self._is_void() or loss() is not None

        yield PendingStep(is_done, result, self._awaited)
        yield self.told()

    def _awaited(self) -> int | None:
        return next(iter(self._speakers.values()), None)

    def _is_void(self) -> bool:
        """Tells whether others were lost since this attempt has begun."""
        return self._attempt is not None and len(self._members.lost) != len(self._attempt)

    def _final_loss(self, machine: int) -> Loss | None:
        """Finds the loss without which a machine says nothing more.

        Others of a machine may speak for one that was lost since this operation began; if they do not within
        `_MATES_S`, it had begun to speak.
        """
        if self._attempt is not None:
            return None
        first = self._members.first_loss()
        if first is not None:
            return first
        for rank in self._members.ranks_on[machine]:
            loss = self._members.loss(rank)
            if loss is not None and rank not in self._gone_before:
                return loss if time.monotonic() > loss.at_s + _MATES_S else None
        return None

    def _find_speaker(self, machine: int) -> int | None:
        """Names who speaks there, as far as is known, and greets it; None when nobody is left."""
        known = self._speakers.get(machine)
        if known is not None and not self._members.is_gone(known, self._seq):
            return known
        for rank in self._members.ranks_on[machine]:
            if not self._members.is_gone(rank, self._seq):
                self._speak_to(machine, rank)
                return rank
        return None

    def _speak_to(self, machine: int, speaker: int) -> None:
        """Says all to this worker of another machine, also what was said to another one before."""
        if self._speakers.get(machine) != speaker:
            with self._lock:
                self._speakers[machine] = speaker
                said = tuple(self._said[machine])
            for topic, tensor in said:
                self._send(speaker, topic, tensor)

    def _send(self, rank: int, topic: str, tensor: torch.Tensor) -> None:
        self._sending.append(self._mesh.send(rank, (self._seq, self._name + topic, self.machine), tensor))
