"""How the tensors of two replicas meet half-way, piece by piece, and what is said in their channel.

One side sends what it has; the other sets itself to the mean and answers with it; the first moves by as much
as the mean differs from what it had sent. Updates that it made meanwhile are kept, and the mean of the two is
what it was. `average` and `copy_state` are the caller's side, `answer_average` and `answer_state` the other.
Parts are exchanged one by one, so that neither side holds more than one of them and the device is never kept
for long. Who may meet whom, and when, is `replicas`' to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch

from shoal.core import DeadlineExceeded, LimitExceeded, Peer, PeerError, TensorError, UsageError
from shoal.experts.state import APPLIED_IDS, ExpertState, cpu_copy
from shoal.tensors import TensorLimits, TensorSpec, check, describe, pack, size_bytes, unpack
from shoal.tensors.dtypes import dtype_name, dtype_named
from shoal.transport import Channel, Reply

if TYPE_CHECKING:
    from shoal.experts.expert import Expert

T = TypeVar("T")


ITEM_S = 60.0
"""How long either side waits for the other's next part."""
_STATE_TO_MODULE = 8  # no optimizer keeps more than a few tensors for each of the module's
_SLACK_BYTES = 1 << 20


class OnDevice(Protocol):
    """Runs blocking code between two batches: `ExpertServer.on_device`."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """What the work returns."""


class StateHead(msgspec.Struct, frozen=True, array_like=True):
    """What a state consists of; its tensors follow in parts."""

    is_newcomer: bool
    """Then nothing follows."""
    specs: dict[str, TensorSpec] = {}
    numbers: dict[str, Any] = {}


async def average(expert: Expert, peer: Peer, channel: Channel, on_device: OnDevice) -> None:
    """Meet the other replica half-way; PeerError that names it when it gives what is not to be used."""
    tensors = await on_device(expert.parameters_and_buffers)
    for part in plan(tensors):
        sent = await on_device(functools.partial(take, tensors, part))
        await channel.send(part, pack(sent)[1])
        item = await _next(channel)
        with _blaming(expert, peer):
            answered, means = _read(item)
            if answered != part:
                raise TensorError("it answers with other pieces than it was sent")
            await on_device(functools.partial(_move_to_mean, expert, tensors, part, sent, means))
    await channel.end()
    await channel.result()


async def answer_average(expert: Expert, channel: Channel, on_device: OnDevice) -> None:
    """Meet whoever asks half-way; TensorError when it sends what is not to be used."""
    tensors = await on_device(expert.parameters_and_buffers)
    while (item := await _next(channel)) is not None:
        part, theirs = _read(item)
        means = await on_device(functools.partial(_meet_half_way, expert, tensors, part, theirs))
        await channel.send(part, pack(means)[1])


async def copy_state(expert: Expert, peer: Peer, channel: Channel, on_device: OnDevice) -> list[str] | None:
    """Become a copy of the other replica; warnings of what it lacks, or None when it is a newcomer itself.

    Weights and what the optimizer has learned are copied; how fast it learns stays this expert's own. Nothing
    is changed before all of it is here. PeerError that names the peer when it is not to be used.
    """
    await channel.end()
    own = await on_device(expert.parameters_and_buffers)
    item = await _next(channel)
    with _blaming(expert, peer):
        head = _convert(item, StateHead)
        if head.is_newcomer:
            return None
        tensors = _room_for(head.specs, own)
    num_bytes = 0
    while (item := await _next(channel)) is not None:
        with _blaming(expert, peer):
            part, given = _read(item)
            fill(tensors, part, given)
            num_bytes += sum(map(_num_bytes, given))
    with _blaming(expert, peer):
        if num_bytes != sum(map(_num_bytes, tensors.values())):
            raise TensorError("it is not whole")
        state = ExpertState(tensors, head.numbers)
        return await on_device(functools.partial(_load, expert, own, state))


async def answer_state(expert: Expert, channel: Channel, on_device: OnDevice) -> None:
    """Send the expert's state to whoever asks."""
    state = await on_device(expert.state)
    tensors = {name: tensor for name, tensor in state.tensors.items() if name != APPLIED_IDS}
    specs = {name: describe(tensor) for name, tensor in tensors.items()}
    await channel.send(StateHead(is_newcomer=False, specs=specs, numbers=state.numbers))
    for part in plan(tensors):
        await channel.send(part, pack(take(tensors, part))[1])


