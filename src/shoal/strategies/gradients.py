"""One round of gradients inside one backward pass: copied into buckets, reduced while backward goes on.

Each parameter's post-accumulate hook copies its gradient into the bucket and makes `.grad` the view there.
A bucket that is full, and all before it, is reduced: the order is that of the layout, on all members alike.
What is not there at the end of backward was not used by it. Such a parameter gives what `.grad` holds, or
zeros; it gets a gradient only when some member has one, which flags at the end of the bucket tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import torch
from torch import nn

from shoal.core.errors import UsageError
from shoal.group import Group, Handle
from shoal.group.functions import announce
from shoal.strategies.hooks import at_end_of_backward
from shoal.strategies.monitors import Monitors
from shoal.tensors import (
    ALIGNMENT_BYTES,
    DTYPES,
    Allocate,
    Bucket,
    BucketLayout,
    BucketSlot,
    TensorSpec,
)
from shoal.tensors.memory import copy_into


def flagged_bytes(layout: BucketLayout) -> int:
    """The size of a bucket that has a flag for each of its tensors at its end."""
    flags_bytes = len(layout.slots) * DTYPES[layout.dtype].itemsize
    return layout.size_bytes - (-flags_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class GroupBucket:
    """Flat memory of the group with views for some tensors and, at its end, a flag for each of them."""

    handle: Handle[torch.Tensor] | None
    """Of the reduction under way."""

    def __init__(self, layout: BucketLayout, allocate: Allocate) -> None:
        self.num_missing = 0
        self.handle = None
        dtype = DTYPES[layout.dtype]
        real = dtype.to_real()
        flags = BucketSlot(-1, TensorSpec(layout.dtype, (len(layout.slots),)), layout.size_bytes)
        layout = msgspec.structs.replace(
            layout, slots=(*layout.slots, flags), size_bytes=flagged_bytes(layout)
        )
        self.memory = allocate(layout.size_bytes // real.itemsize, real)
        bucket = Bucket(layout, memory=self.memory)
        *self.views, self.flags = bucket.views
        self._ones = torch.ones_like(self.flags)

    def fill(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Copies all gradients by one operation of a device, and sets all flags; False where one is missing.

        torch's optimizers write all their parameters by such operations, none of which is documented.
        """
        given = []
        for gradient, view in zip(gradients, self.views, strict=True):
            if gradient is None or gradient is view or gradient.layout is not torch.strided:
                return False
            given.append(gradient.detach() if gradient.requires_grad else gradient)
        torch._foreach_copy_([*self.views, self.flags], [*given, self._ones])
        return True


class _Place:
    """One parameter's place in a bucket; `last_round` is the last one that it was ready for."""

    __slots__ = ("bucket", "last_round", "number", "parameter", "view")

    def __init__(self, parameter: nn.Parameter, bucket: GroupBucket, number: int) -> None:
        self.parameter = parameter
        self.bucket = bucket
        self.number = number
        self.view = bucket.views[number]
        self.last_round = -1

    def take(self, gradient: torch.Tensor | None) -> None:
        """Copies a gradient in, unless it is there already."""
        view = self.view
        if gradient is view or gradient is None:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        copy_into(view, gradient.detach() if gradient.requires_grad else gradient)
        self.parameter.grad = view


