"""What a group of peers that train together gives to a strategy, and what it is opened with.

All members issue the collective operations (`empty`, `all_reduce`, `broadcast`, `all_gather`, `exchange`,
`barrier`) in the same order; a group that notices otherwise says who called what. Every operation returns a
handle at once, and goes on while the caller computes; operations on the same memory follow each other. The
one-sided ones (`publish`, `reclaim`, `fetch`, `read`, `mutex`, and what a `window` does) wait for nobody, or
for one peer alone. A `with` block that ends in an exception does not leave in order, so that the others learn
of it.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

import msgspec
import torch

from shoal.core import Deadline, PeerLost, UsageError
from shoal.core.run_options import SILENCE_S
from shoal.topology import Weights

T = TypeVar("T")
Reduction = Literal["sum", "mean", "min", "max"]


class Handle(abc.ABC, Generic[T]):
    """An operation under way."""

    @abc.abstractmethod
    def wait(self, deadline: Deadline | None = None) -> T:
        """Its result, when it has one; PeerLost names a peer without whom it cannot be finished.

        Without a deadline the group's own timeout counts.
        """

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether `wait` would return (or raise) at once; does what work there is to do, never blocks."""


class Done(Handle[T]):
    """An operation that was over when it was called."""

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self, deadline: Deadline | None = None) -> T:
        """The result."""
        return self._result

    def is_done(self) -> bool:
        """Yes."""
        return True


class Snapshot(abc.ABC):
    """What a peer has published, as it was at some moment."""

    rank: int
    version: int
    tensor: torch.Tensor
    """Read it, never write it: it may be the publisher's own memory."""

    @abc.abstractmethod
    def is_intact(self) -> bool:
        """Whether all that was read of `tensor` until now is of `version`; if not, fetch again."""


class Slot(abc.ABC):
    """What one source has written to this worker; nobody else touches it inside `with window.slot(...)`."""

    source: int
    num_writes: int
    """Since it was cleared; 0: there is nothing in it, and `tensor` has no meaning."""
    mass: float
    """The push-sum weight that came with the writes: the last one's after a `put`, their sum after adding."""
    note: bytes
    """What the last write said besides."""
    tensor: torch.Tensor
    """Flat; valid inside the `with` block only."""

    @abc.abstractmethod
    def clear(self) -> None:
        """Empty it: the next write starts from nothing, and a `send` that waits may go on."""


