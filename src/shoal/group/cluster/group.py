"""The group of workers on several machines: shared memory inside each, streams between them.

Whatever all take part in happens first inside a machine; then one of its workers speaks with those of other
machines, and passes the result on (`collectives`). An `exchange` goes from rank to rank. One-sided operations
are those of `window`. `members` knows who is there. A worker that waits is woken by the others of its
machine, or by its streams.

An operation is a generator: it yields the handles that it waits for, and goes on with their results. Its
steps inside the machine must come in the same order on all of the machine's workers, so the operations take
turns; one gives its turn away (`yield FREE`) when it has issued its last step there, and may go on beside
later ones. Everything happens in the thread that calls, whenever it calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from shoal.core import (
    Address,
    Deadline,
    DeadlineExceeded,
    Peer,
    PeerId,
    Placement,
    ShoalError,
)
from shoal.core.processes import interface_of
from shoal.group.base import (
    Group,
    GroupSettings,
    GroupStats,
    Handle,
    Loss,
    Reduction,
    T,
    WaitListener,
    WaitReport,
    Window,
    WindowForm,
    check_rank,
    forked,
    has_left,
    out_of_step,
    passed_on,
    rank_to_blame,
)
from shoal.group.cluster.collectives import Collectives, HostStaging
from shoal.group.cluster.machine_exchange import FREE, AlgorithmChoice, PendingStep, Steps
from shoal.group.cluster.members import Members
from shoal.group.cluster.mesh import CONNECTING_S, Mesh
from shoal.group.cluster.rendezvous import (
    LOOPBACK,
    Rendezvous,
    WorkerAddress,
    encryption_line,
    should_encrypt,
)
from shoal.group.cluster.torch_world import TorchOperations
from shoal.group.cluster.window import Windows
from shoal.group.host import HostGroup, open_host_group
from shoal.group.host.engine import Span, is_overlapping, span_of
from shoal.group.kernels import check_average, check_reduction
from shoal.group.solo import SoloGroup
from shoal.topology import MachineWeights, Weights

log = logging.getLogger(__name__)
_SPIN_S = 5e-4
_NAP_S = 5e-3
_LEAVING_S = 10.0
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def open_cluster_group(
    placement: Placement, settings: GroupSettings, addresses: list[WorkerAddress], rendezvous: Rendezvous
) -> ClusterGroup:
    """Connects with the workers of all other machines, and joins those of one's own. Collective."""
    machines: dict[str, list[int]] = {}
    for address in addresses:
        machines.setdefault(address.machine, []).append(address.rank)
    here, host = addresses[placement.rank], LOOPBACK
    if any(address.host_id != here.host_id for address in addresses):
        host = here.address
        interface = interface_of(host)
        if interface is not None:  # gloo would take the one that this machine's name stands for
            os.environ.setdefault(_GLOO_INTERFACE, interface)
    deadline = Deadline.after(settings.meeting_s or settings.timeout_s or CONNECTING_S)
    is_encrypted = should_encrypt(addresses, settings.encrypt)
    line = encryption_line(addresses, settings.encrypt)
    if line and placement.rank == 0 and not rendezvous.name:
        log.warning("%s", line)
    secret = rendezvous.secret(deadline)
    mesh = Mesh(placement.rank, secret, host=host, silence_s=settings.silence_s, is_encrypted=is_encrypted)
    listening = mesh.listen()
    try:
        told = rendezvous.share("mesh", (str(listening.address), str(listening.id)), deadline)
        peers = {
            rank: Peer(Address.parse(address), PeerId.parse(peer_id))
            for rank, (address, peer_id) in enumerate(told)
            if rank not in machines[here.machine]
        }
        names = {address.rank: f"process {address.pid} on {address.host}" for address in addresses}
        mesh.connect(peers, names, deadline)
        return assemble(list(machines.values()), mesh, settings, rendezvous)
    except BaseException as error:
        mesh.close(error)
        raise


