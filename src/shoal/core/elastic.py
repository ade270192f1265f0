"""How a run grows and shrinks while it trains: who is in its next group, and when that group forms.

A run has one `Coordinator`: its launcher's, or that of a simulated world. Workers have numbers that are never
used twice; ranks belong to a generation, which is one group from its forming to the next one. A generation
ends between two steps:

    worker                                            coordinator
                                                      a worker was lost, has come, or is to leave
                                         ◄── Prepare  when will you stop?
    Reached(last_step)  ──►                           I stop after this step, unless I hear of a later one
                                         ◄── MeetAt   the latest step that anybody has named
    (all train on until that step)
    Waiting  ──►                                      I have stopped, and have left the old group
                                         ◄── Form     all have stopped: this is the next generation
    Gather(name, value)  ──►             ◄── Gathered whatever workers must know of each other to connect
    Formed  ──►                                       I am in the new group

Workers answer Prepare at once, wherever they are in a step, so that nobody waits for somebody who waits for
an answer. A worker whose operation fails because of a loss stops there and then, and says Waiting without
being asked. When a worker ends or waits again while a generation forms, all who are not in the new group yet
are told that it has failed, wait again, and another generation is tried. Workers whose strategy does not go
in lockstep stop after the step that they are in.

Parameter servers are in every generation, with the first ranks, and stop when all workers have. They never
come later, do not count as workers, and end when the workers have finished.

Everything here is pure: messages come in, messages go out, time is told. A worker's side is a
`CoordinatorLink`; how its messages travel is the business of its subclasses.
"""

from __future__ import annotations

import abc
import math
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from shoal.core.clock import SYSTEM_CLOCK, Clock
from shoal.core.deadlines import Deadline
from shoal.core.errors import ProtocolError, ShoalError
from shoal.core.ids import Address
from shoal.core.placement import Placement

SUSPECT_S = 2.0
"""A worker that others have lost, and that neither ends nor says anything itself, is given up after so long:
it is stopped, or cut off."""
ANSWERING_S = 60.0
"""One that still answers this coordinator is given so long: it finds out by itself that it is cut off. So
is one that nobody has lost, and that does not answer."""
HORIZON_S = 0.05
"""A worker that is asked when it can stop may train on for so long, and for one step at least: until then it
hears where the others stop."""
MAX_MESSAGE_BYTES = 1 << 24
_LENGTH = struct.Struct(">I")
_SMALLER, _UNREACHED = "the run was made smaller", "other workers cannot connect to it"


class ElasticMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages between a worker and the coordinator of its run."""


class Waiting(ElasticMessage, frozen=True):
    """Up: this worker is in no group, and waits for the next generation."""

    is_fresh: bool
    """Whether it has trained in no generation yet, and has no state to give."""
    lost: tuple[int, ...] = ()
    """The numbers of the workers because of which it could not go on."""
    note: bytes = b""
    """What the others shall know of it if it leaves now."""


class Progress(ElasticMessage, frozen=True):
    """Up: what the others shall know of this worker if it is lost; it replaces what it has said before."""

    note: bytes


class Reached(ElasticMessage, frozen=True):
    """Up, the answer to `Prepare`: this worker stops after that step, unless it hears of a later one."""

    generation: int
    last_step: int


class Gather(ElasticMessage, frozen=True):
    """Up: what this worker gives to a gathering of its generation."""

    generation: int
    name: str
    value: bytes
    is_of_workers: bool = False
    """Whether parameter servers have no part in it."""


class Formed(ElasticMessage, frozen=True):
    """Up: this worker is in the new group; from now on the group itself notices losses."""

    generation: int


class Prepare(ElasticMessage, frozen=True):
    """Down: the generation with this number will end; say when you can stop."""

    generation: int


class MeetAt(ElasticMessage, frozen=True):
    """Down: stop after this step, which nobody has passed."""

    generation: int
    step: int


class WorkerPlace(msgspec.Struct, frozen=True):
    """Where one worker of a generation runs."""

    number: int
    machine: int
    address: str = ""
    """By which workers of other machines reach its machine, where the launcher knows that."""


class Form(ElasticMessage, frozen=True):
    """Down: form a group; ranks are the positions in `places`."""

    generation: int
    places: tuple[WorkerPlace, ...]
    left: tuple[tuple[int, bytes], ...] = ()
    """The numbers and notes of the workers that have left in order since the last generation."""
    lost: tuple[tuple[int, bytes], ...] = ()
    """The numbers of those that were lost since then, and what they had said last."""

    def rank_of(self, number: int) -> int:
        """Finds the rank of the worker with this number."""
        return [place.number for place in self.places].index(number)

    def local_places(self, number: int) -> tuple[int, int]:
        """Finds a worker's number among those of its machine, and how many these are."""
        machine = self.places[self.rank_of(number)].machine
        here = [place.number for place in self.places if place.machine == machine]
        return here.index(number), len(here)