def _move_to_mean(
    expert: Expert,
    tensors: Tensors,
    part: Part,
    sent: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
) -> None:
    move(tensors, part, sent, means)
    expert.num_changes += 1


def _meet_half_way(
    expert: Expert, tensors: Tensors, part: Part, theirs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    means = meet(tensors, part, theirs)
    expert.num_changes += 1
    return means


def _room_for(specs: dict[str, TensorSpec], own: Tensors) -> dict[str, torch.Tensor]:
    """Memory for a state that a peer announces; LimitExceeded when this expert could not have such a one."""
    module_bytes = sum(map(_num_bytes, own.values()))
    limits = TensorLimits(max_bytes=_STATE_TO_MODULE * module_bytes + _SLACK_BYTES)
    check(list(specs.values()), [size_bytes(spec) for spec in specs.values()], limits)
    return {name: torch.empty(spec.shape, dtype=dtype_named(spec.dtype)) for name, spec in specs.items()}


def _load(expert: Expert, own: Tensors, state: ExpertState) -> list[str]:
    for name, mine in own.items():
        given = state.tensors.get(f"module.{name}")
        if given is not None and given.shape == mine.shape:  # the others are `load`'s to refuse
            check_finite(name, given.to(mine.device), mine)
    try:
        return expert.load(state, keeps_settings=True)
    except UsageError as error:
        raise TensorError(error.what, cause=error.cause) from error
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError) as error:
        raise TensorError(f"it cannot be loaded: {error}") from error


async def _next(channel: Channel) -> Reply | None:
    try:
        async with asyncio.timeout(ITEM_S):
            return await channel.receive()
    except TimeoutError:
        raise DeadlineExceeded("the other replica fell silent.") from None


def _read(item: Reply | None) -> tuple[Part, list[torch.Tensor]]:
    part = _convert(item, Part)
    assert item is not None
    return part, unpack([piece.spec for piece in part], item.buffers)


def _convert(item: Reply | None, kind: type[T]) -> T:
    if item is None:
        raise TensorError("it ends before all has come")
    try:
        return msgspec.convert(item.payload, kind)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise TensorError(f"it cannot be read: {error}") from None


@contextlib.contextmanager
def _blaming(expert: Expert, peer: Peer) -> Iterator[None]:
    """What is wrong with an answer is said with the name of who gave it."""
    try:
        yield
    except (TensorError, LimitExceeded) as error:
        raise PeerError(
            f"What {peer} gives as a replica of {expert.uid} is not to be used: {error.what}",
            peer=peer,
            cause=error.cause or "a broken or hostile replica.",
            next_step="leave it out with the deny-list, or have it serve the same model.",
        ) from error


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


PART_BYTES = 16 << 20
"""What is sent at once: much less than a message may have, so that the device is soon free again."""
_NUM_IN_A_PART = 4096

Tensors = Mapping[str, torch.Tensor]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of a tensor, or all of it."""

    name: str
    start: int
    """The first of the rows, which are along the first dimension."""
    spec: TensorSpec


Part = tuple[Piece, ...]


def plan(tensors: Tensors, max_bytes: int = PART_BYTES) -> list[Part]:
    """All tensors cut into parts of at most so many bytes; a single row may be larger."""
    parts: list[Part] = []
    open_part: list[Piece] = []
    room_bytes = max_bytes
    for name, tensor in tensors.items():
        for piece, piece_bytes in _pieces(name, tensor, max_bytes):
            if open_part and (piece_bytes > room_bytes or len(open_part) == _NUM_IN_A_PART):
                parts.append(tuple(open_part))
                open_part, room_bytes = [], max_bytes
            open_part.append(piece)
            room_bytes -= piece_bytes
    if open_part:
        parts.append(tuple(open_part))
    return parts


def take(tensors: Tensors, part: Part) -> list[torch.Tensor]:
    """Copies of these pieces in the CPU's memory."""
    return [cpu_copy(_rows(tensors, piece)) for piece in part]