def assemble(
    machines: Sequence[Sequence[int]],
    mesh: Mesh,
    settings: GroupSettings,
    rendezvous: Rendezvous | None = None,
    staging: HostStaging | None = None,
) -> ClusterGroup:
    """Joins the workers of one's own machine to a connected mesh; `machines` are ranks. Collective."""
    index, here = next((index, list(ranks)) for index, ranks in enumerate(machines) if mesh.rank in ranks)
    local: HostGroup | SoloGroup = SoloGroup(settings.patience)
    if len(here) > 1:
        place, key = here.index(mesh.rank), f"{settings.key} machine {index}"
        inside = msgspec.structs.replace(settings, key=key, workers_per_machine=None, names=tuple(here))
        local = open_host_group(Placement(place, len(here), place, len(here)), inside)
    opened: Group = local
    try:
        opened = group = ClusterGroup(machines, local, mesh, settings, rendezvous, staging or HostStaging())
        group.barrier().wait()  # from now on everybody answers
        group.membership.read_tables()
    except BaseException as error:
        opened.close(error)
        raise
    return group


class ClusterGroup(Group):
    """Workers of several machines; `open_cluster_group` makes one."""

    should_survive: bool = passed_on("local", "should_survive", is_settable=True)
    lost: Mapping[int, Loss] = passed_on("membership", "lost")

    def __init__(
        self,
        machines: Sequence[Sequence[int]],
        local: HostGroup | SoloGroup,
        mesh: Mesh,
        settings: GroupSettings,
        rendezvous: Rendezvous | None,
        staging: HostStaging,
    ) -> None:
        members = Members(machines, local, mesh.monitor, settings)
        self.rank = members.rank
        self.size = members.size
        self.machine = members.machine
        self.machines = members.machines
        self.num_machines = len(members.ranks_on)
        self.patience = settings.patience
        self.membership = members
        """Who takes part, for the parts of this floor; `members` lists it."""
        self.local = local
        """The group inside this machine."""
        self.mesh = mesh
        self.torch_store = None if rendezvous is None else rendezvous.store
        """A torch.distributed store that all members share."""
        self._waiter = _SoloWaiter(self.rank, settings.timeout_s) if isinstance(local, SoloGroup) else local
        self._staging = staging
        self._torch = TorchOperations(members, settings.backend, self.torch_store)
        self._queue = OperationQueue()
        self._issued = 0
        self._has_left = False
        self._is_open = True
        self._pid = os.getpid()
        self._breakage: BaseException | None = None
        self._blamed: int | None = None
        self._silence_s = settings.silence_s
        self._waited_s = [0.0] * self.size
        choice = AlgorithmChoice(settings.all_reduce)
        self._collectives = Collectives(local, mesh, members, staging, self._torch, choice)
        self._windows = Windows(self)
        mesh.on_change = self._waiter.wake
        self._waiter.on_wait.append(self._hear_of_wait)
        self._awaited: int | None = None
        """Who is waited for, while this worker waits."""

    # --- who is there ---

    @property
    def members(self) -> Sequence[int]:
        """The ranks that still take part."""
        return self.membership.present(self.next_seq)

    @property
    def split(self) -> Exception | None:
        """NetworkSplit, or PeerLost where others say so, when this worker is on the side that stops."""
        if self._breakage is None and self.membership.judge_split(self.next_seq):
            self._breakage = self.membership.split
            self.mesh.fail()
        return self.membership.split

    @property
    def stats(self) -> GroupStats:
        """What went over the streams to other machines, with its heads; the rest by `Metered`'s formulas.

        The rest is what this worker gave and got inside its machine, where a collective begins and ends, and
        what torch.distributed was asked to move.
        """
        inside, asked, waited_s = self.local.stats, self._torch.counter, list(self._waited_s)
        for rank, seconds in zip(self.membership.ranks_here, inside.waited_s, strict=False):
            waited_s[rank] += seconds
        sent_to = self._by_rank(asked.sent_to, self.mesh.sent_bytes, inside.sent_to)
        received_from = self._by_rank(asked.received_from, self.mesh.received_bytes, inside.received_from)
        return GroupStats(sum(sent_to), sum(received_from), waited_s, sent_to, received_from)

    def _by_rank(
        self, asked: Sequence[int], between: Mapping[int, int], inside: Sequence[int]
    ) -> tuple[int, ...]:
        """Adds bytes that torch was asked for, those between machines, and those inside this one."""
        total = list(asked)
        for rank, size_bytes in (*between.items(), *zip(self.membership.ranks_here, inside, strict=False)):
            total[rank] += size_bytes
        return tuple(total)

    # --- memory ---

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Makes memory that this machine's workers share."""
        self.clear_queue("empty")
        return self.local.empty(num_elements, dtype, device=device)

    def free(self, tensor: torch.Tensor) -> None:
        """Gives memory of this machine back."""
        self.settle(tensor)
        self.clear_queue("free")
        self.local.free(tensor)

    # --- collectives ---

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Reduces inside each machine, then between machines, of which each reduces one share."""
        check_reduction(tensor, op)
        return self._issue("all_reduce", [tensor], tensor, op)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Copies from `root` inside its machine, and to the others through one worker of each."""
        check_rank(root, self.size)
        return self._issue("broadcast", [tensor], tensor, root)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Collects everybody's tensor; all dimensions but the first are equal."""
        return self._issue("all_gather", [tensor], tensor)

    def barrier(self) -> Handle[None]:
        """Is done when all members have come to it."""
        return self._issue("barrier", [])

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Goes straight from rank to rank; between machines, one worker of each exchanges their averages.

        What goes to other machines is on its way when this returns; `settle` waits for it.
        """
        check_average(tensor)
        used = [tensor] if out is None else [tensor, out]
        if isinstance(weights, MachineWeights):
            weights.weights.check(self.machine, self.num_machines)
            return self._issue("exchange_machines", used, tensor, weights.weights, out)
        weights.check(self.rank, self.size)
        return self._issue("exchange", used, tensor, weights, out)

    def settle(self, tensor: torch.Tensor) -> None:
        """Waits until nobody reads `tensor` any more."""
        if not tensor.numel():
            return
        span = span_of(tensor)
        self.wait(lambda: not self._queue.uses(span), None, "settle")
        sending = self._collectives.sending_of(tensor)
        self.wait(lambda: all(handle.is_done() for handle in sending), None, "settle")
        self.local.settle(tensor)

    # --- one-sided ---

    def _make_window(self, form: WindowForm, sources: Collection[int] | None) -> Window:
        """Makes slots in shared memory for this machine's sources, and in private memory for others."""
        return self._windows.make(form, sources)

    # --- its life ---

    def progress(self) -> None:
        """Goes on with what is under way."""
        self.local.progress()
        if not self._queue:
            return
        if os.getpid() != self._pid:
            raise forked()
        try:
            self._queue.advance()
        except BaseException as error:
            self._breakage = self._breakage or error
            raise

    def leave(self) -> None:
        """Leaves after what is under way; what cannot be finished within seconds is left undone."""
        if self._has_left or self._is_broken() or os.getpid() != self._pid:
            return
        with contextlib.suppress(ShoalError):
            self.wait(lambda: not self._queue, Deadline.after(_LEAVING_S), "leave")
        if self._is_broken():
            return
        with contextlib.suppress(DeadlineExceeded):
            deadline = Deadline.after(_LEAVING_S + self._silence_s)
            self.wait(lambda: not self.membership.is_undecided(self.next_seq), deadline, "leave")
        self._check_split()
        last = self._queue[0].seq - 1 if self._queue else self._issued
        self._has_left = True
        self._queue.drop()
        self._windows.close()
        self.mesh.leave(last)
        self.local.leave()

    def close(self, error: BaseException | None = None) -> None:
        """Leaves, without an error, and gives everything back; tensors of the group stay usable here."""
        if not self._is_open or os.getpid() != self._pid:
            return  # in a forked child all of it is the parent's
        with contextlib.ExitStack() as stack:
            # the last comes first, whatever fails
            stack.callback(lambda: self.local.close(error or self._breakage))
            stack.callback(lambda: self.mesh.close(error))
            stack.callback(self._windows.close)
            stack.callback(lambda: self._torch.close(error))
            try:
                if error is None:
                    self.leave()
                elif (blamed := self._blame(error)) is not None:
                    self.mesh.fail(blamed)
            finally:
                self._is_open = False
                self._queue.drop()

    # --- for the floor's other files ---

    @property
    def next_seq(self) -> int:
        """The number of the next operation."""
        return self._issued + 1

    def handle(self, inner: Handle[Any], what: str, result: Callable[[], T]) -> Handle[T]:
        """Gives a handle of something under way, whose caller makes progress while it waits."""
        return _GroupHandle(self, inner, what, result)

    def clear_queue(self, what: str) -> None:
        """Waits before a step inside the machine that is no operation of the queue."""
        self.check_usable()
        self.wait(lambda: self._queue.is_clear, None, what)

    def wait(self, is_done: Callable[[], bool], deadline: Deadline | None, what: str) -> None:
        """Waits until something is so, and makes progress; PeerLost and DeadlineExceeded end it."""
        awaited: int | None = None
        began_s = time.perf_counter()

        def look() -> bool:
            nonlocal awaited
            self._awaited = awaited = self._queue.awaited()  # when it is over, that was the last to come
            self.progress()
            return is_done()

        def whom() -> str:
            return "" if awaited is None else self.mesh.monitor.describe(awaited)

        try:
            self._waiter.wait_until(look, deadline, what, whom)
        finally:
            self._awaited = None
            if awaited is not None:
                self._waited_s[awaited] += time.perf_counter() - began_s

    def _hear_of_wait(self, place: int | None) -> None:
        """Passes on that this worker waits: for a member of the group, or one of its machine by its place."""
        inside = None if place is None else self.membership.ranks_here[place]
        for hear in self.on_wait:
            hear(inside if self._awaited is None else self._awaited)

    def check_usable(self) -> None:
        """UsageError in a forked child, and when this worker is out of step or has left; raises `split`."""
        if os.getpid() != self._pid:
            raise forked()
        self._check_split()
        if self._breakage is not None:
            raise out_of_step(self.rank, self._breakage)

    # --- the rest ---

    def _issue(self, what: str, tensors: Sequence[torch.Tensor], *arguments: Any) -> Handle[Any]:
        """Begins with an operation on some tensors, whose steps `Collectives` makes."""
        self.check_usable()
        if self._has_left:
            raise has_left(self.rank)
        self._issued += 1
        steps = self._guarded(self._issued, self._collectives.begin(self._issued, what, *arguments))
        operation = QueuedOperation(self._issued, steps, tensors, self._staging.stream_of(tensors))
        self._queue.append(operation)
        self.progress()
        return self.handle(operation, what, operation.wait)

    def _guarded(self, seq: int, steps: Steps) -> Steps:
        """Does an operation; if it fails this worker is out of step, and the others do not wait for it."""
        try:
            return (yield from steps)
        except Exception as error:
            self._breakage = self._breakage or error
            blamed = self._blame(error)
            self.membership.tell_failure(seq, blamed)
            self.mesh.fail(blamed, error)
            raise
        finally:
            self.mesh.forget(seq)

    def _blame(self, error: BaseException) -> int | None:
        """Finds the lost rank because of which this worker fails, if it is one; the first counts."""
        if self._blamed is None:
            self._blamed = rank_to_blame(error, self.rank)
        return self._blamed

    def _is_broken(self) -> bool:
        return self._breakage is not None

    def _check_split(self) -> None:
        if self.split is not None:
            raise self.split


