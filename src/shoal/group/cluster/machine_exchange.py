"""What machines say to each other in one operation, and how they reduce tensors together.

Of each machine one worker speaks with the others, its leader: of those that have come to the operation the
one of lowest rank. Another machine cannot know who has come, and greets whom it takes for the leader. Should
that one turn out to have left before, the next is greeted. A machine whose workers have all left, or are
lost, takes no part. From its greeting on it is known who leads.

An all-reduce of one tensor of each machine goes in pieces that are reduced as they come, in one of two ways.
*direct*: each machine reduces one share. It gets that share from all others, and sends them the result: two
delays, and every machine speaks with every other. *ring* (Patarasuk and Yuan 2009, section 3): a share goes
around the machines twice, once to be summed up, once as the result: as many bytes, and each machine speaks
with two others alone, but 2·(n − 1) delays. Of two machines both are the same. Pieces are reduced and passed
on by the threads that receive them, while the caller computes or waits. Both ways add in the same order, so
that all machines end with equal bits, run after run.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
import torch

from shoal.core import PeerLost, ShoalError, UsageError
from shoal.group.base import PENDING, Done, Handle, Loss, PolledHandle, Reduction, mismatch
from shoal.group.cluster.links import MeshHandle, flat_bytes, view_of
from shoal.group.cluster.members import Members
from shoal.group.cluster.mesh import Mesh, poll_until
from shoal.group.host import HostGroup
from shoal.group.kernels import reduce_into, share_bounds
from shoal.group.solo import SoloGroup
from shoal.tensors.dtypes import dtype_name
from shoal.tensors.memory import tensor_over
from shoal.transport import BufferPool, Head, Reply

_SUCCESSOR_S = 2.0
SMALL_BYTES = 1 << 16
"""Up to this size a tensor comes with its machine's greeting: one delay instead of two."""
FREE: Handle[None] = Done(None)
"""Yielded by an operation whose last step inside the machine is issued."""
Steps = Generator[Handle[Any], Any, Any]
ABSENT = object()
"""Stands for what would have come from a machine that takes no part."""
Algorithm = Literal["ring", "direct"]
LostRanks = frozenset[int]
"""Those that were lost when an attempt at an operation began, after which it is named."""
PartKey = tuple[int, str]
"""The number of an operation, and the name of one of its parts."""
_RESULT = "group.result"
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 512 << 10, 16 << 20
_NUM_PIECES = 4
"""Under way at once, within the bounds above: receiving, reducing and sending overlap, and Python does not
count. Shares of several machines are under way at once anyway."""
_CACHED_ELEMENTS = 1 << 18
"""So many the processor's cache holds from one operation to the next."""
_SERIAL_ELEMENTS = 1 << 15
"""Up to so many elements torch computes in the thread that asks, also where it has several."""
_MIN_RING_BYTES = 4 << 20
_NUM_TRIALS = 4
_HALF = (torch.float16, torch.bfloat16)


class PendingStep(PolledHandle[Any]):
    """Something that an operation waits for; `awaited` names the rank that has not come, if it is known."""

    def __init__(self, look: Callable[[], Any], awaited: Callable[[], int | None] = lambda: None) -> None:
        super().__init__(look)
        self.awaited = awaited


def until(is_so: Callable[[], bool]) -> PendingStep:
    """Waits until something is so."""
    return PendingStep(lambda: None if is_so() else PENDING)


def arrived(handles: Sequence[Handle[Any]]) -> PendingStep:
    """Waits until all that was sent has arrived; who is gone is noticed where something is expected of it."""
    return until(lambda: all(handle.is_done() for handle in handles))


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
    """Who says it: of a machine its leader."""
    workers: Sequence[int] = ()
    """The ranks for which it speaks, where that is a machine: all of it that takes part."""
    detail: Any = None
    content: bytes = b""
    """A tensor that is so small that it comes with the greeting."""

    @classmethod
    def decode(cls, content: torch.Tensor, own: str, rank: int) -> MachineGreeting:
        """Reads what came; UsageError when it speaks of something else than this worker does."""
        greeting = msgspec.msgpack.decode(content.numpy().tobytes(), type=cls)
        if greeting.action != own:
            raise mismatch(rank, own, greeting.rank, greeting.action)
        return greeting

    def encode(self) -> torch.Tensor:
        """Gives it as a tensor of bytes."""
        return torch.frombuffer(bytearray(msgspec.msgpack.encode(self)), dtype=torch.uint8)


