"""What torch.distributed over gloo has to set beside the operations of a group; it has nothing one-sided.

Its collectives take tensors of a GPU. Its messages between two don't, so that they go through memory of the
CPU, as a program would have to send them.
"""

from __future__ import annotations

import torch
from torch import distributed

from shoal.bench.collective_calls import Call, Expected, Stage
from shoal.topology.weights import Weights


def _all_reduce(stage: Stage) -> Call:
    tensor, size = stage.tensor(), stage.group.size

    def run() -> list[torch.Tensor]:
        distributed.all_reduce(tensor)
        return [tensor]

    return Call(run, [Expected(size, sum(range(size)))], tensor.zero_)


def _broadcast(stage: Stage) -> Call:
    tensor = stage.tensor()

    def run() -> list[torch.Tensor]:
        distributed.broadcast(tensor, 0)
        return [tensor]

    return Call(run, [Expected(1, 0)])


def _all_gather(stage: Stage) -> Call:
    tensor, ranks = stage.tensor(), range(stage.group.size)
    parts = [torch.empty_like(tensor) for _ in ranks]

    def run() -> list[torch.Tensor]:
        distributed.all_gather(parts, tensor)
        return parts

    return Call(run, [Expected(1, rank) for rank in ranks])


def _exchange(stage: Stage) -> Call:
    return _average(stage, stage.neighbours())


def _pair_gossip(stage: Stage) -> Call:
    return _average(stage, [[partner] for partner in stage.partners()])


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


def _barrier(stage: Stage) -> Call:
    def run() -> list[torch.Tensor]:
        distributed.barrier()
        return []

    return Call(run)


GLOO_CALLS = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "exchange": _exchange,
    "pair_gossip": _pair_gossip,
    "barrier": _barrier,
}
