"""Optimizers at the start: built alike on all members, and with rank 0's state where that has any.

So a checkpoint that only rank 0 has loaded is everybody's. State goes by the order of the parameters in the
optimizer, which is compared by name; schedulers are no part of it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.optim import Optimizer

from shoal.core.errors import ShoalError, UsageError
from shoal.group import Group
from shoal.strategies.start import take_values
from shoal.tensors import DTYPES, TensorSpec, describe, size_bytes
from shoal.tensors.packing import reshape_dense

log = logging.getLogger(__name__)


class Account(msgspec.Struct, array_like=True):
    """What one member says of its optimizer."""

    names: bytes
    """A digest of the parameters' names, group by group."""
    settings: list[dict[str, Any]]
    """Of each group: lr, momentum and so on."""
    has_state: bool


def start_optimizers(
    group: Group,
    optimizer: Optimizer,
    named: Mapping[str, torch.Tensor],
    *,
    should_take_state: bool,
    must_be_equal: bool,
) -> None:
    """Compare settings, or take settings and state of rank 0 where that has state. Collective.

    Settings that differ are an error, on all members, where they `must_be_equal`, and a warning elsewhere.
    """
    accounts = [msgspec.convert(account, Account) for account in group.share(_account(optimizer, named))]
    ranks = group.members
    for rank, account in zip(ranks, accounts, strict=True):
        if account.names != accounts[0].names:
            raise UsageError(
                f"the optimizer of rank {rank} has other parameters, or others first, than that of "
                f"rank {ranks[0]}.",
                next_step="give it the same parameters, in the same groups and order, on all workers.",
            )
    if should_take_state and accounts[0].has_state:
        _take_state(group, optimizer)
        return
    difference = _difference(ranks, accounts)
    if difference and must_be_equal:
        raise UsageError(
            f"{difference}: the replicas would drift apart.",
            cause="the optimizer is built in another way there, or a checkpoint was loaded there alone.",
            next_step="build it alike on all workers; a checkpoint is loaded on all, or on rank 0.",
        )
    if difference and group.rank == ranks[0]:
        log.warning("%s", difference)


def _account(optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> Account:
    names = {id(tensor): name for name, tensor in named.items()}
    groups = [[names[id(tensor)] for tensor in group["params"]] for group in optimizer.param_groups]
    settings = [
        {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    digest = hashlib.sha256(msgspec.msgpack.encode(groups)).digest()
    return Account(digest, settings, any(optimizer.state.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return _scalar(value) if _is_scalar(value) else type(value).__name__


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _scalar(value: Any) -> Any:
    """Without subclasses (numpy's float64 is a float), which do not travel."""
    kinds = (bool, int, float, str)
    return next((kind(value) for kind in kinds if isinstance(value, kind)), None)


def _difference(ranks: Sequence[int], accounts: Sequence[Account]) -> str | None:
    first = accounts[0]
    for rank, account in zip(ranks, accounts, strict=True):
        if account.has_state and not first.has_state:
            return f"the optimizer of rank {rank} has state, that of rank {ranks[0]} has none"
        for number, (mine, theirs) in enumerate(zip(first.settings, account.settings, strict=True)):
            for name in (*mine, *theirs):
                if mine.get(name) != theirs.get(name):
                    where = f" in group {number}" if len(first.settings) > 1 else ""
                    return (
                        f"the optimizer of rank {rank} has {name} {theirs.get(name)}{where}, "
                        f"that of rank {ranks[0]} {mine.get(name)}"
                    )
    return None


# --- state ---


class _Kept(msgspec.Struct, array_like=True):
    """A state_dict without its tensors: they are numbers, positions in `specs`."""

    tree: Any
    specs: list[TensorSpec]
    problem: str = ""


def _take_state(group: Group, optimizer: Optimizer) -> None:
    tensors: list[torch.Tensor] = []
    kept = _Kept(None, [])
    if group.rank == 0:
        try:
            kept.tree = _strip(optimizer.state_dict(), tensors)
            kept.specs = [describe(tensor) for tensor in tensors]
        except ShoalError as error:
            kept.problem = error.what
    kept = msgspec.convert(group.share(kept)[0], _Kept)
    if kept.problem:
        raise UsageError(
            kept.problem,
            next_step="load the same checkpoint on all workers, and attach(..., should_start_equal=False).",
        )
    if group.rank:
        tensors = [_empty(spec) for spec in kept.specs]
    take_values(group, tensors)
    if group.rank:
        optimizer.load_state_dict(_fill(kept.tree, tensors))


def _strip(value: Any, tensors: list[torch.Tensor]) -> list[Any]:
    """The value as [kind, plain parts], its tensors added to the list."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if isinstance(value, dict):
        return ["dict", [[_strip(key, tensors), _strip(part, tensors)] for key, part in value.items()]]
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return [kind, [_strip(part, tensors) for part in value]]
    if _is_scalar(value):
        return ["plain", _scalar(value)]
    raise UsageError(f"the optimizer of rank 0 keeps {type(value).__name__}, which cannot be sent to others.")


def _fill(stripped: list[Any], tensors: Sequence[torch.Tensor]) -> Any:
    kind, content = stripped
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {_fill(key, tensors): _fill(part, tensors) for key, part in content}
    if kind in ("list", "tuple"):
        parts = [_fill(part, tensors) for part in content]
        return tuple(parts) if kind == "tuple" else parts
    return content


def _empty(spec: TensorSpec) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    return reshape_dense(torch.empty(size_bytes(spec) // dtype.itemsize, dtype=dtype), spec)
