"""What workers and servers know of the optimizer: its numbers, its state, and the model that all begin with.

The numbers of its groups (lr, momentum, betas) go with each push, so that a schedule on the worker counts on
the servers. Its state lies with the servers, each of which keeps that of its own shards; the worker that
writes a checkpoint takes it from there, piece by piece, and no other has a part in that: at the end workers
leave one by one.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from shoal.core.errors import CheckpointError, ShoalError, UsageError
from shoal.group import Group, Slot, Window, share
from shoal.strategies.averaging import packed
from shoal.strategies.session import TrainingSession
from shoal.strategies.start import require_equal, take_state, take_values
from shoal.tensors import DTYPES, TensorSpec, describe, size_bytes
from shoal.tensors.checkpoint import flatten, rebuild
from shoal.tensors.packing import reshape_dense

PIECE_BYTES = 2**20
"""The size of the pieces in which a server sends its state."""
_SIZE = struct.Struct("<q")


class OptimizerNumbers:
    """The numbers of an optimizer's groups, in an order that is the same wherever it was built alike.

    What is no number (nesterov, foreach) stays as it was at attach.
    """

    names: list[tuple[int, str, int | None]]
    """For each number its group, its name, and the position in a tuple if it is in one."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._groups = optimizer.param_groups
        self.names = [
            (number, name, position)
            for number, group in enumerate(optimizer.param_groups)
            for name in sorted(group)
            if name != "params"
            for position in _positions(group[name])
        ]
        self._last: list[float] | None = None

    def read(self, rate_factor: float = 1.0) -> list[float]:
        """Gives the numbers as they are now, learning rates times a factor."""
        read = []
        for number, name, position in self.names:
            value = self._groups[number][name]
            value = float(value if position is None else value[position])
            read.append(value * (rate_factor if name == "lr" else 1.0))
        return read

    def write(self, values: Sequence[float], rate_factor: float = 1.0) -> None:
        """Makes the numbers what they were elsewhere; nearly free when they are that already."""
        places = zip(values, self.names, strict=True)
        values = [value * (rate_factor if name == "lr" else 1.0) for value, (_, name, _) in places]
        if values == self._last:
            return
        self._last = values
        for value, (number, name, position) in zip(values, self.names, strict=True):
            group = self._groups[number]
            if position is None:
                group[name] = _replaced(group[name], value)
            else:
                parts = list(group[name])
                parts[position] = _replaced(parts[position], value)
                group[name] = type(group[name])(parts)


def _positions(value: Any) -> Sequence[int | None]:
    """Finds the numbers in a value; None stands for the value itself."""
    if isinstance(value, list | tuple):
        return [place for place, part in enumerate(value) if _is_number(part)]
    return [None] if _is_number(value) else []


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)


def _replaced(value: Any, number: float) -> Any:
    """Gives the number in the type of the value that it replaces."""
    if isinstance(value, torch.Tensor):
        return value.fill_(number)
    return int(number) if isinstance(value, int) and number.is_integer() else number


# --- the start ---


def take_first_worker(group: Group, root: int, session: TrainingSession) -> bool:
    """Makes parameters, buffers, and the optimizer's settings and state of rank `root` everybody's.

    Where its optimizer has no state, others keep theirs. UsageError on all when one is of another kind. Tells
    whether all members have their models on GPUs.
    """
    require_equal(group, session.named_tensors)
    take_values(group, list(session.named_tensors.values()), root)
    optimizer = session.optimizer
    shape = [sorted(optimizer.defaults), [len(part["params"]) for part in optimizer.param_groups]]
    has_state, is_on_device = any(optimizer.state.values()), session.device.type != "cpu"
    everybody = share(group, [has_state + 2 * is_on_device, shape])
    for rank, (_, theirs) in zip(group.members, everybody, strict=True):
        if theirs != everybody[0][1]:
            raise UsageError(
                f"rank {rank} of workers and servers has another optimizer than rank {group.members[0]}.",
                next_step="build the same one, with the same groups of parameters, on all.",
            )
    flags = {rank: flag for rank, (flag, _) in zip(group.members, everybody, strict=True)}
    if flags[root] & 1:
        state = take_state(group, optimizer.state_dict, root)
        if group.rank != root:
            optimizer.load_state_dict(state)
    else:
        settings = take_state(group, lambda: [_settings(each) for each in optimizer.param_groups], root)
        if group.rank != root:
            for mine, first in zip(optimizer.param_groups, settings, strict=True):
                mine.update(first)
    return all(flag & 2 for flag in flags.values())


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Gives those settings of an optimizer's group that can be sent."""
    settings = {}
    for name, value in group.items():
        try:
            flatten(value)
        except UsageError:
            continue
        if name != "params":
            settings[name] = value
    return settings


# --- checkpoints ---


def merge_states(optimizer: Optimizer, states: Iterable[Mapping[int, Any]]) -> dict[str, Any]:
    """Makes one `state_dict` of the servers' states; settings are one's own."""
    # each has state for its own shards alone, by positions among all parameters
    merged = {position: kept for state in states for position, kept in state.items()}
    return {**optimizer.state_dict(), "state": merged}


class _Head(msgspec.Struct, array_like=True):
    """Describes a state before its tensors come."""

    plain: Any = None
    names: list[str] = []
    specs: list[TensorSpec] = []
    problem: str = ""


def send_state(window: Window, to: int, state: Any) -> None:
    """Sends a state; returns when `to` has it, or is gone. What cannot travel is the receiver's error."""
    try:
        plain, tensors = flatten(state)
        head = _Head(plain, list(tensors), [describe(tensor) for tensor in tensors.values()])
    except ShoalError as error:
        tensors, head = {}, _Head(problem=error.what)
    piece = torch.zeros(PIECE_BYTES, dtype=torch.uint8)

    def send(message: torch.Tensor) -> None:
        for part in torch.split(message, PIECE_BYTES):
            piece[: part.numel()] = part
            window.send(to, piece, note=_SIZE.pack(message.numel())).wait()

    send(torch.frombuffer(bytearray(msgspec.msgpack.encode(head)), dtype=torch.uint8))
    for bucket, _ in packed(list(tensors.values())):
        send(bucket.flat.view(torch.uint8))


def receive_state(next_slot: Callable[[], contextlib.AbstractContextManager[Slot]]) -> Any:
    """Receives what `send_state` sent, slot by slot; CheckpointError when that was not possible."""

    def receive() -> torch.Tensor:
        message: torch.Tensor | None = None
        num_bytes = 0
        while message is None or num_bytes < message.numel():
            with next_slot() as slot:
                if message is None:
                    message = torch.empty(*_SIZE.unpack(slot.note), dtype=torch.uint8)
                part = message[num_bytes : num_bytes + PIECE_BYTES]
                part.copy_(slot.tensor[: part.numel()])
                num_bytes += part.numel()
        return message

    head = msgspec.msgpack.decode(receive().numpy().data, type=_Head)
    if head.problem:
        raise CheckpointError(f"a server's state cannot be had: {head.problem}")
    tensors = {name: _empty(spec) for name, spec in zip(head.names, head.specs, strict=True)}
    for bucket, members in packed(list(tensors.values())):
        bucket.flat.view(torch.uint8).copy_(receive())
        bucket.store(members)
    return rebuild(head.plain, tensors)


def _empty(spec: TensorSpec) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    return reshape_dense(torch.empty(size_bytes(spec) // dtype.itemsize, dtype=dtype), spec)
