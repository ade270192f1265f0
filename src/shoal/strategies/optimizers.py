"""Optimizers at the start: built alike on all members, or with what rank 0 has, where that is further on.

So a checkpoint that only rank 0 has loaded is everybody's. State goes by the order of the parameters in the
optimizer, which is compared by name; schedulers are no part of it. Later, `SteppedParameters` tells which
part of the state a round may average.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.group import Group, share
from shoal.strategies.attachment import Attachment
from shoal.strategies.start import take_state
from shoal.tensors.checkpoint import is_scalar, scalar

log = logging.getLogger(__name__)


class Account(msgspec.Struct, array_like=True):
    """What one member says of its optimizer."""

    rank: int
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
    has_loaded: bool = False,
) -> None:
    """Compare settings, or take settings and state of rank 0 where that has state or `has_loaded` some.

    Collective. What is loaded may be settings alone, such as a rate that a scheduler has changed.
    Settings that differ are an error, on all members, where they `must_be_equal`, and a warning elsewhere.
    """
    own = _account(group.rank, optimizer, named)
    accounts = [msgspec.convert(account, Account) for account in share(group, own)]
    first = accounts[0]
    for account in accounts:
        if account.names != first.names:
            raise UsageError(
                f"the optimizer of rank {account.rank} has other parameters, or others first, than that of "
                f"rank {first.rank}.",
                next_step="give it the same parameters, in the same groups and order, on all workers.",
            )
    if should_take_state and (has_loaded or first.has_state):
        state = take_state(group, optimizer.state_dict)
        if group.rank:
            optimizer.load_state_dict(state)
        return
    difference = _difference(accounts)
    if difference and must_be_equal:
        raise UsageError(
            f"{difference}: the replicas would drift apart.",
            cause="the optimizer is built in another way there, or a checkpoint was loaded there alone.",
            next_step="build it alike on all workers; a checkpoint is loaded on all, or on rank 0.",
        )
    if difference and group.rank == first.rank:
        log.warning("%s", difference)


class SteppedParameters:
    """Remembers which parameters this worker's optimizer has stepped since the round before.

    torch leaves out a parameter without a gradient, and its state then stays what it was. So in a round only
    the workers that have stepped a parameter have momentum of it that is new: to average in that of the
    others, or zeros for those that have none, would take momentum away from those that use the parameter. A
    worker all of whose steps were skipped (a GradScaler's) takes part as in the round before.
    """

    def __init__(self) -> None:
        self._stepped: dict[nn.Parameter, None] = {}
        self._is_round_over = False

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Say whether the round that is under way, or was the last, has momentum of this parameter."""
        return parameter in self._stepped

    def add_step(self, attachment: Attachment) -> None:
        """Take note of a step, before its gradients are gone."""
        if self._is_round_over:
            self._stepped = {}
            self._is_round_over = False
        for parameter in attachment.parameters:
            if parameter.grad is not None:
                self._stepped[parameter] = None

    def end_round(self) -> None:
        """Begin anew at the next step; until then the round's parameters are known."""
        self._is_round_over = True


def _account(rank: int, optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> Account:
    names = {id(tensor): name for name, tensor in named.items()}
    groups = [[names[id(tensor)] for tensor in group["params"]] for group in optimizer.param_groups]
    settings = [
        {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    digest = hashlib.sha256(msgspec.msgpack.encode(groups)).digest()
    return Account(rank, digest, settings, any(optimizer.state.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return scalar(value) if is_scalar(value) else type(value).__name__


def _difference(accounts: Sequence[Account]) -> str | None:
    first = accounts[0]
    for account in accounts:
        if account.has_state and not first.has_state:
            return f"the optimizer of rank {account.rank} has state, that of rank {first.rank} has none"
        for number, (mine, theirs) in enumerate(zip(first.settings, account.settings, strict=True)):
            for name in (*mine, *theirs):
                if mine.get(name) != theirs.get(name):
                    where = f" in group {number}" if len(first.settings) > 1 else ""
                    return (
                        f"the optimizer of rank {account.rank} has {name} {theirs.get(name)}{where}, "
                        f"that of rank {first.rank} {mine.get(name)}"
                    )
    return None
