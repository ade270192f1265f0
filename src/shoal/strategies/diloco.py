"""`diloco`: many local steps, then one outer step by what all have learned (Douillard et al. 2023).

Streaming (Douillard et al. 2025): the model in fragments that take turns, each under way while training goes
on, in fewer bits. The outer step is taken in a group of one as well.
"""

from __future__ import annotations

from typing import Any

from shoal.core.errors import UsageError
from shoal.group import Group
from shoal.strategies.averaging import make_codec
from shoal.strategies.options import DiLoCoOptions
from shoal.strategies.outer_step import TAKE_MEAN, OuterRule, OuterStep, split
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import private_memory


class DiLoCo(Strategy):
    """Outer SGD with Nesterov momentum on the mean of (common copy − parameters), every `local_steps` steps.

    Fragment f of F is sent after step `local_steps · (f + 1) / F` of each period, and its outer step is taken
    `overlap_steps` later. The user's optimizer keeps its state throughout. Buffers are averaged once a
    period. Goes on without lost peers.
    """

    name = "diloco"
    survives_loss = True
    has_last_round = True  # fragments that take turns, or are mixed, differ even right after an outer step
    works_alone = True
    trains_shards = True
    common_state = ("fragments",)
    Options = DiLoCoOptions
    options: DiLoCoOptions

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        num_fragments, num_steps = self.options.fragments, self.options.local_steps
        if num_fragments > num_steps:
            raise UsageError(
                f"{num_fragments} fragments cannot take turns in {num_steps} local steps.",
                next_step="take fewer fragments, or more local steps.",
            )
        if self.options.overlap_steps >= num_steps:
            raise UsageError(
                f"a fragment that is under way for {self.options.overlap_steps} steps is not back when it is "
                f"sent again, after {num_steps}.",
                next_step="take fewer overlap_steps, or more local_steps.",
            )
        rank, has_feedback = self.group.rank, self.options.error_feedback
        self.codec = make_codec(self.options.codec, rank, has_feedback=has_feedback)
        self.fragments: list[OuterStep] = []
        self._rule = OuterRule(self.options.outer_lr, self.options.outer_momentum, self.options.mixing)

    def start(self, session: TrainingSession) -> None:
        """Makes the common copies."""
        allocate = session.empty if self.codec is None else private_memory()
        has_momentum = self.options.outer_momentum > 0
        self.fragments = [
            OuterStep(number, part, allocate, has_momentum=has_momentum)
            for number, part in enumerate(split(session.named_parameters, self.options.fragments))
        ]

    def stop(self, session: TrainingSession) -> None:
        """Lets go of the copies."""
        self.fragments = []

    def after_forward(self, session: TrainingSession) -> None:
        """Lets what is under way go on."""
        self.group.progress()

    def after_step(self, session: TrainingSession) -> None:
        """Takes the outer steps that are due, and sends the fragments whose turn it is."""
        now = self.steps + 1
        period = self.options.local_steps
        for fragment in self.fragments:
            if fragment.due == now:
                fragment.step(self._rule)
        for fragment in self.fragments:
            turn = period * (fragment.number + 1) // len(self.fragments)
            if now % period == turn % period:
                fragment.send(self.group, self.codec)
                fragment.due = now + self.options.overlap_steps
                if fragment.due == now:
                    fragment.step(self._rule)
        if session.is_round:
            session.average_buffers()

    @property
    def is_equal_after_round(self) -> bool:
        """Whether all fragments step at once, and nothing of a worker's own stays."""
        options = self.options
        return options.fragments == 1 and not options.overlap_steps and not options.mixing

    def last_round(self, session: TrainingSession) -> None:
        """Takes outer steps under way; then parameters become the mean of all, without outer momentum."""
        self.finish(session, should_leave=False)
        for fragment in self.fragments:
            fragment.send(self.group, self.codec)
            fragment.step(TAKE_MEAN)
        session.average_buffers()

    def finish(self, session: TrainingSession, *, should_leave: bool) -> None:
        """Waits for what is under way, and applies it."""
        for fragment in self.fragments:
            if fragment.due is not None:
                fragment.step(self._rule)
