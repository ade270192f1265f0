"""The order of a worker's operations over several machines, and what machines say to each other in one.

An operation is a generator: it yields what it waits for, and goes on with the result. Its steps inside the
machine must come in the same order on all of the machine's workers, so one operation after another has the
lane; it gives the lane free (`yield FREE`) when it has issued its last step there, and may go on beside later
ones. Everything happens in the thread that calls, whenever it calls.

A machine speaks by the first of its workers that has come to the operation. Who that is follows from who has
come there; another machine cannot know that, and sends to whom it takes for the speaker. Should that one turn
out to have left before, all that was said to it is said again to the next. A machine whose workers have all
left, or are lost, takes no part.
"""

from __future__ import annotations

import abc
import contextlib
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, Protocol

import msgspec
import torch

from shoal.core import Deadline, PeerLost, ShoalError, UsageError
from shoal.group.base import Loss, Reduction
from shoal.group.cluster.mesh import Mesh, MeshHandle
from shoal.group.host.engine import Span, is_overlapping
from shoal.group.kernels import reduce_into, share

_MATES_S = 2.0
_ARRIVING_S = 5.0
_SMALL_BYTES = 1 << 16
"""Up to this size everybody gets everything at once: one delay instead of two."""
_KINDS = ("all_reduce", "broadcast", "all_gather", "exchange", "exchange_machines", "barrier")


class Waitable(Protocol):
    """Something that an operation waits for."""

    def is_done(self) -> bool:
        """Whether `result` returns, or raises, at once."""

    def result(self) -> Any:
        """What it brought."""


class Free:
    """Yielded by an operation whose last step inside the machine is issued."""


FREE = Free()
Steps = Generator[Waitable | Free, Any, Any]


class Step(abc.ABC):
    """A waitable that can say for whom it waits."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether `result` returns, or raises, at once."""

    @abc.abstractmethod
    def result(self) -> Any:
        """What it brought, or its error."""

    def awaited(self) -> int | None:
        """The rank that has not come, where it is known."""
        return None


class Operation:
    """One numbered operation under way."""

    def __init__(self, seq: int, what: str, steps: Steps, spans: Sequence[Span]) -> None:
        self.seq = seq
        self.what = what
        self.spans = spans
        """Memory that it reads or writes: a later operation on any of it begins when this one is over."""
        self.is_begun = False
        self.is_free = False
        self.is_over = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._steps = steps
        self._waiting: Waitable | None = None

    def awaited(self) -> int | None:
        """The rank that it waits for, where it is known."""
        return self._waiting.awaited() if isinstance(self._waiting, Step) else None

    def advance(self) -> bool:
        """Go on as far as it can; whether it moved."""
        moved = False
        while not self.is_over:
            if self._waiting is not None and not self._waiting.is_done():
                return moved
            moved = True
            self._go_on()
        return moved

    def drop(self) -> None:
        """Forget it where it stands."""
        self._end()
        self._steps.close()

    def _go_on(self) -> None:
        waited, self._waiting = self._waiting, None
        self.is_begun = True
        try:
            brought = None if waited is None else waited.result()
        except Exception as error:  # noqa: BLE001  (it is the operation's, which may catch it)
            self._resume(error)
        else:
            self._resume(brought)

    def _resume(self, brought: Any) -> None:
        try:
            if isinstance(brought, Exception):
                asked = self._steps.throw(brought)
            else:
                asked = self._steps.send(brought)
            while isinstance(asked, Free):
                self.is_free = True
                asked = next(self._steps)
            self._waiting = asked
        except StopIteration as end:
            self.value = end.value
            self._end()
        except BaseException as error:
            self.error = error
            self._end()
            if not isinstance(error, Exception):
                raise

    def _end(self) -> None:
        self.is_free = self.is_over = True
        self._waiting = None