class GradientRound:
    """The rounds of one model's gradients, one after another; after each, they are means over the group.

    With `monitors` squares are reduced too, in buckets of the same layouts. `on_share` is told, on a device,
    before gradients are shared.
    """

    def __init__(
        self,
        group: Group,
        buckets: Sequence[tuple[GroupBucket, Sequence[nn.Parameter]]],
        is_paused: Callable[[], bool],
        *,
        monitors: Monitors | None = None,
        squares: Sequence[GroupBucket] = (),
        on_share: Callable[[], None] | None = None,
    ) -> None:
        self.is_open = False
        """From the first gradient of a backward pass to its end."""
        self.has_unshared = False
        """Some came while it was paused, and no round has followed."""
        self.has_shared = False
        """A round has ended since the last step."""
        self.error: BaseException | None = None
        """What the last round ended in."""
        self._group = group
        self._number = 0
        self._num_started = 0
        self._is_paused = is_paused
        self._places = {
            bucket: [_Place(parameter, bucket, number) for number, parameter in enumerate(parameters)]
            for bucket, parameters in buckets
        }
        self._buckets = list(self._places)
        self._place_of: dict[torch.Tensor, _Place] = {
            place.parameter: place for places in self._places.values() for place in places
        }
        self._monitors = monitors
        self._squares = squares
        self._on_share = on_share

    def ready(self, parameter: torch.Tensor) -> None:
        """Takes a gradient that backward has just computed, and reduces the buckets that are full."""
        if not self.is_open and not self.begin():
            return
        place = self._place_of[parameter]
        if place.last_round == self._number:
            self._begin_again()
        place.last_round = self._number
        place.take(parameter.grad)
        bucket = place.bucket
        bucket.num_missing -= 1
        try:
            if not bucket.num_missing:
                self._start_full()
            if self._num_started:
                self._group.progress()
        except BaseException as error:
            self._fail(error)
            raise

    def begin(self) -> bool:
        """Begins a round at the first gradient of a backward pass; False when that is not to be shared."""
        if self._is_paused():
            self.has_unshared = True
            return False
        self.is_open = True
        self.error = None
        self._number += 1
        self._num_started = 0
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.views)
        at_end_of_backward(partial(self._end, self._number))
        if self._on_share is not None:
            announce(self._group, len(self._buckets) + len(self._squares))
        return True

    def has_foreign(self) -> bool:
        """Tells whether there are gradients that no round has left there."""
        return any(
            place.parameter.grad is not None and place.parameter.grad is not place.view
            for place in self._place_of.values()
        )

    def release(self) -> None:
        """Moves gradients back into private memory."""
        for place in self._place_of.values():
            if place.parameter.grad is place.view:
                place.parameter.grad = place.view.clone()

    def _begin_again(self) -> None:
        """At a gradient that is ready for the second time; UsageError when that cannot be mended."""
        if self._num_started:
            raise UsageError(
                "a parameter's gradient was ready twice in one backward pass.",
                cause="a parameter inside and outside of a reentrant checkpoint, or an earlier backward pass "
                "that raised.",
                next_step="checkpoint with use_reentrant=False; after an exception, leave the loop.",
            )
        self.begin()

    def _fail(self, error: BaseException) -> None:
        """Ends the round without a result."""
        self.error = error
        self.is_open = False
        for bucket in (*self._buckets, *self._squares):
            bucket.handle = None

    def _start_full(self) -> None:
        """Reduces the buckets that are full, up to the first that is not."""
        while self._num_started < len(self._buckets):
            bucket = self._buckets[self._num_started]
            if bucket.num_missing:
                return
            bucket.flags.fill_(1)
            self._start(bucket)

    def _start(self, bucket: GroupBucket) -> None:
        if self._squares:
            square = self._squares[self._num_started]
            torch.mul(bucket.memory, bucket.memory, out=square.memory)
            square.handle = self._group.all_reduce(square.memory)
        bucket.handle = self._group.all_reduce(bucket.memory)
        self._num_started += 1

    def _end(self, number: int) -> None:
        """Of the backward pass in which a round began; it may have ended with a pass inside, or failed."""
        if not self.is_open or number != self._number:
            return
        try:
            unused = self._start_rest() if self._num_started < len(self._buckets) else []
            num_members = 0 if self._monitors is None else len(self._group.members)
            for bucket in (*self._buckets, *self._squares):
                assert bucket.handle is not None, "a bucket that was never started"
                bucket.handle.wait()
                bucket.handle = None
        except BaseException as error:
            self._fail(error)
            raise
        self.is_open = False
        self.has_unshared = False
        self.has_shared = True
        # all flags of a bucket at once: to look at one is to wait for a GPU
        flags = {bucket: bucket.flags.tolist() for bucket in dict.fromkeys(place.bucket for place in unused)}
        for place in unused:
            if flags[place.bucket][place.number] != 0:
                place.parameter.grad = place.view
        if self._monitors is not None:
            pairs = zip(self._buckets, self._squares, strict=True)
            self._monitors.observe_buckets(
                [(mean.views, square.views) for mean, square in pairs], num_members
            )

    def _start_rest(self) -> list[_Place]:
        """Reduces what was not started, unused parameters included; gives those without any gradient."""
        if self._on_share is not None:
            self._on_share()
        without = []
        rest = self._buckets[self._num_started :]
        for bucket in rest:
            places = self._places[bucket]
            if self._on_share is not None and bucket.fill([place.parameter.grad for place in places]):
                for place in places:
                    place.parameter.grad = place.view
                continue
            bucket.flags.fill_(1)
            for place in places:
                if place.last_round == self._number:
                    continue
                if place.parameter.grad is None:
                    place.view.zero_()
                    bucket.flags[place.number] = 0
                    without.append(place)
                else:
                    place.take(place.parameter.grad)
        for bucket in rest:
            self._start(bucket)
        return without
