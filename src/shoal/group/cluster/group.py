"""The group of workers on several machines: shared memory inside each, streams between them.

Whatever all take part in happens first inside a machine; then the first of its workers that has come speaks
with those of other machines (`machine_exchange`), and passes the result on. An `exchange` goes from rank to rank.
Tensors on a device, and all tensors where a backend was asked for, go through torch.distributed instead
(`DeviceOperations`). One-sided operations are `window`'s. The order of operations is the `Lane`'s. A worker
that waits is woken by its mates, or by its streams.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch

from shoal.core import Deadline, DeadlineExceeded, PeerLost, Placement, ShoalError, UsageError
from shoal.group.base import Group, GroupSettings, Handle, Loss, Reduction, Snapshot, Window
from shoal.group.cluster.collectives import Collectives, DeviceOperations, on_host
from shoal.group.cluster.heartbeat import NetworkPartition, find_partition
from shoal.group.cluster.machine_exchange import Lane, Operation, Steps
from shoal.group.cluster.mesh import Mesh
from shoal.group.cluster.rendezvous import Rendezvous, Seat, interface_of
from shoal.group.cluster.window import Remote
from shoal.group.host import HostGroup, open_host_group
from shoal.group.host.engine import span_of
from shoal.group.kernels import check_reduction
from shoal.group.operations import Tally
from shoal.group.solo import SoloGroup
from shoal.topology import Weights

log = logging.getLogger(__name__)
_SPIN_S = 5e-4
_NAP_S = 5e-3
_LINE_EVERY_S = 10.0
_LEAVING_S = 10.0
_DEPARTURES = "shoal: departures"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class Waiter(Protocol):
    """Waits in the caller's thread."""

    def wait(
        self, is_done: Callable[[], bool], deadline: Deadline | None, what: str, whom: Callable[[], str]
    ) -> None:
        """Until `is_done`; a line every ten seconds says what for, and `whom` if that is known."""

    def wake(self) -> None:
        """Look again; from any thread."""


class LocalWait:
    """Beside mates on the same machine, whose bells ring for this worker too."""

    def __init__(self, local: HostGroup) -> None:
        self._local = local

    def wait(
        self, is_done: Callable[[], bool], deadline: Deadline | None, what: str, whom: Callable[[], str]
    ) -> None:
        """As the machine's group waits."""
        self._local.wait_until(is_done, deadline, what, whom)

    def wake(self) -> None:
        """Ring one's own bell."""
        self._local.wake()


class SoloWait:
    """Alone on a machine."""

    def __init__(self, rank: int, timeout_s: float | None) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._bell = threading.Event()  # law: rung by the mesh's loop thread, heard by the caller's

    def wait(
        self, is_done: Callable[[], bool], deadline: Deadline | None, what: str, whom: Callable[[], str]
    ) -> None:
        """Spin briefly, then sleep."""
        if deadline is None and self._timeout_s is not None:
            deadline = Deadline.after(self._timeout_s)
        began_s = time.perf_counter()
        next_line_s = began_s + _LINE_EVERY_S
        while True:
            self._bell.clear()
            if is_done():
                return
            now_s = time.perf_counter()
            if now_s - began_s < _SPIN_S:
                time.sleep(0)
                continue
            if deadline is not None and deadline.is_past:
                raise DeadlineExceeded(
                    f"{self._line(what, whom(), now_s - began_s)}: the deadline has passed.",
                    next_step="see what that rank does, or give a longer --peer-timeout.",
                )
            if now_s > next_line_s:
                next_line_s += _LINE_EVERY_S
                log.warning("%s", self._line(what, whom(), now_s - began_s))
            self._bell.wait(_NAP_S)

    def wake(self) -> None:
        """Set the event."""
        self._bell.set()

    def _line(self, what: str, whom: str, waited_s: float) -> str:
        return f"rank {self._rank}: {what}: waiting{' for ' if whom else ''}{whom}, {waited_s:.0f} s"


def open_torch_group(
    placement: Placement, settings: GroupSettings, seats: list[Seat], rendezvous: Rendezvous
) -> TorchGroup:
    """Connect with the workers of all other machines, and join those of one's own. Collective."""
    names: dict[str, list[int]] = {}
    for seat in seats:
        names.setdefault(seat.machine, []).append(seat.rank)
    here = seats[placement.rank]
    mates = names[here.machine]
    if any(seat.host_id != here.host_id for seat in seats):
        _show_torch(here.address)
    mesh = Mesh.open(placement.rank, seats, mates, settings, rendezvous)
    try:
        return assemble(list(names.values()), mesh, settings, rendezvous)
    except BaseException:
        mesh.abandon()
        raise


