"""GPU memory of the workers of one machine: collectives, slots of windows and publications in it.

The protocol is that of the CPU: of operation n a worker says that it has arrived, and that it has finished.
On a GPU both are said twice: by the processor when it has *issued* its part, and by the GPU when its part is
*done*, in a word of the control page that its stream writes (`cuda`). An operation that ends the run on a
loss waits on the processor until all have issued their parts, and leaves the rest to the streams. One that
outlives losses waits on the processor until the others' parts are done, so that nothing is mixed in that is
half-written.

Workers that share one GPU take turns on it, and a change from one process to another costs as much as
reducing 100 MB. So there one of them reduces for all, and mixes for all where everybody mixes with everybody.
Workers on GPUs of their own reduce a share each.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from shoal.core import Deadline, UsageError
from shoal.group.base import Handle, Reduction, T
from shoal.group.functions import share as share_objects
from shoal.group.host.cuda import DeviceStream, MakeDevice, SharedDevice, open_device
from shoal.group.host.engine import ProgressEngine, Span, Task, is_overlapping, sent_by, span_of
from shoal.group.host.memory import (
    DEVICE_ARRIVED,
    DEVICE_CODE,
    DEVICE_COMPLETE,
    DEVICE_FINISHED,
    DEVICE_PUBLISHED,
    FREED,
    NUM_READS,
    READ_CLAIMS,
    READ_TICKETS,
    READS_DONE,
    MemoryFull,
)
from shoal.group.kernels import mix_into, reduce_into, share
from shoal.topology import Weights

if TYPE_CHECKING:
    from shoal.group.host.group import HostGroup

_HAS_FACTORS, _IS_FULL, _RESULT = 4, 5, 6
"""Words of the description of an exchange: whether its factors for sending count, whether it mixes with
everybody, and where its result lies."""
_STAGE_BYTES = 128 << 20
"""The largest piece of private memory that passes through group memory at once."""
_GRAIN_BYTES = 2 << 20
"""The driver gives memory in such pieces."""
Step = Callable[[Task, torch.Tensor, dict[int, torch.Tensor]], None]
"""Work on one piece: the own part, and the staged parts of those who take part, by rank."""


class DeviceSegment:
    """A range of GPU memory: a region of `stride_bytes` at each rank, all mapped here."""

    def __init__(self, code: int, regions: Mapping[int, torch.Tensor], rank: int) -> None:
        self.code = code
        """A number for its beginning that is the same on all workers."""
        self.regions = regions
        self.stride_bytes = regions[rank].numel()
        self.start = regions[rank].data_ptr()
        self.end = self.start + self.stride_bytes

    def region(self, rank: int, offset_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Gives a flat tensor in a rank's region."""
        end = offset_bytes + num_elements * dtype.itemsize
        return self.regions[rank][offset_bytes:end].view(dtype)


