"""Parts of a model with a second, common copy: what was learned since is averaged, and the copy steps by it.

The copy and its momentum are equal on all members, to the bit; over several machines nearly so, and when
somebody is lost in the middle of an average, some have counted it and others have not. Copies that differ
come together again by themselves: what travels without a codec is the parameters, and not their difference
from a copy that may be another one. When a fragment is sent, and which steps come in between, is left to the
strategies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.core.errors import UsageError
from shoal.group import Group, Handle
from shoal.strategies.averaging import start_mean
from shoal.strategies.coded import start_coded_mean
from shoal.tensors import DTYPES, Bucket, BucketLayout
from shoal.tensors.codecs import Codec

Allocate = Callable[[int, torch.dtype], torch.Tensor]
_PIECE = 1 << 15
"""Elements that stay in a processor's cache from one operation of the outer step to the next."""


@dataclass(frozen=True, slots=True)
class OuterRule:
    """`m ← momentum·m + d`, `copy ← copy − lr·(d + momentum·m)` for the mean d of `copy − parameters`.

    Then the parameters become `mixing · parameters + (1 − mixing) · copy`.
    """

    lr: float
    momentum: float = 0.0
    mixing: float = 0.0


TAKE_MEAN = OuterRule(lr=1.0)
"""Copy and parameters become the mean of all members' parameters, and the momentum stays what it is."""


def split(named: Mapping[str, nn.Parameter], num_parts: int) -> list[dict[str, nn.Parameter]]:
    """Consecutive parameters, in parts of about equal size; fewer parts where there are fewer parameters."""
    total = sum(parameter.numel() for parameter in named.values())
    parts: list[dict[str, nn.Parameter]] = [{} for _ in range(num_parts)]
    end = 0
    for name, parameter in named.items():
        middle = end + parameter.numel() / 2
        end += parameter.numel()
        parts[min(num_parts - 1, int(num_parts * middle / total)) if total else 0][name] = parameter
    return [part for part in parts if part]


def private_memory(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """For differences that travel encoded: of the CPU, where codecs work, and not of the group."""
    return torch.zeros(num_elements, dtype=dtype)


@dataclass(slots=True)
class _Part:
    """The tensors of one dtype."""

    names: list[str]
    parameters: list[nn.Parameter]
    copy: Bucket
    momentum: Bucket | None
    memory: torch.Tensor
    """What travels, in real numbers."""
    difference: Bucket
    """The same memory: in the end the mean of the copy less the parameters."""


@dataclass(eq=False)
class Fragment:
    """Some parameters, their common copy, and what travels to have the mean difference of the two.

    `allocate` gives the memory for that. The copy begins as what the parameters are.
    """

    number: int
    named: Mapping[str, nn.Parameter]
    allocate: Allocate
    has_momentum: bool
    due: int | None = None
    """The step after which the outer step is taken; None: nothing is under way."""
    _parts: list[_Part] = field(default_factory=list)
    _handles: list[Handle[torch.Tensor]] = field(default_factory=list)
    _has_sent_parameters: bool = False

    def __post_init__(self) -> None:
        names, parameters = list(self.named), list(self.named.values())
        for layout in BucketLayout.plan(parameters, max_bytes=sys.maxsize):
            real = DTYPES[layout.dtype].to_real()
            memory = self.allocate(layout.size_bytes // real.itemsize, real)
            difference = Bucket(layout, memory=memory)
            copy = Bucket(layout, device=memory.device)
            copy.load(layout.pick(parameters))
            momentum = Bucket(layout, device=memory.device) if self.has_momentum else None
            members = layout.pick(parameters)
            self._parts.append(_Part(layout.pick(names), members, copy, momentum, memory, difference))

    def send(self, group: Group, codec: Codec | None) -> None:
        """Start the mean of what the members have learned since the copy was made. Collective."""
        self._has_sent_parameters = codec is None
        for part in self._parts:
            with torch.no_grad():
                places = zip(part.difference.views, part.copy.views, part.parameters, strict=True)
                for difference, copy, parameter in places:
                    if codec is None:
                        difference.copy_(parameter)
                    else:
                        torch.sub(copy, parameter.to(copy.device), out=difference)
            if codec is not None:
                slot = f"{self.number}.{part.copy.layout.dtype}"
                self._handles.append(start_coded_mean(group, part.memory, codec, slot))
            elif group.num_machines > 1 and group.should_survive:
                # an all-reduce between machines ends with whoever speaks for one of them
                self._handles.append(start_mean(group, part.memory))
            else:
                self._handles.append(group.all_reduce(part.memory))

    def arrive(self) -> None:
        """Wait for the mean difference; nothing but what travels has changed until then."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        if handles and self._has_sent_parameters:
            for part in self._parts:
                torch.sub(part.copy.flat, part.difference.flat, out=part.difference.flat)

    def step(self, rule: OuterRule) -> None:
        """Wait for the mean, and take the outer step."""
        self.arrive()
        self.due = None
        for part in self._parts:
            momentum = part.momentum.flat if part.momentum is not None and rule.momentum else None
            _outer_step(part.copy.flat, part.difference.flat, momentum, rule)
            with torch.no_grad():
                for parameter, copy in zip(part.parameters, part.copy.views, strict=True):
                    if rule.mixing:
                        parameter.lerp_(copy.to(parameter.device), 1 - rule.mixing)
                    else:
                        parameter.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Copies, by the parameters' names; what is under way is waited for."""
        self.arrive()
        state: dict[str, Any] = {"copy": {}, "momentum": {}, "arrived": {}, "due": self.due}
        for part in self._parts:
            kinds = {"copy": part.copy, "momentum": part.momentum}
            kinds["arrived"] = None if self.due is None else part.difference
            for kind, bucket in kinds.items():
                if bucket is not None:
                    views = zip(part.names, bucket.views, strict=True)
                    state[kind].update({name: view.clone() for name, view in views})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """UsageError if it is of other parameters."""
        if [*state["copy"]] != [name for part in self._parts for name in part.names]:
            raise UsageError(
                "the state is of other parameters, or of other fragments.",
                next_step="attach the model, and take the number of fragments, that it was saved from.",
            )
        self.due = None if state["due"] is None else int(state["due"])
        for part in self._parts:
            kinds = {"copy": part.copy, "momentum": part.momentum}
            kinds["arrived"] = None if self.due is None else part.difference
            for kind, bucket in kinds.items():
                if bucket is not None and state[kind]:
                    bucket.load([state[kind][name] for name in part.names])


def _outer_step(
    copy: torch.Tensor, mean: torch.Tensor, momentum: torch.Tensor | None, rule: OuterRule
) -> None:
    size = _PIECE if copy.device.type == "cpu" else max(1, copy.numel())
    for start in range(0, copy.numel(), size):
        piece = slice(start, start + size)
        part = copy[piece].sub_(mean[piece], alpha=rule.lr)
        if momentum is not None:
            velocity = momentum[piece].mul_(rule.momentum).add_(mean[piece])
            part.sub_(velocity, alpha=rule.lr * rule.momentum)