class Gathered(ElasticMessage, frozen=True):
    """Down: the values of all who have a part in the gathering, by rank."""

    generation: int
    name: str
    values: tuple[bytes, ...]


class FormingFailed(ElasticMessage, frozen=True):
    """Down: a worker of the generation that is forming has ended, or waits for another one; stop forming."""

    generation: int
    number: int


class Leave(ElasticMessage, frozen=True):
    """Down: end this worker's training in order; the run goes on without it, or is over."""

    reason: str


class LeavingRun(ShoalError):
    """Says that this worker is to end its training: the run was made smaller, or is over."""


UpMessage: TypeAlias = Waiting | Progress | Reached | Gather | Formed
DownMessage: TypeAlias = Prepare | MeetAt | Form | Gathered | FormingFailed | Leave
_State = Literal["starting", "waiting", "training"]


@dataclass(slots=True)
class _Worker:
    number: int
    machine: int
    is_server: bool = False
    state: _State = "starting"
    is_fresh: bool = True
    is_leaving: bool = False
    """Whether it is to leave when the next generation forms."""
    last_step: int | None = None
    """What it has answered to the last `Prepare`."""
    lost: tuple[int, ...] = ()
    suspected_s: float | None = None
    """Since when others have lost it."""
    note: bytes = b""
    is_forming: bool = False
    """Whether it was told to form a group, and has neither done so nor failed."""
    has_formed: bool = False
    """Whether it is, or was, in the group of the generation that it was last told to form."""
    unreached: tuple[int, ...] = ()
    """The numbers of those that it could not connect to when that group did not form."""
    told_gone: int | None = None
    """The number that it was told is gone while that group formed."""