class Window(abc.ABC):
    """Memory of every member that others write without asking: one slot for each source.

    Weights are applied on the way: what is in the slot is `weight` times what was given. A lost peer's slots
    can still be read. Writes to a peer that is gone are over at once and do nothing.
    """

    name: str
    num_elements: int
    dtype: torch.dtype

    @abc.abstractmethod
    def put(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Overwrite this worker's slot at `to`. Until the handle is done `tensor` must not be written."""

    @abc.abstractmethod
    def accumulate(
        self, to: int, tensor: torch.Tensor, *, weight: float = 1.0, mass: float = 0.0, note: bytes = b""
    ) -> Handle[None]:
        """Add to this worker's slot at `to`; nothing is ever added twice or lost."""

    @abc.abstractmethod
    def send(self, to: int, tensor: torch.Tensor, *, note: bytes = b"") -> Handle[None]:
        """Put, once the slot is empty: `to` takes one after the other, and none is missed."""

    @abc.abstractmethod
    def slot(self, source: int) -> contextlib.AbstractContextManager[Slot]:
        """One source's slot at this worker, held: a writer waits until the block ends."""

    @abc.abstractmethod
    def filled(self) -> Sequence[int]:
        """Sources whose slots have something in them, in rank order; never blocks."""

    @abc.abstractmethod
    def wait(self, deadline: Deadline | None = None) -> Sequence[int]:
        """As `filled`, once there is one; empty at the deadline, or when all sources are gone."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give the memory back; collective, as `Group.free`."""


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
        """What is raised where nothing goes on without that peer; `when` is said before the reason."""
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


class Group(abc.ABC):
    """The peers that train together, seen from one of them; a context manager."""

    rank: int
    size: int
    """Members at the start; `members` are those that still take part."""
    run: str = ""
    """The name of the run that `shoal.init()` has opened it for; empty otherwise."""
    local_rank: int = 0
    """Among the processes of this machine, as the launcher of `shoal.init()` counts them: the number of the
    GPU to take."""
    machine: int
    """Index of this worker's machine."""
    num_machines: int
    patience: float
    should_survive: bool = False
    """Whether all operations go on without lost peers; `exchange` and `fetch` always do."""
    everybody: Group | None = None
    """Workers and parameter servers together, the servers first; None where there are no servers. Then this
    group is that of the workers alone, and on a server a group of one."""
    num_servers: int = 0
    role: Literal["worker", "server"] = "worker"
    blamed: int | None = None
    """The lost rank because of which this worker fails, for `abandon` to tell the others."""

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What strategies remember of this group, each under its own name: which names it has given, say."""
        return {}

    @property
    @abc.abstractmethod
    def members(self) -> Sequence[int]:
        """Ranks that still take part, in order, oneself included."""

    @property
    @abc.abstractmethod
    def lost(self) -> Mapping[int, Loss]:
        """Peers that were lost (not those that left in order), in the order in which it was noticed."""

    @property
    @abc.abstractmethod
    def waited_s(self) -> Sequence[float]:
        """Seconds that this worker has waited for each rank, the last to arrive each time."""

    @property
    @abc.abstractmethod
    def traffic_bytes(self) -> tuple[int, int]:
        """Sent and received by this worker since the group was opened.

        Inside a machine they are what `Metered`'s formulas say, between machines what went over the streams.
        """

    @abc.abstractmethod
    def machine_of(self, rank: int) -> int:
        """Index of a rank's machine."""

    @abc.abstractmethod
    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """A flat tensor of zeros, 64-byte aligned, in memory that exchanges fastest; collective, blocking.

        UsageError for a `device` whose memory the group cannot exchange.
        """

    @abc.abstractmethod
    def free(self, tensor: torch.Tensor) -> None:
        """Give back what `empty` gave; collective. Views of it may not be used any more."""

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """In place; all members end with equal bits. Members that have left count neither in sum nor mean."""

    @abc.abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """In place, from `root`."""

    @abc.abstractmethod
    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Everybody's tensor, by member in rank order; the first dimensions may differ."""

    @abc.abstractmethod
    def exchange(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """The weighted average with neighbours, into `out` or, without it, in place.

        With `out`, `tensor` must be memory of the group (`empty`), and others read it there: it may be
        written again only by a later exchange that has it as `out`, or after `settle(tensor)`. Peers that
        are gone are left out, their weight goes to oneself: an exchange outlives a lost peer.
        """

    @abc.abstractmethod
    def settle(self, tensor: torch.Tensor) -> None:
        """Wait until nobody reads `tensor` any more, so that it may be written."""

    @abc.abstractmethod
    def barrier(self) -> Handle[None]:
        """Done when all members have come to it."""

    @abc.abstractmethod
    def publish(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """Let others fetch `tensor`, memory of the group.

        It may not be written until `reclaim(name, version)`, nor reclaimed before a newer version is
        published, so that there is always one to fetch.
        """

    @abc.abstractmethod
    def reclaim(self, name: str, version: int) -> None:
        """Snapshots of this version and older ones are void from now on; their memory may be written."""

    @abc.abstractmethod
    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """The newest that `peer` has published; None when it has published nothing, or is gone."""

    @abc.abstractmethod
    def changing(self, name: str, version: int) -> contextlib.AbstractContextManager[None]:
        """Inside, this worker may write what it has published, which is then of that version.

        Nobody can `read` it meanwhile. For what is published once and then changed in place; who fetches it
        instead gets snapshots that are not intact.
        """

    @abc.abstractmethod
    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """Copy what `peer` has published, in one piece, once it is of this version or newer; its version.

        None when the peer is gone; with `version` 0 also when it has published nothing.
        """

    @abc.abstractmethod
    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
    ) -> Window:
        """Memory for others to write; `sources` are those that may write to this worker, by default all.

        Collective, blocking; each may name other sources. A name can be used again after `Window.close`.
        """

    @abc.abstractmethod
    def mutex(self, name: str, owner: int) -> contextlib.AbstractContextManager[None]:
        """One holder at a time of this name at this rank, in the whole group; freed when the holder is lost.

        PeerLost when the owner is.
        """

    @abc.abstractmethod
    def progress(self) -> None:
        """Do what work of operations under way can be done now; never blocks."""

    @abc.abstractmethod
    def leave(self) -> None:
        """Take part in nothing more; others go on without this worker, and it is not lost. Idempotent."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leave, and give everything back. Idempotent."""

    @abc.abstractmethod
    def abandon(self) -> None:
        """Give everything back without leaving in order: the others find this worker lost. Idempotent."""

    def blame(self, error: BaseException | None) -> None:
        """Remember whose loss this worker fails of, if the error tells, so that the others blame the same."""
        peer = error.peer if isinstance(error, PeerLost) else None
        if isinstance(peer, int) and peer != self.rank and self.blamed is None:
            self.blamed = peer

    def check_split(self) -> None:  # noqa: B027 - most groups cannot be cut
        """NetworkSplit when the network is cut and this worker is on the side that stops; never blocks.

        Strategies that outlive losses ask this in every round. Groups of one machine have nothing to ask.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.blame(error)
            self.abandon()

    def exchange_machines(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Average inside each machine, and with other machines by `weights` over machine indices.

        Factors for sending (`weights.destinations`) don't count: all of a machine's workers receive.
        """
        factors = {self.machine: weights.own, **weights.sources}
        ranks: dict[int, list[int]] = {}
        for rank in self.members:
            ranks.setdefault(self.machine_of(rank), []).append(rank)
        gone = [machine for machine in weights.sources if machine not in ranks]
        factors[self.machine] += sum(factors.pop(machine) for machine in gone)
        spread = {
            rank: factor / len(ranks[machine])
            for machine, factor in factors.items()
            for rank in ranks[machine]
        }
        return self.exchange(tensor, Weights(spread.pop(self.rank), spread), out=out)

    def pair_gossip(self, tensor: torch.Tensor, peer: int, weight: float = 0.5) -> Handle[torch.Tensor]:
        """`(1 − weight) · own + weight · peer's`, in place; a collective in which each may name another."""
        return self.exchange(tensor, Weights(1 - weight, {peer: weight}))

    def share(self, value: Any) -> list[Any]:
        """Everybody's small value (numbers, strings, lists, dicts), by member in rank order. Collective."""
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(value)), dtype=torch.uint8)
        return [msgspec.msgpack.decode(part.numpy().data) for part in self.all_gather(encoded).wait()]

    def next_number(self, kind: str) -> int:
        """One that nothing of this kind has had in this group, the same for all members. Collective."""
        number: int = max(self.share(self.notes.get(kind, 0)))
        self.notes[kind] = number + 1
        return number

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """A named part of the user's program, for the timeline; does nothing without one."""
        yield