class QueuedOperation(Handle[Any]):
    """One numbered operation under way; `OperationQueue.advance` drives it.

    On tensors of a GPU it runs in a `stream` beside its caller's, after what the caller's was given before
    the call. An operation goes on whenever some call makes progress: in the stream that is the current one
    then, it would wait for what was given to that stream since, and hold up what comes after.
    """

    def __init__(
        self, seq: int, steps: Steps, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None = None
    ) -> None:
        self.seq = seq
        self.spans = [span_of(tensor) for tensor in tensors if tensor.numel()]
        """Memory that it reads or writes: a later operation on any of it begins when this one is over."""
        self.is_begun = False
        self.is_free = False
        self.is_over = False
        self._result: Any = None
        self._error: BaseException | None = None
        self._waiting: Handle[Any] | None = None
        self._steps = steps
        self._stream = stream
        if stream is not None:
            self._event = torch.cuda.current_stream(stream.device).record_event()
            self._steps = self._in_stream(stream, tensors, steps)

    def is_done(self) -> bool:
        """Tells whether it is over."""
        return self.is_over

    def wait(self, deadline: Deadline | None = None) -> Any:
        """Returns the result of an operation that is over, or raises its error.

        The current stream waits for the operation's end on the GPU, and may then use its result.
        """
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(self._event)
            for tensor in self._result if isinstance(self._result, list) else [self._result]:
                tensor.record_stream(current)
        return self._result

    def awaited(self) -> int | None:
        """Names the rank that it waits for, where it is known."""
        return self._waiting.awaited() if isinstance(self._waiting, PendingStep) else None

    def advance(self) -> bool:
        """Goes on as far as it can; tells whether it moved."""
        moved = False
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while not self.is_over and (self._waiting is None or self._waiting.is_done()):
                moved = self.is_begun = True
                try:
                    self._waiting = self._resume()
                except StopIteration as end:
                    self._result = end.value
                    self._end()
                except BaseException as error:
                    self._error = error
                    self._end()
                    if not isinstance(error, Exception):
                        raise
                # FREE itself is done, so that the operation goes on at once
                self.is_free |= self._waiting is FREE
        return moved

    def drop(self) -> None:
        """Forgets it where it stands."""
        self._end()
        self._steps.close()

    def _in_stream(self, stream: torch.cuda.Stream, tensors: Sequence[torch.Tensor], steps: Steps) -> Steps:
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)  # it may be dropped before the stream is done with it
        result = yield from steps
        self._event = stream.record_event()
        return result

    def _resume(self) -> Handle[Any]:
        """Gives the steps what they have waited for, or its error; gives what they wait for next."""
        try:
            brought = None if self._waiting is None else self._waiting.wait()
        except Exception as error:  # noqa: BLE001  (it is the operation's, which may catch it)
            return self._steps.throw(error)
        return self._steps.send(brought)

    def _end(self) -> None:
        self.is_free = self.is_over = True
        self._waiting = None