class LostMeanwhile(Exception):
    """Somebody was lost since an attempt has begun."""


class MachineExchange:
    """One operation between this machine, for which this worker speaks, and the others.

    `present` are the places of this machine's workers that take part in it. `name` tells apart those that are
    parts of the same operation. An `attempt`, where there is one, is the ranks that were lost when it began:
    when others are lost it ends in `LostMeanwhile`.
    """

    def __init__(
        self,
        mesh: Mesh,
        members: Members,
        seq: int,
        present: Sequence[int],
        name: str = "",
        attempt: LostRanks | None = None,
    ) -> None:
        self.machine = members.machine
        self.wake = mesh.wake
        """Lets whoever waits for this operation look again."""
        self.workers = [members.ranks_here[place] for place in present]
        """The ranks for which this worker speaks."""
        self._attempt = attempt
        self._mesh = mesh
        self._members = members
        self._seq = seq
        self._name = name
        self._mine = MachineGreeting("", mesh.rank)
        self._leaders: dict[int, int] = {}
        """Who was greeted on each other machine, the last one."""
        self._said: dict[int, list[tuple[str, torch.Tensor]]] = {
            machine: [] for machine in range(len(members.ranks_on)) if machine != members.machine
        }
        """All that was said to each machine, for whoever speaks for it in the end."""
        self._lock = threading.Lock()  # law: of both, between the caller's thread and those that receive
        self._sending: list[MeshHandle[None]] = []
        self._gone_before = tuple(mesh.monitor.lost)
        """Those without whom the others have begun this operation, too."""

    def greet(self, action: str, detail: Any = None) -> Steps:
        """Says what is being done here, and gives what is done elsewhere, by machine.

        UsageError when others do something else; PeerLost when one of them is needed and lost.
        """
        self.announce(action, detail)
        return (yield from self.hear_greetings())

    def find_machines(self) -> list[int]:
        """Lists the machines that seem to take part, this one included."""
        members = self._members
        return [
            machine
            for machine, ranks in enumerate(members.ranks_on)
            if machine == self.machine or not all(members.is_gone(rank, self._seq) for rank in ranks)
        ]

    def announce(self, action: str, detail: Any = None, content: bytes = b"") -> None:
        """Says what is being done here to all other machines."""
        self._mine = MachineGreeting(action, self._mesh.rank, self.workers, detail, content)
        greeting = self._mine.encode()
        for machine, said in self._said.items():
            said.insert(0, ("greeting", greeting))
            self._find_leader(machine)

    def hear_greetings(self) -> Steps:
        """Gives what all machines that take part have said of what they do."""
        heard = {self.machine: self._mine}
        for machine in self._said:
            came = yield self.hear(machine, "greeting")
            if came is not ABSENT:
                heard[machine] = MachineGreeting.decode(came, self._mine.action, self._mesh.rank)
                self._members.note_absent(machine, heard[machine].workers, self._seq)
                self._send_all_to(machine, heard[machine].rank)
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
            leader = self._leaders.get(machine)
        if leader is not None:
            self._send(leader, topic, tensor)

    def hear(
        self, machine: int, topic: str, into: torch.Tensor | None = None, *, is_required: bool = False
    ) -> PendingStep:
        """Waits for what a machine says about a topic: bytes, or `into`; ABSENT when it takes no part.

        PeerLost instead of ABSENT where something `is_required`.
        """
        received = self._mesh.receive(None, (self._seq, self._name + topic, machine), into)

        def look() -> Any:
            is_over = received.is_done() or self.is_void() or self._final_loss(machine) is not None
            if not is_over and self._find_leader(machine) is not None:
                return PENDING
            # what came just before its sender went counts
            if received.is_done():
                with contextlib.suppress(PeerLost):
                    came = received.wait()
                    if came is not None:
                        return came
            if self.is_void():
                raise LostMeanwhile
            # somebody may be lost since the first look; where all are, that has ended the receive
            loss = self._final_loss(machine)
            if loss is None and is_required:
                loss = self._members.loss_on(machine)
            if loss is not None:
                raise loss.error()
            return ABSENT

        return PendingStep(look, lambda: self._leaders.get(machine))

    def told(self) -> PendingStep:
        """Waits until all that was said has arrived."""
        return arrived(self._sending)

    def listen(
        self, machine: int, topic: str, into: torch.Tensor | None, on_arrival: Callable[[torch.Tensor], None]
    ) -> None:
        """Has `on_arrival` called, in any thread, with what a machine says about a topic."""
        self._mesh.receive(None, (self._seq, self._name + topic, machine), into, on_arrival)

    def finish(self, reduction: MachineReduction) -> Steps:
        """Waits until a reduction that was started is over, and all that it sends has left."""
        others = [machine for machine in reduction.machines if machine != self.machine]

        def look() -> Any:
            if reduction.error is not None:
                raise reduction.error
            if reduction.is_over:
                return None
            if self.is_void():
                raise LostMeanwhile
            for machine in others:
                loss = self._final_loss(machine)
                if loss is None and self._find_leader(machine) is None:
                    loss = self._members.loss_on(machine)
                if loss is not None and not reduction.is_over:  # all may have come just before
                    raise loss.error()
            return PENDING

        yield PendingStep(look, lambda: next(iter(self._leaders.values()), None))
        yield self.told()

    def is_void(self) -> bool:
        """Tells whether others were lost since this attempt has begun."""
        return self._attempt is not None and len(self._members.lost) != len(self._attempt)

    def _final_loss(self, machine: int) -> Loss | None:
        """Finds the loss without which a machine says nothing more.

        Others of a machine may speak for one that was lost since this operation began; if they do not within
        `_SUCCESSOR_S`, it had begun to speak.
        """
        if self._attempt is not None:
            return None
        first = self._members.first_loss()
        if first is not None:
            return first
        for rank in self._members.ranks_on[machine]:
            loss = self._mesh.monitor.lost.get(rank)
            if loss is not None and rank not in self._gone_before:
                return loss if time.monotonic() > loss.at_s + _SUCCESSOR_S else None
        return None

    def _find_leader(self, machine: int) -> int | None:
        """Names the leader there, as far as is known, and greets it; None when nobody is left."""
        known = self._leaders.get(machine)
        if known is not None and not self._members.is_gone(known, self._seq):
            return known
        for rank in self._members.ranks_on[machine]:
            if not self._members.is_gone(rank, self._seq):
                self._send_all_to(machine, rank)
                return rank
        return None

    def _send_all_to(self, machine: int, leader: int) -> None:
        """Says all to this worker of another machine, also what was said to another one before."""
        if self._leaders.get(machine) != leader:
            with self._lock:
                self._leaders[machine] = leader
                said = tuple(self._said[machine])
            for topic, tensor in said:
                self._send(leader, topic, tensor)

    def _send(self, rank: int, topic: str, tensor: torch.Tensor) -> None:
        self._sending.append(self._mesh.send(rank, (self._seq, self._name + topic, self.machine), tensor))


