"""`diloco`: many local steps, then one outer step by what all have learned (Douillard et al. 2023).

Streaming (Douillard et al. 2025): the model in fragments that take turns, each under way while training goes
on, in fewer bits. The outer step is taken in a group of one as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from shoal.core.errors import UsageError
from shoal.group import Group
from shoal.strategies.attachment import Attachment
from shoal.strategies.averaging import packed, start_mean
from shoal.strategies.buffers import average_buffers
from shoal.strategies.coded import make_codec
from shoal.strategies.fragments import TAKE_MEAN, Fragment, OuterRule, private_memory, split
from shoal.strategies.options import CommonOptions, DiLoCoOptions
from shoal.strategies.parameters import SurvivingStrategy


class DiLoCo(SurvivingStrategy):
    """Outer SGD with Nesterov momentum on the mean of (common copy − parameters), every `local_steps` steps.

    Fragment f of F is sent after step `local_steps · (f + 1) / F` of each period, and its outer step is taken
    `overlap_steps` later. The user's optimizer keeps its state throughout. Buffers are averaged once a
    period. Goes on without lost peers; with a codec and several machines not if one is lost in the middle of
    a mean. So without a codec parameters go from each worker to each one of other machines.
    """

    name = "diloco"
    survives_loss = True
    Options: ClassVar[type[CommonOptions]] = DiLoCoOptions
    options: DiLoCoOptions

    def __init__(self, group: Group, *, options: CommonOptions | None = None, **named: Any) -> None:
        super().__init__(group, options=options, **named)
        _check(self.options)
        self._codec = make_codec(self.options.codec, group.rank, has_feedback=self.options.error_feedback)
        self._rule = OuterRule(self.options.outer_lr, self.options.outer_momentum, self.options.mixing)
        self._fragments: list[Fragment] = []
        self._loaded: Mapping[str, Any] | None = None

    @property
    def is_alone(self) -> bool:
        """Never: the outer step is taken alone, too."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Also the common copy, its momentum, what has come and is not applied, and the codec's rests."""
        state = super().state_dict()
        if self._fragments:
            state["fragments"] = [fragment.state_dict() for fragment in self._fragments]
        elif self._loaded is not None:
            state["fragments"] = self._loaded["fragments"]
        if self._codec is not None:
            state["codec"] = self._codec.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Fragments must be as many; before attach they wait until then."""
        self._load(state)
        if self._codec is not None and "codec" in state:
            self._codec.load_state_dict(state["codec"])

    def _load_common_state(self, state: Mapping[str, Any]) -> None:
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded = state if "fragments" in state else None
        if self._fragments:
            self._take_loaded()

    def _started(self, attachment: Attachment) -> None:
        parts = split(attachment.named_parameters, self.options.fragments)
        allocate = self._allocate if self._codec is None else private_memory
        has_momentum = self.options.outer_momentum > 0
        self._fragments = [
            Fragment(number, part, allocate, has_momentum) for number, part in enumerate(parts)
        ]
        self._take_loaded()

    def _take_loaded(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        if len(loaded["fragments"]) != len(self._fragments):
            raise UsageError(
                f"the state has {len(loaded['fragments'])} fragments, not {len(self._fragments)}.",
                next_step="take the number of fragments that it was saved with.",
            )
        for fragment, state in zip(self._fragments, loaded["fragments"], strict=True):
            fragment.load_state_dict(state)

    def _stopped(self) -> None:
        self._fragments = []

    def _after_forward(self) -> None:
        self.group.progress()

    def _after_step(self) -> None:
        self._look_for_losses()
        now = self.steps + 1
        period = self.options.local_steps
        for fragment in self._fragments:
            if fragment.due == now:
                fragment.step(self._rule)
        for fragment in self._fragments:
            turn = period * (fragment.number + 1) // len(self._fragments)
            if now % period == turn % period:
                fragment.send(self.group, self._codec)
                fragment.due = now + self.options.overlap_steps
                if fragment.due == now:
                    fragment.step(self._rule)
        if self.is_round:
            average_buffers(self.group, self.attachment.model)

    def _skipped_step(self) -> None:
        self._after_step()

    @property
    def has_last_round(self) -> bool:
        """Always: fragments that take turns, or are mixed, differ even right after their outer steps."""
        return True

    @property
    def _is_equal_after_round(self) -> bool:
        options = self.options
        return options.fragments == 1 and not options.overlap_steps and not options.mixing

    def _last_round(self) -> None:
        """Outer steps under way are taken; then parameters become the mean of all, without outer momentum."""
        self._finish_steps()
        for fragment in self._fragments:
            fragment.send(self.group, self._codec)
            fragment.step(TAKE_MEAN)
        average_buffers(self.group, self.attachment.model)

    def _finish_steps(self) -> None:
        for fragment in self._fragments:
            if fragment.due is not None:
                fragment.step(self._rule)

    def _average_all(self) -> None:
        """Of the members' parameters; their common copy is what it was."""
        with torch.no_grad():
            for bucket, members in packed([parameter.detach() for parameter in self.attachment.parameters]):
                start_mean(self.group, bucket.flat).wait()
                bucket.store(members)

    def detached(self, *, should_leave: bool, is_failed: bool) -> None:
        """What is under way is waited for and applied, unless this worker failed."""
        try:
            if not is_failed:
                self._finish_steps()
        except BaseException:
            super().detached(should_leave=False, is_failed=True)
            raise
        super().detached(should_leave=should_leave, is_failed=is_failed)


def _check(options: DiLoCoOptions) -> None:
    if options.fragments > options.local_steps:
        raise UsageError(
            f"{options.fragments} fragments cannot take turns in {options.local_steps} local steps.",
            next_step="take fewer fragments, or more local steps.",
        )
    if options.overlap_steps >= options.local_steps:
        raise UsageError(
            f"a fragment that is under way for {options.overlap_steps} steps is not back when it is sent "
            f"again, after {options.local_steps}.",
            next_step="take fewer overlap_steps, or more local_steps.",
        )
