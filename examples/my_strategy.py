"""A strategy of your own in one file: NoLoCo. docs/write-a-strategy.md explains each part of it.

shoal run -np 2 --strategy my_strategy:NoLoCo --local-steps 8 train_digits.py
shoal compare --strategies all,my_strategy:NoLoCo
"""

from typing import Annotated

from msgspec import Meta

from shoal.strategies import Strategy, StrategyOptions, TrainingSession
from shoal.tensors import Flat


class NoLoCoOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options describe the outer step."""

    local_steps: Annotated[int, Meta(ge=1, description="steps from one outer step to the next")] = 8
    outer_lr: Annotated[float, Meta(gt=0, description="learning rate of the outer step")] = 0.7
    outer_momentum: Annotated[float, Meta(ge=0, lt=1, description="momentum of the outer step")] = 0.5
    pull: Annotated[float, Meta(ge=0, description="how far two partners move toward each other")] = 1.0
    seed: Annotated[int, Meta(description="seed of the choice of partners")] = 0


class NoLoCo(Strategy):
    """Trains alone for some steps, then does an outer step with one random partner.

    m ← momentum · m + lr · mean(x − s) − pull · (s − mean(s)), then s ← s + m and x ← s.
    """

    name = "my-noloco"
    survives_loss = True
    has_last_round = True
    Options = NoLoCoOptions
    options: NoLoCoOptions
    slow: Flat
    momentum: Flat

    def start(self, session: TrainingSession) -> None:
        """Begins with slow weights s that are equal to the parameters x."""
        self.slow = session.parameters.clone()
        self.momentum = session.parameters.zeros_like()

    def after_step(self, session: TrainingSession) -> None:
        """Does the outer step, in every round."""
        if not session.is_round:
            return
        partner = session.random_partner(self.options.seed)
        peers = [] if partner is None else [partner]
        change = session.average(session.parameters - self.slow, peers)
        common = session.average(self.slow, peers)
        self.momentum *= self.options.outer_momentum
        self.momentum.add_(change, alpha=self.options.outer_lr)
        self.momentum.sub_(self.slow - common, alpha=self.options.pull)
        self.slow += self.momentum
        session.parameters.copy_(self.slow)
