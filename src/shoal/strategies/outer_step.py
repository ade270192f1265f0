"""An outer step: what was learned since the last one is averaged, and a common copy steps by it.

The copy and its momentum are equal on all members, to the bit. Where a checkpoint has made copies that
differ, they come together again by themselves: what travels without a codec is the parameters, and not their
difference from a copy that may be another one. When a step is taken, and what comes in between, is left to
strategies.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core.errors import UsageError
from shoal.group import Group, Handle
from shoal.strategies.averaging import start_coded_mean
from shoal.tensors import Allocate, Flat, local_part, private_memory
from shoal.tensors.codecs import Codec

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


class OuterStep:
    """Some parameters, their common copy with its momentum, and what travels to have their mean difference.

    `allocate` gives the memory for what travels; the copy, which begins as what the parameters are, is beside
    it on the same device. Encoded differences travel from the CPU, where codecs work.
    """

    due: int | None = None
    """The optimizer's step after which the outer step is taken; None: nothing is under way."""

    def __init__(
        self, number: int, named: Mapping[str, nn.Parameter], allocate: Allocate, *, has_momentum: bool
    ) -> None:
        self.number = number
        self._parameters = named
        self._difference = Flat.zeros(named, allocate)
        self.copy = Flat.of(named, private_memory(self._difference.device))
        self.momentum = self.copy.zeros_like() if has_momentum else None
        self._handles: list[Handle[torch.Tensor]] = []
        self._has_sent_parameters = False

    def send(self, group: Group, codec: Codec | None) -> None:
        """Starts the mean of what the members have learned since the copy was made. Collective."""
        self._has_sent_parameters = codec is None
        if codec is not None:
            self._difference.zero_()  # a codec may have put something into the gaps between parameters
        with torch.no_grad():
            for (name, difference), copy in zip(self._difference.items(), self.copy.views, strict=True):
                parameter = local_part(self._parameters[name])
                if codec is None:
                    difference.copy_(parameter)
                else:
                    torch.sub(copy, parameter.to(copy.device), out=difference)
        for layout, flat in zip(self.copy.layouts, self._difference.flats, strict=True):
            if codec is not None:
                slot = f"{self.number}.{layout.dtype}"
                self._handles.append(start_coded_mean(group, flat, codec, slot))
            else:
                self._handles.append(group.all_reduce(flat))

    def arrive(self) -> None:
        """Waits for the mean difference; nothing but what travels has changed until then."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.wait()
        if handles and self._has_sent_parameters:
            for copy, difference in zip(self.copy.flats, self._difference.flats, strict=True):
                torch.sub(copy, difference, out=difference)

    def step(self, rule: OuterRule) -> None:
        """Waits for the mean, and takes the outer step."""
        self.arrive()
        self.due = None
        momenta = self.momentum.flats if self.momentum is not None and rule.momentum else []
        for copy, mean, momentum in itertools.zip_longest(self.copy.flats, self._difference.flats, momenta):
            num_elements = _PIECE if copy.device.type == "cpu" else max(1, copy.numel())
            for start in range(0, copy.numel(), num_elements):
                piece = slice(start, start + num_elements)
                part = copy[piece].sub_(mean[piece], alpha=rule.lr)
                if momentum is not None:
                    velocity = momentum[piece].mul_(rule.momentum).add_(mean[piece])
                    part.sub_(velocity, alpha=rule.lr * rule.momentum)
        with torch.no_grad():
            for name, copy in self.copy.items():
                parameter = local_part(self._parameters[name])
                if rule.mixing:
                    parameter.lerp_(copy.to(parameter.device), 1 - rule.mixing)
                else:
                    parameter.copy_(copy)

    def state_dict(self) -> dict[str, Any]:
        """Gives copies, by the parameters' names; what is under way is waited for."""
        self.arrive()
        return {
            "copy": self.copy.state_dict(),
            "momentum": {} if self.momentum is None else self.momentum.state_dict(),
            "arrived": {} if self.due is None else self._difference.state_dict(),
            "due": self.due,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from there; UsageError if the state is of other parameters."""
        if [*state["copy"]] != self.copy.names:
            raise UsageError(
                "the state is of other parameters, or of other fragments.",
                next_step="attach the model, and take the number of fragments, that it was saved from.",
            )
        self.due = None if state["due"] is None else int(state["due"])
        self.copy.load_state_dict(state["copy"])
        if self.momentum is not None and state["momentum"]:
            self.momentum.load_state_dict(state["momentum"])
        if self.due is not None and state["arrived"]:
            self._difference.load_state_dict(state["arrived"])


def split(named: Mapping[str, nn.Parameter], num_parts: int) -> list[dict[str, nn.Parameter]]:
    """Divides consecutive parameters into about equal parts; fewer where there are fewer parameters."""
    total = sum(parameter.numel() for parameter in named.values())
    parts: list[dict[str, nn.Parameter]] = [{} for _ in range(num_parts)]
    end = 0
    for name, parameter in named.items():
        middle = end + parameter.numel() / 2
        end += parameter.numel()
        parts[min(num_parts - 1, int(num_parts * middle / total)) if total else 0][name] = parameter
    return [part for part in parts if part]