class Coordinator:
    """Decides who is in the next generation of a run, and when it forms.

    `send` gives a message to a worker, `expel` ends a worker that others cannot reach. Call `advance` now and
    then: it is the only one that looks at the time.
    """

    def __init__(
        self,
        *,
        send: Callable[[int, DownMessage], None],
        expel: Callable[[int, str], None],
        min_workers: int = 1,
    ) -> None:
        self.generation = 0
        """The number of the last generation that was told to form; 0 before the first."""
        self.members: tuple[int, ...] = ()
        """The numbers of its workers, by rank."""
        self.min_workers = min_workers
        self.addresses: dict[int, str] = {}
        """By number of the machine: the address by which the others reach it, where that is known."""
        self._send = send
        self._expel = expel
        self._workers: dict[int, _Worker] = {}
        self._is_preparing = False
        self._step: int | None = None
        """After which step all stop; None while nobody was told."""
        self._has_lost = False
        """Whether a member of this generation was lost."""
        self._has_formed = False
        """Whether a worker has ever been in a group; servers come there a little earlier."""
        self._has_finished = False
        """Whether a worker that has trained has ended in order by itself: its training is over."""
        self._failed: tuple[tuple[int, int], ...] = ()
        """The numbers of each two that did not reach each other when all stopped the last time."""
        self._left: dict[int, bytes] = {}
        """The notes of those that have left since a generation has formed."""
        self._lost: dict[int, bytes] = {}
        """The notes of those that were lost since then."""
        self._told: tuple[int, ...] = ()
        """The numbers of those of whom this generation was told that they have left, or were lost."""
        self._gatherings: dict[str, dict[int, bytes]] = {}
        """By name: what the workers of this generation have given, by number."""

    # What happens to workers.

    def add(self, number: int, machine: int, *, is_server: bool = False) -> None:
        """Takes note of a worker that was started; it joins once it waits."""
        self._workers[number] = _Worker(number, machine, is_server)

    def end(self, number: int, *, has_left: bool) -> None:
        """Takes note of a worker's end; `has_left` if it had left its group in order."""
        worker = self._workers.pop(number, None)
        if worker is None:
            return
        if has_left and not worker.is_fresh and not worker.is_leaving and not worker.is_server:
            self._has_finished = True
        if not has_left:
            self._lost[number] = worker.note
        if worker.state == "training" and not has_left:
            self._has_lost = True
            self._fail_forming(number)

    def give_up(self, number: int, reason: str) -> None:
        """Goes on without a worker that is stopped, or cut off; it is ended."""
        if number in self._workers:
            self._expel(number, reason)
            self.end(number, has_left=False)

    def retire(self, numbers: Collection[int]) -> None:
        """Lets these workers leave when the next generation forms."""
        for number in numbers:
            if number in self._workers:
                self._workers[number].is_leaving = True

    @property
    def leaving(self) -> list[int]:
        """The numbers of those that are to leave, and have not been told so yet."""
        return [worker.number for worker in self._workers.values() if worker.is_leaving]

    def keep(self, numbers: Collection[int]) -> None:
        """Lets these workers stay that were to leave, unless they have been told so."""
        for number in numbers:
            if number in self._workers:
                self._workers[number].is_leaving = False

    def take(self, number: int, message: UpMessage) -> None:
        """Takes what a worker says."""
        worker = self._workers.get(number)
        if worker is None:
            return
        match message:
            case Waiting():
                self._stopped(worker, message)
            case Progress():
                worker.note = message.note
            case Reached():
                if message.generation == self.generation:
                    worker.last_step = message.last_step
            case Gather():
                self._gather(worker, message)
            case Formed():
                if message.generation == self.generation and worker.state == "training":
                    worker.is_forming = worker.is_fresh = False
                    worker.has_formed = True
                    self._has_formed = self._has_formed or not worker.is_server
                    self._forget_told()

    # What follows from it.

    @property
    def is_changing(self) -> bool:
        """Whether another generation is to form."""
        present = [worker for worker in self._workers.values() if worker.state != "starting"]
        can_leave = not all(worker.is_leaving or worker.is_server for worker in present)
        return self._has_lost or any(
            worker.state == "waiting" or (worker.is_leaving and can_leave) for worker in present
        )

    @property
    def has_state(self) -> bool:
        """Whether somebody has what was learned, or needs it no more."""
        if not self._has_formed or self._has_finished or not self._workers:
            return True
        return any(not worker.is_fresh and not worker.is_server for worker in self._workers.values())

    @property
    def num_short(self) -> int:
        """How many workers are missing for the next generation to form, when all have stopped for it."""
        if not self._workers or not self.is_changing or self._in_state("training"):
            return 0
        return max(0, self.min_workers - len(_staying(self._workers.values())))

    def advance(self, now_s: float) -> None:
        """Goes as far as it can."""
        self._look_at_suspects(now_s)
        for worker in self._in_state("waiting"):
            if worker.is_leaving and worker.is_fresh:  # nobody needs to stop for it
                self._dismiss(worker, _SMALLER)
        if not self.is_changing:
            return
        training = self._in_state("training")
        if training and not self._is_preparing:
            self._is_preparing = True
            for worker in training:
                worker.last_step = None
                self._send(worker.number, Prepare(self.generation))
        if training and self._step is None and all(worker.last_step is not None for worker in training):
            self._step = max(worker.last_step or 0 for worker in training)
            for worker in training:
                self._send(worker.number, MeetAt(self.generation, self._step))
        if not training:
            self._form()

    def _in_state(self, state: _State) -> list[_Worker]:
        return [worker for worker in self._workers.values() if worker.state == state]

    def _forget_told(self) -> None:
        """Forgets what those have said who have gone, once all members of a generation know of them."""
        members = [self._workers.get(number) for number in self.members]
        if all(member is not None and member.has_formed for member in members):
            for number in self._told:
                self._left.pop(number, None)
                self._lost.pop(number, None)
            self._told = ()

    def _stopped(self, worker: _Worker, message: Waiting) -> None:
        was_training = worker.state == "training"
        has_failed = was_training and not worker.has_formed
        # whoever was told that somebody is gone blames that one, and has not tried to reach it
        blamed = [number for number in message.lost if number != worker.told_gone]
        worker.unreached = tuple(blamed) if has_failed else ()
        worker.state, worker.is_fresh, worker.lost = "waiting", message.is_fresh, message.lost
        worker.suspected_s, worker.is_forming, worker.note = None, False, message.note
        if was_training and (message.lost or self._step is None):
            self._has_lost = True
            self._fail_forming(worker.number)

    def _fail_forming(self, number: int) -> None:
        """Tells those who are not in the new group yet that this worker does not come."""
        self._gatherings = {}
        for worker in self._in_state("training"):
            if worker.is_forming:
                worker.is_forming, worker.told_gone = False, number
                self._send(worker.number, FormingFailed(self.generation, number))

    def _gather(self, worker: _Worker, message: Gather) -> None:
        if message.generation != self.generation or not worker.is_forming:
            return
        values = self._gatherings.setdefault(message.name, {})
        values[worker.number] = message.value
        servers = [each.number for each in self._workers.values() if each.is_server]
        members = [number for number in self.members if not message.is_of_workers or number not in servers]
        if all(number in values for number in members):
            del self._gatherings[message.name]
            by_rank = tuple(values[number] for number in members)
            for number in members:
                self._send(number, Gathered(self.generation, message.name, by_rank))

    def _look_at_suspects(self, now_s: float) -> None:
        """Gives up workers that others have lost and that say nothing: they are stopped, or cut off.

        One that nobody has lost, and that does not say when it can stop, hangs with the interpreter's lock.
        """
        lost = [number for worker in self._in_state("waiting") for number in worker.lost]
        for worker in self._in_state("training"):
            is_lost, is_silent = worker.number in lost, self._is_preparing and worker.last_step is None
            if not is_lost and not is_silent:
                worker.suspected_s = None
            elif worker.suspected_s is None:
                worker.suspected_s = now_s
            elif now_s - worker.suspected_s >= (SUSPECT_S if is_lost and is_silent else ANSWERING_S):
                reason = "other workers do not reach it" if is_lost else "it does not answer"
                self.give_up(worker.number, reason)

    def _form(self) -> None:
        if not self.generation and self._in_state("starting"):
            return  # the first generation is that of all who were started for it
        self._dismiss_leaving()
        waiting = self._in_state("waiting")
        if self._has_finished and all(worker.is_fresh or worker.is_server for worker in waiting):
            for worker in waiting:
                self._dismiss(worker, "the other workers have finished")
            return
        if self._is_short(waiting):
            return
        self._leave_out_unreachable(waiting)
        waiting = self._in_state("waiting")
        if self._is_short(waiting):
            return
        places = _in_order(waiting, self.addresses)
        self.generation += 1
        self.members = tuple(place.number for place in places)
        self._is_preparing, self._step, self._has_lost = False, None, False
        self._gatherings = {}
        for worker in waiting:
            worker.state, worker.lost, worker.is_forming = "training", (), True
            worker.has_formed, worker.unreached, worker.told_gone = False, (), None
        left, lost = tuple(self._left.items()), tuple(self._lost.items())
        self._told = (*self._left, *self._lost)
        for place in places:
            self._send(place.number, Form(self.generation, places, left, lost))

    def _is_short(self, waiting: Sequence[_Worker]) -> bool:
        return sum(not worker.is_server for worker in waiting) < max(1, self.min_workers)

    def _dismiss_leaving(self) -> None:
        """Lets those go that are to leave; who alone has what was learned goes a generation later."""
        waiting = self._in_state("waiting")
        has_heir = any(not worker.is_fresh for worker in _staying(waiting))
        for worker in waiting:
            if worker.is_leaving and has_heir:
                self._dismiss(worker, _SMALLER)

    def _dismiss(self, worker: _Worker, reason: str) -> None:
        del self._workers[worker.number]
        self._left[worker.number] = worker.note
        self._send(worker.number, Leave(reason))

    def _leave_out_unreachable(self, waiting: Sequence[_Worker]) -> None:
        """Gives up those that others cannot connect to, and could not reach before.

        Where the network between machines is cut, all of a machine's workers go: those of the one which fewer
        others reach, or which has fewer workers, or newer ones, so that nobody else is given up.
        """
        here = {worker.number: worker for worker in waiting}
        before = self._failed
        self._failed = tuple(_pair(worker.number, other) for worker in waiting for other in worker.lost)
        blames = [
            (worker, here[number])
            for worker in waiting
            for number in worker.unreached
            if number in here and _pair(worker.number, number) in before
        ]
        between = [(one.machine, other.machine) for one, other in blames if one.machine != other.machine]
        cuts = list(dict.fromkeys((min(cut), max(cut)) for cut in between))
        while cuts:
            machines: dict[int, tuple[Any, ...]] = {}
            for machine in dict.fromkeys(machine for cut in cuts for machine in cut):
                mates = [worker for worker in waiting if worker.machine == machine]
                num_cut, has_server = sum(machine in cut for cut in cuts), any(one.is_server for one in mates)
                machines[machine] = not has_server, num_cut, -len(mates), min(one.number for one in mates)
            worst = max(machines, key=machines.__getitem__)
            cuts = [cut for cut in cuts if worst not in cut]
            for worker in waiting:
                if worker.machine == worst:
                    self.give_up(worker.number, _UNREACHED)
        accused = [other.number for one, other in blames if one.machine == other.machine]
        left = [number for number in accused if not here[number].is_server]
        if left and not between:
            # of two that blame each other the newer one goes
            self.give_up(max(left, key=lambda number: (accused.count(number), number)), _UNREACHED)


