"""Collectives on GPU memory, for the workers of one machine.

The protocol is that of the CPU: of operation n a worker says that it has arrived, and that it has finished. On a
GPU both are said twice. The processor says so when it has *issued* its part; the GPU when its part is *complete*,
by a word of the control page that its stream writes (`cuda`). An operation that ends the run on a loss waits on
the processor until all have issued their parts, and leaves the rest to the streams. One that outlives losses
waits on the processor until the others' parts are complete, so that nothing of a lost worker is mixed in half.

Workers that share one GPU take turns on it, and every change from one process to another costs more than
reducing 100 MB. So one of them reduces for all there, while workers on GPUs of their own reduce a share each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shoal.core import Deadline, UsageError
from shoal.group.base import Handle, Reduction, T
from shoal.group.functions import share as share_objects
from shoal.group.host.control import (
    DEVICE_ARRIVED,
    DEVICE_CODE,
    DEVICE_COMPLETE,
    DEVICE_FINISHED,
    Control,
)
from shoal.group.host.cuda import Device, open_device
from shoal.group.host.engine import Engine, Span, Task, is_overlapping, span_of
from shoal.group.host.memory import MemoryFull
from shoal.group.kernels import reduce_into, share

if TYPE_CHECKING:
    from shoal.group.host.group import HostGroup

_HAS_FACTORS, _IS_FULL, _RESULT = 4, 5, 6
"""Words of the description of an exchange: whether its factors for sending count, whether it mixes with
everybody, and where its result lies."""
_STAGE_BYTES = 128 << 20
"""The largest piece of memory of others that passes through group memory at once."""
_GRAIN_BYTES = 2 << 20
"""The driver gives memory in such pieces."""


class DeviceSegment:
    """A range of GPU memory: a region of `stride_bytes` at each rank, all mapped here."""

    def __init__(self, code: int, regions: Mapping[int, torch.Tensor], rank: int) -> None:
        self.code = code
        """A number for its beginning that is the same on all workers."""
        self.regions = regions
        self.flat = regions[rank]
        self.stride_bytes = self.flat.numel()
        self.start = self.flat.data_ptr()
        self.end = self.start + self.stride_bytes

    def region(self, rank: int, offset_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Gives a flat tensor in a rank's region."""
        end = offset_bytes + num_elements * dtype.itemsize
        return self.regions[rank][offset_bytes:end].view(dtype)