class Lane:
    """A worker's operations, in order."""

    def __init__(self) -> None:
        self._open: deque[Operation] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._open

    @property
    def is_clear(self) -> bool:
        """Whether all operations have issued their last step inside the machine."""
        return all(operation.is_free for operation in self._open)

    @property
    def first_seq(self) -> int:
        """The number of the first operation under way."""
        return self._open[0].seq

    def add(self, operation: Operation) -> None:
        """The next one."""
        self._open.append(operation)

    def advance(self) -> None:
        """Go on with all that can go on."""
        moved = True
        while moved:
            moved = False
            is_clear = True
            for operation in tuple(self._open):
                may_go_on = is_clear or operation.is_free
                if may_go_on and (operation.is_begun or not self._is_in_use(operation)):
                    moved |= operation.advance()
                is_clear = is_clear and operation.is_free
            while self._open and self._open[0].is_over:
                self._open.popleft()

    def awaited(self) -> int | None:
        """The rank that the first operation waits for, where it is known."""
        return next((rank for each in self._open if (rank := each.awaited()) is not None), None)

    def uses(self, span: Span) -> bool:
        """Whether an operation under way reads or writes some memory."""
        return any(not each.is_over and is_overlapping(each.spans, [span]) for each in self._open)

    def drop(self) -> None:
        """Forget all that is under way."""
        while self._open:
            self._open.popleft().drop()

    def _is_in_use(self, operation: Operation) -> bool:
        for earlier in self._open:
            if earlier is operation:
                return False
            if not earlier.is_over and is_overlapping(earlier.spans, operation.spans):
                return True
        return False


Talk = Generator[Waitable, Any, Any]


class Roll(Protocol):
    """Who takes part in an operation, as far as this worker knows."""

    def ranks_on(self, machine: int) -> Sequence[int]:
        """A machine's ranks."""

    def has_left(self, rank: int, seq: int) -> bool:
        """Whether a rank left in order before an operation."""

    def loss(self, rank: int) -> Loss | None:
        """Why a rank is lost, if it is."""

    def first_loss(self) -> Loss | None:
        """Of anybody, where a loss ends every operation; None while nobody is lost, or others can go on."""