class CoordinatorLink(abc.ABC):
    """A worker's way to the coordinator of its run.

    `steps` is written by the session after each step, and read wherever the link is asked when this worker
    can stop: in a thread of its own, or in the turn of another simulated worker.
    """

    def __init__(self, number: int, clock: Clock = SYSTEM_CLOCK) -> None:
        self.number = number
        self.steps = 0
        """The optimizer's steps until now."""
        self.is_lockstep = True
        """Whether all workers stop after the same step; otherwise each stops after the one that it is in."""
        self.last_step: int | None = None
        """The step after which this worker has promised to stop, if it hears nothing of a later one."""
        self.due_step: int | None = None
        """The step after which all stop, once that is known."""
        self._generation = 0
        self._early: Prepare | None = None
        """Has come before this worker has begun the generation that it speaks of."""
        self._clock = clock
        self._began_s = clock.now_s()
        self._began_step = 0

    @abc.abstractmethod
    def send(self, message: UpMessage) -> None:
        """Gives the coordinator a message; from any thread."""

    @abc.abstractmethod
    def receive(self, deadline: Deadline | None = None) -> DownMessage | None:
        """Waits for the next message that is not answered by the link itself; None at the deadline."""

    @abc.abstractmethod
    def wait_until_due(self) -> None:
        """Waits until it is known after which step all stop."""

    def stepped(self, steps: int) -> None:
        """Takes note of how many steps this worker has done."""
        self.steps = steps

    def begin(self, form: Form, steps: int) -> None:
        """Begins a generation, after so many steps."""
        self._generation = form.generation
        self.trains_on(steps)
        self.last_step = self.due_step = None
        early, self._early = self._early, None
        if early is not None:
            self.handle(early)

    def trains_on(self, steps: int) -> None:
        """Takes note that training goes on now after so many steps, which this worker may have taken over."""
        self.steps = self._began_step = steps
        self._began_s = self._clock.now_s()

    def handle(self, message: DownMessage) -> bool:
        """Answers what needs no worker to stop for it; False for all else."""
        match message:
            case Prepare():
                if message.generation == self._generation:
                    # until then it hears where the others stop
                    self.last_step = self.steps + (self.num_steps_in(HORIZON_S) if self.is_lockstep else 0)
                    self.send(Reached(message.generation, self.last_step))
                elif message.generation > self._generation:
                    self._early = message
            case MeetAt():
                if message.generation == self._generation:
                    self.due_step = message.step
            case _:
                return False
        return True

    def num_steps_in(self, seconds: float) -> int:
        """Estimates how many steps this worker does in so long a time, by those of this generation."""
        num_steps = self.steps - self._began_step
        if num_steps < 1:
            return 1  # nothing is known yet
        step_s = max(1e-6, (self._clock.now_s() - self._began_s) / num_steps)
        return max(1, math.ceil(seconds / step_s))


