"""The collectives of one machine's workers, in memory of the CPU and of GPUs.

A tensor of the group's own memory is worked on where it lies. Any other passes, piece by piece, through two
halves of memory that all reach: while one piece is worked on, the next is copied into the other half.

On a GPU a worker says twice that it has arrived at an operation, and that it has finished its part: by the
processor when it has *issued* its part, and by the GPU when its part is *done*, in a word of the control page
that its stream writes (`device`). An operation that ends the run on a loss waits on the processor until all
have issued their parts, and leaves the rest to the streams. So does an exchange: its weights are read by the
GPU when the others' parts are there, and one that is lost before weighs nothing then. Whatever else outlives
losses waits on the processor until the others' parts are done, so that nothing half-written is used.

Workers that share one GPU take turns on it, and a change from one process to another costs as much as
reducing 100 MB. So there one of them reduces for all. Workers on GPUs of their own reduce a share each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch

from shoal.core import ShoalError, UsageError
from shoal.group.base import Handle, Reduction, absent_root
from shoal.group.host.device import GRAIN_BYTES, DeviceMemory, DeviceStream, Word
from shoal.group.host.engine import ProgressEngine, Span, Task, TasksHandle, is_overlapping, put_back, span_of
from shoal.group.host.memory import DEVICE_ARRIVED, DEVICE_CODE, DEVICE_FINISHED, Arena, Segment
from shoal.group.kernels import mix_into, mix_on_device, reduce_into, reduce_to_all, share_bounds
from shoal.tensors.memory import copy_into
from shoal.topology import Weights

NO_PLACE = -1
"""Stands in a description for memory that others cannot reach."""
STAGE_BYTES = 1 << 22
"""One half of the CPU's staging memory: a step's overhead does not count any more, caches still hold it."""
_MAX_DEVICE_STAGE_BYTES = 128 << 20
"""The largest piece of private GPU memory that passes through group memory at once."""
_SMALL_BYTES = 1 << 16
_HAS_FACTORS = 4
"""The word in the description of an exchange that says whether its factors for sending count."""
Views = Callable[[Sequence[int]], dict[int, torch.Tensor]]
"""Views the same place in the memory of some ranks, by rank."""
Step = Callable[[Task, torch.Tensor, dict[int, torch.Tensor]], None]
"""Work on one piece: the own part, and the staged parts of those who take part, by rank."""


class HostCollectives:
    """The collectives of one worker on memory of the CPU, where all work is done in the thread that calls.

    `words` describe an operation to the others: its kind, dtype and number of elements, and its detail.
    """

    _stage_code = NO_PLACE
    """By this minus n a description names the piece of private memory that begins at element n."""
    _can_gather_in_place = True

    def __init__(
        self, engine: ProgressEngine, memory: Arena | DeviceMemory, stage: Segment | None = None
    ) -> None:
        self._engine = engine
        self._control = engine.control
        self._rank = engine.rank
        self._memory = memory
        self._stage = stage
        self._order: Callable[[], None] | None = None
        """Orders the caller's stream after what was issued, where there are streams."""
        self._read_at: dict[Span, int] = {}
        """Memory that others read, and the last operation in which they do."""

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, words: list[int]) -> Handle[torch.Tensor]:
        """Reduces in place; private memory, and where losses are outlived any, through the stage."""
        flat = tensor.detach() if tensor.requires_grad else tensor
        place = None if self._engine.should_survive else self._memory.find_own(flat)
        if place is None:
            return self._reduce_staged(tensor, op, words)
        flat = flat.view(-1) if flat.ndim != 1 else flat
        words.append(place[0].code + place[1])
        task = self._reduce_in_place(flat, _views(place, flat), op, words)
        return TasksHandle(self._engine, [self._engine.issue(task)], lambda: tensor, self._order)

    def broadcast(self, tensor: torch.Tensor, root: int, words: list[int]) -> Handle[torch.Tensor]:
        """Lets all copy the root's tensor, where it lies or from the stage."""
        flat, is_root = tensor.detach(), self._rank == root
        place = self._memory.find_own(flat) if self._may_broadcast_in_place(flat) else None
        if place is None:

            def take(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                if not is_root:
                    part.copy_(_sent_by(root, stages))

            sources = () if is_root else (root,)
            return self._through_stage(tensor, words, take, sources=sources, should_give=is_root)
        flat = flat.view(-1)
        words = [*words, place[0].code + place[1]]
        task = self._broadcast_in_place(flat, _views(place, flat), root, words)
        # the root waits for everybody: they read its memory
        task.sources = None if is_root else (root,)
        return TasksHandle(self._engine, [self._engine.issue(task)], lambda: tensor, self._order)

    def all_gather(
        self,
        tensor: torch.Tensor,
        shapes: Mapping[int, tuple[int, ...]],
        codes: Mapping[int, int],
        words: list[int],
    ) -> Handle[list[torch.Tensor]]:
        """Collects tensors of known shapes, from where they lie where all are group memory."""
        results = {rank: tensor.new_empty(shape) for rank, shape in shapes.items()}
        flats = {rank: result.view(-1) for rank, result in results.items()}
        own, longest = flats[self._rank], max(flat.numel() for flat in flats.values())
        piece = self._half_bytes(longest * own.element_size(), own.device) // own.element_size()
        if self._order is not None:
            self._order()  # operations before this one may still be writing it
        copy_into(results[self._rank], tensor.detach().reshape(shapes[self._rank]))
        if self._can_gather_in_place and NO_PLACE not in codes.values():

            def read_all(task: Task, present: list[int]) -> None:
                for rank in present:
                    if rank != self._rank:
                        views = _views(self._memory.at(codes[rank]), flats[rank])
                        copy_into(flats[rank], views([rank])[rank])

            task = Task([*words, NO_PLACE, 0], read_all, [span_of(tensor)], is_shared=True)
            tasks = [self._engine.issue(task)]
        else:

            def take(task: Task, mine: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                start = NO_PLACE - task.words[2]
                for rank, staged in stages.items():
                    if rank != self._rank:
                        theirs = flats[rank][start : start + piece]
                        theirs.copy_(staged[: theirs.numel()])

            tasks = []
            for start in range(0, longest, piece):
                described = [*words, NO_PLACE - start, 0, self._stage_code]
                num_staged = min(piece, longest - start)
                task = self._staged(own[start : start + piece], described, take, num_staged)
                tasks.append(self._engine.issue(task))

        def those_who_stayed() -> list[torch.Tensor]:
            return [
                result
                for rank, result in results.items()
                if all(task.present is not None and rank in task.present for task in tasks)
            ]

        return TasksHandle(self._engine, tasks, those_who_stayed, self._order)

    def exchange(
        self, tensor: torch.Tensor, weights: Weights, words: list[int], out: torch.Tensor | None
    ) -> Handle[torch.Tensor]:
        """Mixes once the sources' tensors are written."""
        if out is None:

            def mix(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
                stages[self._rank] = part
                own_weight, sources = self._weigh(task.seq, weights, stages)
                parts = [(stages[rank], weight) for rank, weight in sources.items()]
                mix_into(part, part, own_weight, parts)

            return self._through_stage(tensor, words, mix, weights=weights)
        own = tensor.detach() if tensor.requires_grad else tensor
        result = out.detach() if out.requires_grad else out
        place = self._memory.find_own(own)
        own_span, result_span = span_of(own), span_of(result)
        is_alike = result.shape == own.shape and result.dtype == own.dtype and result.is_contiguous()
        if place is None or not is_alike or is_overlapping([result_span], [own_span]):
            raise UsageError(
                "exchange(tensor, out=...) needs a tensor in memory of the group, and an `out` of the same "
                "shape and dtype, contiguous, that does not overlap it.",
                next_step="take both from group.empty(), or leave out= away.",
            )
        if own.ndim != 1:
            own, result = own.view(-1), result.view(-1)
        words = [*words, place[0].code + place[1]]
        task = self._mix_in_place(own, result, _views(place, own), weights, words)
        task.spans = (own_span, result_span)
        task.after = self.forget_readers(result_span)
        self._read_at[own_span] = self._engine.issue(task).seq
        return TasksHandle(self._engine, [task], lambda: out, self._order)

    def settle(self, tensor: torch.Tensor) -> None:
        """Waits until nobody reads `tensor` any more."""
        if not self._read_at:
            return
        seq = self.forget_readers(span_of(tensor))
        if not self._is_finished(seq):
            self._engine.wait_until(lambda: self._is_finished(seq), None, "settle")

    def forget_readers(self, span: Span) -> int:
        """Finds the last operation in which others read any of some memory that is to be written."""
        start, end = span
        read = [other for other in self._read_at if other[0] < end and start < other[1]]
        return max([self._read_at.pop(other) for other in read]) if read else 0

    # --- common to CPU and GPU ---

    def _through_stage(
        self,
        tensor: torch.Tensor,
        words: list[int],
        step: Step,
        *,
        sources: Sequence[int] | None = None,
        weights: Weights | None = None,
        should_give: bool = True,
    ) -> Handle[torch.Tensor]:
        """Copies pieces into group memory, where the others read them, and does a step on each piece.

        What is empty is one piece, too, so that all count alike.
        """
        flat = tensor.detach().reshape(-1)
        piece = self._half_bytes(flat.nbytes, flat.device) // flat.element_size()
        tasks = []
        for start in range(0, max(flat.numel(), 1), piece):
            part = flat[start : start + piece]
            described = [*words, self._stage_code - start]
            task = self._staged(part, described, step, part.numel(), should_give=should_give, weights=weights)
            task.sources = sources
            if weights is not None:
                self._address(task, weights)
            tasks.append(self._engine.issue(task))
        return TasksHandle(self._engine, tasks, lambda: put_back(flat, tensor), self._order)

    def _address(self, task: Task, weights: Weights) -> None:
        """Says from whom, and to whom with which factors, an exchange goes."""
        task.sources = tuple(weights.sources)
        task.is_survivable = True
        task.must_match = 4
        task.words.append(int(weights.destinations is not None))
        if weights.destinations is not None:
            task.factors = [weights.destinations.get(rank, math.nan) for rank in range(self._engine.size)]

    def _weigh(self, seq: int, weights: Weights, present: Collection[int]) -> tuple[float, dict[int, float]]:
        """Finds this worker's own weight, and those of its sources by what they have told, too."""
        if len(present) < self._engine.size:
            gone = [source for source in weights.sources if source not in present]
            if gone:
                weights = weights.without(gone)
        sources = dict(weights.sources)
        for source in sources:
            if self._engine.has_come_to(seq, source):  # else its factor is 1 by a rule that all share
                sources[source] *= self._factor_of(source, seq)
        return weights.own, sources

    def _factor_of(self, source: int, seq: int) -> float:
        """Reads the factor by which a source sends to this worker; UsageError when it does not send to it."""
        if not self._control.description(source, seq)[_HAS_FACTORS]:
            return 1.0
        factor = self._control.factor(source, seq, self._rank)
        if math.isnan(factor):
            name = self._engine.name_of
            raise UsageError(
                f"rank {name(self._rank)} wants to receive from rank {name(source)}, which does not send to "
                "it.",
                next_step="let sources and destinations agree; a Topology's weights do.",
            )
        return factor

    # --- what a GPU does otherwise ---

    def _is_finished(self, seq: int) -> bool:
        """Tells whether nobody reads any more what others could read in an operation."""
        return self._engine.is_finished(seq)

    def _reduce_in_place(self, flat: torch.Tensor, views: Views, op: Reduction, words: list[int]) -> Task:
        """Lets each worker reduce one share, for all."""

        def work(task: Task, present: list[int]) -> None:
            low, high = share_bounds(
                present.index(self._rank), len(present), flat.numel(), flat.element_size()
            )
            reduce_to_all(list(views(present).values()), low, high, op)

        return Task(words, work, [span_of(flat)], is_shared=True, needs_shares=True)

    def _may_broadcast_in_place(self, tensor: torch.Tensor) -> bool:
        """Of what is small the root gives a copy, and need not wait until all have read it."""
        return tensor.nbytes > _SMALL_BYTES

    def _broadcast_in_place(self, flat: torch.Tensor, views: Views, root: int, words: list[int]) -> Task:
        def work(task: Task, present: list[int]) -> None:
            if self._rank != root:
                copy_into(flat, _sent_by(root, views(present)))

        return Task(words, work, [span_of(flat)], is_shared=self._rank == root)

    def _mix_in_place(
        self, own: torch.Tensor, out: torch.Tensor, views: Views, weights: Weights, words: list[int]
    ) -> Task:
        """Lets each mix for itself; the caller says which memory the task is on."""

        def work(task: Task, present: list[int]) -> None:
            own_weight, sources = self._weigh(task.seq, weights, present)
            given = views(list(sources))
            mix_into(out, own, own_weight, [(given[rank], weight) for rank, weight in sources.items()])

        task = Task(words, work)
        self._address(task, weights)
        return task

    def _half_bytes(self, size_bytes: int, device: torch.device) -> int:
        """Says how much of a tensor of that size one half of the stage holds."""
        return STAGE_BYTES

    def _staged(
        self,
        part: torch.Tensor,
        words: list[int],
        step: Step,
        num_staged: int,
        *,
        should_give: bool = True,
        weights: Weights | None = None,
    ) -> Task:
        """Makes the task of one piece, of which the others have `num_staged` elements.

        Copies it into the stage, if this worker is to give something, and does the step. With `weights` the
        step mixes by them.
        """
        stage = self._stage
        assert stage is not None

        def copy_in(task: Task) -> None:
            stage.region(self._rank, task.half * STAGE_BYTES, part.numel(), part.dtype).copy_(part)

        def work(task: Task, present: list[int]) -> None:
            at, dtype = task.half * STAGE_BYTES, part.dtype
            step(task, part, {rank: stage.region(rank, at, num_staged, dtype) for rank in present})

        prepare = copy_in if should_give else None
        return Task(words, work, [span_of(part)], prepare=prepare, is_staged=True)

    def _reduce_staged(self, tensor: torch.Tensor, op: Reduction, words: list[int]) -> Handle[torch.Tensor]:
        """Lets each reduce everything for itself, or its share in the stage, then all copy all shares out.

        From three workers on shares move fewer bytes; on a GPU they would be one more change of processes.
        """

        def reduce(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
            reduce_into(part, list(stages.values()), op)

        stage = self._stage
        if self._engine.size <= 2 or self._engine.should_survive or stage is None:  # none: on a GPU
            return self._through_stage(tensor, words, reduce)

        def reduce_share(task: Task, part: torch.Tensor, stages: dict[int, torch.Tensor]) -> None:
            place = list(stages).index(self._rank)
            low, high = share_bounds(place, len(stages), part.numel(), part.element_size())
            own = stages.pop(self._rank)[low:high]
            # what it is reduced into comes first, since it is overwritten
            reduce_into(own, [own, *(staged[low:high] for staged in stages.values())], op)

        def copy_out(part: torch.Tensor, first: Task, task: Task, present: list[int]) -> None:
            ranks = first.present or []
            for index, rank in enumerate(ranks):
                low, high = share_bounds(index, len(ranks), part.numel(), part.element_size())
                at = first.half * STAGE_BYTES
                part[low:high].copy_(stage.region(rank, at, part.numel(), part.dtype)[low:high])

        flat = tensor.detach().reshape(-1)
        piece = STAGE_BYTES // flat.element_size()
        tasks = []
        for start in range(0, max(flat.numel(), 1), piece):
            part = flat[start : start + piece]
            first = self._staged(part, [*words, self._stage_code - start], reduce_share, part.numel())
            first.needs_shares = True
            first.num_holding = 1
            first.half = (self._engine.issued + 1 >> 1) & 1  # two tasks use one half, the next two the other
            self._engine.issue(first)
            work = partial(copy_out, part, first)
            second = Task(first.words, work, first.spans, follows=first, after=first.seq)
            tasks += [first, self._engine.issue(second)]
        return TasksHandle(self._engine, tasks, lambda: put_back(flat, tensor), self._order)


class DeviceCollectives(HostCollectives):
    """The collectives on GPU memory: work is given to a stream, which `DeviceMemory.join_queue` chooses."""

    _stage_code = -DEVICE_CODE
    _can_gather_in_place = False

    def __init__(self, engine: ProgressEngine, memory: DeviceMemory) -> None:
        super().__init__(engine, memory)
        self._devices = memory
        self._order = memory.order_caller
        self._weights: dict[bool, tuple[torch.Tensor, Sequence[torch.Tensor]]] = {}
        """Memory of the GPU for the weights of an exchange, by whether they have double precision."""
        self._halves: torch.Tensor | None = None
        """The stage, in group memory of the GPU, once it was needed."""
        self._halves_read_at = [0, 0]
        """The last operation in which each half was read."""
        self._words: list[Word] = []
        """Words for the stream to write or wait for that nothing else has followed yet: they go together."""
        engine.flush = self._flush

    def close(self) -> None:
        """Lets go of the staging memory."""
        self._halves = None
        self._words.clear()

    def _reduce_in_place(self, flat: torch.Tensor, views: Views, op: Reduction, words: list[int]) -> Task:
        def work(task: Task, present: list[int]) -> None:
            reducers = present[:1] if self._devices.is_one_device else present
            self._engine.note_on_device(task.seq, present, reducers)
            if self._rank in reducers:
                self._follow(task.seq, DEVICE_ARRIVED, present)
                parts = list(views(present).values())
                if len(reducers) > 1:
                    own = present.index(self._rank)
                    low, high = share_bounds(own, len(present), flat.numel(), flat.element_size())
                    parts = [part[low:high] for part in parts]
                queue = self._next_work()
                queue.run(partial(_reduce_first, parts, op))
                for part in parts[1:]:
                    queue.copy(part, parts[0])
                self._signal(DEVICE_FINISHED, task.seq)
                self._follow(task.seq, DEVICE_FINISHED, reducers)
            else:
                self._follow(task.seq, DEVICE_FINISHED, reducers)
                self._signal(DEVICE_FINISHED, task.seq)

        task = self._task(words, work, flat)
        task.may_precede = True
        return task

    def _may_broadcast_in_place(self, tensor: torch.Tensor) -> bool:
        return not self._engine.should_survive

    def _broadcast_in_place(self, flat: torch.Tensor, views: Views, root: int, words: list[int]) -> Task:
        def work(task: Task, present: list[int]) -> None:
            if self._rank == root:
                self._follow(task.seq, DEVICE_FINISHED, present)
            else:
                theirs = _sent_by(root, views(present))
                self._engine.note_on_device(task.seq, (root,))
                self._follow(task.seq, DEVICE_ARRIVED, [root])
                self._next_work().copy(flat, theirs)
            self._signal(DEVICE_FINISHED, task.seq)

        return self._task(words, work, flat)

    def _mix_in_place(
        self, own: torch.Tensor, out: torch.Tensor, views: Views, weights: Weights, words: list[int]
    ) -> Task:
        def work(task: Task, present: list[int]) -> None:
            self._follow_readers(task.after)  # until then they read what `out` was
            self._mix_given(task, out, own, weights, views(present))
            self._signal(DEVICE_FINISHED, task.seq)

        task = self._task(words, work, own, out, spans=())
        self._address(task, weights)
        self._let_lead(task, weights)
        return task

    def _let_lead(self, task: Task, weights: Weights) -> None:
        """Lets the processor not wait for the others' where nothing has to be heard of them.

        Two workers whose steps take now more, now less time would else take the longer one in each step.
        """
        if weights.is_by_rule:
            task.may_lead, task.check = True, self._check_rule

    def _mix_given(
        self,
        task: Task,
        out: torch.Tensor,
        own: torch.Tensor,
        weights: Weights,
        given: Mapping[int, torch.Tensor],
    ) -> None:
        """Lets the stream mix what others give once it is there, without those that are lost until then."""
        if weights.is_by_rule:
            arrived = [rank for rank in weights.sources if self._engine.has_come_to(task.seq, rank)]
            error = self._check_rule(task, arrived)
            if error is not None:
                raise error
        own_weight, sources = self._weigh(task.seq, weights, given)
        ranks, is_double = list(sources), own.dtype is torch.float64
        address = self._control.set_weights(task.seq, sources, is_double=is_double)
        self._engine.note_on_device(task.seq, ranks, is_weighted=True)
        self._follow(task.seq, DEVICE_ARRIVED, ranks)
        queue = self._next_work()
        memory, told = self._weights_on_device(own.device, is_double=is_double)
        queue.load(memory, address)
        parts = [(given[rank], told[rank], weight) for rank, weight in sources.items()]
        queue.run(partial(mix_on_device, out, own, own_weight, parts))

    def _check_rule(self, task: Task, sources: Sequence[int]) -> ShoalError | None:
        """Makes the error for a source that sends with a factor, where weights are by a rule without any."""
        try:
            factors = {source: self._factor_of(source, task.seq) for source in sources}
        except UsageError as error:
            return error
        for source, factor in factors.items():
            if factor != 1.0:
                name = self._engine.name_of
                return UsageError(
                    f"rank {name(source)} sends to rank {name(self._rank)} with factor {factor:g}, and that "
                    "one takes its weights from a rule without factors (a Topology, or Weights.uniform).",
                    next_step="on a GPU, give all workers weights of one kind.",
                )
        return None

    def _weights_on_device(
        self, device: torch.device, *, is_double: bool
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Finds memory for the weights of an exchange, as a whole and as a number for each rank.

        Operations follow each other on the GPU, so it serves them all.
        """
        if is_double not in self._weights:
            whole = torch.zeros(self._engine.size, dtype=torch.float64, device=device)
            shared = self._devices.device
            self._devices.queue.follow(shared.mark(shared.caller))  # in whose stream it is filled with zeros
            numbers = whole if is_double else whole.view(torch.float32)[::2]
            self._weights[is_double] = whole, numbers.unbind()
        return self._weights[is_double]

    def _half_bytes(self, size_bytes: int, device: torch.device) -> int:
        """Makes halves of the stage that hold so much, up to a bound; collective when they are too small."""
        wanted_bytes = max(GRAIN_BYTES, 1 << max(0, size_bytes - 1).bit_length())
        half_bytes = min(_MAX_DEVICE_STAGE_BYTES, wanted_bytes)
        if self._halves is None or self._halves.numel() < 2 * half_bytes:
            self._halves = self._devices.empty(2 * half_bytes, torch.uint8, device)
            self._halves_read_at = [0, 0]
        return self._halves.numel() // 2

    def _staged(
        self,
        part: torch.Tensor,
        words: list[int],
        step: Step,
        num_staged: int,
        *,
        should_give: bool = True,
        weights: Weights | None = None,
    ) -> Task:
        assert self._halves is not None
        place, half_bytes = self._devices.find_own(self._halves), self._halves.numel() // 2
        assert place is not None
        segment, start = place

        def copy_in(task: Task) -> None:
            own = segment.region(self._rank, start + task.half * half_bytes, part.numel(), part.dtype)
            self._follow_readers(self._halves_read_at[task.half])
            self._next_work().run(lambda: copy_into(own, part))
            self._halves_read_at[task.half] = task.seq

        def may_work(task: Task, present: list[int]) -> bool:
            is_waiting = weights is None and self._engine.should_survive
            return not is_waiting or self._engine.are_done_on_device(DEVICE_ARRIVED, task.seq, present)

        def work(task: Task, present: list[int]) -> None:
            at, dtype = start + task.half * half_bytes, part.dtype
            stages = {rank: segment.region(rank, at, num_staged, dtype) for rank in present}
            if weights is not None:
                self._mix_given(task, part, part, weights, stages)
            else:
                if not self._engine.should_survive:
                    self._engine.note_on_device(task.seq, present)
                    self._follow(task.seq, DEVICE_ARRIVED, present)
                self._next_work().run(partial(step, task, part, stages))
            self._signal(DEVICE_FINISHED, task.seq)

        task = self._task(words, work, part, copy_in=copy_in if should_give else None)
        task.may_arrive = lambda task: self._engine.is_finished(self._halves_read_at[task.half])
        task.may_work = may_work
        if weights is not None:
            self._let_lead(task, weights)
        return task

    # --- order ---

    def _task(
        self,
        words: list[int],
        work: Callable[[Task, list[int]], None],
        *tensors: torch.Tensor,
        copy_in: Callable[[Task], None] | None = None,
        spans: Sequence[Span] | None = None,
    ) -> Task:
        """Makes a task whose part is there when the caller's stream has come to where it is now.

        It is on the memory of `tensors`, unless `spans` says where.
        """
        device = self._devices.device
        caller = device.caller
        mark = device.mark(caller) if self._devices.join_queue() is not caller else None

        def prepare(task: Task) -> None:
            if self._devices.queue is not caller:
                queue = self._next_work()
                for tensor in tensors:
                    device.keep(tensor, queue)
                if mark is not None:  # else the queue has followed the caller's stream since
                    queue.follow(mark)
            if copy_in is not None:
                copy_in(task)
            self._signal(DEVICE_ARRIVED, task.seq)

        if spans is None:
            spans = [span_of(tensor) for tensor in tensors]
        return Task(words, work, spans, prepare=prepare)

    def _signal(self, name: int, seq: int) -> None:
        self._words.append((True, self._control.address(self._rank, name), seq))

    def _follow(self, seq: int, name: int, ranks: Sequence[int]) -> None:
        """Lets the stream wait until the GPUs of others have come so far."""
        for rank in ranks:
            if rank != self._rank:
                self._words.append((False, self._control.address(rank, name), seq))

    def _next_work(self) -> DeviceStream:
        """Gives the stream for what comes next, behind all words that are to come before."""
        if self._words:
            self._flush()
        return self._devices.queue

    def _flush(self) -> None:
        """Gives the stream the words that are kept."""
        words, self._words = self._words, []
        if words:
            self._devices.queue.order(words)

    def _follow_readers(self, seq: int) -> None:
        """Lets the stream wait until nobody's GPU reads any more what others read in an operation."""
        if self._is_finished(seq):
            return
        for rank in range(self._engine.size):
            if not self._engine.are_done_on_device(DEVICE_FINISHED, seq, [rank]):
                self._follow(seq, DEVICE_FINISHED, [rank])

    def _is_finished(self, seq: int) -> bool:
        """Tells whether the GPUs of all have finished an operation."""
        return not seq or self._engine.are_done_on_device(DEVICE_FINISHED, seq, range(self._engine.size))


def _views(place: tuple[Segment, int], like: torch.Tensor) -> Views:
    """Views the memory of others at the same place as a tensor of one's own."""
    (segment, offset), num_elements, dtype = place, like.numel(), like.dtype
    return lambda ranks: {rank: segment.region(rank, offset, num_elements, dtype) for rank in ranks}


def _sent_by(root: int, views: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Finds the root's tensor; UsageError when it has left."""
    if root not in views:
        raise absent_root(root)
    return views[root]


def _reduce_first(parts: Sequence[torch.Tensor], op: Reduction) -> None:
    """Replaces the first part by the reduction of all, in few operations of a GPU."""
    if op == "mean" and len(parts) == 2:
        torch.lerp(parts[0], parts[1], 0.5, out=parts[0])  # one operation instead of two
    else:
        reduce_into(parts[0], parts, op)