class MachineReduction:
    """Reduces one flat tensor of each of several machines, into `out`, which may be the tensor itself.

    What others send comes into its place from when it is made; `start` sends. `name` tells it from others of
    the same operation. A ring works in place alone.
    """

    def __init__(
        self,
        between: MachineExchange,
        machines: Sequence[int],
        algorithm: Algorithm,
        op: Reduction,
        flat: torch.Tensor,
        out: torch.Tensor,
        name: str,
    ) -> None:
        self.machines = machines
        self._between = between
        self._algorithm = algorithm
        self._op = op
        self._name = name
        self._place = list(machines).index(between.machine)
        places = range(len(machines))
        self._others = [*places[self._place + 1 :], *places[: self._place]]
        """The places of the other machines, in the order of a ring: so not all send to the same one first."""
        self._pieces = [_pieces(flat, place, len(machines)) for place in places]
        """Of each machine's share, by the machine's place among them."""
        is_in_place = out is flat
        self._results = (
            self._pieces if is_in_place else [_pieces(out, place, len(machines)) for place in places]
        )
        self._num_missing = 1
        """What has been asked for and has not come, and one more until it was started."""
        self._parts: dict[int, dict[int, torch.Tensor]] = {}
        """What has come for each piece of this machine's share, by machine."""
        self._has_started = False
        self._waiting: list[Callable[[], None]] = []
        """What has come before it was started."""
        self.error: Exception | None = None
        """What went wrong in another thread."""
        self._lock = threading.Lock()  # law: between the threads that receive from several machines
        if algorithm == "ring":
            self._listen_in_ring()
        else:
            self._listen_directly()

    @property
    def is_over(self) -> bool:
        """Whether all pieces have come; some may not have left yet."""
        return self._num_missing == 0 or self.error is not None

    def start(self) -> None:
        """Sends what is here; what comes is reduced from now on."""
        with self._lock:
            self._has_started = True
            waiting, self._waiting = self._waiting, []
        if self._algorithm == "ring":
            for number, piece in enumerate(self._pieces[self._place]):
                self._say(self._others[0], f"sum {self._place} {number}", piece)
        else:
            for number in range(len(self._pieces[0])):
                for place in self._others:
                    if number < len(self._pieces[place]):
                        self._say(place, f"part {number}", self._pieces[place][number])
        for act in waiting:
            act()
        self._count(-1)

    # --- direct ---

    def _listen_directly(self) -> None:
        for place in self._others:
            for number, piece in enumerate(self._results[place]):
                self._listen(place, f"share {number}", piece, lambda piece: None)
        for number in range(len(self._pieces[self._place])):
            for place in self._others:
                self._listen(place, f"part {number}", None, partial(self._add_part, place, number))

    def _add_part(self, place: int, number: int, came: torch.Tensor) -> None:
        mine, result = self._pieces[self._place][number], self._results[self._place][number]
        with self._lock:
            parts = self._parts.setdefault(number, {})
            parts[place] = came.view(mine.dtype)
            if len(parts) < len(self._others):
                return
            del self._parts[number]
        # in the order of a ring, so that both ways give the same bits; `result` may be `mine`
        _reduce(result, [mine, *(parts[other] for other in self._others)], self._op)
        for other in self._others:
            self._say(other, f"share {number}", result)

    # --- ring ---

    def _listen_in_ring(self) -> None:
        previous, last = self._others[-1], len(self._others) - 1
        for step in range(last + 1):
            summed, whole = self._others[last - step], (self._place - step) % len(self.machines)
            for number in range(len(self._pieces[summed])):
                add = partial(self._add_to_ring, summed, number, is_last=step == last)
                self._listen(previous, f"sum {summed} {number}", None, add)
            for number, piece in enumerate(self._pieces[whole]):
                take = partial(self._pass_on, whole, number, is_last=step == last)
                self._listen(previous, f"whole {whole} {number}", piece, take)

    def _add_to_ring(self, place: int, number: int, came: torch.Tensor, *, is_last: bool) -> None:
        piece = self._pieces[place][number]
        _reduce(piece, [piece, came.view(piece.dtype)], "sum" if self._op == "mean" else self._op)
        if is_last and self._op == "mean":
            for start in range(0, piece.numel(), _num_at_once()):
                piece[start : start + _num_at_once()].mul_(1 / len(self.machines))
        self._say(self._others[0], f"{'whole' if is_last else 'sum'} {place} {number}", piece)

    def _pass_on(self, place: int, number: int, piece: torch.Tensor, *, is_last: bool) -> None:
        if not is_last:
            self._say(self._others[0], f"whole {place} {number}", piece)

    # --- both ---

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_missing += change

    def _say(self, place: int, topic: str, piece: torch.Tensor) -> None:
        self._between.say(self.machines[place], f"{self._name} {topic}", piece)

    def _listen(
        self, place: int, topic: str, into: torch.Tensor | None, act: Callable[[torch.Tensor], None]
    ) -> None:
        self._count(1)

        def on_arrival(came: torch.Tensor) -> None:
            with self._lock:
                # others may have begun: nothing is changed here before it is known that all do the same
                if not self._has_started:
                    self._waiting.append(partial(on_arrival, came))
                    return
            try:
                act(came)
            except Exception as error:  # noqa: BLE001 - of another thread; whoever waits raises it
                self.error = error
            self._count(-1)
            if self.is_over:
                self._between.wake()

        self._between.listen(self.machines[place], f"{self._name} {topic}", into, on_arrival)