def _show_torch(address: str) -> None:
    """Let gloo use the interface that the mesh uses: it would take what this machine's name stands for."""
    interface = interface_of(address)
    if interface is not None:
        os.environ.setdefault(_GLOO_INTERFACE, interface)


def assemble(
    machines: Sequence[Sequence[int]],
    mesh: Mesh,
    settings: GroupSettings,
    rendezvous: Rendezvous | None = None,
) -> TorchGroup:
    """Join the workers of one's own machine to a mesh that is connected; `machines` are ranks. Collective."""
    rank = mesh.rank
    index, mates = next((index, list(ranks)) for index, ranks in enumerate(machines) if rank in ranks)
    local: HostGroup | SoloGroup
    waiter: Waiter
    if len(mates) == 1:
        local = SoloGroup(settings.patience)
        waiter = SoloWait(rank, settings.timeout_s)
    else:
        place = mates.index(rank)
        inside = msgspec.structs.replace(
            settings,
            key=f"{settings.key} machine {index}",
            workers_per_machine=None,
            names=tuple(mates),
        )
        local = open_host_group(Placement(place, len(mates), place, len(mates)), inside)
        waiter = LocalWait(local)
    size = sum(map(len, machines))
    devices = DeviceOperations(rank, size, len(mates), settings.backend, rendezvous)
    try:
        group = TorchGroup(machines, local, mesh, waiter, devices, settings)
    except BaseException:
        local.abandon()
        raise
    try:
        group.barrier().wait()  # from now on everybody answers
        group.know_mates()
    except BaseException:
        group.abandon()
        raise
    return group