class Action(msgspec.Struct, frozen=True, array_like=True):
    """What is done, which must be alike everywhere; short, for it goes before every tensor."""

    kind: int
    dtype: str = ""
    num_elements: int = 0
    rule: str = ""
    """A reduction, or a root."""

    @classmethod
    def on(cls, kind: str, tensor: torch.Tensor, rule: str = "") -> Action:
        """An operation on a tensor."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(_KINDS.index(kind), dtype, tensor.numel(), rule)

    @classmethod
    def of(cls, kind: str) -> Action:
        """An operation without one, or on tensors that differ."""
        return cls(_KINDS.index(kind))

    def __str__(self) -> str:
        kind = _KINDS[self.kind] if 0 <= self.kind < len(_KINDS) else "something else"
        rule = f", {self.rule}" if self.rule else ""
        return f"{kind} of {self.num_elements} elements ({self.dtype}{rule})" if self.dtype else kind


class Words(msgspec.Struct, frozen=True, array_like=True):
    """The first thing that is said in an operation, by a machine or a rank."""

    action: Action
    rank: int
    """Who speaks."""
    num_workers: int = 1
    """For whom."""
    detail: Any = None

    @classmethod
    def heard(cls, content: torch.Tensor, own: Action, rank: int) -> Words:
        """What came, as bytes; UsageError when it speaks of something else than this worker does."""
        words = msgspec.msgpack.decode(content.numpy().tobytes(), type=cls)
        if words.action != own:
            raise UsageError(
                f"rank {rank} called {own} where rank {words.rank} called {words.action}.",
                cause="the workers do not run the same program, or not with the same data.",
                next_step="let all workers issue the same operations in the same order.",
            )
        return words

    def said(self) -> torch.Tensor:
        """As bytes."""
        return torch.frombuffer(bytearray(msgspec.msgpack.encode(self)), dtype=torch.uint8)


class Absent:
    """In place of what would have come from a machine that takes no part."""


ABSENT = Absent()


class Conversation:
    """One operation between this machine, for which this worker speaks, and the others."""

    def __init__(self, mesh: Mesh, roll: Roll, seq: int, machine: int, others: Sequence[int]) -> None:
        self.machine = machine
        self._mesh = mesh
        self._roll = roll
        self._seq = seq
        self._others = list(others)
        self._said: dict[int, list[tuple[str, torch.Tensor]]] = {other: [] for other in others}
        self._listeners: dict[int, int] = {}
        self._under_way: list[MeshHandle[None]] = []
        self._wanted: list[MeshHandle[torch.Tensor | None]] = []
        self._gone_before = tuple(mesh.lost)
        """Those without whom the others have begun this operation, too."""

    def greet(self, action: Action, num_workers: int, detail: Any = None) -> Talk:
        """Say what is being done here, and learn what is done elsewhere: `Words` by machine, one's own too.

        UsageError when others do something else; PeerLost when one of them is needed and lost.
        """
        mine = Words(action, self._mesh.rank, num_workers, detail)
        encoded = mine.said()
        for machine in tuple(self._others):
            self.say(machine, "words", encoded)
        heard = {self.machine: mine}
        for machine in tuple(self._others):
            came = yield self.hear(machine, "words")
            if came is ABSENT:
                self._others.remove(machine)
                continue
            theirs = Words.heard(came, action, self._mesh.rank)
            self._speak_to(machine, theirs.rank)
            heard[machine] = theirs
        return dict(sorted(heard.items()))

    def say(self, machine: int, topic: str, tensor: torch.Tensor) -> None:
        """Send; `tensor` may be written again when an answer has come that needs it, or after `told`."""
        self._said[machine].append((topic, tensor))
        listener = self._listener(machine)
        if listener is not None and self._listeners.setdefault(machine, listener) == listener:
            self._send(listener, topic, tensor)
        elif listener is not None:
            self._speak_to(machine, listener)

    def hear(self, machine: int, topic: str, into: torch.Tensor | None = None) -> Step:
        """Wait for what a machine says about a topic: bytes, or `into`; ABSENT when it takes no part."""
        received = self._mesh.receive(None, (self._seq, topic, machine), into)
        self._wanted.append(received)
        return _Heard(self, received, machine)

    def close(self) -> None:
        """Nothing that was asked for is written any more; what is just arriving is waited for."""
        coming = [wanted for wanted in self._wanted if not wanted.is_done() and not self._mesh.forget(wanted)]
        for wanted in coming:
            with contextlib.suppress(ShoalError):
                wanted.wait(Deadline.after(_ARRIVING_S))

    def told(self) -> Step:
        """Wait until all that was said has arrived."""
        return Arrived(self._under_way)

    def reduce(self, flat: torch.Tensor, machines: Sequence[int], op: Reduction) -> Talk:
        """In place, over the machines' tensors, of which each machine reduces its share; equal bits."""
        others = [machine for machine in machines if machine != self.machine]
        if not others or not flat.numel():
            return
        if flat.nbytes <= _SMALL_BYTES:
            parts = {self.machine: flat.clone()}
            for machine in others:
                self.say(machine, "whole", parts[self.machine])
            for machine in others:
                parts[machine] = torch.empty_like(flat)
                self._require((yield self.hear(machine, "whole", parts[machine])), machine)
            reduce_into(flat, [parts[machine] for machine in machines], op)
            return
        shares = {
            machine: flat[slice(*share(index, len(machines), flat.numel(), flat.element_size()))]
            for index, machine in enumerate(machines)
        }
        mine = shares[self.machine]
        for machine in others:
            self.say(machine, "part", shares[machine])
        parts = {self.machine: mine, **{machine: torch.empty_like(mine) for machine in others}}
        waiting = [self.hear(machine, "part", parts[machine]) for machine in others]
        results = [self.hear(machine, "share", shares[machine]) for machine in others]
        for machine, came in zip(others, waiting, strict=True):
            self._require((yield came), machine)
        # what it is reduced into comes first, since it is overwritten
        reduce_into(mine, [mine, *(parts[machine] for machine in others)], op)
        for machine in others:
            self.say(machine, "share", mine)
        for machine, came in zip(others, results, strict=True):
            self._require((yield came), machine)
        yield self.told()

    def look_again(self, machine: int) -> bool:
        """Say everything again if the listener has left before this; whether the machine takes part."""
        known = self._listeners.get(machine)
        listener = self._listener(machine)
        if listener is None:
            return False
        self._listeners[machine] = listener if known is None else known
        self._speak_to(machine, listener)
        return True

    def missing(self, machine: int) -> int | None:
        """Who is waited for there."""
        return self._listeners.get(machine)

    def loss_that_ends_it(self) -> Loss | None:
        """Why this operation cannot be finished, where everybody is needed."""
        return self._roll.first_loss()

    def loss_meanwhile(self, machine: int) -> Loss | None:
        """Somebody of a machine that was lost since this operation began, and may have been its speaker."""
        for rank in self._roll.ranks_on(machine):
            loss = self._roll.loss(rank)
            if loss is not None and rank not in self._gone_before:
                return loss
        return None

    def _listener(self, machine: int) -> int | None:
        """Who speaks there, as far as is known; None when nobody is left."""
        known = self._listeners.get(machine)
        if known is not None and not self._is_gone(known):
            return known
        return next((rank for rank in self._roll.ranks_on(machine) if not self._is_gone(rank)), None)

    def _speak_to(self, machine: int, listener: int) -> None:
        """Say to another one what was said to the one before."""
        if self._listeners.get(machine) != listener:
            self._listeners[machine] = listener
            for topic, tensor in self._said[machine]:
                self._send(listener, topic, tensor)

    def _is_gone(self, rank: int) -> bool:
        return self._roll.has_left(rank, self._seq) or self._roll.loss(rank) is not None

    def _send(self, listener: int, topic: str, tensor: torch.Tensor) -> None:
        key = (self._seq, topic, self.machine)
        self._under_way.append(self._mesh.send(listener, key, tensor))

    def _require(self, came: Any, machine: int) -> None:
        """What a machine that took part must give."""
        if came is ABSENT:
            raise gone_from(self._roll, machine).error()


