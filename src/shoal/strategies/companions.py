"""Tensors beside the parameters, one for each: what a strategy remembers of them, or sends along with them.

They lie as the twins do, flat for each dtype, so that one operation works on all of a dtype. Which memory
they are in, what they mean and when they change is left to the strategies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn

from shoal.core.errors import UsageError
from shoal.group import Group
from shoal.strategies.averaging import start_mean
from shoal.strategies.twins import views_over
from shoal.tensors import DTYPES, BucketLayout

Allocate = Callable[[int, torch.dtype], torch.Tensor]


class Companion:
    """A tensor of zeros for each parameter; `allocate` gives the memory, which is zeros too."""

    flats: list[torch.Tensor]
    """One for each dtype, in the order and layout of the twins' buffers; gaps between tensors are zeros."""

    def __init__(self, named: Mapping[str, nn.Parameter], allocate: Allocate) -> None:
        names, parameters = list(named), list(named.values())
        self.flats = []
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._views: list[torch.Tensor] = []
        for layout in BucketLayout.plan(parameters, max_bytes=sys.maxsize):
            dtype = DTYPES[layout.dtype]
            real = dtype.to_real()
            flat = allocate(layout.size_bytes // real.itemsize, real)
            self.flats.append(flat)
            self._names += layout.pick(names)
            self._parameters += layout.pick(parameters)
            self._views += views_over(layout, flat, dtype)

    def __iter__(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Each parameter with its tensor, in an order that all companions of a model share."""
        return zip(self._parameters, self._views, strict=True)

    def mean(self, group: Group) -> list[torch.Tensor]:
        """Of the members' tensors, in memory like `flats`. Collective; outlives a lost member."""
        means = []
        for flat in self.flats:
            own = flat.to("cpu", copy=True)
            means.append(start_mean(group, own).wait().to(flat.device))
        return means

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, by the names of the parameters."""
        return {name: view.clone() for name, view in zip(self._names, self._views, strict=True)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors of those names; a parameter that the state does not know has zeros."""
        for name, view in zip(self._names, self._views, strict=True):
            tensor = state.get(name)
            if tensor is None:
                view.zero_()
                continue
            if tensor.shape != view.shape:
                raise UsageError(
                    f"the state has {list(tensor.shape)} for {name}, whose shape is {list(view.shape)}.",
                    cause="it is of another model.",
                    next_step="attach the model that it was saved from.",
                )
            view.copy_(tensor)
