"""`all-reduce`: gradients averaged over the group, bucketed, overlapped with backward.

Each parameter's post-accumulate hook copies its gradient into the bucket and makes `.grad` the view there.
A bucket that is full, and all before it, is reduced: the order is that of the layout, on all members alike.
What is not there at the end of backward was not used by it. Such a parameter gives what `.grad` holds, or
zeros; it gets a gradient only when some member has one, which flags at the end of the bucket tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.core.errors import PeerLost, UsageError
from shoal.group import Group, Handle
from shoal.group.functions import announce
from shoal.strategies.hooks import at_end_of_backward
from shoal.strategies.options import AllReduceOptions
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import DEFAULT_BUCKET_BYTES, BucketLayout, FlaggedBucket
from shoal.tensors.memory import copy_into

_GPU_BUCKET_MIB = 64.0
"""Of buckets on a GPU, if nothing else is asked for: a meeting costs more there than it hides."""


class GradientStrategy(Strategy):
    """Shares gradients in every step or, with `local_steps` above 1, parameters after so many local steps."""

    is_equal_after_round = True

    @property
    def shares_gradients(self) -> bool:
        """Unless it shares parameters."""
        return self.options.local_steps == 1

    def after_step(self, session: TrainingSession) -> None:
        """Averages parameters, where those are shared."""
        if not self.shares_gradients and session.is_round:
            self.last_round(session)

    def average_all(self, session: TrainingSession) -> None:
        """Does nothing: a round is one."""


class GradientAllReduce(GradientStrategy):
    """When `backward()` returns, `.grad` is the mean over the group: as one worker with all the batches.

    With `local_steps` above 1, parameters are averaged after so many local steps instead. A lost peer ends
    `backward()` with PeerLost, and the step after it is refused: parameters stay as they were. The closure of
    an optimizer (LBFGS) is shared each time that it runs backward: it must run equally often on all members,
    so let it return a loss that is averaged over them.
    """

    name = "all-reduce"
    Options = AllReduceOptions
    options: AllReduceOptions

    _round: GradientRound | None = None
    _copies: Sequence[tuple[FlaggedBucket, list[nn.Parameter]]] = ()

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        is_named = "bucket_mib" in {name.replace("-", "_") for name in options}
        self._has_asked_size = is_named or self.options.bucket_mib != AllReduceOptions().bucket_mib

    def start(self, session: TrainingSession) -> None:
        """Makes the buckets in which gradients, or parameters, travel."""
        parameters = session.trainable
        if not self.shares_gradients:
            self._copies = [
                (FlaggedBucket(layout, session.empty), layout.pick(parameters))
                for layout in BucketLayout.plan(parameters, max_bytes=DEFAULT_BUCKET_BYTES)
            ]
            return
        is_large = session.device.type != "cpu" and not self._has_asked_size
        size = round((_GPU_BUCKET_MIB if is_large else self.options.bucket_mib) * 2**20)
        layouts = BucketLayout.plan(parameters, max_bytes=size, is_reversed=True)
        self._round = GradientRound(session, layouts)

    def hears(self, method: str) -> bool:
        """Listens to gradients only where those are shared."""
        return self.shares_gradients if method == "gradient_ready" else super().hears(method)

    def gradient_ready(self, session: TrainingSession, parameter: torch.Tensor) -> None:
        """Puts a gradient into its bucket; on a GPU all go at the end of backward, by few operations."""
        gradients = self._round
        if gradients is None:
            return
        if not gradients.is_on_device:
            gradients.ready(parameter)
        elif not gradients.is_open:
            gradients.begin()

    def before_step(self, session: TrainingSession) -> None:
        """Refuses gradients that were not shared, or not with all."""
        if self._round is None:
            return
        if self._round.error is not None:
            raise self._round.error
        if session.device.type != "cpu" and not self.group.should_survive:
            # on a GPU `backward()` returns before gradients are there: they may lack those of a lost peer
            self.group.progress()
            for loss in self.group.lost.values():
                raise loss.error(f" in round {self.rounds}")
        if self._round.is_open:
            raise UsageError(
                "step() after a backward pass that did not come to its end.",
                cause="it raised, and its gradients are shared in part.",
                next_step="leave the loop when backward() raises.",
            )
        if self._round.has_unshared:
            raise UsageError(
                "step() after accumulate(), with gradients that were not shared.",
                cause="the last backward pass before a step was inside of accumulate() too.",
                next_step="leave the last one outside: it shares the sum of all.",
            )
        is_unseen = not self._round.has_shared and not session.has_closure
        if is_unseen and self._round.has_foreign():
            raise UsageError(
                "step() with gradients that were not shared.",
                cause="they come from autograd.grad() or from a backward pass before attach.",
                next_step="call backward() inside of the `with` block; it shares what it leaves in `.grad`.",
            )

    def after_step(self, session: TrainingSession) -> None:
        """Averages parameters, where those are shared."""
        if self._round is not None:
            self._round.has_shared = False
        super().after_step(session)

    def skip_step(self, session: TrainingSession) -> None:
        """Takes part in an average of parameters."""
        super().after_step(session)

    def last_round(self, session: TrainingSession) -> None:
        """Averages parameters; nothing is written until all has arrived."""
        handles = []
        for bucket, parameters in self._copies:
            for view, parameter in zip(bucket.views, parameters, strict=True):
                view.copy_(parameter)
            handles.append(self.group.all_reduce(bucket.memory))
        for handle in handles:
            handle.wait()
        for bucket, parameters in self._copies:
            for view, parameter in zip(bucket.views, parameters, strict=True):
                parameter.copy_(view)

    def stop(self, session: TrainingSession) -> None:
        """Moves gradients back into private memory."""
        if self._round is not None:
            self._round.release()


class GradientRound:
    """The rounds of one model's gradients, one after another; after each, they are means over the group.

    Where the strategy is monitored squares are reduced too, in buckets of the same layouts.
    """

    def __init__(self, session: TrainingSession, layouts: Sequence[BucketLayout]) -> None:
        self.is_open = False
        """From the first gradient of a backward pass to its end."""
        self.has_unshared = False
        """Some came while it was paused, and no round has followed."""
        self.has_shared = False
        """A round has ended since the last step."""
        self.error: BaseException | None = None
        """What the last round ended in."""
        self._session = session
        self._group = session.group
        self.is_on_device = session.device.type != "cpu"
        self._number = 0
        self._num_started = 0
        self._buckets = [_GradientBucket(layout, session.empty) for layout in layouts]
        self._monitors = session.strategy.gradient_monitors
        self._squares = [
            _GradientBucket(layout, session.empty) for layout in layouts if self._monitors is not None
        ]
        self._members = {
            bucket: layout.pick(session.trainable)
            for bucket, layout in zip(self._buckets, layouts, strict=True)
        }
        """The parameters of each bucket, in the order of its views."""
        self._places: dict[torch.Tensor, tuple[_GradientBucket, int]] = {
            parameter: (bucket, number)
            for bucket, members in self._members.items()
            for number, parameter in enumerate(members)
        }
        self._ready: dict[torch.Tensor, None] = {}
        """The parameters whose gradients have come in this round."""

    def ready(self, parameter: torch.Tensor) -> None:
        """Takes a gradient that backward has just computed, and reduces the buckets that are full."""
        if not self.is_open and not self.begin():
            return
        if parameter in self._ready:
            self._begin_again()
        self._ready[parameter] = None
        bucket, number = self._places[parameter]
        bucket.take(number, parameter)
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
        if self._session.is_accumulating:
            self.has_unshared = True
            return False
        self.is_open = True
        self.error = None
        self._number += 1
        self._num_started = 0
        self._ready.clear()
        for bucket in self._buckets:
            bucket.num_missing = len(bucket.views)
        at_end_of_backward(partial(self._attempt_end, self._number))
        if self.is_on_device:
            announce(self._group, len(self._buckets) + len(self._squares))
        return True

    def has_foreign(self) -> bool:
        """Tells whether there are gradients that no round has left there."""
        return any(
            parameter.grad is not None and parameter.grad is not bucket.views[number]
            for parameter, (bucket, number) in self._places.items()
        )

    def release(self) -> None:
        """Moves gradients back into private memory."""
        for parameter, (bucket, number) in self._places.items():
            if parameter.grad is bucket.views[number]:
                parameter.grad = bucket.views[number].clone()

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

    def _start(self, bucket: _GradientBucket) -> None:
        if self._squares:
            square = self._squares[self._num_started]
            torch.mul(bucket.memory, bucket.memory, out=square.memory)
            square.handle = self._group.all_reduce(square.memory)
        bucket.handle = self._group.all_reduce(bucket.memory)
        self._num_started += 1

    def _attempt_end(self, number: int) -> None:
        try:
            self._end(number)
        except PeerLost as error:
            self._session.go_on_without(error)

    def _end(self, number: int) -> None:
        """Ends a round with the backward pass that began it; does nothing if it is over or has failed."""
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
        if unused:
            self._take_means_of(unused)
        if self._monitors is not None:
            pairs = zip(self._buckets, self._squares, strict=True)
            self._monitors.observe_buckets(
                [(mean.views, square.views) for mean, square in pairs], num_members
            )

    def _take_means_of(self, unused: Sequence[nn.Parameter]) -> None:
        """Gives parameters that had no gradient here the mean, where some member had one."""
        # all flags of a bucket at once: to look at one is to wait for a GPU
        flags = {
            bucket: bucket.flags.tolist()
            for bucket in dict.fromkeys(self._places[each][0] for each in unused)
        }
        for parameter in unused:
            bucket, place = self._places[parameter]
            if flags[bucket][place] != 0:
                parameter.grad = bucket.views[place]

    def _start_rest(self) -> list[nn.Parameter]:
        """Reduces what was not started, unused parameters included; gives those without any gradient."""
        if self.is_on_device:
            self._session.finite.sharing()
        without = []
        rest = self._buckets[self._num_started :]
        for bucket in rest:
            members = self._members[bucket]
            if self.is_on_device and bucket.fill([parameter.grad for parameter in members]):
                for view, parameter in zip(bucket.views, members, strict=True):
                    parameter.grad = view
                continue
            bucket.flags.fill_(1)
            for number, parameter in enumerate(members):
                if parameter in self._ready:
                    continue
                if parameter.grad is None:
                    bucket.views[number].zero_()
                    bucket.flags[number] = 0
                    without.append(parameter)
                else:
                    bucket.take(number, parameter)
        for bucket in rest:
            self._start(bucket)
        return without


class _GradientBucket(FlaggedBucket):
    """A bucket in memory of the group, of whose reductions one round after another keeps count."""

    num_missing = 0
    """Gradients that have not come in this round."""
    handle: Handle[torch.Tensor] | None = None
    """Of the reduction under way."""

    def take(self, number: int, parameter: torch.Tensor) -> None:
        """Copies a parameter's gradient in, unless it is there already; `.grad` becomes the view."""
        view, gradient = self.views[number], parameter.grad
        if gradient is view or gradient is None:
            return
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        copy_into(view, gradient.detach() if gradient.requires_grad else gradient)
        parameter.grad = view
