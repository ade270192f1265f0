"""Parameters in one flat buffer for each dtype: one write carries them all, and they are mixed in place.

For strategies whose rounds cannot fail half-way: what comes is in memory of this worker before it is mixed.
Others take `twins`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from shoal.group import Group
from shoal.strategies.twins import require_equal_layouts, require_same_kind, views_over
from shoal.tensors import DTYPES, BucketLayout


class Flats:
    """The parameters in flat memory of their device, from construction, a collective, until `close`."""

    tensors: list[torch.Tensor]
    """One for each dtype, in an order that all members share; complex numbers as two real ones, gaps zero."""

    def __init__(self, group: Group, parameters: Sequence[torch.nn.Parameter]) -> None:
        layouts = BucketLayout.plan(parameters, max_bytes=sys.maxsize)
        require_equal_layouts(group, layouts)
        device = parameters[0].device if parameters else None
        self.tensors = []
        self._members: list[torch.nn.Parameter] = []
        self._views: list[torch.Tensor] = []
        for layout in layouts:
            dtype = DTYPES[layout.dtype]
            real = dtype.to_real()
            flat = torch.zeros(layout.size_bytes // real.itemsize, dtype=real, device=device)
            self.tensors.append(flat)
            self._members += layout.pick(parameters)
            self._views += views_over(layout, flat, dtype)
        self.adopt()

    def adopt(self) -> None:
        """Take back parameters whose `data` was replaced (`model.to(...)`, `p.data = …`), with their values.

        Cheap when nothing was replaced.
        """
        for parameter, view in zip(self._members, self._views, strict=True):
            if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                require_same_kind(parameter, view)
                view.copy_(parameter.detach())
                parameter.data = view

    def close(self) -> None:
        """The parameters move into memory of their own; idempotent."""
        for parameter in self._members:
            parameter.data = parameter.detach().clone()
        self.tensors, self._members, self._views = [], [], []