class DeviceCollectives:
    """One worker's GPU memory of a group, and the collectives in it; all workers of a group use one device each."""

    def __init__(
        self,
        group: HostGroup,
        engine: Engine,
        control: Control,
        make: Callable[[torch.device], Device] = open_device,
    ) -> None:
        self.device: Device | None = None
        self._group = group
        self._engine = engine
        self._control = control
        self._make = make
        self._rank = group.rank
        self._segments: list[DeviceSegment] = []
        self._taken_bytes = 0
        self._is_one_device = True
        """Whether all workers share one GPU."""
        self._stage: torch.Tensor | None = None
        self._halves = [0, 0]
        """The last operation that used each half of the stage."""
        self._half = 0
        self._read_at: dict[Span, int] = {}
        """Memory that others read, and the last operation in which they do."""

    # --- memory ---

    def empty(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Takes GPU memory on all members, and maps everybody's; MemoryFull on all when one has no room."""
        if num_elements <= 0:
            return torch.empty(0, dtype=dtype, device=device)
        size_bytes = -(-num_elements * dtype.itemsize // _GRAIN_BYTES) * _GRAIN_BYTES
        own, told = self._allocate(device, size_bytes)
        regions, problem = {self._rank: own}, ""
        for rank, (_, handle, _) in told.items():
            if rank != self._rank:
                try:
                    regions[rank] = self._opened.attach(handle, size_bytes)
                except UsageError as error:
                    problem = str(error)
        problems = [text for text in share_objects(self._group, problem) if text]
        if problems:
            raise UsageError(problems[0])
        self._is_one_device = len({identity for identity, _, _ in told.values()}) == 1
        segment = DeviceSegment(DEVICE_CODE + self._taken_bytes, regions, self._rank)
        self._taken_bytes += size_bytes
        self._segments.append(segment)
        return segment.region(self._rank, 0, num_elements, dtype)

    def _allocate(
        self, device: torch.device, size_bytes: int
    ) -> tuple[torch.Tensor, dict[int, tuple[str, bytes, str]]]:
        """Takes this worker's memory and learns the others' handles, by rank."""
        own, handle, problem = torch.empty(0), b"", ""
        try:
            if self.device is None:
                self.device = self._make(device)
                self.device.register(self._control.memory)
            own, handle = self.device.allocate(size_bytes)
        except UsageError as error:
            problem = str(error)
        identity = "" if self.device is None else self.device.identity
        everybody = share_objects(self._group, [self._rank, identity, handle, problem])
        problems = [text for _, _, _, text in everybody if text]
        if problems:
            raise MemoryFull(problems[0])
        return own, {rank: (identity, handle, text) for rank, identity, handle, text in everybody}

    def free(self, tensor: torch.Tensor, meet: Callable[[], None]) -> None:
        """Gives memory back once nobody's GPU uses it; `meet` waits for the other workers."""
        segment = self.find(tensor)
        if segment is None:
            return
        self._opened.synchronize()
        meet()
        self._segments.remove(segment)

    def takes(self, tensor: torch.Tensor) -> bool:
        """Tells whether operations on a tensor are done here."""
        if tensor.device.type != "cpu":
            return True
        return self.device is not None and self.device.takes(tensor)

    def find(self, tensor: torch.Tensor) -> DeviceSegment | None:
        """Finds the segment that holds a tensor of this worker's own region."""
        pointer = tensor.data_ptr()
        return next((each for each in self._segments if each.start <= pointer < each.end), None)

    def at(self, code: int) -> tuple[DeviceSegment, int]:
        """Finds the segment, and the offset in its regions, that a number names."""
        for segment in self._segments:
            if 0 <= code - segment.code < segment.stride_bytes:
                return segment, code - segment.code
        raise UsageError("A peer names GPU memory that this worker has given back.")

    def place(self, tensor: torch.Tensor) -> tuple[DeviceSegment, int] | None:
        """Tells where a tensor lies in group memory; None for other memory and for tensors with gaps."""
        segment = self.find(tensor)
        if segment is None or not tensor.is_contiguous():
            return None
        return segment, tensor.data_ptr() - segment.start

    def close(self) -> None:
        """Gives the memory back, for as far as no tensor holds it."""
        self._segments.clear()
        self._stage = None
        if self.device is not None:
            self.device.unregister(self._control.memory)

    # --- collectives ---

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, words: list[int]) -> Handle[torch.Tensor]:
        """Reduces in place; memory of others, and where losses are outlived, through the stage."""
        place = None if self._group.should_survive else self.place(tensor)
        if place is None:

            def reduce(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                reduce_into(part, list(stages.values()), op)

            return self._through_stage(tensor, words, reduce)
        segment, offset = place
        flat = tensor.detach().view(-1)

        def work(task: Task, present: list[int]) -> None:
            reducers = present[:1] if self._is_one_device else present
            if self._rank in reducers:
                self._follow(task.seq, DEVICE_ARRIVED, present)
                views = [segment.region(rank, offset, flat.numel(), flat.dtype) for rank in present]
                low, high = 0, flat.numel()
                if len(reducers) > 1:
                    low, high = share(present.index(self._rank), len(present), high, flat.element_size())
                self._side.run(partial(_reduce_to_all, [view[low:high] for view in views], op))
                self._signal(DEVICE_FINISHED, task.seq)
            self._follow(task.seq, DEVICE_FINISHED, reducers)
            self._note(task.seq, present)

        task = self._task([*words, segment.code + offset], work, flat)
        return self._begin([task], lambda: tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, words: list[int]) -> Handle[torch.Tensor]:
        """Lets all copy the root's tensor where it lies."""
        place = None if self._group.should_survive else self.place(tensor)
        sources = None if self._rank == root else (root,)
        if place is None:

            def take(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                if self._rank != root:
                    part.copy_(_sent_by(root, stages))

            return self._through_stage(tensor, words, take, sources=(root,) if self._rank != root else ())
        segment, offset = place
        flat = tensor.detach().view(-1)

        def work(task: Task, present: list[int]) -> None:
            if self._rank == root:
                self._follow(task.seq, DEVICE_FINISHED, present)  # they read its memory
            else:
                _sent_by(root, dict.fromkeys(present, flat))
                self._follow(task.seq, DEVICE_ARRIVED, [root])
                theirs = segment.region(root, offset, flat.numel(), flat.dtype)
                self._side.run(partial(flat.copy_, theirs))
            self._signal(DEVICE_FINISHED, task.seq)
            self._note(task.seq, present)

        task = self._task([*words, segment.code + offset], work, flat)
        task.sources = sources
        return self._begin([task], lambda: tensor)

    def all_gather(
        self, tensor: torch.Tensor, shapes: Mapping[int, torch.Size], words: list[int]
    ) -> Handle[list[torch.Tensor]]:
        """Collects tensors of known shapes through the stage."""
        results = {rank: tensor.new_empty(shape) for rank, shape in shapes.items()}
        flats = {rank: result.view(-1) for rank, result in results.items()}
        own = tensor.detach().reshape(-1)
        longest = max(flat.numel() for flat in flats.values())
        stage_bytes = self._prepare_stage(longest * tensor.element_size(), tensor.device)
        piece = stage_bytes // tensor.element_size()
        tasks = []
        for start in range(0, max(longest, 1), piece):
            part = slice(start, start + piece)

            def take(
                task: Task, mine: torch.Tensor, stages: dict[int, torch.Tensor], part: slice = part
            ) -> None:
                for rank, staged in stages.items():
                    theirs = flats[rank][part]
                    theirs.copy_(mine if rank == self._rank else staged[: theirs.numel()])

            tasks.append(
                self._staged(own[part], [*words, -1 - start, -DEVICE_CODE], take, min(piece, longest - start))
            )

        def those_who_stayed() -> list[torch.Tensor]:
            return [
                result
                for rank, result in results.items()
                if all(task.present is not None and rank in task.present for task in tasks)
            ]

        return self._begin(tasks, those_who_stayed)

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, words: list[int], out: torch.Tensor | None
    ) -> Handle[torch.Tensor]:
        """Mixes once the sources' tensors are complete.

        Where workers share one GPU and everybody mixes with everybody, one of them mixes for all.
        """
        if out is None:

            def step(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                self._mix(self._rank, task.seq, part, {**stages, self._rank: part})

            return self._through_stage(tensor, words, step, weights=weights)
        place, result_place = self.place(tensor), self.place(out)
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
            if mixer in (None, self._rank):
                return self._engine.are_complete_on_device(DEVICE_ARRIVED, task.seq, present)
            return self._engine.are_complete_on_device(DEVICE_FINISHED, task.seq, [mixer])

        def work(task: Task, present: list[int]) -> None:
            mixer = self._mixer(task, present)
            if mixer in (None, self._rank):
                views = {rank: segment.region(rank, offset, own.numel(), own.dtype) for rank in present}
                results = {self._rank: result}
                if mixer is not None:
                    results |= {rank: self._result_of(rank, task.seq, own) for rank in present if rank != mixer}
                for rank, out in results.items():
                    self._side.run(partial(self._mix, rank, task.seq, out, views))
            self._signal(DEVICE_FINISHED, task.seq)

        task = self._task([*words, segment.code + offset], work, own, result)
        self._address(task, weights)
        # where all mix with all, one may mix for the others, into memory that it reaches
        is_full = set(weights.sources) >= {*self._engine.members()} - {self._rank}
        is_reached = result_place is not None and self._is_one_device
        task.words += [int(is_full and is_reached), result_place[0].code + result_place[1] if result_place else 0]
        task.may_arrive = lambda task: self._is_finished(after)
        task.may_work = may_work
        handle = self._begin([task], lambda: out)
        self._read_at[span_of(tensor)] = task.seq
        return handle

    def _mixer(self, task: Task, present: Sequence[int]) -> int | None:
        """Finds who mixes for all: the lowest rank, where all mix with all in memory that all reach.

        All come to the same, since the descriptions of all are there. Should that one be lost, each mixes.
        """
        everybody = self._engine.members_at(task.seq)
        if len(present) < len(everybody):
            return None
        for rank in present:
            if self._control.description(rank, task.seq)[_IS_FULL] != 1:
                return None
        mixer = min(present)
        return None if self._engine.is_gone(mixer) else mixer

    def _result_of(self, rank: int, seq: int, like: torch.Tensor) -> torch.Tensor:
        segment, offset = self.at(self._control.description(rank, seq)[_RESULT])
        return segment.region(rank, offset, like.numel(), like.dtype)

    def _address(self, task: Task, weights: Weights) -> None:
        """Says from whom, and to whom with which factors, an exchange goes."""
        size, sends = self._group.size, weights.destinations
        task.sources = tuple(weights.sources)
        task.is_survivable = True
        task.must_match = 4
        task.words.append(int(sends is not None))
        received = [weights.sources.get(rank, math.nan) for rank in range(size)]
        received[self._rank] = weights.own
        sent = [math.nan if sends is None else sends.get(rank, math.nan) for rank in range(size)]
        task.factors = [*sent, *received]

    def _mix(self, rank: int, seq: int, out: torch.Tensor, views: Mapping[int, torch.Tensor]) -> None:
        """Takes a rank's weighted average, by the weights that it and its sources have told."""
        received = [
            self._control.factor(rank, seq, self._group.size + other) for other in range(self._group.size)
        ]
        sources = {
            other: weight for other, weight in enumerate(received) if other != rank and not math.isnan(weight)
        }
        weights = Weights(received[rank], sources).without([other for other in sources if other not in views])
        parts = []
        for other, weight in weights.sources.items():
            factor = 1.0
            if self._control.description(other, seq)[_HAS_FACTORS]:
                factor = self._control.factor(other, seq, rank)
                if math.isnan(factor):
                    raise not_sent(self._engine.name_of(rank), self._engine.name_of(other))
            parts.append((views[other], weight * factor))
        mix_into(out, views[rank], weights.own, parts)

    def settle(self, tensor: torch.Tensor) -> None:
        """Waits until nobody's GPU reads `tensor` any more."""
        seq = self._forget_readers(span_of(tensor))
        if not self._is_finished(seq):
            self._engine.wait_until(lambda: self._is_finished(seq), None, "settle")

    # --- through the stage ---

    def _through_stage(
        self,
        tensor: torch.Tensor,
        words: list[int],
        step: Callable[..., None],
        *,
        sources: Sequence[int] | None = None,
        weights: Weights | None = None,
    ) -> Handle[torch.Tensor]:
        """Copies pieces into group memory, where the others read them, and does a step on each piece."""
        flat = tensor.detach().reshape(-1)
        stage_bytes = self._prepare_stage(flat.nbytes, tensor.device)
        piece = stage_bytes // flat.element_size()
        tasks = []
        for start in range(0, max(flat.numel(), 1), piece):
            part = flat[start : start + piece]
            task = self._staged(
                part, [*words, -DEVICE_CODE - start], step, part.numel(), needs_task=needs_task
            )
            task.sources = sources
            if address is not None:
                address(task)
            tasks.append(task)

        def put_back() -> torch.Tensor:
            if flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat.view(tensor.shape))
            return tensor

        return self._begin(tasks, put_back)

    def _staged(
        self,
        part: torch.Tensor,
        words: list[int],
        step: Callable[..., None],
        num_staged: int,
    ) -> Task:
        """Makes the task of one piece, in the half of the stage that was not used last."""
        stage = self._stage
        assert stage is not None
        half, self._half = self._half, 1 - self._half
        segment, offset = self.place(stage[half * (stage.numel() // 2) :]) or (None, 0)
        assert segment is not None

        def copy_in(task: Task) -> None:
            self._side.run(partial(segment.region(self._rank, offset, part.numel(), part.dtype).copy_, part))
            self._halves[half] = task.seq

        def work(task: Task, present: list[int]) -> None:
            if not self._is_surviving(task):
                self._follow(task.seq, DEVICE_ARRIVED, present)
            stages = {rank: segment.region(rank, offset, num_staged, part.dtype) for rank in present}
            if self._rank in stages:
                stages[self._rank] = stages[self._rank][: part.numel()]
            self._side.run(partial(step, task, part, stages))
            self._signal(DEVICE_FINISHED, task.seq)
            self._note(task.seq, present)

        task = self._task(words, work, part, copy_in=copy_in)
        task.may_arrive = lambda task: self._is_finished(self._halves[half])
        task.may_work = lambda task, present: (
            not self._is_surviving(task) or self._are_complete(task, present)
        )
        return task

    def _prepare_stage(self, size_bytes: int, device: torch.device) -> int:
        """Makes a stage whose halves hold so much, up to a bound; the size of a half. Collective when it grows."""
        half_bytes = min(_STAGE_BYTES, max(_GRAIN_BYTES, 1 << max(0, size_bytes - 1).bit_length()))
        if self._stage is None or self._stage.numel() < 2 * half_bytes:
            self._stage = self.empty(2 * half_bytes, torch.uint8, device)
            self._halves = [0, 0]
        return self._stage.numel() // 2

    # --- order ---

    def _task(
        self,
        words: list[int],
        work: Callable[[Task, list[int]], None],
        *tensors: torch.Tensor,
        copy_in: Callable[[Task], None] | None = None,
    ) -> Task:
        """Makes a task whose part is complete when the caller's stream has come to where it is now."""
        mark = self._opened.mark(self._opened.caller)

        def prepare(task: Task) -> None:
            self._side.follow(mark)
            if copy_in is not None:
                copy_in(task)
            self._signal(DEVICE_ARRIVED, task.seq)

        task = Task(words, work, *map(span_of, tensors))
        task.prepare = prepare
        return task

    def _begin(self, tasks: Sequence[Task], result: Callable[[], T]) -> Handle[T]:
        for task in tasks:
            self._engine.issue(task)
        return _DeviceHandle(self._engine, self._opened, tasks, result)

    @property
    def _side(self) -> Any:
        return self._opened.side

    def _signal(self, name: int, seq: int) -> None:
        self._side.signal(self._control.address(self._rank, name), seq)

    def _follow(self, seq: int, name: int, ranks: Sequence[int]) -> None:
        """Lets the side stream wait until the parts of others are complete."""
        for rank in ranks:
            if rank != self._rank:
                self._side.wait(self._control.address(rank, name), seq)

    def _note(self, seq: int, present: Sequence[int]) -> None:
        """Remembers an operation that streams wait in, until this worker's has come through."""
        self._signal(DEVICE_COMPLETE, seq)
        self._engine.note_on_device(seq, present)

    def _is_surviving(self, task: Task) -> bool:
        return task.is_survivable or self._group.should_survive

    def _are_complete(self, task: Task, present: Sequence[int]) -> bool:
        return self._engine.are_complete_on_device(DEVICE_ARRIVED, task.seq, present)

    def _is_finished(self, seq: int) -> bool:
        return seq == 0 or self._engine.are_complete_on_device(DEVICE_FINISHED, seq, range(self._group.size))

    def _forget_readers(self, span: Span) -> int:
        """Finds the last operation in which others read any of some memory that is to be written."""
        read = [other for other in self._read_at if is_overlapping([other], [span])]
        return max([self._read_at.pop(other) for other in read], default=0)

    @property
    def _opened(self) -> Device:
        assert self.device is not None, "no memory of a device was taken yet"
        return self.device


class _DeviceHandle(Handle[T]):
    """Operations that a device does; to wait is to order the caller's stream after them."""

    def __init__(
        self, engine: Engine, device: Device, tasks: Sequence[Task], result: Callable[[], T]
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
        """Who took part in the first of them, once it is over."""
        return (self._tasks[0].present if self._tasks else None) or ()

    def is_done(self) -> bool:
        self._engine.progress()
        return all(self._engine.is_complete(task) for task in self._tasks)


def _reduce_to_all(parts: Sequence[torch.Tensor], op: Reduction) -> None:
    """Replaces all parts by their reduction."""
    reduce_into(parts[0], parts, op)
    for part in parts[1:]:
        part.copy_(parts[0])


def _sent_by(root: int, views: Mapping[int, torch.Tensor]) -> torch.Tensor:
    if root not in views:
        raise UsageError(
            f"rank {root}, which should broadcast, has left the group.", next_step="broadcast from a member."
        )
    return views[root]
