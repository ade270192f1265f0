"""Values, states and outcomes that members of a group tell each other: functions over the interface."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from shoal.core.errors import CheckpointError, ShoalError, UsageError
from shoal.group.base import Group, Window, WindowSlot
from shoal.group.functions import share
from shoal.tensors.buckets import packed
from shoal.tensors.checkpoint import SentState, rebuild

PIECE_BYTES = 2**20
"""The size of the pieces in which a state goes through a window."""
Fail = Callable[[str], ShoalError]


def take_values(group: Group, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Copies the values of `root` into equal tensors; of DTensors its part. Collective."""
    for bucket, mine in packed([tensor.detach() for tensor in tensors]):
        group.broadcast(bucket.flat.view(torch.uint8), root).wait()
        if group.rank != root:
            bucket.store(mine)


def take_state(group: Group, make: Callable[[], Any], root: int = 0) -> Any:
    """Gives all members the state that `make` returns on `root`, where alone it is called.

    A state has numbers, texts, tensors, lists and dicts. Collective; UsageError on all when it has others.
    """
    sent, tensors = SentState.of(make) if group.rank == root else (SentState(), {})
    sent = msgspec.convert(share(group, sent)[list(group.members).index(root)], SentState)
    if sent.problem:
        raise UsageError(
            f"what rank {root} has cannot be given to the others: {sent.problem}",
            next_step="load the same checkpoint on all workers, and attach(..., should_start_equal=False).",
        )
    if group.rank != root:
        tensors = sent.room()
    take_values(group, list(tensors.values()), root)
    return rebuild(sent.plain, tensors)


def send_state(window: Window, to: int, state: Any) -> None:
    """Sends a state; returns when `to` has it, or is gone. What cannot travel is the receiver's error."""
    head, tensors = SentState.of(lambda: state)
    piece = torch.zeros(PIECE_BYTES, dtype=torch.uint8)

    def send(message: torch.Tensor) -> None:
        for part in torch.split(message, PIECE_BYTES):
            piece[: part.numel()] = part
            window.send(to, piece, note=b"%d" % message.numel()).wait()

    send(torch.frombuffer(bytearray(msgspec.msgpack.encode(head)), dtype=torch.uint8))
    for bucket, _ in packed(list(tensors.values())):
        send(bucket.flat.view(torch.uint8))


def receive_state(next_slot: Callable[[], contextlib.AbstractContextManager[WindowSlot]]) -> Any:
    """Receives what `send_state` sent, slot by slot; CheckpointError when that was not possible."""

    def receive() -> torch.Tensor:
        message: torch.Tensor | None = None
        num_bytes = 0
        while message is None or num_bytes < message.numel():
            with next_slot() as slot:
                if message is None:
                    message = torch.empty(int(slot.note), dtype=torch.uint8)
                part = message[num_bytes : num_bytes + PIECE_BYTES]
                part.copy_(slot.tensor[: part.numel()])
                num_bytes += part.numel()
        return message

    head = msgspec.msgpack.decode(receive().numpy().data, type=SentState)
    if head.problem:
        raise CheckpointError(f"a server's state cannot be had: {head.problem}")
    tensors = head.room()
    for bucket, members in packed(list(tensors.values())):
        bucket.flat.view(torch.uint8).copy_(receive())
        bucket.store(members)
    return rebuild(head.plain, tensors)


def agree(group: Group, act: Callable[[], Any], fail: Fail = CheckpointError) -> dict[int, Any]:
    """Acts, and returns what that gives on each member, by rank; where one fails, all raise. Collective."""
    value, problem = None, ""
    try:
        value = act()
    except ShoalError as error:
        problem = error.what
    except OSError as error:
        problem = f"{error.strerror or error}"
    said = {rank: theirs for rank, *theirs in share(group, [group.rank, value, problem])}
    for rank, (_, trouble) in said.items():
        if trouble:
            raise fail(f"{trouble} (rank {rank})")
    return {rank: theirs for rank, (theirs, _) in said.items()}


def on_first(group: Group, first: int, act: Callable[[], Any], fail: Fail = CheckpointError) -> Any:
    """Acts on the first member alone, and returns on all what that gives; where it fails, all raise."""
    said = agree(group, lambda: act() if group.rank == first else None, fail)
    if first not in said:
        raise fail(f"rank {first} was lost")
    return said[first]
