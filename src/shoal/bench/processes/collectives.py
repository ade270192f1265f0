"""The operations of a group as `shoal bench collectives` calls them, each ready to be made again and again.

Worker r gives `pattern + r`, so that whatever is summed or averaged is `factor · pattern + offset`.

Beside them stands what torch.distributed has over gloo, which is nothing one-sided. Its collectives take
tensors of a GPU; its messages between two don't, so that they go through memory of the CPU, as a program
would have to send them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import distributed

from shoal.core import BenchmarkError
from shoal.group import Group, Window, pair_gossip
from shoal.topology.weights import Weights

CPU = torch.device("cpu")
_PERIOD = 1021
_TOLERANCE = 0.01
_TRIES = 100
"""Of a snapshot that its publisher, who waits for nobody, overwrites while it is read."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a result must be: `factor · pattern + offset`."""

    factor: float
    offset: float

    @classmethod
    def average(cls, weights: Weights, rank: int) -> Expected:
        """Expect the average of what `rank` and its sources give."""
        parts = {rank: weights.own, **weights.sources}
        return cls(sum(parts.values()), sum(weight * peer for peer, weight in parts.items()))


@dataclass(frozen=True, slots=True)
class Call:
    """An operation with its tensors."""

    run: Callable[[], Sequence[torch.Tensor]]
    """Makes the call, and returns the tensors with its results."""
    expected: Sequence[Expected] = ()
    """What the results of the first run must be."""
    reset: Callable[[], object] = lambda: None
    """Is called between the first run and the others."""


@dataclass(slots=True)
class Stage:
    """One size and one kind of memory: where a call finds its tensors and its neighbours."""

    group: Group
    num_elements: int
    has_own_memory: bool = False
    """Whether tensors lie in the group's own memory."""
    device: torch.device = CPU
    versions: Iterator[int] = field(default_factory=itertools.count)
    """Of what is published; they go on from stage to stage."""
    _shared: list[torch.Tensor] = field(default_factory=list)
    _windows: list[Window] = field(default_factory=list)

    def tensor(self) -> torch.Tensor:
        """What this worker gives."""
        tensor = self.shared() if self.has_own_memory else self.foreign()
        return tensor.copy_(pattern(self.num_elements)).add_(self.group.rank)

    def foreign(self) -> torch.Tensor:
        """Memory of the device that the group does not know of."""
        return torch.empty(self.num_elements, device=self.device)

    def shared(self) -> torch.Tensor:
        """The group's own memory, whatever kind is measured."""
        self._shared.append(self.group.empty(self.num_elements, device=self.device))
        return self._shared[-1]

    def window(self, name: str) -> Window:
        """Open a window in which this worker publishes what it has."""
        self._windows.append(self.group.window(name, self.num_elements, sources=()))
        return self._windows[-1]

    def free(self) -> None:
        """Give the group's memory back."""
        for tensor in self._shared:
            self.group.free(tensor)
        self._shared.clear()
        for window in self._windows:  # afterwards: until all have met, somebody may still read there
            window.close()
        self._windows.clear()

    def partners(self) -> list[int]:
        """The partner of each rank: two and two, and who is left over takes the one before."""
        size = self.group.size
        return [rank ^ 1 if rank ^ 1 < size else rank - 1 for rank in range(size)]

    def neighbours(self) -> list[list[int]]:
        """Whom each rank hears in an exponential-2 graph: everybody where there are two or three."""
        size = self.group.size
        steps = [1 << power for power in range((size - 1).bit_length())]
        return [[(rank - step) % size for step in steps] for rank in range(size)]