class Handover:
    """Does one worker's part of operations that outlive the loss of any worker, also of a machine's leader.

    The workers of a machine all have what their machine gives, and leave it as it is until the operation is
    over. One of them, the leader, gets the result from the other machines, out of place, and hands it out.
    When it is lost before, the next one leads. The operation between machines is an *attempt*, named after
    the ranks that were lost when it began; when another rank is lost, all give it up and begin anew without
    that rank.

    All who are left must end with the same result. So a machine uses a result only when all machines have
    said that they have it, too, or when it has it and one of the others is lost. Whoever begins anew asks all
    others first: one that has a result gives it, also long after it has gone on; one that has none promises
    not to use one of that attempt any more. If nobody has one, nobody has used one. The last result is kept
    for this until the next operation is over, in which all machines have taken part.
    """

    def __init__(self, local: HostGroup | SoloGroup, mesh: Mesh, members: Members) -> None:
        self._local = local
        self._mesh = mesh
        self._members = members
        self._pool = BufferPool()
        self._results: dict[PartKey, torch.Tensor] = {}
        """The results that others may ask for."""
        self._void: dict[PartKey, LostRanks] = {}
        """Losses that an attempt at an operation must know of, so that its result may be used."""
        self._awaited: dict[PartKey, int] = {}
        """The place of who is to hand out a result to this worker."""
        self._lock = threading.Lock()  # law: of both maps, between the caller's thread and the mesh's loop
        mesh.handle(_RESULT, self._serve_result, payload_type=tuple[int, str, list[int]])

    def empty_like(self, flat: torch.Tensor) -> torch.Tensor:
        """Makes memory of the host for a result; it is used again when nobody needs it any more."""
        if not flat.numel():
            return torch.empty(0, dtype=flat.dtype)
        return tensor_over(self._pool.allocate(flat.nbytes)).view(flat.dtype)

    def outlive(
        self, seq: int, name: str, present: Sequence[int], work: Callable[[MachineExchange], Steps]
    ) -> Steps:
        """Gives all workers of this machine what `work` returns to the leader: bytes.

        `present` are the places of those that have what the machine gives. `work` gives the result and the
        machines that took part; it is done again when somebody is lost.
        """
        part = (seq, name)
        for leader in present:
            result = None
            is_leader = self._members.ranks_here[leader] == self._members.rank
            if is_leader:
                result = yield from self._agree(part, present, work, is_successor=leader != present[0])
            elif len(self._members.ranks_here) > 1:
                self._awaited[part] = leader
            if len(self._members.ranks_here) > 1:
                result = yield from self._hand_out(leader, result)
            if result is not None:
                self._keep(part, result)
                return result
            self._awaited.pop(part, None)
        raise UsageError("no worker of this machine is left to take part.")  # this worker is

    # --- between machines ---

    def _agree(
        self,
        part: PartKey,
        present: Sequence[int],
        work: Callable[[MachineExchange], Steps],
        *,
        is_successor: bool,
    ) -> Steps:
        """Makes attempts until this machine has the result that all others have."""
        (seq, name), should_ask = part, is_successor
        while True:
            yield until(lambda: not self._members.is_undecided(seq))
            if self._members.judge_split(seq):
                assert self._members.split is not None
                raise self._members.split
            lost = frozenset(self._members.lost)
            if should_ask and (found := (yield from self._ask(part, lost))) is not None:
                return found
            should_ask = True
            name_of_attempt = f"{name}{sorted(lost)} "
            between = MachineExchange(self._mesh, self._members, seq, present, name_of_attempt, lost)
            with contextlib.suppress(LostMeanwhile):
                result, machines = yield from work(between)
                if not self._may_use(part, lost, result):
                    yield until(between.is_void)
                    continue
                with contextlib.suppress(LostMeanwhile):  # whoever does not have the result asks for it
                    yield from between.agree(machines)
                return result

    def _ask(self, part: PartKey, lost: LostRanks) -> Steps:
        """Asks all workers of other machines for the result of an earlier attempt; None when none has it.

        PeerLost when one has left that took part: it may have used a result that nobody else has.
        """
        (seq, name), members = part, self._members
        others = [
            rank
            for rank in range(members.size)
            if members.place_of(rank) is None and not members.is_gone(rank, seq)
        ]
        came: dict[int, torch.Tensor] = {}

        def allocate(rank: int) -> Callable[[Head], list[memoryview]]:
            def place(head: Head) -> list[memoryview]:
                came[rank] = torch.empty(head.total_bytes, dtype=torch.uint8)
                return [view_of(came[rank])] if head.total_bytes else []

            return place

        asked = {
            rank: self._mesh.call(rank, _RESULT, (seq, name, sorted(lost)), into=allocate(rank))
            for rank in others
        }
        found: torch.Tensor | None = None
        for rank, handle in asked.items():
            yield until(handle.is_done)
            try:
                if handle.wait().payload and found is None:
                    found = came.get(rank, torch.empty(0, dtype=torch.uint8))
            except PeerLost:
                if rank in self._mesh.monitor.left and found is None:
                    raise
                continue  # the next attempt knows of it
        return found

    async def _serve_result(self, head: Head, buffers: Sequence[memoryview]) -> Reply:
        """Gives the result of an operation, or promises not to use one of an attempt that is over.

        One whose leader is lost first looks whether that has handed out a result before.
        """
        seq, name, lost = head.payload
        part = (seq, name)

        def is_clear() -> bool:
            leader = self._awaited.get(part)
            return leader is None or leader in self._local.members

        await poll_until(is_clear)
        with self._lock:
            result = self._results.get(part)
            if result is None:
                self._void[part] = self._void.get(part, LostRanks()) | LostRanks(lost)
                return Reply(payload=False)
        return Reply(payload=True, buffers=[view_of(result)] if result.numel() else [])

    def _may_use(self, part: PartKey, lost: LostRanks, result: torch.Tensor) -> bool:
        """Keeps the result of an attempt for others, unless it was promised that it is not used."""
        with self._lock:
            if not self._void.get(part, lost) <= lost:
                return False
            self._results[part] = result
            return True

    def _keep(self, part: PartKey, result: torch.Tensor) -> None:
        """Keeps the result of a part of an operation that is over here, and forgets those before it."""
        with self._lock:
            self._results = {part: result}
            self._void = {other: lost for other, lost in self._void.items() if other[0] >= part[0]}
            self._awaited.pop(part, None)

    # --- inside the machine ---

    def _hand_out(self, leader: int, result: torch.Tensor | None) -> Steps:
        """Gives the leader's result to all workers of the machine; None when it was lost before."""
        size = torch.tensor([0 if result is None else result.numel()])
        if not (yield from self._copy(leader, size)):
            return None
        num_bytes = int(size.item())
        if result is None:
            result = self.empty_like(torch.empty(num_bytes, dtype=torch.uint8, device="meta"))
        if num_bytes and not (yield from self._copy(leader, result)):
            return None
        return result

    def _copy(self, leader: int, tensor: torch.Tensor) -> Steps:
        """Copies the leader's tensor to all; False when it was lost before it gave it, on all alike."""
        handle = self._local.broadcast(tensor, leader)
        yield until(handle.is_done)
        try:
            handle.wait()
        except ShoalError:
            if leader in self._local.members:
                raise
            return False
        return True


