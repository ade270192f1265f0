"""The group of one machine's workers: tensors in shared memory, and each reduces its share of them.

A tensor of the group's own memory (`empty`) is exchanged where it lies. Any other passes through staging
memory, in pieces. `all_gather` waits for the others before it returns: it must learn their sizes.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from shoal.core import Deadline, DeadlineExceeded, Placement, ShoalError, UsageError
from shoal.group.base import Group, GroupSettings, GroupStats, Handle, Loss, Reduction, T, rank_to_blame
from shoal.group.functions import spread_over_ranks
from shoal.group.host.cuda import MakeDevice, open_device
from shoal.group.host.device import DeviceCollectives, DeviceMemory
from shoal.group.host.engine import (
    KINDS,
    STAGE_BYTES,
    HostTrafficCounter,
    ProgressEngine,
    Span,
    Staging,
    Task,
    TasksHandle,
    is_overlapping,
    regions,
    sent_by,
    span_of,
)
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
from shoal.group.host.window import HostWindow, SlotLayout, WindowSet
from shoal.group.kernels import OPS, check_reduction, mix_into, reduce_into, reduce_to_all, share
from shoal.tensors.memory import copy_into
from shoal.topology import MachineWeights, Weights

_LEAVING_S = 10.0
_MEETING_S = 300.0
_PAGE = 4096
_ALL_REDUCE, _BROADCAST, _ALL_GATHER, _EXCHANGE, _BARRIER, _EMPTY, _FREE = range(len(KINDS))
_NOTHING, _TAKEN, _NO_ROOM = range(3)
_NO_PLACE = -1
_SMALL_BYTES = 1 << 16
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
            arena = undo.enter_context(contextlib.closing(Arena(files, size)))
            shared = SharedFiles(
                files, [arena.grow(ControlPage.region_bytes(size)), arena.grow(2 * STAGE_BYTES)]
            )
            ControlPage(arena.map(shared.places[0]), rank, size).clear()
        own_pipe = WakePipes.new_pipe()
        for descriptor in own_pipe:
            undo.callback(os.close, descriptor)
        deadline = Deadline.after(settings.timeout_s or _MEETING_S)
        request = JoinRequest(rank, size, os.getpid())
        met = meet(f"{settings.key} {number}", request, own_pipe[1], shared, deadline)
        for descriptor in met.pipes[:rank] + met.pipes[rank + 1 :]:
            undo.callback(os.close, descriptor)
        if rank != 0:
            arena = undo.enter_context(contextlib.closing(Arena(met.shared.files, size)))
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
        self._on_device = DeviceCollectives(self._devices, engine)
        self._staging = Staging(self.rank, stage, engine)
        self._counter = HostTrafficCounter(engine)
        self._windows = WindowSet(engine, arena, self._counter, self._devices)
        self._read_at: dict[Span, int] = {}
        """Memory that others read, and the last operation in which they do."""
        self._is_open = True

    @property
    def members(self) -> Sequence[int]:
        """The ranks that still take part."""
        return self._engine.members()

    @property
    def lost(self) -> Mapping[int, Loss]:
        """The peers that ended or fell silent without having left."""
        # operations go on without one as soon as it is judged, which the watch notices up to a beat later
        lost = self._watch.lost
        judged = [rank for rank in self._engine.judged() if rank not in lost] if self._is_open else []
        return {**lost, **{rank: self._watch.loss(rank) for rank in judged}} if judged else lost

    @property
    def left_at_s(self) -> Mapping[int, float]:
        """When those have left that have, by the monotonic clock, to within a beat."""
        unseen = [rank for rank in self._engine.left() if rank not in self._watch.left_at_s]
        return {**self._watch.left_at_s, **dict.fromkeys(unseen, time.monotonic())}

    @property
    def stats(self) -> GroupStats:
        """Bytes as a network without shared memory would have carried them, and waiting."""
        return GroupStats(
            self._counter.sent_bytes, self._counter.received_bytes, tuple(self._engine.waited_s)
        )

    @property
    def should_survive(self) -> bool:
        """Whether all operations go on without lost peers."""
        return self._engine.should_survive

    @should_survive.setter
    def should_survive(self, value: bool) -> None:
        self._engine.should_survive = value

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
            self._devices.free(tensor, lambda: self._meet(Task([_FREE, 0, 0, 0])))
            return
        segment = self._arena.find(tensor)
        if segment is None:
            return

        def work(task: Task, present: list[int]) -> None:
            if self.rank == present[0]:
                segment.discard()

        span = (segment.start, segment.end)
        self._meet(Task([_FREE, 0, segment.place.size_bytes, segment.code], work, [span]))
        self._forget_readers(span)
        self._arena.forget(segment)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = "mean") -> Handle[torch.Tensor]:
        """Reduces in place; of the group's own memory each worker reduces one share, for all."""
        given, tensor = tensor, tensor.detach()
        check_reduction(tensor, op)
        self._counter.all_reduce(tensor.nbytes)
        words = [_ALL_REDUCE, code_of(tensor.dtype), tensor.numel(), OPS.index(op)]
        if self._devices.takes(tensor):
            return self._on_device.all_reduce(given, op, words)
        should_survive = self._engine.should_survive
        place = None if should_survive else self._arena.find_own(tensor, self.rank)
        if place is None:
            if self.size > 2 and not should_survive:
                return self._staging.reduce_in_shares(given, words, op)

            def reduce(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                reduce_into(part, list(stages.values()), op)

            return self._staging.run(given, words, reduce)
        segment, offset = place
        count, dtype = tensor.numel(), tensor.dtype

        def work(task: Task, present: list[int]) -> None:
            views = list(regions(segment, offset, tensor, present).values())
            low, high = share(present.index(self.rank), len(present), count, dtype.itemsize)
            reduce_to_all(views, low, high, op)

        task = Task([*words, segment.code + offset], work, [span_of(tensor)])
        task.is_shared = task.needs_shares = True
        return self._begin(task, given)

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Handle[torch.Tensor]:
        """Copies the root's tensor to all, in place."""
        given, tensor = tensor, tensor.detach()
        self._engine.check_rank(root)
        self._counter.broadcast(tensor.nbytes, root)
        words = [_BROADCAST, code_of(tensor.dtype), tensor.numel(), root]
        if self._devices.takes(tensor):
            return self._on_device.broadcast(given, root, words)
        sources = () if self.rank == root else (root,)
        place = self._arena.find_own(tensor, self.rank)
        # of what is small the root gives a copy, and need not wait until all have read it
        if place is None or tensor.numel() * tensor.element_size() <= _SMALL_BYTES:

            def take(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                if self.rank != root:
                    part.copy_(sent_by(root, stages))

            def address(task: Task) -> None:
                task.sources = sources

            return self._staging.run(given, words, take, address, should_give=self.rank == root)
        segment, offset = place

        def work(task: Task, present: list[int]) -> None:
            if self.rank != root:
                copy_into(tensor.view(-1), sent_by(root, regions(segment, offset, tensor, present)))

        task = Task([*words, segment.code + offset], work, [span_of(tensor)])
        # the root waits for everybody: they read its memory
        task.sources = None if self.rank == root else sources
        task.is_shared = self.rank == root
        return self._begin(task, given)

    def all_gather(self, tensor: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Collects everybody's tensor; all dimensions but the first are equal."""
        tensor = tensor.detach()
        rows, rest = (tensor.shape[0], tuple(tensor.shape[1:])) if tensor.ndim else (1, ())
        told: dict[int, list[int]] = {}

        def learn(task: Task, present: list[int]) -> None:
            told.update({rank: self._control.description(rank, task.seq)[4:6] for rank in present})

        width = torch.Size(rest).numel()
        place = self._arena.find_own(tensor, self.rank)
        code = _NO_PLACE if place is None else place[0].code + place[1]
        words = [_ALL_GATHER, code_of(tensor.dtype), width, len(rest), rows, code]
        self._meet(Task(words, learn, must_match=4))
        row_bytes = width * tensor.element_size()
        all_bytes = row_bytes * sum(rows for rows, _ in told.values())
        self._counter.all_gather(tensor.nbytes, all_bytes - tensor.nbytes)
        if self._devices.takes(tensor):
            shapes = {rank: (rows, *rest) for rank, (rows, _) in told.items()}
            return self._on_device.all_gather(tensor, shapes, [_ALL_GATHER, code_of(tensor.dtype)])
        results = {rank: tensor.new_empty((rows, *rest)) for rank, (rows, _) in told.items()}
        copy_into(results[self.rank], tensor.reshape(rows, *rest))
        flats = {rank: result.view(-1) for rank, result in results.items()}
        piece = STAGE_BYTES // tensor.element_size()
        longest = max(flat.numel() for flat in flats.values())
        codes = {rank: code for rank, (_, code) in told.items()}
        if _NO_PLACE not in codes.values():
            tasks = [self._engine.issue(self._read_all(tensor, flats, codes))]
        else:
            tasks = [
                self._engine.issue(self._staging.gather_step(_ALL_GATHER, flats, slice(start, start + piece)))
                for start in range(0, longest, piece)
            ]

        def those_who_stayed() -> list[torch.Tensor]:
            return [
                result
                for rank, result in results.items()
                if all(task.present is not None and rank in task.present for task in tasks)
            ]

        return TasksHandle(self._engine, tasks, those_who_stayed)

    def exchange(
        self, tensor: torch.Tensor, weights: Weights | MachineWeights, *, out: torch.Tensor | None = None
    ) -> Handle[torch.Tensor]:
        """Takes the weighted average; waits for those alone that this worker names as sources."""
        given, tensor = tensor, tensor.detach()
        if not isinstance(weights, Weights):
            weights = spread_over_ranks(self, weights)
        weights.check(self.rank, self.size)
        if not tensor.is_floating_point():
            raise UsageError(
                f"Cannot average {tensor.dtype} tensors: convert the tensor to a floating-point type first."
            )
        words = [_EXCHANGE, code_of(tensor.dtype), tensor.numel()]
        self._counter.exchange(tensor.nbytes, weights)
        if self._devices.takes(tensor):
            return self._on_device.exchange(given, weights, words, out)
        if out is None:

            def mix(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                self._mix(task, part, part, stages, weights)

            return self._staging.run(given, words, mix, lambda task: self._address(task, weights))
        result, out = out, out.detach()
        place = self._arena.find_own(tensor, self.rank)
        is_alike = out.shape == tensor.shape and out.dtype == tensor.dtype and out.is_contiguous()
        if place is None or not is_alike or is_overlapping([span_of(out)], [span_of(tensor)]):
            raise UsageError(
                "An exchange into another tensor begins in memory of the group; both are alike, and apart.",
                next_step="take both from group.empty(), or leave out= away.",
            )
        segment, offset = place

        def work(task: Task, present: list[int]) -> None:
            views = regions(segment, offset, tensor, present)
            self._mix(task, out.view(-1), tensor.view(-1), views, weights)

        task = Task([*words, segment.code + offset], work, [span_of(tensor), span_of(out)])
        self._address(task, weights)
        task.after = self._forget_readers(span_of(out))
        handle = self._begin(task, result)
        self._read_at[span_of(tensor)] = task.seq
        return handle

    def settle(self, tensor: torch.Tensor) -> None:
        """Waits until nobody reads `tensor` any more."""
        if self._devices.takes(tensor):
            self._on_device.settle(tensor)
            return
        seq = self._forget_readers(span_of(tensor))
        if not self._engine.is_finished(seq):
            self._engine.wait_until(lambda: self._engine.is_finished(seq), None, "settle")

    def barrier(self) -> Handle[None]:
        """Is done when all members have come to it."""
        return self._begin(Task([_BARRIER, 0, 0, 0]), None)

    def window(
        self,
        name: str,
        num_elements: int,
        dtype: torch.dtype = torch.float32,
        *,
        sources: Collection[int] | None = None,
        device: torch.device | None = None,
    ) -> HostWindow:
        """Makes a window whose slots lie in shared memory, where each source writes its own."""
        if num_elements < 1:
            raise UsageError(f"Window {name!r} would have no elements.", next_step="give it one at least.")
        code_of(dtype)  # refuses here what could not be described later
        is_on_device = device is not None and device.type != "cpu"
        if sources == ():  # on all members: there is nothing to agree on
            return HostWindow(name, SlotLayout({}, num_elements, dtype), (), self._windows, device)
        with self._uncounted():
            layout = SlotLayout.agree(self, name, num_elements, dtype, sources, is_on_device=is_on_device)
        memory = [self.empty(-(-layout.size_bytes // self.size) or 1, torch.uint8)]
        if is_on_device:
            memory.append(self.empty(layout.device_bytes or 1, torch.uint8, device=device))

        def free() -> None:
            self._windows.forget(memory[0])
            for tensor in memory:
                self.free(tensor)

        return HostWindow(name, layout, memory, self._windows, device, free)

    def wait_until(
        self, is_done: Callable[[], bool], deadline: Deadline | None, what: str, whom: Callable[[], str]
    ) -> None:
        """Waits for something else than an operation of this group, and goes on with those meanwhile."""
        self._engine.wait_until(is_done, deadline, what, whom)

    def wake(self) -> None:
        """Lets `wait_until` look again; from any thread."""
        self._pipes.wake_self()

    def progress(self) -> None:
        """Arrives and works as far as the others allow."""
        self._engine.progress()

    def leave(self) -> None:
        """Leaves after what is under way; what cannot be finished within seconds is left undone.

        A worker that is out of step does not leave: the others shall know that it is lost.
        """
        if not self._engine.is_usable or self._control.gone_after(self.rank) != NOT_YET:
            return
        with contextlib.suppress(ShoalError):
            self._engine.wait_until(self._is_idle, Deadline.after(_LEAVING_S), "leave")
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
            self._control.judge(self.rank, self._control.get(self.rank, ARRIVED))
            self._pipes.tell(BEAT, beat)
        self._pipes.close()
        self._windows.locks.close()
        self._on_device.close()
        self._devices.close()
        self._arena.close()

    @contextlib.contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Counts nothing of what happens inside: what workers agree on is no data."""
        counted = self._counter.sent_bytes, self._counter.received_bytes
        yield
        self._counter.sent_bytes, self._counter.received_bytes = counted

    def _is_idle(self) -> bool:
        return not (self._engine.is_busy or self._windows.pending.is_busy)

    def _drop(self) -> None:
        self._engine.drop()
        self._windows.pending.drop(None, f"rank {self.rank} has left the group before it was done.")

    def _begin(self, task: Task, result: T) -> Handle[T]:
        return TasksHandle(self._engine, [self._engine.issue(task)], lambda: result)

    def _meet(self, task: Task) -> None:
        """Does an operation that cannot be left half-way: who gives up here is out of step."""
        self._engine.issue(task)
        try:
            self._engine.wait(task, None)
        except DeadlineExceeded as error:
            self._engine.fail(error)
            raise

    def _forget_readers(self, span: Span) -> int:
        """Finds the last operation in which others read any of some memory that is to be written."""
        read = [other for other in self._read_at if is_overlapping([other], [span])]
        return max([self._read_at.pop(other) for other in read], default=0)

    def _take_memory(self, num_elements: int, dtype: torch.dtype, region: int) -> MemoryRange | None:
        """Learns what memory the first of those present has taken for all; None when it has gone."""
        answers: list[list[int]] = []

        def learn(task: Task, present: list[int]) -> None:
            answers.extend(self._control.description(rank, task.seq)[3:6] for rank in present)

        task = Task([_EMPTY, code_of(dtype), num_elements, _NOTHING, 0, 0], learn, must_match=3)
        if self.rank == self._engine.members()[0]:
            task.prepare = lambda task: self._grow(task, region)
        self._meet(task)
        state, file, offset = next((answer for answer in answers if answer[0]), (_NOTHING, 0, 0))
        if state == _NO_ROOM:
            raise MemoryFull(
                f"Shared memory for {self.size} times {region / 1e6:.1f} MB is not to be had.",
                cause="/dev/shm and the temporary folder are full.",
                next_step="free some space there, or point TMPDIR to a folder with more.",
            )
        return MemoryRange(file, offset, region * self.size) if state == _TAKEN else None

    def _grow(self, task: Task, region: int) -> None:
        """Does the coordinator's part of `empty`: takes the memory, and says where it is."""
        try:
            place = self._arena.grow(region)
        except MemoryFull:
            task.words[3] = _NO_ROOM
        else:
            task.words[3:] = [_TAKEN, place.file, place.offset_bytes]

    def _read_all(self, own: torch.Tensor, flats: dict[int, torch.Tensor], codes: dict[int, int]) -> Task:
        """Makes the task that copies everybody's tensor from where it lies in the group's memory."""

        def work(task: Task, present: list[int]) -> None:
            for rank in present:
                if rank != self.rank:
                    segment, offset = self._arena.at(codes[rank])
                    flat = flats[rank]
                    copy_into(flat, segment.region(rank, offset, flat.numel(), flat.dtype))

        return Task([_ALL_GATHER, code_of(own.dtype), -1, 0], work, [span_of(own)], is_shared=True)

    def _address(self, task: Task, weights: Weights) -> None:
        """Says from whom, and to whom with which factors, an exchange goes."""
        task.sources = tuple(weights.sources)
        task.is_survivable = True
        task.must_match = 4
        task.words.append(int(weights.destinations is not None))
        if weights.destinations is not None:
            task.factors = [weights.destinations.get(rank, math.nan) for rank in range(self.size)]

    def _mix(
        self,
        task: Task,
        out: torch.Tensor,
        own: torch.Tensor,
        views: dict[int, torch.Tensor],
        weights: Weights,
    ) -> None:
        gone = [rank for rank in weights.sources if rank not in views]
        if gone:
            weights = weights.without(gone)
        sources = []
        for rank, weight in weights.sources.items():
            factor = 1.0
            if self._control.description(rank, task.seq)[4]:
                factor = self._control.factor(rank, task.seq, self.rank)
                if math.isnan(factor):
                    raise self._engine.not_sent_error(rank, self.rank)
            sources.append((views[rank], weight * factor))
        mix_into(out, own, weights.own, sources)