def place_in(form: Form, number: int, rendezvous: Address | None = None) -> Placement:
    """Gives a worker's place in a generation; `rendezvous` is an address that all machines reach."""
    rank = form.rank_of(number)
    local_rank, local_size = form.local_places(number)
    machines = list(dict.fromkeys(place.machine for place in form.places))
    return Placement(
        rank,
        len(form.places),
        local_rank,
        local_size,
        "shoal run",
        rendezvous,
        machine=machines.index(form.places[rank].machine),
    )


def _pair(one: int, other: int) -> tuple[int, int]:
    return min(one, other), max(one, other)


def _staying(workers: Iterable[_Worker]) -> list[_Worker]:
    """Finds those that count as workers, and are not to leave."""
    return [worker for worker in workers if not worker.is_leaving and not worker.is_server]


def _in_order(workers: Sequence[_Worker], addresses: Mapping[int, str]) -> tuple[WorkerPlace, ...]:
    """Puts those of one machine side by side, servers first, and then those that have a state to give.

    Servers were started first, and fill their machines: none is on a machine after one with workers.
    """
    ordered = sorted(workers, key=lambda worker: (not worker.is_server, worker.is_fresh, worker.number))
    machines = list(dict.fromkeys(worker.machine for worker in ordered))
    return tuple(
        WorkerPlace(worker.number, machine, addresses.get(machine, ""))
        for machine in machines
        for worker in ordered
        if worker.machine == machine
    )


M = TypeVar("M")


def encode_message(message: msgspec.Struct) -> bytes:
    """Gives the message as bytes, with its length before it."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


class MessageReader(Generic[M]):
    """Finds messages in a stream of bytes; `kind` is the union of those that may come."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[M]:
        """Gives the messages that are whole now; ProtocolError for what is none."""
        self._rest += data
        messages: list[M] = []
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            end = _LENGTH.size + length
            if length > MAX_MESSAGE_BYTES:
                raise ProtocolError(
                    f"A message of {length} bytes is none of a launcher's, its agents' or its workers'."
                )
            if len(self._rest) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(self._rest[_LENGTH.size : end])))
            except msgspec.DecodeError as error:
                raise ProtocolError(
                    f"A message between a launcher and its agents or workers cannot be read: {error}.",
                    cause="they have different versions of Shoal.",
                ) from None
            del self._rest[:end]
        return messages