class TorchGroup(Group):
    """Workers of several machines; `open_torch_group` makes one."""

    def __init__(
        self,
        machines: Sequence[Sequence[int]],
        local: HostGroup | SoloGroup,
        mesh: Mesh,
        waiter: Waiter,
        devices: DeviceOperations,
        settings: GroupSettings,
    ) -> None:
        self.rank = rank = mesh.rank
        self.size = sum(map(len, machines))
        self.num_machines = len(machines)
        self.patience = settings.patience
        self._machines = [list(ranks) for ranks in machines]
        self._machine_of = {rank: index for index, ranks in enumerate(machines) for rank in ranks}
        self.machine = self._machine_of[rank]
        self._mates = self._machines[self.machine]
        """The ranks of this machine; a rank's place among them is its rank inside."""
        self._local = local
        self._mesh = mesh
        self._waiter = waiter
        self._devices = devices
        self._lane = Lane()
        self._issued = 0
        self._has_left = False
        self._is_open = True
        self._pid = os.getpid()
        self._breakage: BaseException | None = None
        self._lost: dict[int, Loss] = {}
        self._silence_s = settings.silence_s
        self._on_split = settings.on_split
        self._judged: Mapping[int, Loss] = mesh.lost
        """The losses for which it is settled which side of a cut network this worker is on."""
        self._said: Sequence[int] = ()
        """The silent ranks that were spoken of last."""
        self._split: Exception | None = None
        """Why this worker stops, if it is on the wrong side of a cut network."""
        self._waited_s = [0.0] * self.size
        self._tally = Tally(rank, self.size)
        """Of what goes through torch.distributed."""
        self._own_departures: torch.Tensor | None = None
        self._departures: dict[int, Any] = {}
        """For each mate's place: by rank, one more than the last operation in which that rank takes part; and
        behind them the number of an operation that the mate could not finish, and one more than the rank
        that was to blame."""
        if not isinstance(local, SoloGroup):
            self._own_departures = local.empty(self.size + 2, torch.int64)
            local.publish(_DEPARTURES, self._own_departures, 0)
        self._collectives = Collectives(self)
        self._remote = Remote(self)
        devices.watch = self._error_of_absence
        devices.gather = self._collectives.barrier
        mesh.add_listener(waiter.wake)

    # --- who is there ---

    @property
    def members(self) -> Sequence[int]:
        """Ranks that still take part."""
        inside = [self._mates[place] for place in self._local.members]
        following = self._issued + 1
        outside = [
            rank
            for rank in range(self.size)
            if self._machine_of[rank] != self.machine and not self.is_gone(rank, following)
        ]
        return sorted(inside + outside)

    @property
    def lost(self) -> Mapping[int, Loss]:
        """Peers that ended or fell silent without having left."""
        inside = tuple(self._local.lost.items())
        found = [dataclasses.replace(loss, rank=self._mates[place]) for place, loss in inside]
        for loss in (*found, *tuple(self._mesh.lost.values())):
            self._lost.setdefault(loss.rank, loss)
        return self._lost

    @property
    def waited_s(self) -> Sequence[float]:
        """Seconds that this worker has waited for each rank."""
        waited = list(self._waited_s)
        for place, seconds in enumerate(self._local.waited_s):
            waited[self._mates[place]] += seconds
        return waited

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """What went over the streams to other machines, with its heads; the rest by `Metered`'s formulas.

        The rest is what this worker gave and got inside its machine, where a collective begins and ends, and
        what torch.distributed was asked to move.
        """
        sent, received = self._local.traffic_bytes
        traffic = self._mesh.traffic
        # copied at once: another thread counts on
        sent += self._tally.sent_bytes + sum(tuple(traffic.sent_bytes.values()))
        received += self._tally.received_bytes + sum(tuple(traffic.received_bytes.values()))
        return sent, received

    @property
    def should_survive(self) -> bool:
        """Whether all operations go on without lost peers."""
        return self._local.should_survive

    @should_survive.setter
    def should_survive(self, value: bool) -> None:
        self._local.should_survive = value

    @property
    def mesh(self) -> Mesh:
        """The streams to other machines: its `traffic` says what went over them."""
        return self._mesh

    @property
    def remote(self) -> Remote:
        """One-sided operations with other machines."""
        return self._remote

    @property
    def local(self) -> HostGroup | SoloGroup:
        """The group inside this machine."""
        return self._local

    @property
    def torch_store(self) -> Any:
        """A torch.distributed store that all members share."""
        return self._devices.store

    def machine_of(self, rank: int) -> int:
        """Index of a rank's machine."""
        return self._machine_of[rank]

    def ranks_on(self, machine: int) -> Sequence[int]:
        """A machine's ranks."""
        return self._machines[machine]

    def place_of(self, rank: int) -> int | None:
        """A rank's place inside this machine; None for those of others."""
        return self._mates.index(rank) if rank in self._mates else None

    def check_split(self) -> None:
        """NetworkSplit, or PeerLost where others say so, when this worker is on the side that stops."""
        is_new = self._breakage is None and self._mesh.lost is not self._judged
        if is_new and not self._is_undecided():
            self._judged = self._mesh.lost
            self._judge_split()
        if self._split is not None:
            raise self._split

    def _is_undecided(self) -> bool:
        """Whether somebody else seems to fall silent too, so that it is not clear yet who is where."""
        return self._find_partition() is not None and any(
            self._mesh.silent_s(rank) > self._silence_s / 2
            for rank in self.members
            if self.place_of(rank) is None
        )

    def _find_partition(self) -> NetworkPartition | None:
        left_at_s = dict(self._mesh.left_at_s)
        if isinstance(self._local, HostGroup):
            left_at_s |= {self._mates[place]: at_s for place, at_s in self._local.left_at_s.items()}
        return find_partition(self.lost.values(), self.members, left_at_s, self._silence_s)

    def _judge_split(self) -> None:
        found = self._find_partition()
        if found is None or self._on_split == "ignore":
            return
        is_allowed = self._on_split == "continue"
        if found.should_stop and not is_allowed:
            self._split = self._breakage = found.error()
            self._mesh.fail()
        elif found.is_worth_saying and found.silent != self._said:
            self._said = found.silent
            log.warning("rank %d: %s", self.rank, found.line(is_allowed=is_allowed))

    def has_left(self, rank: int, seq: int) -> bool:
        """Whether a rank of another machine left in order before an operation."""
        if self._mesh.left.get(rank, seq) < seq:
            return True
        return any(0 < table[rank] <= seq for table in self._departures.values())

    def know_mates(self) -> None:
        """From now on mates tell each other who of other machines has left."""
        if isinstance(self._local, SoloGroup):
            return
        for place, rank in enumerate(self._mates):
            found = self._local.fetch(_DEPARTURES, place).wait() if rank != self.rank else None
            if found is not None:
                self._departures[place] = found.tensor.numpy()

    def first_loss(self) -> Loss | None:
        """Of anybody, where a loss ends every operation."""
        return None if self.should_survive else next(iter(self.lost.values()), None)

    def has_failed(self, place: int, seq: int) -> bool:
        """Whether a mate says that it could not finish an operation."""
        return place in self._departures and int(self._departures[place][self.size]) == seq

    def mate_error(self, place: int) -> PeerLost:
        """What a mate's loss or failure means to those that it spoke for."""
        rank = self._mates[place]
        blamed = int(self._departures[place][self.size + 1]) - 1 if place in self._departures else -1
        if blamed >= 0:
            return (self.lost.get(blamed) or Loss(blamed, "it failed")).error()
        return (self.lost.get(rank) or Loss(rank, "it failed in the middle of an operation")).error()

    def tell_mates(self) -> None:
        """What this worker has heard; those it passes results on to shall know as much when they come."""
        if self._own_departures is not None:
            for rank, after in self._mesh.left.items():
                self._own_departures[rank] = after + 1

    def loss(self, rank: int) -> Loss | None:
        """Why a rank of another machine is lost, if it is."""
        return self._mesh.lost.get(rank)

    def is_gone(self, rank: int, seq: int) -> bool:
        """Whether a rank of another machine takes no part in an operation."""
        return rank in self._mesh.lost or self.has_left(rank, seq)

    # --- memory ---

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Memory that this machine's workers share, or a device's own."""
        if device is not None and device.type != "cpu":
            return torch.zeros(num_elements, dtype=dtype, device=device)
        self._clear_lane("empty")
        return self._local.empty(num_elements, dtype)

    def free(self, tensor: torch.Tensor) -> None:
        """Give memory of this machine back."""
        if tensor.device.type == "cpu":
            self.settle(tensor)
            self._clear_lane("free")
            self._local.free(tensor)

    # --- collectives ---

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Inside each machine, then between machines, of which each reduces one share."""
        check_reduction(tensor, op)
        if self._devices.takes(tensor):
            self._tally.all_reduce(tensor.nbytes)
            return self._issue("all_reduce", self._devices.all_reduce(self._issued + 1, tensor, op), tensor)
        return self._issue("all_reduce", self._collectives.all_reduce(self._issued + 1, tensor, op), tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """From `root` inside its machine, and to the others through one worker of each."""
        if not 0 <= root < self.size:
            raise UsageError(
                f"There is no rank {root} among {self.size}.", next_step="broadcast from a member."
            )
        if self._devices.takes(tensor):
            self._tally.broadcast(tensor.nbytes, root)
            return self._issue("broadcast", self._devices.broadcast(self._issued + 1, tensor, root), tensor)
        return self._issue("broadcast", self._collectives.broadcast(self._issued + 1, tensor, root), tensor)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Everybody's tensor; all dimensions but the first are equal."""
        if self._devices.takes(tensor):
            # the others' sizes come later; most often all give alike
            self._tally.all_gather(tensor.nbytes, tensor.nbytes * (self.size - 1))
            return self._issue("all_gather", self._devices.all_gather(self._issued + 1, tensor), tensor)
        return self._issue("all_gather", self._collectives.all_gather(self._issued + 1, tensor), tensor)

    def barrier(self) -> Handle[None]:
        """Done when all members have come to it."""
        return self._issue("barrier", self._collectives.barrier(self._issued + 1))

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """The weighted average with neighbours, straight from rank to rank.

        What goes to other machines is on its way when this returns; `settle` waits for it.
        """
        weights.check(self.rank, self.size)
        if not tensor.is_floating_point():
            raise UsageError(
                f"A weighted average of {tensor.dtype} is none.", next_step="use floating point."
            )
        spans = [tensor] if out is None else [tensor, out]
        seq = self._issued + 1
        if tensor.device.type == "cpu":
            return self._issue("exchange", self._collectives.exchange(seq, tensor, weights, out), *spans)
        steps = on_host(tensor, out, lambda staged: self._collectives.exchange(seq, staged, weights, None))
        return self._issue("exchange", steps, *spans)

    def exchange_machines(
        self, tensor: torch.Tensor, weights: Weights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Averaged inside each machine; one worker of each exchanges the averages, and passes them on."""
        weights.check(self.machine, self.num_machines)
        spans = [tensor] if out is None else [tensor, out]
        seq = self._issued + 1
        if tensor.device.type == "cpu":
            return self._issue(
                "exchange_machines", self._collectives.exchange_machines(seq, tensor, weights, out), *spans
            )
        steps = on_host(
            tensor, out, lambda staged: self._collectives.exchange_machines(seq, staged, weights, None)
        )
        return self._issue("exchange_machines", steps, *spans)

    def settle(self, tensor: torch.Tensor) -> None:
        """Wait until nobody reads `tensor` any more."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return
        span = span_of(tensor)
        self.wait(lambda: not self._lane.uses(span), None, "settle")
        waiting = self._collectives.take_sending(span)
        if waiting:
            self.wait(lambda: all(handle.is_done() for handle in waiting), None, "settle")
        self._local.settle(tensor)

    # --- one-sided ---

    def publish(self, name: str, tensor: torch.Tensor, version: int) -> None:
        """For this machine where it lies, for others by a copy when they ask."""
        self._remote.publish(name, tensor, version)

    def reclaim(self, name: str, version: int) -> None:
        """Snapshots up to this version are void from now on."""
        self._remote.reclaim(name, version)

    def fetch(self, name: str, peer: int) -> Handle[Snapshot | None]:
        """A peer's own memory on this machine, a copy from another."""
        return self._remote.fetch(name, peer)

    def changing(self, name: str, version: int) -> contextlib.AbstractContextManager[None]:
        """Inside, what is published may be written."""
        return self._remote.changing(name, version)

    def read(self, name: str, peer: int, into: torch.Tensor, *, version: int = 0) -> Handle[int | None]:
        """A copy of what a peer has published, in one piece."""
        return self._remote.read(name, peer, into, version=version)

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
    ) -> Window:
        """Slots in shared memory for this machine's sources, and in one's own for others."""
        return self._remote.window(name, num_elements, dtype, sources)

    def mutex(self, name: str, owner: int) -> contextlib.AbstractContextManager[None]:
        """One holder in the whole group."""
        return self._remote.mutex(name, owner)

    # --- its life ---

    def progress(self) -> None:
        """Go on with what is under way."""
        self._local.progress()
        if self._lane.is_idle:
            return
        self._check_forked()
        try:
            self._lane.advance()
        except BaseException as error:
            self._breakage = self._breakage or error
            raise

    def leave(self) -> None:
        """After what is under way; what cannot be finished within seconds is left undone."""
        if self._has_left or self._has_failed() or os.getpid() != self._pid:
            return
        self._finish()
        if self._has_failed():
            return
        with contextlib.suppress(DeadlineExceeded):
            deadline = Deadline.after(_LEAVING_S + self._silence_s)
            self.wait(lambda: not self._is_undecided(), deadline, "leave")
        self.check_split()
        last = self._issued if self._lane.is_idle else self._lane.first_seq - 1
        self._has_left = True
        self._lane.drop()
        self._remote.leave()
        self._mesh.leave(last)
        self._local.leave()

    def close(self) -> None:
        """Leave; tensors of the group stay usable in this process."""
        if not self._is_open or os.getpid() != self._pid:
            return  # in a forked child all of it is the parent's
        with contextlib.ExitStack() as stack:
            # the last comes first, whatever fails
            stack.callback(self._close_local)
            stack.callback(self._mesh.close)
            stack.callback(self._remote.close)
            stack.callback(self._devices.close)
            try:
                self.leave()
            finally:
                self._is_open = False

    def _close_local(self) -> None:
        if self._breakage is not None:
            self._local.abandon()
        else:
            self._local.close()

    def abandon(self) -> None:
        """Give everything back; the others find this worker lost, unless it has left."""
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open = False
        self._lane.drop()
        self._devices.abandon()
        self._remote.close()
        self._local.blamed = self.blamed
        if self.blamed is not None:
            self._mesh.fail(self.blamed)
        self._mesh.abandon()
        self._local.abandon()

    # --- for the rooms' other files ---

    @property
    def next_seq(self) -> int:
        """The number of the next operation."""
        return self._issued + 1

    def wake(self) -> None:
        """Let a wait look again; from any thread."""
        self._waiter.wake()

    def _error_of_absence(self, seq: int) -> PeerLost | None:
        """Of somebody who is lost, or has left before an operation."""
        for loss in self.lost.values():
            return loss.error()
        inside = self._local.members
        for rank in range(self.size):
            place = self.place_of(rank)
            if (place is None and self.has_left(rank, seq)) or (place is not None and place not in inside):
                return PeerLost(
                    f"rank {rank} has left the group, and torch.distributed cannot go on without it.",
                    peer=rank,
                    next_step="let all workers take the same number of steps.",
                )
        return None

    def _guarded(self, seq: int, steps: Steps) -> Steps:
        """An operation that fails leaves this worker out of step, and its mates shall not wait for it."""
        try:
            return (yield from steps)
        except Exception as error:
            self._breakage = self._breakage or error
            self.blame(error)
            if self._own_departures is not None:
                self._own_departures[self.size + 1] = 0 if self.blamed is None else self.blamed + 1
                self._own_departures[self.size] = seq
            self._mesh.fail(self.blamed)
            raise
        finally:
            self._collectives.close_talks(seq)

    def _issue(self, what: str, steps: Steps, *tensors: torch.Tensor) -> Handle[Any]:
        self.check_usable()
        if self._has_left:
            raise UsageError(
                f"rank {self.rank} has left the group and takes part in nothing more.",
                next_step="make it the last thing to leave or to close.",
            )
        self._issued += 1
        spans = [span_of(tensor) for tensor in tensors if tensor.numel()]
        operation = Operation(self._issued, what, self._guarded(self._issued, steps), spans)
        self._lane.add(operation)
        self.progress()
        return _OperationHandle(self, operation)

    def _clear_lane(self, what: str) -> None:
        """Before a step inside the machine that is no operation of the lane."""
        self.check_usable()
        self.wait(lambda: self._lane.is_clear, None, what)

    def wait(self, is_done: Callable[[], bool], deadline: Deadline | None, what: str) -> None:
        """Until something is so, making progress all the while; PeerLost and DeadlineExceeded end it."""

        def look() -> bool:
            self.progress()
            return is_done()

        began_s = time.perf_counter()
        awaited: list[int] = []

        def whom() -> int | None:
            rank = self._lane.awaited()
            awaited[:] = [] if rank is None else [rank]
            return rank

        if look():
            return
        try:
            self._waiter.wait(look, deadline, what, lambda: self._describe_awaited(whom()))
        finally:
            whom()
            if awaited:
                self._waited_s[awaited[0]] += time.perf_counter() - began_s

    def _describe_awaited(self, rank: int | None) -> str:
        return "" if rank is None else self._mesh.describe(rank)

    def _finish(self) -> None:
        """Go on with what is under way for some seconds."""
        with contextlib.suppress(ShoalError):
            self.wait(lambda: self._lane.is_idle, Deadline.after(_LEAVING_S), "leave")

    def _has_failed(self) -> bool:
        return self._breakage is not None

    def check_usable(self) -> None:
        """UsageError in a forked child, and when this worker is out of step; else as `check_split`."""
        self._check_forked()
        self.check_split()
        if self._breakage is not None:
            if isinstance(self._breakage, PeerLost) and self._breakage.peer == self.rank:
                raise self._breakage  # given up by the others: whoever asks first shall hear that
            raise UsageError(
                f"rank {self.rank} is out of step with the others since an operation was broken off: "
                f"{type(self._breakage).__name__}.",
                next_step="end this worker; what comes after an interrupted operation cannot be right.",
            )

    def _check_forked(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "The group belongs to the process that opened it, and this one was forked from it.",
                next_step="let the workers of a DataLoader load data and nothing else.",
            )


class _OperationHandle(Handle[Any]):
    def __init__(self, group: TorchGroup, operation: Operation) -> None:
        self._group = group
        self._operation = operation

    def wait(self, deadline: Deadline | None = None) -> Any:
        operation = self._operation
        if not operation.is_over:
            self._group.wait(lambda: operation.is_over, deadline, operation.what)
        if operation.error is not None:
            raise operation.error
        return operation.value

    def is_done(self) -> bool:
        if not self._operation.is_over:
            self._group.progress()
        return self._operation.is_over