@torch.no_grad()
def meet(tensors: Tensors, part: Part, theirs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Set these pieces to the mean of what they are and what `theirs` are; the mean, in the CPU's memory.

    TensorError, and nothing is changed, when they are not pieces of the same tensors or not finite.
    """
    check_shapes(tensors, part, theirs)
    rows = [_rows(tensors, piece) for piece in part]
    means = [_mean(mine, other.to(mine.device)) for mine, other in zip(rows, theirs, strict=True)]
    for piece, mine, mean in zip(part, rows, means, strict=True):
        check_finite(piece.name, mean, mine)
    for mine, mean in zip(rows, means, strict=True):
        mine.copy_(mean)
    return [cpu_copy(mean) for mean in means]


@torch.no_grad()
def move(tensors: Tensors, part: Part, sent: Sequence[torch.Tensor], means: Sequence[torch.Tensor]) -> None:
    """Bring these pieces, which were `sent` and may have changed since, to the mean.

    TensorError, and nothing is changed, when it cannot be their mean.
    """
    check_shapes(tensors, part, means)
    for piece, old, mean in zip(part, sent, means, strict=True):
        check_finite(piece.name, mean, old)
    for piece, old, mean in zip(part, sent, means, strict=True):
        now = _rows(tensors, piece)
        before, after = old.to(now.device), mean.to(now.device)
        # by itself the sum would differ from the mean in the last bit, and replicas would never be equal
        now.copy_(torch.where(now == before, after, now + (after - before)))


@torch.no_grad()
def fill(tensors: Tensors, part: Part, given: Sequence[torch.Tensor]) -> None:
    """Write these pieces; TensorError when they are not pieces of the tensors."""
    check_shapes(tensors, part, given)
    for piece, tensor in zip(part, given, strict=True):
        _rows(tensors, piece).copy_(tensor)


def check_shapes(tensors: Tensors, part: Part, given: Sequence[torch.Tensor]) -> None:
    """TensorError when what another replica has given is not these pieces."""
    for piece, tensor in zip(part, given, strict=True):
        mine = _rows(tensors, piece)
        if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
            raise TensorError(
                f"{piece.name[:100]!r} is {dtype_name(tensor.dtype)}{list(tensor.shape)}, "
                f"not {dtype_name(mine.dtype)}{list(mine.shape)}",
                cause="replicas of one expert run different models.",
            )


def check_finite(name: str, given: torch.Tensor, own: torch.Tensor) -> None:
    """TensorError when a tensor is not finite; what was infinite before, as masks are, may stay so."""
    if not (given.isfinite() | (given == own)).all():
        raise TensorError(f"{name[:100]!r} is not finite", cause="a broken or hostile replica.")


def _pieces(name: str, tensor: torch.Tensor, max_bytes: int) -> list[tuple[Piece, int]]:
    size_bytes = tensor.numel() * tensor.element_size()
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if size_bytes <= max_bytes or not shape or shape[0] < 2:
        return [(Piece(name, 0, TensorSpec(dtype, shape)), size_bytes)]
    row_bytes = size_bytes // shape[0]
    num_rows = max(1, max_bytes // row_bytes)
    pieces = []
    for start in range(0, shape[0], num_rows):
        num = min(num_rows, shape[0] - start)
        pieces.append((Piece(name, start, TensorSpec(dtype, (num, *shape[1:]))), num * row_bytes))
    return pieces


def _rows(tensors: Tensors, piece: Piece) -> torch.Tensor:
    """The piece itself, to be read or written to; TensorError when there is no such piece."""
    tensor = tensors.get(piece.name)
    if tensor is None:
        raise TensorError(
            f"there is no tensor {piece.name[:100]!r}", cause="replicas of one expert run different models."
        )
    shape = piece.spec.shape
    if tensor.dim() == 0 or (piece.start == 0 and shape == tuple(tensor.shape)):
        return tensor
    num_rows = shape[0] if shape else 0
    if piece.start < 0 or num_rows < 1 or piece.start + num_rows > tensor.shape[0]:
        raise TensorError(f"{piece.name[:100]!r} has {tensor.shape[0]} rows, and not those that were sent")
    return tensor.narrow(0, piece.start, num_rows)


def _mean(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    wide = mine.dtype if mine.dtype.itemsize >= 4 else torch.float32
    mean = torch.lerp(mine.to(wide), theirs.to(wide), 0.5).to(mine.dtype)
    return torch.where(mine == theirs, mine, mean)
