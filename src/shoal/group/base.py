"""The interface between a strategy and the peers that it trains with, and what a group is opened with.

All members issue the collective operations (`empty`, `free`, `all_reduce`, `broadcast`, `all_gather`,
`exchange`, `barrier`, `window`) in the same order; a group that notices otherwise says who called what. An
operation returns a handle at once and goes on while the caller computes; operations on the same memory follow
each other. What a `Window` does is one-sided: it waits for nobody, or for one peer alone. A `with` block that
ends in an exception does not leave in order, so that the others learn of it. What can be said with these
operations (`share`, `Mutex`, ...) stands in `functions`.

Tensors may lie on a GPU. There `Handle.wait` returns as soon as the operation is ordered before whatever the
caller gives to its current stream afterwards, as with any other work of a GPU. A `Window` works in the
caller's current stream, which must always be the same one, and `filled` names slots whose writes the GPU has
done. A `barrier` orders processors, not GPUs.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Literal, Self, TypeVar, get_args

import msgspec
import torch

from shoal.core import SYSTEM_CLOCK, Deadline, DeadlineExceeded, PeerLost, UsageError
from shoal.core.run_options import SILENCE_S, AllReduceChoice, EncryptChoice
from shoal.report.timeline import Timeline
from shoal.topology import MachineWeights, Weights

T = TypeVar("T")
log = logging.getLogger(__name__)
Reduction = Literal["sum", "mean", "min", "max"]


class Handle(abc.ABC, Generic[T]):
    """An operation that is under way."""

    @abc.abstractmethod
    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives its result, once it has one; PeerLost names a peer without whom it cannot be finished.

        Without a deadline the group's own timeout counts.
        """

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Tells whether `wait` would return (or raise) at once; does work that can be done, never blocks."""


class Done(Handle[T]):
    """An operation that was over when it was called."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result at once."""
        return self._result

    def is_done(self) -> bool:
        """Is true from the beginning."""
        return True


class Pending(enum.Enum):
    """The type of `PENDING`, which an attempt gives that has no result yet."""

    PENDING = enum.auto()


PENDING: Final = Pending.PENDING


class PolledHandle(Handle[T]):
    """An operation that is tried again whenever somebody looks, until it has a result or an error.

    `attempt` gives the result, or PENDING, and never blocks; what it raises is the operation's error.
    """

    def __init__(self, attempt: Callable[[], T | Pending]) -> None:
        self._attempt = attempt
        self._result: T | Pending = PENDING
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether it has a result or an error."""
        return self._result is not PENDING or self.error is not None

    def try_again(self) -> bool:
        """Makes one more attempt, unless it is over; tells whether it is."""
        if not self.is_over:
            try:
                self._result = self._attempt()
            except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
                self.error = error
        return self.is_over

    def is_done(self) -> bool:
        """Tells whether it is over, after one more attempt."""
        return self.try_again()

    def wait(self, deadline: Deadline | None = None) -> T:
        """Gives the result, or raises the error, of an operation that is over."""
        if self.error is not None:
            raise self.error
        assert self._result is not PENDING, "an operation that is not over"
        return self._result


class Snapshot(abc.ABC):
    """A tensor that a peer has published, as it was at some moment."""

    rank: int
    version: int
    tensor: torch.Tensor
    """Read it, never write it: it may be the publisher's own memory."""

    @abc.abstractmethod
    def is_intact(self) -> bool:
        """Tells whether all that was read of `tensor` until now is of `version`; if not, fetch again.

        On a GPU this says that the caller has issued its reads; call it once, after them.
        """


class WindowSlot(abc.ABC):
    """The memory that one source writes at this worker; held inside `with window.slot(...)`."""

    source: int
    num_writes: int
    """Writes since it was cleared; with 0 there is nothing in it, and `tensor` has no meaning."""
    mass: float
    """The push-sum weight that came with the writes: the last one's after a `put`, their sum after `add`."""
    note: bytes
    """The bytes that came with the last write."""
    tensor: torch.Tensor
    """A flat tensor that is valid inside the `with` block only."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Empties it: the next write starts from nothing, and a `send` that waits may go on."""


@dataclass(frozen=True, slots=True)
class Write:
    """One write into a slot of a window."""

    kind: Literal["put", "add", "send"]
    tensor: torch.Tensor
    weight: float = 1.0
    mass: float = 0.0
    note: bytes = b""