class GroupSettings(msgspec.Struct, frozen=True):
    """Of one group, alike on all its members."""

    key: str
    """Tells this group from others on the machine; its members share it."""
    patience: float = 1.0
    timeout_s: float | None = None
    """The longest wait for a peer that is alive; None waits on, with a line every ten seconds."""
    workers_per_machine: int | None = None
    """Splits one machine into several, to try out what is meant for several."""
    names: tuple[int, ...] = ()
    """For a machine's group inside a larger one: its members' ranks there, for what is said to people."""
    backend: Literal["gloo", "nccl"] | None = None
    """Of torch.distributed, which then carries collectives of all tensors (gloo) or those of devices."""
    network_interface: str | None = None
    """Through which machines talk: its name, or an address of it; None finds the one that reaches rank 0."""
    on_split: Literal["stop", "continue", "ignore"] = "stop"
    """What the side of a cut network does that should stop: see `heartbeat`. `ignore` also says nothing."""
    folder: Path | None = None
    """Where shared memory lies; by default /dev/shm where there is one, else the temporary folder."""

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise UsageError(f"A patience of {self.patience} waits for nobody.", next_step="give 1 or more.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"A timeout of {self.timeout_s} s is none.", next_step="leave it out.")

    def name_of(self, rank: int) -> int:
        """The rank that people know a member by."""
        return self.names[rank] if self.names else rank

    @property
    def silence_s(self) -> float:
        """How long a peer may be silent."""
        return SILENCE_S * self.patience
