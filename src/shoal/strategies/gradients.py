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
        self.num_slots = len(layout.slots)
        self.num_missing = 0
        self.handle = None
        dtype = DTYPES[layout.dtype]
        real = dtype.to_real()
        flags = BucketSlot(-1, TensorSpec(layout.dtype, (self.num_slots,)), layout.size_bytes)
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

    __slots__ = ("bucket", "last_round", "number", "parameter", "round", "view")

    def __init__(
        self, owner: GradientRound, parameter: nn.Parameter, bucket: GroupBucket, number: int
    ) -> None:
        self.round = owner
        self.parameter = parameter
        self.bucket = bucket
        self.number = number
        self.view = bucket.views[number]
        self.last_round = -1

    def ready(self, parameter: torch.Tensor) -> None:
        """The post-accumulate hook."""
        owner = self.round
        if not owner.is_open and not owner.begin():
            return
        if self.last_round == owner.number:
            owner.begin_again()
        self.last_round = owner.number
        self.take(parameter.grad)
        bucket = self.bucket
        bucket.num_missing -= 1
        try:
            if not bucket.num_missing:
                owner.start_full()
            if owner.num_started:
                owner.group.progress()
        except BaseException as error:
            owner.fail(error)
            raise

    def take(self, gradient: torch.Tensor | None) -> None:
        """Copy a gradient in, unless it is there already."""
        view = self.view
        if gradient is view or gradient is None:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        copy_into(view, gradient.detach() if gradient.requires_grad else gradient)
        self.parameter.grad = view


class GradientRound:
    """The rounds of one model's gradients, one after another; after each, they are means over the group."""

    def __init__(
        self,
        group: Group,
        buckets: Sequence[tuple[GroupBucket, Sequence[nn.Parameter]]],
        is_paused: Callable[[], bool],
    ) -> None:
        self.group = group
        self.is_open = False
        """From the first gradient of a backward pass to its end."""
        self.has_unshared = False
        """Some came while it was paused, and no round has followed."""
        self.has_shared = False
        """A round has ended since the last step."""
        self.number = 0
        self.num_started = 0
        self.error: BaseException | None = None
        """What the last round ended in."""
        self._is_paused = is_paused
        self._buckets = [bucket for bucket, _ in buckets]
        self._places = [
            _Place(self, parameter, bucket, number)
            for bucket, parameters in buckets
            for number, parameter in enumerate(parameters)
        ]
        self._place_of: dict[torch.Tensor, _Place] = {place.parameter: place for place in self._places}
        self._places_of = {
            bucket: [place for place in self._places if place.bucket is bucket] for bucket in self._buckets
        }
        self._monitors: Monitors | None = None
        self._squares: Sequence[GroupBucket] = ()
        self.on_share: Callable[[], None] | None = None
        """Is told on a device before gradients are shared."""

    def watch(self, monitors: Monitors, squares: Sequence[GroupBucket]) -> None:
        """Reduce squares too, in buckets of the same layouts, and tell the monitors of each round."""
        self._monitors = monitors
        self._squares = squares

    def ready(self, parameter: torch.Tensor) -> None:
        """Takes a gradient that backward has just computed."""
        self._place_of[parameter].ready(parameter)

    def begin(self) -> bool:
        """At the first gradient of a backward pass; False when it is not to be shared."""
        if self._is_paused():
            self.has_unshared = True
            return False
        self.is_open = True
        self.error = None
        self.number += 1
        self.num_started = 0
        for bucket in self._buckets:
            bucket.num_missing = bucket.num_slots
        at_end_of_backward(partial(self._end, self.number))
        if self.on_share is not None:
            announce(self.group, len(self._buckets) + len(self._squares))
        return True

    def begin_again(self) -> None:
        """At a gradient that is ready for the second time; UsageError when that cannot be mended."""
        if self.num_started:
            raise UsageError(
                "a parameter's gradient was ready twice in one backward pass.",
                cause="a parameter inside and outside of a reentrant checkpoint, or an earlier backward pass "
                "that raised.",
                next_step="checkpoint with use_reentrant=False; after an exception, leave the loop.",
            )
        self.begin()

    def fail(self, error: BaseException) -> None:
        """The round ends without a result."""
        self.error = error
        self.is_open = False
        for bucket in (*self._buckets, *self._squares):
            bucket.handle = None

    def start_full(self) -> None:
        """Reduce the buckets that are full, up to the first that is not."""
        while self.num_started < len(self._buckets):
            bucket = self._buckets[self.num_started]
            if bucket.num_missing:
                return
            bucket.flags.fill_(1)
            self._start(bucket)

    def has_foreign(self) -> bool:
        """Whether there are gradients that no round has left there."""
        return any(
            place.parameter.grad is not None and place.parameter.grad is not place.view
            for place in self._places
        )

    def release(self) -> None:
        """Gradients go back into private memory."""
        for place in self._places:
            if place.parameter.grad is place.view:
                place.parameter.grad = place.view.clone()

    def _start(self, bucket: GroupBucket) -> None:
        if self._monitors is not None:
            square = self._squares[self.num_started]
            torch.mul(bucket.memory, bucket.memory, out=square.memory)
            square.handle = self.group.all_reduce(square.memory)
        bucket.handle = self.group.all_reduce(bucket.memory)
        self.num_started += 1

    def _end(self, number: int) -> None:
        """Of the backward pass in which a round began; it may have ended with a pass inside, or failed."""
        if not self.is_open or number != self.number:
            return
        try:
            unused = self._start_rest() if self.num_started < len(self._buckets) else []
            num_members = 0 if self._monitors is None else len(self.group.members)
            for bucket in (*self._buckets, *self._squares):
                assert bucket.handle is not None, "a bucket that was never started"
                bucket.handle.wait()
                bucket.handle = None
        except BaseException as error:
            self.fail(error)
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
            means = [bucket.views for bucket in self._buckets]
            squares = [bucket.views for bucket in self._squares]
            self._monitors.observe_buckets(list(zip(means, squares, strict=True)), num_members)

    def _start_rest(self) -> list[_Place]:
        """Reduce what was not started, unused parameters included; those without any gradient."""
        if self.on_share is not None:
            self.on_share()
        without = []
        for bucket in self._buckets[self.num_started :]:
            places = self._places_of[bucket]
            is_filled = self.on_share is not None and bucket.fill([place.parameter.grad for place in places])
            if is_filled:
                for place in places:
                    place.parameter.grad = place.view
                continue
            bucket.flags.fill_(1)
            for place in places:
                if place.last_round == self.number:
                    continue
                if place.parameter.grad is None:
                    place.view.zero_()
                    place.bucket.flags[place.number] = 0
                    without.append(place)
                else:
                    place.take(place.parameter.grad)
        for bucket in self._buckets[self.num_started :]:
            self._start(bucket)
        return without