class DeviceMemory:
    """One worker's memory on its GPU, and the mapped memory of all others; there is one GPU for a worker."""

    def __init__(self, group: HostGroup, engine: ProgressEngine, make: MakeDevice = open_device) -> None:
        self.is_one_device = True
        """Whether all workers share one GPU."""
        self._group = group
        self._engine = engine
        self._make = make
        self._device: SharedDevice | None = None
        self._segments: list[DeviceSegment] = []
        self._taken_bytes = 0

    @property
    def device(self) -> SharedDevice:
        """The GPU, once memory was taken on it."""
        assert self._device is not None, "no memory of a device was taken yet"
        return self._device

    @property
    def is_open(self) -> bool:
        """Whether memory was taken on a device."""
        return self._device is not None

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies on a device."""
        return tensor.device.type != "cpu" or (self._device is not None and self._device.takes(tensor))

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Takes memory on all members, and maps everybody's; MemoryFull on all when one has no room."""
        if num_elements <= 0:
            return torch.empty(0, dtype=dtype, device=device)
        rank = self._engine.rank
        size_bytes = -(-num_elements * dtype.itemsize // _GRAIN_BYTES) * _GRAIN_BYTES
        own, told = self._allocate(device, size_bytes)
        regions, problem = {rank: own}, ""
        for other, (_, handle) in told.items():
            if other != rank:
                try:
                    regions[other] = self.device.attach(handle, size_bytes)
                except UsageError as error:
                    problem = str(error)
        problems = [text for text in share_objects(self._group, problem) if text]
        if problems:
            raise UsageError(problems[0])
        self.is_one_device = len({identity for identity, _ in told.values()}) == 1
        segment = DeviceSegment(DEVICE_CODE + self._taken_bytes, regions, rank)
        self._taken_bytes += size_bytes
        self._segments.append(segment)
        return segment.region(rank, 0, num_elements, dtype)

    def _allocate(
        self, device: torch.device, size_bytes: int
    ) -> tuple[torch.Tensor, dict[int, tuple[str, bytes]]]:
        """Takes this worker's memory; learns everybody's GPU and handle, by rank."""
        own, handle, identity, problem = torch.empty(0), b"", "", ""
        try:
            if self._device is None:
                opened = self._make(device)
                opened.register(self._engine.control.memory)
                self._device = opened
            identity = self.device.identity
            own, handle = self.device.allocate(size_bytes)
        except UsageError as error:
            problem = str(error)
        everybody = share_objects(self._group, [self._engine.rank, identity, handle, problem])
        problems = [text for *_, text in everybody if text]
        if problems:
            raise MemoryFull(problems[0])
        return own, {rank: (identity, handle) for rank, identity, handle, _ in everybody}

    def free(self, tensor: torch.Tensor, meet: Callable[[], None]) -> None:
        """Gives memory back once nobody's GPU uses it; `meet` waits for the other workers."""
        segment = self._find(tensor)
        if segment is not None:
            self.device.synchronize()
            meet()
            self._segments.remove(segment)

    def place(self, tensor: torch.Tensor) -> tuple[DeviceSegment, int] | None:
        """Tells where a tensor lies in group memory; None for other memory and for tensors with gaps."""
        segment = self._find(tensor)
        if segment is None or not tensor.is_contiguous():
            return None
        return segment, tensor.data_ptr() - segment.start

    def at(self, code: int) -> tuple[DeviceSegment, int]:
        """Finds the segment, and the offset in its regions, that a number names."""
        for segment in self._segments:
            if 0 <= code - segment.code < segment.stride_bytes:
                return segment, code - segment.code
        raise UsageError("A peer names GPU memory that this worker has given back.")

    def close(self) -> None:
        """Gives the memory back, for as far as no tensor holds it."""
        self._segments.clear()
        if self._device is not None:
            self._device.unregister(self._engine.control.memory)

    def _find(self, tensor: torch.Tensor) -> DeviceSegment | None:
        pointer = tensor.data_ptr()
        return next((each for each in self._segments if each.start <= pointer < each.end), None)


class DeviceCollectives:
    """The collectives of one worker on GPU memory."""

    def __init__(self, memory: DeviceMemory, engine: ProgressEngine) -> None:
        self._memory = memory
        self._engine = engine
        self._control = engine.control
        self._rank = engine.rank
        self._stage: torch.Tensor | None = None
        self._stage_read_at = [0, 0]
        """The last operation in which each half of the stage was read."""
        self._half = 0
        self._read_at: dict[Span, int] = {}
        """Memory that others read, and the last operation in which they do."""

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, words: list[int]) -> Handle[torch.Tensor]:
        """Reduces in place; private memory, and where losses are outlived any, through the stage."""
        place = None if self._engine.should_survive else self._memory.place(tensor)
        if place is None:

            def reduce(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                reduce_into(part, list(stages.values()), op)

            return self._through_stage(tensor, words, reduce)
        segment, offset = place
        flat = tensor.detach().view(-1)

        def work(task: Task, present: list[int]) -> None:
            reducers = present[:1] if self._memory.is_one_device else present
            if self._rank in reducers:
                self._follow(task.seq, DEVICE_ARRIVED, present)
                parts = [segment.region(rank, offset, flat.numel(), flat.dtype) for rank in present]
                if len(reducers) > 1:
                    place = present.index(self._rank), len(present)
                    low, high = share(*place, flat.numel(), flat.element_size())
                    parts = [part[low:high] for part in parts]
                self._side.run(partial(_reduce_to_all, parts, op))
                self._signal(DEVICE_FINISHED, task.seq)
            self._follow(task.seq, DEVICE_FINISHED, reducers)
            self._note(task.seq, present)

        return self._begin([self._task([*words, segment.code + offset], work, flat)], lambda: tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, words: list[int]) -> Handle[torch.Tensor]:
        """Lets all copy the root's tensor where it lies."""
        place = None if self._engine.should_survive else self._memory.place(tensor)
        if place is None:

            def take(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                if self._rank != root:
                    part.copy_(sent_by(root, stages))

            sources = () if self._rank == root else (root,)
            return self._through_stage(tensor, words, take, sources=sources)
        segment, offset = place
        flat = tensor.detach().view(-1)

        def work(task: Task, present: list[int]) -> None:
            if self._rank == root:
                self._follow(task.seq, DEVICE_FINISHED, present)  # they read its memory
            else:
                sent_by(root, dict.fromkeys(present, flat))
                self._follow(task.seq, DEVICE_ARRIVED, [root])
                theirs = segment.region(root, offset, flat.numel(), flat.dtype)
                self._side.run(lambda: _copy(flat, theirs))
            self._signal(DEVICE_FINISHED, task.seq)
            self._note(task.seq, present)

        task = self._task([*words, segment.code + offset], work, flat)
        task.sources = None if self._rank == root else (root,)
        return self._begin([task], lambda: tensor)

    def all_gather(
        self, tensor: torch.Tensor, shapes: Mapping[int, tuple[int, ...]], words: list[int]
    ) -> Handle[list[torch.Tensor]]:
        """Collects tensors of known shapes through the stage."""
        results = {rank: tensor.new_empty(shape) for rank, shape in shapes.items()}
        flats = {rank: result.view(-1) for rank, result in results.items()}
        own = tensor.detach().reshape(-1)
        longest = max(flat.numel() for flat in flats.values())
        piece = self._prepare_stage(longest * own.element_size(), own.device) // own.element_size()

        def take(part: slice, task: Task, mine: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
            for rank, staged in stages.items():
                theirs = flats[rank][part]
                theirs.copy_(mine if rank == self._rank else staged[: theirs.numel()])

        tasks = []
        for start in range(0, max(longest, 1), piece):
            part = slice(start, start + piece)
            num_staged = min(piece, longest - start)
            described = [*words, -1 - start, 0, -DEVICE_CODE]
            tasks.append(self._staged(own[part], described, partial(take, part), num_staged))

        def those_who_stayed() -> list[torch.Tensor]:
            return [
                result
                for rank, result in results.items()
                if all(task.present is not None and rank in task.present for task in tasks)
            ]

        return self._begin(tasks, those_who_stayed)

    # --- exchanges ---

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, words: list[int], out: torch.Tensor | None
    ) -> Handle[torch.Tensor]:
        """Mixes once the sources' tensors are written."""
        if out is None:

            def step(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                self._mix(self._rank, task.seq, part, {**stages, self._rank: part})

            return self._through_stage(tensor, words, step, weights=weights)
        place, result_place = self._memory.place(tensor), self._memory.place(out)
        is_alike = out.shape == tensor.shape and out.dtype == tensor.dtype and out.is_contiguous()
        if place is None or not is_alike or is_overlapping([span_of(out)], [span_of(tensor)]):
            raise UsageError(
                "An exchange into another tensor begins in memory of the group; both are alike, and apart.",
                next_step="take both from group.empty(), or leave out= away.",
            )
        segment, offset = place
        own, result = tensor.detach().view(-1), out.detach().view(-1)
        after = self._forget_readers(span_of(out))

        def may_work(task: Task, present: list[int]) -> bool:
            mixer = self._mixer(task, present)
            if mixer is None or mixer == self._rank:
                return self._engine.are_done_on_device(DEVICE_ARRIVED, task.seq, present)
            return self._engine.are_done_on_device(DEVICE_FINISHED, task.seq, [mixer])

        def work(task: Task, present: list[int]) -> None:
            mixer = self._mixer(task, present)
            if mixer is None or mixer == self._rank:
                views = {rank: segment.region(rank, offset, own.numel(), own.dtype) for rank in present}
                self._side.run(partial(self._mix, self._rank, task.seq, result, views))
            if mixer == self._rank:
                for rank in present:
                    if rank != self._rank:
                        theirs = self._result_of(rank, task.seq, own)
                        self._side.run(partial(self._mix, rank, task.seq, theirs, views))
            self._signal(DEVICE_FINISHED, task.seq)

        task = self._task([*words, segment.code + offset], work, own, result)
        self._address(task, weights)
        # where all mix with all, one may mix for the others, into memory that it reaches
        is_full = all(rank in weights.sources for rank in self._engine.members() if rank != self._rank)
        if result_place is None or not self._memory.is_one_device:
            task.words += [0, 0]
        else:
            task.words += [int(is_full), result_place[0].code + result_place[1]]
        task.may_arrive = lambda task: self._is_finished(after)
        task.may_work = may_work
        handle = self._begin([task], lambda: out)
        self._read_at[span_of(tensor)] = task.seq
        return handle

    def settle(self, tensor: torch.Tensor) -> None:
        """Waits until nobody's GPU reads `tensor` any more."""
        seq = self._forget_readers(span_of(tensor))
        if not self._is_finished(seq):
            self._engine.wait_until(lambda: self._is_finished(seq), None, "settle")

    def _mixer(self, task: Task, present: Sequence[int]) -> int | None:
        """Finds who mixes for all: the lowest rank, where all mix with all in memory that all reach.

        All come to the same, since everybody's description is there. Should that one be lost, each mixes for
        itself: what is read stays as it is until all have finished.
        """
        if len(present) < len(self._engine.members(task.seq)):
            return None
        if any(self._control.description(rank, task.seq)[_IS_FULL] != 1 for rank in present):
            return None
        return None if self._engine.is_gone(present[0]) else present[0]

    def _result_of(self, rank: int, seq: int, like: torch.Tensor) -> torch.Tensor:
        segment, offset = self._memory.at(self._control.description(rank, seq)[_RESULT])
        return segment.region(rank, offset, like.numel(), like.dtype)

    def _address(self, task: Task, weights: Weights) -> None:
        """Says from whom, and to whom, with which factors an exchange goes."""
        size, sends = self._engine.size, weights.destinations
        task.sources = tuple(weights.sources)
        task.is_survivable = True
        task.must_match = 4
        task.words.append(int(sends is not None))
        receives = [weights.sources.get(rank, math.nan) for rank in range(size)]
        receives[self._rank] = weights.own
        task.factors = [*((sends or {}).get(rank, math.nan) for rank in range(size)), *receives]

    def _mix(self, rank: int, seq: int, out: torch.Tensor, views: Mapping[int, torch.Tensor]) -> None:
        """Takes a rank's weighted average, by the weights that it and its sources have told."""
        size = self._engine.size
        told = {other: self._control.factor(rank, seq, size + other) for other in range(size)}
        own = told.pop(rank)
        sources = {other: weight for other, weight in told.items() if not math.isnan(weight)}
        weights = Weights(own, sources).without([other for other in sources if other not in views])
        parts = []
        for other, weight in weights.sources.items():
            factor = 1.0
            if self._control.description(other, seq)[_HAS_FACTORS]:
                factor = self._control.factor(other, seq, rank)
                if math.isnan(factor):
                    raise self._engine.not_sent_error(other, rank)
            parts.append((views[other], weight * factor))
        mix_into(out, views[rank], weights.own, parts)

    # --- through the stage ---

    def _through_stage(
        self,
        tensor: torch.Tensor,
        words: list[int],
        step: Step,
        *,
        sources: Sequence[int] | None = None,
        weights: Weights | None = None,
    ) -> Handle[torch.Tensor]:
        """Copies pieces into group memory, where the others read them, and does a step on each piece."""
        flat = tensor.detach().reshape(-1)
        piece = self._prepare_stage(flat.nbytes, flat.device) // flat.element_size()
        tasks = []
        for start in range(0, max(flat.numel(), 1), piece):
            part = flat[start : start + piece]
            task = self._staged(part, [*words, -DEVICE_CODE - start], step, part.numel())
            task.sources = sources
            if weights is not None:
                self._address(task, weights)
            tasks.append(task)

        def put_back() -> torch.Tensor:
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))
            return tensor

        return self._begin(tasks, put_back)

    def _staged(self, part: torch.Tensor, words: list[int], step: Step, num_staged: int) -> Task:
        """Makes the task of one piece, in the half of the stage that was not used last."""
        assert self._stage is not None
        half, self._half = self._half, 1 - self._half
        place = self._memory.place(self._stage[half * (self._stage.numel() // 2) :])
        assert place is not None
        segment, offset = place

        def copy_in(task: Task) -> None:
            own = segment.region(self._rank, offset, part.numel(), part.dtype)
            self._side.run(lambda: _copy(own, part))
            self._stage_read_at[half] = task.seq

        def may_work(task: Task, present: list[int]) -> bool:
            return not self._is_surviving(task) or self._engine.are_done_on_device(
                DEVICE_ARRIVED, task.seq, present
            )

        def work(task: Task, present: list[int]) -> None:
            if not self._is_surviving(task):
                self._follow(task.seq, DEVICE_ARRIVED, present)
            stages = {rank: segment.region(rank, offset, num_staged, part.dtype) for rank in present}
            stages[self._rank] = stages[self._rank][: part.numel()]
            self._side.run(partial(step, task, part, stages))
            self._signal(DEVICE_FINISHED, task.seq)
            self._note(task.seq, present)

        task = self._task(words, work, part, copy_in=copy_in)
        task.may_arrive = lambda task: self._is_finished(self._stage_read_at[half])
        task.may_work = may_work
        return task

    def _prepare_stage(self, size_bytes: int, device: torch.device) -> int:
        """Makes halves of the stage that hold so much, up to a bound; the size of one. May be collective."""
        half_bytes = min(_STAGE_BYTES, max(_GRAIN_BYTES, 1 << max(0, size_bytes - 1).bit_length()))
        if self._stage is None or self._stage.numel() < 2 * half_bytes:
            self._stage = self._memory.empty(2 * half_bytes, torch.uint8, device)
            self._stage_read_at = [0, 0]
        return self._stage.numel() // 2

    def close(self) -> None:
        """Forgets the stage."""
        self._stage = None

    # --- order ---

    @property
    def _side(self) -> DeviceStream:
        return self._memory.device.side

    def _task(
        self,
        words: list[int],
        work: Callable[[Task, list[int]], None],
        *tensors: torch.Tensor,
        copy_in: Callable[[Task], None] | None = None,
    ) -> Task:
        """Makes a task whose part is there when the caller's stream has come to where it is now."""
        mark = self._memory.device.mark(self._memory.device.caller)

        def prepare(task: Task) -> None:
            self._side.follow(mark)
            if copy_in is not None:
                copy_in(task)
            self._signal(DEVICE_ARRIVED, task.seq)

        task = Task(words, work, [span_of(tensor) for tensor in tensors])
        task.prepare = prepare
        return task

    def _begin(self, tasks: Sequence[Task], result: Callable[[], T]) -> Handle[T]:
        for task in tasks:
            self._engine.issue(task)
        return _DeviceHandle(self._engine, self._memory.device, tasks, result)

    def _signal(self, name: int, seq: int) -> None:
        self._side.signal(self._control.address(self._rank, name), seq)

    def _follow(self, seq: int, name: int, ranks: Sequence[int]) -> None:
        """Lets the side stream wait until the GPUs of others have come so far."""
        for rank in ranks:
            if rank != self._rank:
                self._side.wait(self._control.address(rank, name), seq)

    def _note(self, seq: int, present: Sequence[int]) -> None:
        """Remembers an operation in which streams wait for each other."""
        self._signal(DEVICE_COMPLETE, seq)
        self._engine.note_on_device(seq, present)

    def _is_surviving(self, task: Task) -> bool:
        return task.is_survivable or self._engine.should_survive

    def _is_finished(self, seq: int) -> bool:
        return not seq or self._engine.are_done_on_device(DEVICE_FINISHED, seq, range(self._engine.size))

    def _forget_readers(self, span: Span) -> int:
        """Finds the last operation in which others read any of some memory that is to be written."""
        read = [other for other in self._read_at if is_overlapping([other], [span])]
        return max([self._read_at.pop(other) for other in read], default=0)


class _DeviceHandle(Handle[T]):
    """Tasks of a device; to wait is to order the caller's stream after them."""

    def __init__(
        self, engine: ProgressEngine, device: SharedDevice, tasks: Sequence[Task], result: Callable[[], T]
    ) -> None:
        self._engine = engine
        self._device = device
        self._tasks = tasks
        self._result = result

    def wait(self, deadline: Deadline | None = None) -> T:
        for task in self._tasks:
            self._engine.wait(task, deadline)
        self._device.caller.follow(self._device.mark(self._device.side))
        return self._result()

    @property
    def present(self) -> Sequence[int]:
        """The ranks that took part in the first task, once it is over."""
        return (self._tasks[0].present if self._tasks else None) or ()

    def is_done(self) -> bool:
        self._engine.progress()
        return all(self._engine.is_complete(task) for task in self._tasks)


def _reduce_to_all(parts: Sequence[torch.Tensor], op: Reduction) -> None:
    """Replaces all parts by their reduction."""
    reduce_into(parts[0], parts, op)
    for part in parts[1:]:
        part.copy_(parts[0])


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source)


# --- windows ---


class DeviceSlot:
    """How often one slot in GPU memory was written and read, so that streams wait for each other.

    The counts change when a write or a read is issued, under the slot's lock; GPUs say when it is done.
    """

    SIZE_BYTES = 256
    _WRITES, _IS_SUM, _READS, _WRITTEN, _READ = 0, 1, 8, 16, 24
    """Words of 8 bytes, those of two writers in cache lines of their own."""

    def __init__(self, device: SharedDevice, memory: torch.Tensor) -> None:
        self._device = device
        self._words = memory.numpy().data.cast("B").cast("q")
        self._address = memory.data_ptr()

    def begin_write(self) -> None:
        """Lets the caller's stream wait until the owner's has read what was there."""
        if self._words[self._READS]:
            self._device.caller.wait(self._address + 8 * self._READ, self._words[self._READS])

    def end_write(self, *, is_sum: bool) -> None:
        """Says that a write was issued, which added to earlier ones or not."""
        self._words[self._IS_SUM] = is_sum
        self._words[self._WRITES] += 1
        self._device.caller.signal(self._address + 8 * self._WRITTEN, self._words[self._WRITES])

    def is_written(self) -> bool:
        """Tells whether all writes that were issued are done."""
        return self._words[self._WRITTEN] >= self._words[self._WRITES]

    @property
    def is_sum(self) -> bool:
        """Whether the last write added to what was there."""
        return bool(self._words[self._IS_SUM])

    def end_read(self) -> None:
        """Says that a read was issued."""
        self._words[self._READS] += 1
        self._device.caller.signal(self._address + 8 * self._READ, self._words[self._READS])

    def free(self) -> None:
        """Lets no stream wait for the owner any more: it is lost."""
        self._words[self._READ] = FREED


class DeviceReads:
    """Reads of publications in GPU memory that streams have under way, so that nobody writes over them.

    A reader claims a publication before it looks once more whether that is still valid; a publisher makes it
    void before it looks at the claims. With a fence in between one of the two sees the other (Dekker). The
    publisher's stream then waits until the reader's has read.
    """

    def __init__(self, memory: DeviceMemory, engine: ProgressEngine) -> None:
        self._memory = memory
        self._engine = engine
        self._control = engine.control
        self._next = 0
        self._is_open = [False] * NUM_READS
        self._fence = threading.Lock()  # law: its atomic operations order stores before loads

    def begin(self, peer: int, number: int) -> int:
        """Claims a publication of a peer; the claim's number is for `end`."""
        index = self._next
        self._next = (index + 1) % NUM_READS
        if self._is_open[index]:
            self.end(index)
        rank, ticket = self._engine.rank, self._control.get(self._engine.rank, READ_TICKETS[index])
        if ticket and not self._control.is_done_on_device(rank, READS_DONE[index], ticket):
            self._memory.device.caller.synchronize()  # all claims are taken, by reads that are not done
        self._control.set(READ_TICKETS[index], ticket + 1)
        self._control.set(READ_CLAIMS[index], (peer + 1) << 40 | number)
        self._is_open[index] = True
        self._order()
        return index

    def end(self, index: int) -> None:
        """Says that what is read under a claim was issued to the caller's stream."""
        if self._is_open[index]:
            self._is_open[index] = False
            ticket = self._control.get(self._engine.rank, READ_TICKETS[index])
            word = self._control.address(self._engine.rank, READS_DONE[index])
            self._memory.device.caller.signal(word, ticket)

    def publish(self, number: int) -> None:
        """Says, when the caller's stream has come there, that a publication is written."""
        word = self._control.address(self._engine.rank, DEVICE_PUBLISHED)
        self._memory.device.caller.signal(word, number)

    def follow(self, number: int) -> None:
        """Lets the caller's stream wait for those that read publications up to this number."""
        self._order()
        own = self._engine.rank + 1
        for rank in range(self._engine.size):
            if rank == self._engine.rank or self._engine.is_gone(rank):
                continue
            for index in range(NUM_READS):
                claim = self._control.get(rank, READ_CLAIMS[index])
                if claim >> 40 == own and claim & ((1 << 40) - 1) <= number:
                    ticket = self._control.get(rank, READ_TICKETS[index])
                    self._memory.device.caller.wait(self._control.address(rank, READS_DONE[index]), ticket)

    def _order(self) -> None:
        with self._fence:
            pass