class OperationQueue(deque[QueuedOperation]):
    """Holds a worker's operations that are under way, in order."""

    @property
    def is_clear(self) -> bool:
        """Whether all operations have issued their last step inside the machine."""
        return all(operation.is_free for operation in self)

    def advance(self) -> None:
        """Goes on with all operations that can go on."""
        moved = True
        while moved:
            moved, is_clear = False, True
            in_use: list[Span] = []
            for operation in tuple(self):
                may_begin = operation.is_begun or not is_overlapping(in_use, operation.spans)
                if may_begin and (is_clear or operation.is_free):
                    moved |= operation.advance()
                is_clear = is_clear and operation.is_free
                if not operation.is_over:
                    in_use += operation.spans
            while self and self[0].is_over:
                self.popleft()

    def awaited(self) -> int | None:
        """Names the rank that the first operation waits for, where it is known."""
        return next((rank for each in self if (rank := each.awaited()) is not None), None)

    def uses(self, span: Span) -> bool:
        """Tells whether an operation under way reads or writes some memory."""
        return any(not each.is_over and is_overlapping(each.spans, [span]) for each in self)

    def drop(self) -> None:
        """Forgets all that is under way."""
        while self:
            self.popleft().drop()


@dataclass(eq=False, slots=True)
class _GroupHandle(Handle[T]):
    """Something under way in a group, which makes progress while its caller waits."""

    group: ClusterGroup
    inner: Handle[Any]
    what: str
    result: Callable[[], T]

    def wait(self, deadline: Deadline | None = None) -> T:
        if not self.inner.is_done():
            self.group.wait(self.inner.is_done, deadline, self.what)
        return self.result()

    def is_done(self) -> bool:
        if not self.inner.is_done():
            self.group.progress()
        return self.inner.is_done()


class _SoloWaiter:
    """Waits for a worker that is alone on its machine, as `HostGroup` does for one that is not."""

    def __init__(self, rank: int, timeout_s: float | None) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self.on_wait: list[WaitListener] = []
        self._is_woken = threading.Event()  # law: set by the mesh's loop thread, waited for by the caller's

    def wait_until(
        self, is_done: Callable[[], bool], deadline: Deadline | None, what: str, whom: Callable[[], str]
    ) -> None:
        """Spins briefly, then sleeps; `whom` says who is waited for, if that is known."""

        def line(waited_s: float) -> str:
            name = whom()
            return f"rank {self._rank}: {what}: waiting{name and ' for ' + name}, {waited_s:.0f} s"

        began_s = time.perf_counter()
        report = WaitReport(line, self.on_wait, deadline, self._timeout_s)
        while True:
            self._is_woken.clear()
            if is_done():
                return
            if time.perf_counter() - began_s < _SPIN_S:
                time.sleep(0)
                continue
            report.look()
            self._is_woken.wait(_NAP_S)

    def wake(self) -> None:
        """Lets the wait look again; from any thread."""
        self._is_woken.set()