@dataclass(frozen=True, slots=True)
class WindowForm:
    """What a window is made of: its name, and the number, type and place of the elements of each slot."""

    name: str
    num_elements: int
    dtype: torch.dtype
    device: torch.device | None


class Window(abc.ABC):
    """Memory of every member that others use without asking: one slot for each source, and one publication.

    A slot is written by its source: what is in it is `weight` times what was given. A lost peer's slots can
    still be read. Writes to a peer that is gone are over at once and do nothing. A publication is a tensor of
    the group's memory with a version, which others read.
    """

    name: str
    num_elements: int
    dtype: torch.dtype
    device: torch.device
    _is_open = True

    def __init__(self, form: WindowForm) -> None:
        self.name = form.name
        self.num_elements = form.num_elements
        self.dtype = form.dtype
        self.device = form.device or torch.device("cpu")

    def put(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Overwrites this worker's slot at `to`. Until the handle is done `tensor` must not be written."""
        return self._write(to, Write("put", tensor, weight, mass, note))

    def add(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Adds to this worker's slot at `to`; nothing is ever added twice or lost."""
        return self._write(to, Write("add", tensor, weight, mass, note))

    def send(self, to: int, tensor: torch.Tensor, *, note: bytes = b"") -> Handle[None]:
        """Puts, once the slot is empty: `to` takes one after the other, and none is missed."""
        return self._write(to, Write("send", tensor, note=note))

    @abc.abstractmethod
    def _write(self, to: int, write: Write) -> Handle[None]:
        """Begins a write of any kind."""

    @abc.abstractmethod
    def slot(self, source: int) -> contextlib.AbstractContextManager[WindowSlot]:
        """Holds one source's slot at this worker: a writer waits until the block ends."""

    @abc.abstractmethod
    def filled(self) -> Sequence[int]:
        """Lists the sources whose slots have something in them, in rank order; never blocks."""

    @abc.abstractmethod
    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """Lists as `filled` does, once one is; empty at the deadline, or when all sources are gone."""

    @abc.abstractmethod
    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """Lets others fetch or read `tensor`, which is memory of the group.

        It may not be written until `reclaim(version)`, nor reclaimed before a newer version is published, so
        that there is always one to fetch.
        """

    @abc.abstractmethod
    def reclaim(self, version: int) -> None:
        """Makes snapshots of this version and older ones void; their memory may be written again."""

    @abc.abstractmethod
    def changing(self, version: int) -> contextlib.AbstractContextManager[None]:
        """Lets this worker write, inside the block, what it has published, which is then of that version.

        Nobody can `read` it meanwhile. For what is published once and then changed in place; who fetches it
        instead gets snapshots that are not intact.
        """

    @abc.abstractmethod
    def fetch(self, peer: int) -> Handle[Snapshot | None]:
        """Gets the newest that `peer` has published, without a copy where it can be reached.

        None when it has published nothing, or is gone.
        """

    @abc.abstractmethod
    def read(self, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Copies what `peer` has published, whole, once it is of this version or newer; gives its version.

        None when the peer is gone; with `version` 0 also when it has published nothing.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives the memory back; collective as `Group.free`, unless the window has no slots."""

    def _check_open(self) -> None:
        """Raises UsageError when it was closed."""
        if not self._is_open:
            raise UsageError(f"Window {self.name!r} is closed.", next_step="make it again by group.window().")

    def _check_change(self, published: int | None, version: int) -> None:
        """Raises UsageError unless what is published, of a version or None, may become one of `version`."""
        if published is None:
            raise UsageError(
                f"Nothing is published in window {self.name!r}, so it cannot be changed.",
                next_step="publish it first.",
            )
        if version < published:
            raise UsageError(
                f"{self.name!r} is of version {published} and cannot become {version}.",
                next_step="count upwards.",
            )

    def _no_slot(self, owner: int, source: int) -> UsageError:
        """Makes the error of one that is not among the sources of another one's window."""
        return UsageError(
            f"rank {owner} has no slot for rank {source} in window {self.name!r}.",
            next_step="name it among the sources when the window is made.",
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """A peer that is gone without having said so."""

    rank: int
    reason: str
    """'its process 4711 ended', 'silent for 5.2 s'."""
    kind: Literal["ended", "silent", "verdict"] = "ended"
    """Whether its end is known; or nothing comes from it, and it may be alive beyond a cut network; or it has
    said that it goes on without this worker."""
    at_s: float = 0.0
    """When it was noticed, by the monotonic clock; 0 where nobody needs it."""
    because: Loss | None = None
    """The earlier loss because of which it failed: the one to blame."""

    @property
    def root(self) -> Loss:
        """The loss that this one follows from, if it follows from another."""
        return self if self.because is None else self.because.root

    def error(self, when: str = "") -> PeerLost:
        """Makes the error for where nothing goes on without that peer; `when` stands before the reason."""
        root = self.root
        if self.kind == "verdict":
            return PeerLost(
                f"rank {root.rank}, this worker, is lost{when}: {root.reason}.",
                peer=root.rank,
                cause="this worker was stopped, or its machine or network was.",
                next_step="start again with a larger --patience.",
            )
        return PeerLost(
            f"rank {root.rank} is lost{when}: {root.reason}.",
            peer=root.rank,
            cause="it was killed, stopped, or failed; its own output says more.",
            next_step="start again, or use a strategy that outlives a lost worker (neighbor, pair).",
        )


WaitListener = Callable[[int | None], object]
"""Is told the rank that is waited for, or None where that is not known."""
WAIT_HEARD_EVERY_S = 1.0
LINE_EVERY_S = 10.0


class WaitReport:
    """What is said of a wait while it lasts: a line every ten seconds, and to `listeners` once a second.

    `line` makes the line, of the seconds that this worker has waited. Without a deadline `timeout_s` counts.
    """

    def __init__(
        self,
        line: Callable[[float], str],
        listeners: Sequence[WaitListener] = (),
        deadline: Deadline | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._line = line
        self._listeners = listeners
        if deadline is None and timeout_s is not None:
            deadline = Deadline.after(timeout_s)
        self._deadline = deadline
        self._began_s = SYSTEM_CLOCK.now_s()
        self._next_line_s, self._next_call_s = LINE_EVERY_S, WAIT_HEARD_EVERY_S

    def look(self, blocker: int | None = None) -> None:
        """Says what is due, and to listeners who is waited for; DeadlineExceeded at the deadline."""
        waited_s = SYSTEM_CLOCK.now_s() - self._began_s
        if self._deadline is not None and self._deadline.is_past:
            raise DeadlineExceeded(
                f"{self._line(waited_s)}: the deadline has passed.",
                next_step="see what that rank does, or give a longer --peer-timeout.",
            )
        if waited_s > self._next_call_s:
            self._next_call_s += WAIT_HEARD_EVERY_S
            for hear in self._listeners:
                hear(blocker)
        if waited_s > self._next_line_s:
            self._next_line_s += LINE_EVERY_S
            log.warning("%s", self._line(waited_s))


class GroupStats(msgspec.Struct, frozen=True):
    """What a group has cost this worker since it was opened."""

    sent_bytes: int
    """Inside a machine what the table of operations says, between machines what went over the streams."""
    received_bytes: int
    waited_s: Sequence[float]
    """Seconds that this worker has waited for each rank, the last to arrive each time."""
    sent_to: Sequence[int] = ()
    """Bytes by rank, of `everybody` where there are servers. What others fetch or read, only they count."""
    received_from: Sequence[int] = ()
    """Bytes by rank, likewise. What others put, add or send into a window, only they count."""


def passed_on(to: str, name: str, *, is_settable: bool = False) -> Any:
    """Makes a property that is read, and perhaps written, at the part `to` of an object."""
    part = attrgetter(to)
    write = (lambda self, value: setattr(part(self), name, value)) if is_settable else None
    return property(attrgetter(f"{to}.{name}"), write, doc=f"Is `{name}` of `{to}`.")


class Group(abc.ABC):
    """The peers that train together, seen from one of them; a context manager."""

    rank: int
    size: int
    """Members at the start; `members` are those that still take part."""
    machine: int
    """Index of this worker's machine."""
    machines: Sequence[int]
    """The index of each rank's machine."""
    num_machines: int
    run: str = ""
    """The name of the run that `shoal.init()` has opened it for; empty otherwise."""
    local_rank: int = 0
    """This worker's number among the processes of its machine, by its launcher: the GPU to take."""
    patience: float
    """How many times as long as usual a peer may be silent (5 s) before it counts as lost."""
    should_survive: bool = False
    """Whether operations go on without lost peers; `exchange` and windows always do.

    A broadcast, and an exchange of machines, end with PeerLost all the same when the worker is lost that was
    sending for its machine.
    """
    everybody: Group | None = None
    """Workers and parameter servers together, the servers first; None where there are no servers. Then this
    group is that of the workers alone, and on a server a group of one."""
    num_servers: int = 0
    role: Literal["worker", "server"] = "worker"
    timeline: Timeline | None = None
    """Where operations are recorded, if they are."""

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What strategies remember of this group, each under its own name: which names it has given, say."""
        return {}

    @cached_property
    def on_wait(self) -> list[WaitListener]:
        """Is called about once a second, in the thread that waits, while this worker waits for others."""
        return []

    @property
    @abc.abstractmethod
    def members(self) -> Sequence[int]:
        """The ranks that still take part, in order, this worker included."""

    @property
    @abc.abstractmethod
    def lost(self) -> Mapping[int, Loss]:
        """The peers that were lost (not those that left in order), in the order in which it was noticed."""

    @property
    @abc.abstractmethod
    def stats(self) -> GroupStats:
        """Bytes and waiting so far."""

    @property
    def split(self) -> Exception | None:
        """The error that ends this worker when the network is cut and it is on the side that stops.

        Strategies that outlive losses look at it in every round. Groups of one machine cannot be cut.
        """
        return None

    @abc.abstractmethod
    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Makes a flat tensor of zeros, 64-byte aligned, in memory that peers reach; collective, blocking.

        UsageError for a `device` whose memory the group cannot exchange.
        """

    @abc.abstractmethod
    def free(self, tensor: torch.Tensor) -> None:
        """Gives back what `empty` gave; collective. Views of it may not be used any more."""

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Reduces in place; all members end with equal bits. Members that have left do not count."""

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Copies the root's tensor to all, in place."""

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Collects everybody's tensor, by member in rank order; the first dimensions may differ."""

    @abc.abstractmethod
    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Takes the weighted average with neighbours, into `out` or, without it, in place.

        With `out`, `tensor` must be memory of the group (`empty`), and others read it there: it may be
        written again only by a later exchange that has it as `out`, or after `settle(tensor)`. Peers that
        are gone are left out, their weight goes to oneself: an exchange outlives a lost peer.
        """

    @abc.abstractmethod
    def settle(self, tensor: torch.Tensor) -> None:
        """Waits until nobody reads `tensor` any more, so that it may be written."""

    @abc.abstractmethod
    def barrier(self) -> Handle[None]:
        """Is done when all members have come to it."""

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
        device: torch.device | None = None,
    ) -> Window:
        """Makes memory for one-sided operations; `sources` write to this worker, by default all others.

        Collective, blocking; each may name other sources. With the empty tuple as `sources` on all members it
        has no slots and only publishes; then nobody is waited for. A name is free again after `Window.close`.
        """
        return self._make_window(WindowForm(name, num_elements, dtype, device), sources)

    @abc.abstractmethod
    def _make_window(self, form: WindowForm, sources: Collection[int] | None) -> Window:
        """Makes a window of that form."""

    @abc.abstractmethod
    def progress(self) -> None:
        """Does what work of operations under way can be done now; never blocks."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Takes part in nothing more; others go on without this worker, and it is not lost. Idempotent."""

    @abc.abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Leaves and gives everything back. Idempotent.

        With an error this worker does not leave in order: the others find it lost, or, when the error is the
        loss of another rank, blame that one.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)


def check_rank(rank: int, size: int) -> None:
    """Raises UsageError for a rank that does not exist."""
    if not 0 <= rank < size:
        raise UsageError(f"There is no rank {rank} among {size}.", next_step="name a member.")


def has_left(rank: int) -> UsageError:
    """Makes the error of a worker that does something after it has left."""
    return UsageError(
        f"rank {rank} has left the group and takes part in nothing more.",
        next_step="make it the last thing to leave or to close.",
    )


def held_by_itself(rank: int, what: str) -> UsageError:
    """Makes the error of a worker that waits for itself."""
    return UsageError(
        f"rank {rank} waits for {what}, which it holds itself.",
        next_step="end the first `with` block before the second begins.",
    )


def forked() -> UsageError:
    """Makes the error of a child that was forked from the process that opened a group."""
    return UsageError(
        "The group belongs to the process that opened it, and this one was forked from it.",
        next_step="let the workers of a DataLoader load data and nothing else.",
    )


def out_of_step(rank: int, breakage: BaseException) -> BaseException:
    """Makes the error of a worker that goes on after something has broken off an operation."""
    if isinstance(breakage, PeerLost) and breakage.peer == rank:
        return breakage  # given up by the others: whoever asks first shall hear that
    return UsageError(
        f"rank {rank} is out of step with the others since an operation was broken off: "
        f"{type(breakage).__name__}.",
        next_step="end this worker; what comes after an interrupted operation cannot be right.",
    )


def mismatch(rank: int, own: str, other_rank: int, other: str) -> UsageError:
    """Makes the error of a worker that calls something else than another one does."""
    return UsageError(
        f"rank {rank} called {own} where rank {other_rank} called {other}.",
        cause="the workers do not run the same program, or not with the same data.",
        next_step="let all workers issue the same operations in the same order.",
    )


def absent_root(root: int) -> UsageError:
    """Makes the error of a broadcast by one that has left."""
    return UsageError(
        f"rank {root}, which should broadcast, has left the group.", next_step="broadcast from a member."
    )


def rank_to_blame(error: BaseException | None, own_rank: int) -> int | None:
    """Finds the lost rank because of which a worker fails, if its error names another one."""
    peer = error.peer if isinstance(error, PeerLost) else None
    return peer if isinstance(peer, int) and peer != own_rank else None


class GroupSettings(msgspec.Struct, frozen=True):
    """What one group is opened with, alike on all its members."""

    key: str
    """Tells this group from others on the machine; its members share it."""
    patience: float = 1.0
    timeout_s: float | None = None
    """The longest wait for a peer that is alive; None waits on, with a line every ten seconds."""
    meeting_s: float | None = None
    """How long members may take to come, where that is not `timeout_s`, or minutes."""
    workers_per_machine: int | None = None
    """Splits one machine into several, to try out what is meant for several."""
    names: tuple[int, ...] = ()
    """For a machine's group inside a larger one: its members' ranks there, for what is said to people."""
    backend: Literal["gloo", "nccl"] | None = None
    """Of torch.distributed, which then carries collectives of all tensors (gloo) or those of devices."""
    network_interface: str | None = None
    """Through which machines talk: its name, or an address of it; None finds the one that reaches rank 0."""
    on_split: Literal["stop", "continue", "ignore"] = "stop"
    """What the side of a cut network does that should stop (`cluster.members`); `ignore` is silent, too."""
    encrypt: EncryptChoice = "auto"
    """Whether tensors go encrypted (TLS) between machines; `auto` encrypts outside of one private network.

    Control messages are encrypted in any case, and members always prove who they are.
    """
    all_reduce: AllReduceChoice = "auto"
    """How machines reduce together: around a ring, or each directly with all others; `auto` chooses.

    Two machines, small tensors, halves, tensors on GPUs, and operations that go on without lost peers are
    always direct.
    """
    folder: Path | None = None
    """Where shared memory lies; by default /dev/shm where there is one, else the temporary folder."""

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise UsageError(f"patience={self.patience} is not above 0.", next_step="give 1 or more.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(
                f"timeout_s={self.timeout_s} is not above 0.", next_step="leave it out, to wait without end."
            )
        for name, kind in (("encrypt", EncryptChoice), ("all_reduce", AllReduceChoice)):
            value, choices = getattr(self, name), get_args(kind)
            if value not in choices:
                raise UsageError(
                    f"{name}={value!r} is unknown.", next_step=f"choose one of {', '.join(choices)}."
                )

    def name_of(self, rank: int) -> int:
        """Gives the rank that people know a member by."""
        return self.names[rank] if self.names else rank

    @property
    def silence_s(self) -> float:
        """How long a peer may be silent."""
        return SILENCE_S * self.patience
