"""Parameters in memory of the group, twice: the live copy that trains, the spare one that a round fills.

Where others read older copies for longer, there are more of them, which become spare in turn.

An exchange reads the live buffer where it lies and writes the spare one, and `swap` re-points every
parameter: no copy besides the mix itself, and a round that fails has touched nothing that trains. Optimizer
state stays private, keyed by parameter as ever. What is exchanged, and when, is left to strategies.

`p.data` moves with each swap: a view of it that the user keeps across steps (`flat = p.data.view(-1)`) goes
stale; the parameter itself, and all that torch keys by it, does not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from shoal.core.errors import UsageError
from shoal.group import Group, share
from shoal.tensors import DTYPES, Bucket, BucketLayout, size_bytes
from shoal.tensors.memory import tensor_over
from shoal.tensors.packing import reshape_dense


class Pair(NamedTuple):
    """The two buffers of one dtype, flat, gaps between parameters included (they are zeros)."""

    live: torch.Tensor
    spare: torch.Tensor


class Twins:
    """The parameters in memory of the group, from construction, which is collective, until `close`.

    `allocate(num_elements, dtype)` gives that memory, and whoever gave it takes it back after `close`.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[torch.nn.Parameter],
        allocate: Callable[[int, torch.dtype], torch.Tensor],
        *,
        num_buffers: int = 2,
    ) -> None:
        layouts = BucketLayout.plan(parameters, max_bytes=sys.maxsize)
        require_equal_layouts(group, layouts)
        self._num_swaps = 0
        self._buffers: list[list[torch.Tensor]] = []
        """Of each dtype all buffers: the live one, the spare one, and those that are spare after it."""
        self._views: list[list[torch.Tensor]] = [[] for _ in range(num_buffers)]
        """The parameters in each of the buffers."""
        self._members: list[torch.nn.Parameter] = []
        self._versions: list[int] = []
        for layout in layouts:
            dtype = DTYPES[layout.dtype]
            # Mixing is linear: a complex number travels as two real ones.
            real = dtype.to_real()
            buffers = [allocate(layout.size_bytes // real.itemsize, real) for _ in range(num_buffers)]
            self._buffers.append(buffers)
            self._members += layout.pick(parameters)
            for flat, views in zip(buffers, self._views, strict=True):
                views.extend(views_over(layout, flat, dtype))
        for parameter, view in zip(self._members, self._views[0], strict=True):
            require_same_kind(parameter, view)
        self.adopt()

    @property
    def pairs(self) -> Sequence[Pair]:
        """One for each dtype, in an order that all members share."""
        return [Pair(buffers[0], buffers[1]) for buffers in self._buffers]

    @property
    def is_home(self) -> bool:
        """Whether the live buffers are those that were live at first."""
        return self._num_swaps % len(self._views) == 0

    def adopt(self) -> None:
        """Take back parameters whose `data` was replaced (`model.to(...)`, `p.data = …`), with their values.

        Writes the live buffers, as an optimizer does; cheap when nothing was replaced.
        """
        for parameter, view in zip(self._members, self._views[0], strict=True):
            if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                require_same_kind(parameter, view)
                view.copy_(parameter.detach())
                parameter.data = view

    def mark(self) -> None:
        """Remember what the parameters are, for `is_written`."""
        self._versions = [parameter._version for parameter in self._members]

    def is_written(self) -> bool:
        """Whether a parameter was written or replaced since `mark`; `p.data.copy_(…)` leaves no trace."""
        places = zip(self._members, self._versions, self._views[0], strict=True)
        return any(
            parameter._version != version or parameter.data_ptr() != view.data_ptr()
            for parameter, version, view in places
        )

    def keep(self) -> None:
        """Fill the spare buffers with the parameters as they are; others may still read the live ones."""
        for parameter, live, spare in zip(self._members, *self._views[:2], strict=True):
            require_same_kind(parameter, live)
            spare.copy_(parameter.detach())

    def swap(self) -> None:
        """The spare buffers, filled, become the live ones."""
        for parameter, view in zip(self._members, self._views[1], strict=True):
            parameter.data = view
        self._views.append(self._views.pop(0))
        for buffers in self._buffers:
            buffers.append(buffers.pop(0))
        self._num_swaps += 1

    def close(self) -> None:
        """The parameters move back into private memory; idempotent."""
        for parameter in self._members:
            parameter.data = parameter.detach().clone()
        self._buffers, self._members, self._views = [], [], [[], []]


def views_over(layout: BucketLayout, flat: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor for each slot; on the CPU with a storage of its own: saving one takes no other along."""
    if flat.device.type != "cpu":
        return list(Bucket(layout, memory=flat).views)
    memory = flat.view(torch.uint8).numpy().data
    views = []
    for slot in layout.slots:
        size = size_bytes(slot.spec)
        if size:
            raw = tensor_over(memory[slot.offset_bytes : slot.offset_bytes + size])
            views.append(reshape_dense(raw.view(dtype), slot.spec))
        else:
            views.append(torch.empty(slot.spec.shape, dtype=dtype))
    return views


def require_same_kind(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """UsageError when the parameter's values have no place in the view."""

    def kind(tensor: torch.Tensor) -> str:
        return f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"

    if kind(parameter) != kind(view):
        raise UsageError(
            f"a parameter, {kind(parameter)}, does not fit the memory of its group, {kind(view)}.",
            cause="the model was moved or converted after attach, or this group has no memory on its device.",
            next_step="move or convert the model before attach.",
        )


def require_equal_layouts(group: Group, layouts: list[BucketLayout]) -> None:
    """Equal shapes may still lie in another order (channels_last on one worker only)."""
    mine = msgspec.msgpack.encode(layouts)
    for rank, theirs in zip(group.members, share(group, mine), strict=True):
        if theirs != mine:
            raise UsageError(
                f"the parameters of rank {rank} lie otherwise in memory than those of rank {group.rank}.",
                cause="another memory format (channels_last), another order, or other frozen parameters.",
                next_step="build the model in the same way on all workers, its memory format included.",
            )