class _Heard(Step):
    """Something that a machine says, or that it says nothing any more."""

    def __init__(self, talk: Conversation, received: MeshHandle[torch.Tensor | None], machine: int) -> None:
        self._talk = talk
        self._received = received
        self._machine = machine
        self._loss: Loss | None = None
        self._is_absent = False
        self._patient_until_s: float | None = None

    def is_done(self) -> bool:
        if self._received.is_done():
            return True
        self._loss = self._talk.loss_that_ends_it() or self._loss_after_patience()
        # what came just before its sender went counts
        self._is_absent = not self._talk.look_again(self._machine)
        return self._received.is_done() or self._is_absent or self._loss is not None

    def _loss_after_patience(self) -> Loss | None:
        """Its mates may speak for one that was lost; if they do not, it had begun to, and they cannot."""
        loss = self._talk.loss_meanwhile(self._machine)
        if loss is None:
            return None
        if self._patient_until_s is None:
            self._patient_until_s = time.monotonic() + _MATES_S
        return loss if time.monotonic() > self._patient_until_s else None

    def result(self) -> Any:
        came = None
        if self._received.is_done():
            with contextlib.suppress(PeerLost):
                came = self._received.result()
        if came is not None:
            return came
        # one who may be lost since `is_done` has looked; where all are, that has ended the receive as well
        loss = self._talk.loss_that_ends_it() or self._loss
        if loss is not None:
            raise loss.error()
        return ABSENT

    def awaited(self) -> int | None:
        return self._talk.missing(self._machine)


def gone_from(roll: Roll, machine: int) -> Loss:
    """Why a machine that took part gives nothing more."""
    losses = [loss for rank in roll.ranks_on(machine) if (loss := roll.loss(rank)) is not None]
    left = Loss(roll.ranks_on(machine)[0], "it left in the middle of an operation")
    return roll.first_loss() or next(iter(losses), left)


class Arrived(Step):
    """All that was sent has arrived, or nobody is there to take it."""

    def __init__(self, handles: Sequence[MeshHandle[None]]) -> None:
        self._handles = handles

    def is_done(self) -> bool:
        """Whether nothing is on its way any more."""
        return all(handle.is_done() for handle in self._handles)

    def result(self) -> None:
        """Nothing; who is gone is noticed where something is expected of it."""