class AlgorithmChoice:
    """The way of each all-reduce: as it was told, or what was faster until now.

    The first machine measures, and says in each operation which way the next one of that size goes, so that
    all know it before that one begins.
    """

    def __init__(self, asked: Literal["auto", "ring", "direct"]) -> None:
        self._asked = asked
        self._taken_s: dict[int, dict[Algorithm, list[float]]] = {}
        self._told: dict[int, Algorithm] = {}

    def plan(self, flat: torch.Tensor, num_machines: int) -> tuple[Algorithm, Algorithm]:
        """Gives the way of an operation that begins, and that of the next one by what is known here."""
        # a ring adds one after the other, and halves would lose bits each time
        if num_machines <= 2 or flat.nbytes < _MIN_RING_BYTES or flat.dtype in _HALF:
            return "direct", "direct"
        if self._asked != "auto":
            return self._asked, self._asked
        now, taken_s = self._told.get(_size_class(flat), "direct"), self._known(flat)
        if min(map(len, taken_s.values())) < _NUM_TRIALS:
            return now, "ring" if now == "direct" else "direct"  # each in turn
        # the first of each has made connections and memory
        return now, min(taken_s, key=lambda algorithm: statistics.median(taken_s[algorithm][1:]))

    def tell(self, flat: torch.Tensor, algorithm: Algorithm) -> None:
        """Takes note of what the first machine says of the operation after this one."""
        self._told[_size_class(flat)] = algorithm

    def note(self, flat: torch.Tensor, algorithm: Algorithm, seconds: float) -> None:
        """Takes note of how long one has taken; the first few of each kind count."""
        taken_s = self._known(flat)[algorithm]
        if len(taken_s) < _NUM_TRIALS:
            taken_s.append(seconds)

    def _known(self, flat: torch.Tensor) -> dict[Algorithm, list[float]]:
        return self._taken_s.setdefault(_size_class(flat), {"direct": [], "ring": []})


