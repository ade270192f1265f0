"""Many tensors of a model as one flat tensor for each dtype: parameters, momenta, corrections, what travels.

A `Flat` is a vector: `slow + 0.7 * (fast - slow)` is one operation for each dtype, however many tensors there
are, and one exchange moves them all. Each tensor is a view that starts on a 64-byte boundary and keeps its
strides; the gaps in between are zeros. Complex numbers lie there as two real ones.

`ParameterBuffers` keeps a model's parameters in one `Flat`, or in several that take turns: a group reads the
live one and fills a spare one, and `swap` makes that the live one. So nothing is copied but the mix itself,
and a round that fails has touched nothing that trains.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self, TypeAlias

import torch

from shoal.core.errors import UsageError
from shoal.tensors.buckets import BucketLayout
from shoal.tensors.dtypes import DTYPES
from shoal.tensors.memory import tensor_over
from shoal.tensors.packing import reshape_dense
from shoal.tensors.specs import local_part, size_bytes

Allocate: TypeAlias = Callable[[int, torch.dtype], torch.Tensor]
"""Gives zeroed memory for so many elements: a group's, or a worker's own."""


class Flat:
    """A tensor for each name, all of a dtype in one block of memory; made by `zeros`, `of` and `zeros_like`.

    Operators make a new one in private memory; those that end in `_`, and `+=`, `-=`, `*=`, write this one.
    """

    names: list[str]
    """The tensors' names, dtype by dtype."""
    flats: list[torch.Tensor]
    """One for each dtype, gaps included, in an order that all peers share."""

    def __init__(
        self, names: Sequence[str], layouts: Sequence[BucketLayout], flats: Sequence[torch.Tensor]
    ) -> None:
        self.names = [name for layout in layouts for name in layout.pick(names)]
        self.layouts = list(layouts)
        self.flats = list(flats)
        self._given = list(names)

    @classmethod
    def zeros(cls, named: Mapping[str, torch.Tensor], allocate: Allocate | None = None) -> Self:
        """Makes zeros of the shapes, dtypes and strides of these tensors, by default on their device."""
        layouts = BucketLayout.plan(named.values(), max_bytes=sys.maxsize)
        device = next((tensor.device for tensor in named.values()), torch.device("cpu"))
        return cls(list(named), layouts, _allocated(layouts, allocate or private_memory(device)))

    @classmethod
    def of(cls, named: Mapping[str, torch.Tensor], allocate: Allocate | None = None) -> Self:
        """Makes a flat container with copies of these tensors."""
        made = cls.zeros(named, allocate)
        made.fill(named)
        return made

    def zeros_like(self, allocate: Allocate | None = None) -> Flat:
        """Makes zeros with the same names and places, by default in private memory of the same device."""
        allocate = allocate or private_memory(self.device)
        return self._like(_allocated(self.layouts, allocate))

    def clone(self, allocate: Allocate | None = None) -> Flat:
        """Makes a copy, by default in private memory of the same device."""
        if allocate is None:
            return self._like([flat.clone() for flat in self.flats])
        return self.zeros_like(allocate).copy_(self)

    @functools.cached_property
    def views(self) -> list[torch.Tensor]:
        """One tensor for each name, in the same order."""
        pairs = zip(self.layouts, self.flats, strict=True)
        return [view for layout, flat in pairs for view in views_over(layout, flat)]

    @property
    def device(self) -> torch.device:
        """The device that the memory is on."""
        return self.flats[0].device if self.flats else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """The size of all tensors, gaps included."""
        return sum(flat.nbytes for flat in self.flats)

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives each name with its tensor."""
        return zip(self.names, self.views, strict=True)

    def fill(self, named: Mapping[str, torch.Tensor]) -> None:
        """Copies tensors in, by name; a name that is missing becomes zeros. UsageError for another shape."""
        with torch.no_grad():
            for name, view in self.items():
                tensor = named.get(name)
                if tensor is None:
                    view.zero_()
                    continue
                tensor = local_part(tensor)
                if tensor.shape != view.shape:
                    raise UsageError(
                        f"the state has {list(tensor.shape)} for {name}, whose shape is {list(view.shape)}.",
                        cause="it is of another model.",
                        next_step="attach the model that it was saved from.",
                    )
                view.copy_(tensor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Gives copies of the tensors, by name."""
        return {name: view.clone() for name, view in self.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes what `state_dict` gave; tensors that it does not know become zeros."""
        self.fill(state)

    def copy_(self, other: Flat) -> Self:
        """Takes another's values, also from another device."""
        for mine, theirs in self._with(other):
            mine.copy_(theirs)
        return self

    def zero_(self) -> Self:
        """Sets all values to zero."""
        for flat in self.flats:
            flat.zero_()
        return self

    def add_(self, other: Flat, alpha: float = 1.0) -> Self:
        """Adds `alpha` times another one."""
        for mine, theirs in self._with(other):
            mine.add_(theirs, alpha=alpha)
        return self

    def sub_(self, other: Flat, alpha: float = 1.0) -> Self:
        """Subtracts `alpha` times another one."""
        for mine, theirs in self._with(other):
            mine.sub_(theirs, alpha=alpha)
        return self

    def mul_(self, factor: float) -> Self:
        """Multiplies all values by a number."""
        for flat in self.flats:
            flat.mul_(factor)
        return self

    def lerp_(self, other: Flat, weight: float) -> Self:
        """Moves toward another one: `(1 − weight)·self + weight·other`."""
        for mine, theirs in self._with(other):
            mine.lerp_(theirs, weight)
        return self

    def norm(self) -> float:
        """Computes the Euclidean norm of all values as one vector."""
        squares = [torch.linalg.vector_norm(flat, dtype=torch.float64).square() for flat in self.flats]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def __iadd__(self, other: Flat) -> Self:
        return self.add_(other)

    def __isub__(self, other: Flat) -> Self:
        return self.sub_(other)

    def __imul__(self, factor: float) -> Self:
        return self.mul_(factor)

    def __add__(self, other: Flat) -> Flat:
        return self._like([mine + theirs for mine, theirs in self._with(other)])

    def __sub__(self, other: Flat) -> Flat:
        return self._like([mine - theirs for mine, theirs in self._with(other)])

    def __mul__(self, factor: float) -> Flat:
        return self._like([flat * factor for flat in self.flats])

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Flat:
        return self._like([flat / divisor for flat in self.flats])

    def __neg__(self) -> Flat:
        return self * -1.0

    def _like(self, flats: Sequence[torch.Tensor]) -> Flat:
        return Flat(self._given, self.layouts, flats)

    def _with(self, other: Flat) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(self.flats, other.flats, strict=True)


class ParameterBuffers:
    """A model's parameters in flat memory, from construction until `close`; see the module's description.

    `p.data` moves with each swap: a view of it that the user keeps across steps (`flat = p.data.view(-1)`)
    goes stale; the parameter itself, and all that torch keys by it, does not.
    """

    def __init__(
        self,
        named: Mapping[str, torch.nn.Parameter],
        allocate: Allocate | None = None,
        *,
        num_buffers: int = 1,
    ) -> None:
        self._buffers = [Flat.zeros(named, allocate) for _ in range(num_buffers)]
        """The live one, the spare one, and those that are spare after it."""
        self._parameters = [named[name] for name in self.live.names]
        self._versions: list[int] = []
        self._num_swaps = 0
        self._places = [[_place(view) for view in flat.views] for flat in self._buffers]
        """Where the views of each buffer are: to ask for it in every round takes as long as a swap."""
        for parameter, view in zip(self._parameters, self.live.views, strict=True):
            _require_same_kind(parameter, view)
        self.adopt()

    @property
    def live(self) -> Flat:
        """The buffer whose views the parameters are."""
        return self._buffers[0]

    @property
    def spare(self) -> Flat:
        """The buffer that becomes the live one with the next `swap`."""
        return self._buffers[1]

    @property
    def num_buffers(self) -> int:
        """How many buffers take turns."""
        return len(self._buffers)

    @property
    def is_home(self) -> bool:
        """Whether the live buffer is the one that was live at first."""
        return self._num_swaps % len(self._buffers) == 0

    @property
    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each dtype the live and the spare flat tensor."""
        live, spare, *_ = self._buffers
        return list(zip(live.flats, spare.flats, strict=True))

    def adopt(self) -> None:
        """Takes back parameters whose `data` was replaced (`model.to(...)`, `p.data = …`), with their values.

        Writes the live buffer, as an optimizer does; cheap when nothing was replaced.
        """
        for number, (parameter, place) in enumerate(zip(self._parameters, self._places[0], strict=True)):
            if (parameter.data_ptr(), parameter.stride()) != place:
                view = self.live.views[number]
                _require_same_kind(parameter, view)
                view.copy_(parameter.detach())
                parameter.data = view

    def mark(self) -> None:
        """Remembers what the parameters are, for `is_written`."""
        self._versions = [parameter._version for parameter in self._parameters]

    def is_written(self) -> bool:
        """Tells whether a parameter was written or replaced since `mark`; not if by `p.data.copy_(…)`."""
        places = zip(self._parameters, self._versions, self.live.views, strict=True)
        return any(
            parameter._version != version or parameter.data_ptr() != view.data_ptr()
            for parameter, version, view in places
        )

    def keep(self) -> None:
        """Fills the spare buffer with the parameters as they are; others may still read the live one."""
        for parameter, view, spare in zip(self._parameters, self.live.views, self.spare.views, strict=True):
            _require_same_kind(parameter, view)
            spare.copy_(parameter.detach())

    def swap(self) -> None:
        """Makes the spare buffer, which is filled, the live one."""
        for parameter, view in zip(self._parameters, self._buffers[1].views, strict=True):
            parameter.data = view
        self._buffers.append(self._buffers.pop(0))
        self._places.append(self._places.pop(0))
        self._num_swaps += 1

    def close(self) -> None:
        """Moves the parameters back into private memory; idempotent."""
        for parameter in self._parameters:
            parameter.data = parameter.detach().clone()
        self._parameters = []


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.stride()


def private_memory(device: torch.device | str = "cpu") -> Allocate:
    """Gives memory of this process alone, on a device."""
    return lambda num_elements, dtype: torch.zeros(num_elements, dtype=dtype, device=device)


def views_over(layout: BucketLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Makes a tensor for each slot; on the CPU with a storage of its own: saving one takes no other along."""
    dtype = DTYPES[layout.dtype]
    is_on_cpu = flat.device.type == "cpu"
    raw = flat.view(torch.uint8)
    memory = raw.numpy().data if is_on_cpu else None
    views = []
    for slot in layout.slots:
        size = size_bytes(slot.spec)
        span = slice(slot.offset_bytes, slot.offset_bytes + size)
        if not size:
            views.append(torch.empty(slot.spec.shape, dtype=dtype, device=flat.device))
            continue
        part = raw[span] if memory is None else tensor_over(memory[span])
        views.append(reshape_dense(part.view(dtype), slot.spec))
    return views


def _allocated(layouts: Sequence[BucketLayout], allocate: Allocate) -> list[torch.Tensor]:
    flats = []
    for layout in layouts:
        real = DTYPES[layout.dtype].to_real()
        flats.append(allocate(layout.size_bytes // real.itemsize, real))
    return flats


def _require_same_kind(parameter: torch.Tensor, view: torch.Tensor) -> None:
    """UsageError when the parameter's values have no place in the view."""

    def kind(tensor: torch.Tensor) -> str:
        return f"{tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}"

    if kind(parameter) != kind(view):
        raise UsageError(
            f"a parameter, {kind(parameter)}, does not fit the memory of its group, {kind(view)}.",
            cause="the model was moved or converted after attach, or this group has no memory on its device.",
            next_step="move or convert the model before attach.",
        )