def pattern(num_elements: int) -> torch.Tensor:
    """Small whole numbers that repeat with a period that fits no power of two."""
    period = torch.arange(_PERIOD, dtype=torch.float32)
    return period.repeat(num_elements // _PERIOD + 1)[:num_elements]


def difference(tensor: torch.Tensor, expected: Expected) -> str:
    """Say where a result is furthest from what it must be; nothing where it is near enough."""
    tensor = tensor.cpu()
    wanted = pattern(tensor.numel()).mul_(expected.factor).add_(expected.offset)
    error = (tensor - wanted).abs_()
    if float(error.max()) <= _TOLERANCE:
        return ""
    worst = int(error.argmax())
    return f"element {worst} is {float(tensor[worst]):g} and should be {float(wanted[worst]):g}"


def _filling(
    tensors: Sequence[torch.Tensor], call: Callable[[], object]
) -> Callable[[], Sequence[torch.Tensor]]:
    """Make what `Call.run` is of a call whose results are in these tensors."""

    def run() -> Sequence[torch.Tensor]:
        call()
        return tensors

    return run


def _all_reduce(stage: Stage) -> Call:
    group, tensor = stage.group, stage.tensor()
    expected = Expected(group.size, sum(range(group.size)))
    # sums of sums would end at infinity
    return Call(lambda: [group.all_reduce(tensor, "sum").wait()], [expected], tensor.zero_)


def _broadcast(stage: Stage) -> Call:
    group, tensor = stage.group, stage.tensor()
    return Call(lambda: [group.broadcast(tensor).wait()], [Expected(1, 0)])


def _all_gather(stage: Stage) -> Call:
    group, tensor = stage.group, stage.tensor()
    return Call(lambda: group.all_gather(tensor).wait(), [Expected(1, rank) for rank in range(group.size)])


def _exchange(stage: Stage) -> Call:
    """With the group's own memory from one buffer into another and back, as strategies do; else in place."""
    group = stage.group
    weights = Weights.uniform(stage.neighbours()[group.rank])
    expected = [Expected.average(weights, group.rank)]
    if not stage.has_own_memory:
        tensor = stage.tensor()
        return Call(lambda: [group.exchange(tensor, weights).wait()], expected)
    buffers = [stage.tensor(), stage.tensor()]

    def run() -> list[torch.Tensor]:
        group.exchange(buffers[0], weights, out=buffers[1]).wait()
        buffers.reverse()
        return buffers[:1]

    return Call(run, expected)


def _pair_gossip(stage: Stage) -> Call:
    group, tensor = stage.group, stage.tensor()
    partner = stage.partners()[group.rank]
    expected = Expected.average(Weights.uniform([partner]), group.rank)
    return Call(lambda: [pair_gossip(group, tensor, partner).wait()], [expected])


def _publish_fetch(stage: Stage) -> Call:
    """Publish one's own, and copy the partner's newest."""
    copy = stage.foreign()
    return _publish(
        stage, lambda _, theirs: copy.copy_(theirs), Expected(1, stage.partners()[stage.group.rank])
    )


def _publish_mix(stage: Stage) -> Call:
    """Publish one's own, and average it with the partner's newest, as pair averaging does."""
    mixed, rank = stage.foreign(), stage.group.rank
    expected = Expected.average(Weights.uniform([stage.partners()[rank]]), rank)
    return _publish(stage, lambda own, theirs: torch.lerp(own, theirs, 0.5, out=mixed), expected)


def _publish(
    stage: Stage, take: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], expected: Expected
) -> Call:
    """Publish one's own, then `take` it and the partner's newest; what is foreign is copied first."""
    group, name = stage.group, "own" if stage.has_own_memory else "foreign"
    tensor = stage.tensor()
    buffers = [stage.shared().copy_(tensor), stage.shared().copy_(tensor)]
    partner = stage.partners()[group.rank]
    newest = next(stage.versions)
    window = stage.window(name)
    window.publish(buffers[0], newest)
    group.barrier().wait()

    def run() -> list[torch.Tensor]:
        nonlocal newest
        window.reclaim(newest - 1)
        newest = next(stage.versions)
        buffers.reverse()
        if not stage.has_own_memory:
            buffers[0].copy_(tensor)
        window.publish(buffers[0], newest)
        for _ in range(_TRIES):
            snapshot = window.fetch(partner).wait()
            if snapshot is not None:
                taken = take(tensor, snapshot.tensor)
                if snapshot.is_intact():
                    return [taken]
        raise BenchmarkError(f"{_TRIES} snapshots of rank {partner} changed while they were read.")

    return Call(run, [expected])


SHOAL: dict[str, Callable[[Stage], Call]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "exchange": _exchange,
    "pair_gossip": _pair_gossip,
    "publish_fetch": _publish_fetch,
    "publish_mix": _publish_mix,
    "barrier": lambda stage: Call(_filling([], lambda: stage.group.barrier().wait())),
}


# --- gloo ---


def _gloo_all_reduce(stage: Stage) -> Call:
    tensor, size = stage.tensor(), stage.group.size
    run = _filling([tensor], lambda: distributed.all_reduce(tensor))
    return Call(run, [Expected(size, sum(range(size)))], tensor.zero_)


def _gloo_broadcast(stage: Stage) -> Call:
    tensor = stage.tensor()
    return Call(_filling([tensor], lambda: distributed.broadcast(tensor, 0)), [Expected(1, 0)])


def _gloo_all_gather(stage: Stage) -> Call:
    tensor, ranks = stage.tensor(), range(stage.group.size)
    parts = [torch.empty_like(tensor) for _ in ranks]
    run = _filling(parts, lambda: distributed.all_gather(parts, tensor))
    return Call(run, [Expected(1, rank) for rank in ranks])


def _average(stage: Stage, heard: list[list[int]]) -> Call:
    """The uniform average with those whom each rank hears, out of messages between two."""
    rank, tensor = stage.group.rank, stage.tensor()
    weights = Weights.uniform(heard[rank])
    average = torch.empty_like(tensor)
    sent = _for_messages(tensor)
    received = {peer: _for_messages(torch.empty_like(tensor)) for peer in weights.sources}
    messages = [
        distributed.P2POp(distributed.isend, sent, peer)
        for peer, sources in enumerate(heard)
        if rank in sources
    ]
    messages += [distributed.P2POp(distributed.irecv, buffer, peer) for peer, buffer in received.items()]

    def run() -> list[torch.Tensor]:
        if sent is not tensor:
            # waits for the GPU, so that it has also read all that was received by the call before
            sent.copy_(tensor)
        for message in distributed.batch_isend_irecv(messages):
            message.wait()
        torch.mul(tensor, weights.own, out=average)
        for peer, weight in weights.sources.items():
            average.add_(received[peer].to(average.device, non_blocking=True), alpha=weight)
        return [average]

    return Call(run, [Expected.average(weights, rank)])


def _for_messages(tensor: torch.Tensor) -> torch.Tensor:
    """What gloo sends or receives for the tensor: itself, or pinned memory of the CPU for one of a GPU."""
    return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu", pin_memory=True)


GLOO_CALLS: dict[str, Callable[[Stage], Call]] = {
    "all_reduce": _gloo_all_reduce,
    "broadcast": _gloo_broadcast,
    "all_gather": _gloo_all_gather,
    "exchange": lambda stage: _average(stage, stage.neighbours()),
    "pair_gossip": lambda stage: _average(stage, [[partner] for partner in stage.partners()]),
    "barrier": lambda _: Call(_filling([], distributed.barrier)),
}
