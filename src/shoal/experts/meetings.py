"""What two replicas of an expert say to each other inside a channel, each side of it.

`average` and `copy_state` are the caller's side, `answer_average` and `answer_state` the other. Parts are
exchanged one by one, so that neither side holds more than one of them and the device is never kept for
long. Who may meet whom, and when, is `replicas`' to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import torch

from shoal.core import DeadlineExceeded, LimitExceeded, Peer, PeerError, TensorError, UsageError
from shoal.experts import averaging
from shoal.experts.averaging import Part
from shoal.experts.state import APPLIED_IDS, ExpertState
from shoal.tensors import TensorLimits, TensorSpec, check, describe, pack, size_bytes, unpack
from shoal.tensors.dtypes import dtype_named
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
    for part in averaging.plan(tensors):
        sent = await on_device(functools.partial(averaging.take, tensors, part))
        await channel.send(part, pack(sent)[1])
        item = await _next(channel)
        with _blaming(expert, peer):
            answered, means = _read(item)
            if answered != part:
                raise TensorError("it answers with other pieces than it was sent")
            await on_device(functools.partial(_move, expert, tensors, part, sent, means))
    await channel.end()
    await channel.result()


async def answer_average(expert: Expert, channel: Channel, on_device: OnDevice) -> None:
    """Meet whoever asks half-way; TensorError when it sends what is not to be used."""
    tensors = await on_device(expert.parameters_and_buffers)
    while (item := await _next(channel)) is not None:
        part, theirs = _read(item)
        means = await on_device(functools.partial(_meet, expert, tensors, part, theirs))
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
            averaging.fill(tensors, part, given)
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
    for part in averaging.plan(tensors):
        await channel.send(part, pack(averaging.take(tensors, part))[1])


def _move(
    expert: Expert,
    tensors: averaging.Tensors,
    part: Part,
    sent: Sequence[torch.Tensor],
    means: Sequence[torch.Tensor],
) -> None:
    averaging.move(tensors, part, sent, means)
    expert.num_changes += 1


def _meet(
    expert: Expert, tensors: averaging.Tensors, part: Part, theirs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    means = averaging.meet(tensors, part, theirs)
    expert.num_changes += 1
    return means


def _room_for(specs: dict[str, TensorSpec], own: averaging.Tensors) -> dict[str, torch.Tensor]:
    """Memory for a state that a peer announces; LimitExceeded when this expert could not have such a one."""
    module_bytes = sum(map(_num_bytes, own.values()))
    limits = TensorLimits(max_bytes=_STATE_TO_MODULE * module_bytes + _SLACK_BYTES)
    check(list(specs.values()), [size_bytes(spec) for spec in specs.values()], limits)
    return {name: torch.empty(spec.shape, dtype=dtype_named(spec.dtype)) for name, spec in specs.items()}


def _load(expert: Expert, own: averaging.Tensors, state: ExpertState) -> list[str]:
    for name, mine in own.items():
        given = state.tensors.get(f"module.{name}")
        if given is not None and given.shape == mine.shape:  # the others are `load`'s to refuse
            averaging.check_finite(name, given.to(mine.device), mine)
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
