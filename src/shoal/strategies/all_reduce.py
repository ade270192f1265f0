"""`all-reduce`: gradients averaged over the group, bucketed, overlapped with backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from shoal.core.errors import UsageError
from shoal.group import Group
from shoal.strategies.gradients import GradientRound, GroupBucket
from shoal.strategies.options import AllReduceOptions, StrategyOptions
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import DEFAULT_BUCKET_BYTES, BucketLayout

_GPU_BUCKET_MIB = 64.0
"""Of buckets on a GPU, if nothing else is asked for: a meeting costs more there than it hides."""


class GradientAllReduce(Strategy):
    """When `backward()` returns, `.grad` is the mean over the group: as one worker with all the batches.

    With `local_steps` above 1, parameters are averaged after so many local steps instead. A lost peer ends
    `backward()` with PeerLost, and the step after it is refused: parameters stay as they were. The closure of
    an optimizer (LBFGS) is shared each time that it runs backward: it must run equally often on all members,
    so let it return a loss that is averaged over them.
    """

    name = "all-reduce"
    Options: ClassVar[type[StrategyOptions]] = AllReduceOptions
    options: AllReduceOptions

    _round: GradientRound | None = None
    _copies: Sequence[tuple[GroupBucket, list[nn.Parameter]]] = ()

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        is_named = "bucket_mib" in {name.replace("-", "_") for name in options}
        self._has_asked_size = is_named or self.options.bucket_mib != AllReduceOptions().bucket_mib

    @property
    def shares_gradients(self) -> bool:
        """Unless it shares parameters."""
        return self.options.local_steps == 1

    def start(self, session: TrainingSession) -> None:
        """Makes the buckets."""
        parameters = session.trainable
        if not self.shares_gradients:
            self._copies = [
                (GroupBucket(layout, session.empty), layout.pick(parameters))
                for layout in BucketLayout.plan(parameters, max_bytes=DEFAULT_BUCKET_BYTES)
            ]
            return
        is_on_device = session.device.type != "cpu"
        is_large = is_on_device and not self._has_asked_size
        size = round((_GPU_BUCKET_MIB if is_large else self.options.bucket_mib) * 2**20)
        layouts = BucketLayout.plan(parameters, max_bytes=size, is_reversed=True)
        buckets = [(GroupBucket(layout, session.empty), layout.pick(parameters)) for layout in layouts]
        monitors = self.gradient_monitors
        self._round = GradientRound(
            session.group,
            buckets,
            lambda: self.is_accumulating,
            monitors=monitors,
            squares=[] if monitors is None else [GroupBucket(layout, session.empty) for layout in layouts],
            on_share=session.finite.sharing if is_on_device else None,
        )

    def hears(self, method: str) -> bool:
        """Listens to gradients only where those are shared."""
        return self.shares_gradients if method == "gradient_ready" else super().hears(method)

    def gradient_ready(self, session: TrainingSession, parameter: torch.Tensor) -> None:
        """Puts a gradient into its bucket; on a GPU all go at the end of backward, by few operations."""
        if self._round is None:
            return
        if session.device.type == "cpu":
            self._round.ready(parameter)
        elif not self._round.is_open:
            self._round.begin()

    def before_step(self, session: TrainingSession) -> None:
        """Refuses gradients that were not shared, or not with all."""
        if self._round is None:
            return
        if self._round.error is not None:
            raise self._round.error
        self._refuse_void(session)
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

    def _refuse_void(self, session: TrainingSession) -> None:
        """Refuses gradients that lack a lost peer: on a GPU `backward()` returns before they are there."""
        if session.device.type == "cpu" or self.group.should_survive:
            return
        self.group.progress()
        for loss in self.group.lost.values():
            raise loss.error(f" in round {self.rounds}")

    def after_step(self, session: TrainingSession) -> None:
        """Averages parameters, where those are shared."""
        if self._round is not None:
            self._round.has_shared = False
        if self._copies and session.is_round:
            self.last_round(session)

    def skip_step(self, session: TrainingSession) -> None:
        """Takes part in an average of parameters."""
        if self._copies and session.is_round:
            self.last_round(session)

    @property
    def has_last_round(self) -> bool:
        """Whether it shares parameters, which is after every so many steps."""
        return not self.shares_gradients

    @property
    def is_equal_after_round(self) -> bool:
        """Always: a round gives all the same parameters."""
        return True

    def last_round(self, session: TrainingSession) -> None:
        """Averages parameters; nothing is written until all has arrived."""
        with torch.no_grad():
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

    def average_all(self, session: TrainingSession) -> None:
        """Does nothing: a round is one."""

    def stop(self, session: TrainingSession) -> None:
        """Moves gradients back into private memory."""
        if self._round is not None:
            self._round.release()
        self._round = None
        self._copies = ()
