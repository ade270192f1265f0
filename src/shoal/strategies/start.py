"""The consistent start: the same tensors on all members, with the values of rank 0.

Optimizers are left to `optimizers`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import torch

from shoal.core.errors import ShoalError, UsageError
from shoal.group import Group, share
from shoal.strategies.averaging import packed
from shoal.tensors import DTYPES, TensorSpec, describe, size_bytes
from shoal.tensors.checkpoint import flatten, rebuild
from shoal.tensors.packing import reshape_dense


def take_values(group: Group, tensors: Sequence[torch.Tensor], root: int = 0) -> None:
    """Those of `root`, into tensors of the same shapes and dtypes. Collective."""
    for bucket, mine in packed([tensor.detach() for tensor in tensors]):
        group.broadcast(bucket.flat.view(torch.uint8), root).wait()
        if group.rank != root:
            bucket.store(mine)


def take_state(group: Group, make: Callable[[], Any], root: int = 0) -> Any:
    """Gives all members the state that `make` returns on `root`, where alone it is called.

    A state has numbers, texts, tensors, lists and dicts. Collective; UsageError on all when it has others.
    """
    sent = _SentState(None, [], [])
    tensors: dict[str, torch.Tensor] = {}
    if group.rank == root:
        try:
            sent.plain, tensors = flatten(make())
            sent.names = list(tensors)
            sent.specs = [describe(tensor) for tensor in tensors.values()]
        except ShoalError as error:
            sent.problem = error.what
    sent = msgspec.convert(share(group, sent)[list(group.members).index(root)], _SentState)
    if sent.problem:
        raise UsageError(
            f"what rank {root} has cannot be given to the others: {sent.problem}",
            next_step="load the same checkpoint on all workers, and attach(..., should_start_equal=False).",
        )
    if group.rank != root:
        tensors = dict(zip(sent.names, map(_empty, sent.specs), strict=True))
    take_values(group, list(tensors.values()), root)
    return rebuild(sent.plain, tensors)


def require_equal(group: Group, tensors: Mapping[str, torch.Tensor]) -> None:
    """UsageError, on all members, when what they hold differs in more than values; names the first tensor."""
    mine = [
        [name, str(tensor.dtype), list(tensor.shape), tensor.requires_grad]
        for name, tensor in tensors.items()
    ]
    digests = share(group, hashlib.sha256(msgspec.msgpack.encode(mine)).digest())
    if len({*digests}) == 1:
        return
    ranks = group.members
    everybody = share(group, mine)
    for rank, theirs in zip(ranks, everybody, strict=True):
        for first, other in zip_longest(everybody[0], theirs):
            if first != other:
                raise UsageError(
                    f"rank {rank} has {_words(other)} where rank {ranks[0]} has {_words(first)}.",
                    cause="the model is built in another way there (another number of classes, other "
                    "layers frozen, another version of the code).",
                    next_step="build the same model on all workers; values may differ, rank 0's are taken.",
                )


def require_same_count(group: Group, strategy: str, steps: int, rounds: int) -> None:
    """UsageError, on all members, when they have not done equally many: they would share at other times."""
    ranks = group.members
    everybody = share(group, [steps, rounds])
    for rank, theirs in zip(ranks, everybody, strict=True):
        if theirs != everybody[0]:
            (steps, rounds), (first_steps, first_rounds) = theirs, everybody[0]
            raise UsageError(
                f"{strategy} on rank {rank} has done {steps} steps and {rounds} rounds, on rank {ranks[0]} "
                f"{first_steps} and {first_rounds}.",
                cause="a state of the strategy was loaded on some workers only, or is of another time.",
                next_step="load the state of one checkpoint on all workers.",
            )


class _SentState(msgspec.Struct, array_like=True):
    plain: Any
    names: list[str]
    specs: list[TensorSpec]
    problem: str = ""


def _empty(spec: TensorSpec) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    return reshape_dense(torch.empty(size_bytes(spec) // dtype.itemsize, dtype=dtype), spec)


def _words(entry: list[object] | None) -> str:
    if entry is None:
        return "no tensor"
    name, dtype, shape, is_trainable = entry
    kind = str(dtype).removeprefix("torch.")
    return f"{name} ({kind}, shape {shape}, {'trainable' if is_trainable else 'not trainable'})"