def _size_class(flat: torch.Tensor) -> int:
    """Sizes within a factor of four go alike."""
    return flat.nbytes.bit_length() // 2


def _pieces(flat: torch.Tensor, place: int, num_shares: int) -> Sequence[torch.Tensor]:
    """Cuts one share of a tensor into pieces, alike on all machines."""
    low, high = share_bounds(place, num_shares, flat.numel(), flat.element_size())
    if low == high:
        return ()
    largest = share_bounds(0, num_shares, flat.numel(), flat.element_size())[1] * flat.element_size()
    num_pieces = max(1, _NUM_PIECES // (num_shares - 1))
    piece_bytes = min(max(-(-largest // num_pieces), _MIN_PIECE_BYTES), _MAX_PIECE_BYTES) + 63 & ~63
    step = piece_bytes // flat.element_size()
    return [flat[start : min(start + step, high)] for start in range(low, high, step)]


def _reduce(out: torch.Tensor, parts: Sequence[torch.Tensor], op: Reduction) -> None:
    """Reduces parts in their order; `out` may be the first of them."""
    step = _num_at_once()
    for start in range(0, out.numel(), step):
        piece = slice(start, start + step)
        reduce_into(out[piece], [part[piece] for part in parts], op)


def _num_at_once() -> int:
    """Gives how many elements are computed at once: a thread of ours shall not start others of torch."""
    return _CACHED_ELEMENTS if torch.get_num_threads() == 1 else _SERIAL_ELEMENTS


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Gives a result as the bytes that travel."""
    return flat_bytes(tensor) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
