"""`sparse-loco`: DiLoCo whose workers send one or two of a hundred values, in two bits each.

Sarfi et al. 2025, "Communication efficient LLM pre-training with SparseLoCo", algorithm 1. What is not sent
is kept, decays, and is added to what is learned next: it takes the place of DiLoCo's outer momentum.
"""

from __future__ import annotations

from typing import Any

from shoal.group import Group
from shoal.strategies.options import SparseLoCoOptions
from shoal.strategies.outer_step import OuterRule, OuterStep
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import ErrorFeedback, SparseTwoBit, private_memory


class SparseLoCo(Strategy):
    """`e ← β·e + (y − x)`, `q ← Q(e)`, `e ← e − q`, `y ← y − η·mean(q)`, `x ← y`, every `local_steps` steps.

    x are a worker's parameters, y is the common copy, e what the worker has kept, β `error_decay`, η
    `outer_lr`. Q are the `density` largest values of each 4096, in two bits each (codec `sparse-2bit`), over
    all parameters of a dtype as one vector. Each worker gathers what all send and adds it in the order of
    their ranks, so that the copies stay equal to the bit. The user's optimizer keeps its state; buffers are
    averaged in each round.

    Goes on without lost peers. Should some members have counted a lost one's last part and others not, their
    copies stay that far apart until `global_average_every` averages them. Codec and copy are on the CPU,
    wherever the model is.
    """

    name = "sparse-loco"
    survives_loss = True
    is_equal_after_round = True
    common_state = ("outer",)
    Options = SparseLoCoOptions
    options: SparseLoCoOptions
    outer: OuterStep
    """The common copy, and what travels to it."""

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        self.codec = ErrorFeedback(SparseTwoBit(self.options.density), self.options.error_decay)
        self._rule = OuterRule(self.options.outer_lr)

    def start(self, session: TrainingSession) -> None:
        """Makes the common copy."""
        self.outer = OuterStep(0, session.named_parameters, private_memory(), has_momentum=False)

    def after_step(self, session: TrainingSession) -> None:
        """Takes an outer step after every so many steps."""
        if session.is_round:
            self.last_round(session)

    def last_round(self, session: TrainingSession) -> None:
        """Takes an outer step: all models become the common copy, equal to the bit.

        At the end, too: what was not sent by then is left out of the model, as it is in each round before.
        """
        session.check_lost_peers()
        self.outer.send(self.group, self.codec)
        self.outer.step(self._rule)
        session.average_buffers()

    def average_all(self, session: TrainingSession) -> None:
        """Averages parameters, which are the copies here, in full; the copies follow."""
        session.average_parameters()
        self.outer.copy.fill(session.named_parameters)
