"""The group of one machine's workers: tensors in shared memory, and each reduces its share of them.

A tensor of the group's own memory (`empty`) is exchanged where it lies. Any other passes through staging
memory, in pieces. `all_gather` waits for the others before it returns: it must learn their sizes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from shoal.core import Deadline, DeadlineExceeded, Placement, ShoalError, UsageError
from shoal.group.base import (
    Group,
    GroupSettings,
    GroupStats,
    Handle,
    Loss,
    Reduction,
    WindowForm,
    check_rank,
    passed_on,
    rank_to_blame,
)
from shoal.group.functions import spread_over_ranks
from shoal.group.host.collectives import NO_PLACE, STAGE_BYTES, DeviceCollectives, HostCollectives
from shoal.group.host.device import DeviceMemory, MakeDevice, open_device
from shoal.group.host.engine import KINDS, ProgressEngine, Task, TasksHandle, span_of
from shoal.group.host.heartbeat import ProcessWatch
from shoal.group.host.meeting import JoinRequest, SharedFiles, meet
from shoal.group.host.memory import (
    ARRIVED,
    BEAT,
    LEFT,
    NOT_YET,
    Arena,
    ControlPage,
    MemoryFull,
    MemoryRange,
    Segment,
    WakePipes,
    code_of,
    failed_beat,
    open_files,
)
from shoal.group.host.window import HostWindow, WindowSet, agree_on_sources
from shoal.group.kernels import OPS, check_average, check_reduction
from shoal.group.operations import TrafficCounter
from shoal.topology import MachineWeights, Weights

_LEAVING_S = 10.0
_MEETING_S = 300.0
_PAGE = 4096
_ALL_REDUCE, _BROADCAST, _ALL_GATHER, _EXCHANGE, _BARRIER, _EMPTY, _FREE = range(len(KINDS))
_NOTHING, _TAKEN, _NO_ROOM = range(3)
_opened: dict[tuple[str, int], int] = {}


def open_host_group(
    placement: Placement, settings: GroupSettings, make_device: MakeDevice = open_device
) -> HostGroup:
    """Meets the other workers of this machine; DeadlineExceeded names who did not come.

    `make_device` gives what is needed of a GPU when memory on it is first used.
    """
    if placement.size != placement.local_size:
        raise UsageError(
            f"{placement.size} workers on several machines cannot share memory.",
            next_step="run all workers on one machine.",
        )
    rank, size = placement.rank, placement.size
    number = _opened.get((settings.key, rank), 0) + 1
    with contextlib.ExitStack() as undo:
        shared = None
        if rank == 0:
            files = open_files(settings.folder)
            arena = undo.enter_context(contextlib.closing(Arena(files, rank, size)))
            shared = SharedFiles(
                files, [arena.grow(ControlPage.region_bytes(size)), arena.grow(2 * STAGE_BYTES)]
            )
            ControlPage(arena.map(shared.places[0]), rank, size).clear()
        own_pipe = WakePipes.new_pipe()
        for descriptor in own_pipe:
            undo.callback(os.close, descriptor)
        deadline = Deadline.after(settings.meeting_s or settings.timeout_s or _MEETING_S)
        request = JoinRequest(rank, size, os.getpid())
        met = meet(f"{settings.key} {number}", request, own_pipe[1], shared, deadline)
        for descriptor in met.pipes[:rank] + met.pipes[rank + 1 :]:
            undo.callback(os.close, descriptor)
        if rank != 0:
            arena = undo.enter_context(contextlib.closing(Arena(met.shared.files, rank, size)))
            # its own came back to it under another number
            os.close(met.pipes[rank])
            met.pipes[rank] = own_pipe[1]
        page, stage = (arena.map(place) for place in met.shared.places)
        control = ControlPage(page, rank, size)
        pipes = WakePipes(rank, own_pipe[0], met.pipes, control)
        watch = ProcessWatch(rank, met.pids, control, pipes, settings)
        watch.open()
        undo.pop_all()
    _opened[settings.key, rank] = number
    engine = ProgressEngine(rank, size, control, pipes, watch, settings)
    return HostGroup(settings, arena, stage, engine, make_device)


class HostGroup(Group):
    """The workers of one machine; `open_host_group` makes one."""

    should_survive: bool = passed_on("_engine", "should_survive", is_settable=True)

    def __init__(
        self,
        settings: GroupSettings,
        arena: Arena,
        stage: Segment,
        engine: ProgressEngine,
        make_device: MakeDevice = open_device,
    ) -> None:
        self.rank = engine.rank
        self.size = engine.size
        self.patience = settings.patience
        per_machine = settings.workers_per_machine or self.size
        self.machines = tuple(rank // per_machine for rank in range(self.size))
        self.machine = self.machines[self.rank]
        self.num_machines = self.machines[-1] + 1
        self._arena = arena
        self._engine = engine
        self._control = engine.control
        self._pipes = engine.pipes
        self._watch = engine.watch
        self._devices = DeviceMemory(self, engine, make_device)
        self._on_device = DeviceCollectives(engine, self._devices)
        self._on_host = HostCollectives(engine, arena, stage)
        engine.on_wait = self.on_wait
        self._counter = TrafficCounter(self.rank, self.size, engine.members)
        self._windows = WindowSet(engine, arena, self._counter, self._devices)
        self._is_open = True
        self.announce = engine.announce
        self.wait_until = engine.wait_until
        """Waits for something else than an operation of this group, and goes on with those meanwhile."""
        self.wake = engine.pipes.wake_self
        """Lets `wait_until` look again; from any thread."""

    @property
    def members(self) -> Sequence[int]:
        """The ranks that still take part."""
        return list(self._engine.members())

    @property
    def lost(self) -> Mapping[int, Loss]:
        """The peers that ended or fell silent without having left."""
        # operations go on without one as soon as it is judged, which the watch notices up to a beat later
        lost = self._watch.lost
        if not self._is_open or self._control.is_complete():
            return lost
        judged = [rank for rank in self._engine.judged() if rank not in lost]
        return {**lost, **{rank: self._watch.loss(rank) for rank in judged}} if judged else lost

    @property
    def left_at_s(self) -> Mapping[int, float]:
        """When those have left that have, by the monotonic clock, to within a beat."""
        unseen = [rank for rank in self._engine.left() if rank not in self._watch.left_at_s]
        return {**self._watch.left_at_s, **dict.fromkeys(unseen, time.monotonic())}

    @property
    def stats(self) -> GroupStats:
        """Bytes as a network without shared memory would have carried them, and waiting."""
        return self._counter.stats(tuple(self._engine.waited_s))

    def empty(
        self, num_elements: int, dtype: torch.dtype = torch.float32, *, device: torch.device | None = None
    ) -> torch.Tensor:
        """Takes shared memory; MemoryFull on all members when there is none left."""
        if device is not None and device.type != "cpu":
            with self._uncounted():
                return self._devices.empty(num_elements, dtype, device)
        if num_elements <= 0:
            return torch.empty(0, dtype=dtype)
        region = -(-num_elements * dtype.itemsize // _PAGE) * _PAGE
        place = None
        while place is None:  # who should have taken the memory has gone: the next one does
            place = self._take_memory(num_elements, dtype, region)
        segment = self._arena.map(place)
        return segment.new_region(self.rank, 0, num_elements, dtype)

    def free(self, tensor: torch.Tensor) -> None:
        """Gives the memory back to the system."""
        if self._devices.takes(tensor):
            self._devices.free(tensor, lambda: self._meet(Task([_FREE, 0, 0, 0, 0])))
            self._on_device.forget_readers(span_of(tensor))
            return
        segment = self._arena.find(tensor)
        if segment is None:
            return

        def work(task: Task, present: list[int]) -> None:
            if self.rank == present[0]:
                segment.discard()

        span = (segment.start, segment.end)
        self._meet(Task([_FREE, 0, segment.place.size_bytes, segment.code], work, [span]))
        self._on_host.forget_readers(span)
        self._arena.forget(segment)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Reduces in place; of the group's own memory each worker reduces one share, for all."""
        check_reduction(tensor, op)
        self._counter.all_reduce(tensor.nbytes)
        words = [_ALL_REDUCE, code_of(tensor.dtype), tensor.numel(), OPS.index(op)]
        return self._collectives(tensor).all_reduce(tensor, op, words)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Copies the root's tensor to all, in place."""
        check_rank(root, self.size)
        self._counter.broadcast(tensor.nbytes, root)
        words = [_BROADCAST, code_of(tensor.dtype), tensor.numel(), root]
        return self._collectives(tensor).broadcast(tensor, root, words)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Collects everybody's tensor; all dimensions but the first are equal."""
        rows, rest = (tensor.shape[0], tuple(tensor.shape[1:])) if tensor.ndim else (1, ())
        told: dict[int, list[int]] = {}

        def learn(task: Task, present: list[int]) -> None:
            told.update({rank: self._control.description(rank, task.seq)[4:6] for rank in present})

        width, dtype = torch.Size(rest).numel(), code_of(tensor.dtype)
        place = self._arena.find_own(tensor)
        code = NO_PLACE if place is None else place[0].code + place[1]
        self._meet(Task([_ALL_GATHER, dtype, width, len(rest), rows, code], learn, must_match=4))
        shapes = {rank: (rows, *rest) for rank, (rows, _) in told.items()}
        codes = {rank: code for rank, (_, code) in told.items()}
        row_bytes = width * tensor.element_size()
        self._counter.all_gather(tensor.nbytes, {rank: row_bytes * rows for rank, (rows, _) in told.items()})
        return self._collectives(tensor).all_gather(tensor, shapes, codes, [_ALL_GATHER, dtype])

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Takes the weighted average; waits for those alone that this worker names as sources."""
        if not isinstance(weights, Weights):
            weights = spread_over_ranks(self, weights)
        weights.check(self.rank, self.size)
        check_average(tensor)
        self._counter.exchange(tensor.nbytes, weights)
        words = [_EXCHANGE, code_of(tensor.dtype), tensor.numel()]
        return self._collectives(tensor).exchange(tensor, weights, words, out)

    def settle(self, tensor: torch.Tensor) -> None:
        """Waits until nobody reads `tensor` any more."""
        self._collectives(tensor).settle(tensor)

    def barrier(self) -> Handle[None]:
        """Is done when all members have come to it."""
        return TasksHandle(self._engine, [self._engine.issue(Task([_BARRIER, 0, 0, 0, 0]))], lambda: None)

    def _make_window(self, form: WindowForm, sources: Collection[int] | None) -> HostWindow:
        """Makes a window whose slots lie in shared memory, where each source writes its own."""
        if form.num_elements < 1:
            raise UsageError(
                f"Window {form.name!r} would have no elements.", next_step="give it one at least."
            )
        code_of(form.dtype)  # refuses here what could not be described later
        sources_of: Mapping[int, Sequence[int]] = {}
        if sources != ():  # else on all members: there is nothing to agree on
            with self._uncounted():
                sources_of = agree_on_sources(self, form, sources)
        return HostWindow(self, form, sources_of, self._windows)

    def progress(self) -> None:
        """Arrives and works as far as the others allow."""
        self._engine.progress()

    def leave(self) -> None:
        """Leaves after what is under way; what cannot be finished within seconds is left undone.

        A worker that is out of step does not leave: the others shall know that it is lost.
        """
        if not self._engine.is_usable or self._control.gone_after(self.rank) != NOT_YET:
            return
        engine, pending = self._engine, self._windows.pending
        with contextlib.suppress(ShoalError):
            engine.wait_until(
                lambda: not (engine.is_busy or pending.is_busy), Deadline.after(_LEAVING_S), "leave"
            )
            is_drained = self._devices.drain()
            self._engine.wait_until(is_drained, Deadline.after(_LEAVING_S), "leave")
        self._drop()
        self._pipes.tell(LEFT, self._control.get(self.rank, ARRIVED))

    def close(self, error: BaseException | None = None) -> None:
        """Leaves, without an error, and gives everything back; tensors of the group stay usable here."""
        if not self._is_open:
            return
        try:
            if error is None:
                self.leave()
        finally:
            self._is_open = False
            self._drop()
            if not self._engine.is_forked:  # there all of it is the parent's
                self._give_back(rank_to_blame(error, self._engine.name_of(self.rank)))

    def _give_back(self, culprit: int | None) -> None:
        """Lets the others find this worker lost because of `culprit`, unless it has left."""
        self._watch.close()  # first: it would beat over what is said here
        if self._control.gone_after(self.rank) == NOT_YET:
            beat = failed_beat(self._engine.culprit if culprit is None else culprit)
            self._control.set(BEAT, beat)  # first: who sees the verdict shall know whom to blame
            self._control.judge(self.rank, self._control.last_given(self.rank))
            self._pipes.tell(BEAT, beat)
        self._pipes.close()
        self._windows.locks.close()
        self._on_device.close()
        self._devices.close()
        self._arena.close()

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Counts nothing of what happens inside: what workers agree on is no data."""
        counted = list(self._counter.sent_to), list(self._counter.received_from)
        yield
        self._counter.sent_to, self._counter.received_from = counted

    def _drop(self) -> None:
        self._engine.drop()
        self._windows.pending.drop(None, f"rank {self.rank} has left the group before it was done.")

    def _collectives(self, tensor: torch.Tensor) -> HostCollectives:
        return self._on_device if self._devices.takes(tensor) else self._on_host

    def _meet(self, task: Task) -> None:
        """Does an operation that cannot be left half-way: who gives up here is out of step."""
        self._engine.issue(task)
        try:
            self._engine.wait(task, None)
        except DeadlineExceeded as error:
            self._engine.fail(error)
            raise

    def _take_memory(self, num_elements: int, dtype: torch.dtype, region: int) -> MemoryRange | None:
        """Learns what memory the first of those present has taken for all; None when it has gone."""
        answers: list[list[int]] = []

        def learn(task: Task, present: list[int]) -> None:
            answers.extend(self._control.description(rank, task.seq)[3:6] for rank in present)

        def grow(task: Task) -> None:
            try:
                place = self._arena.grow(region)
            except MemoryFull:
                task.words[3] = _NO_ROOM
            else:
                task.words[3:] = [_TAKEN, place.file, place.offset_bytes]

        task = Task([_EMPTY, code_of(dtype), num_elements, _NOTHING, 0, 0], learn, must_match=3)
        if self.rank == self._engine.members()[0]:
            task.prepare = grow
        self._meet(task)
        state, file, offset = next((answer for answer in answers if answer[0]), (_NOTHING, 0, 0))
        if state == _NO_ROOM:
            raise MemoryFull(
                f"No room for {self.size} times {region / 1e6:.1f} MB of shared memory.",
                cause="/dev/shm and the temporary folder are full.",
                next_step="free some space there, or point TMPDIR to a folder with more.",
            )
        return MemoryRange(file, offset, region * self.size) if state == _TAKEN else None
