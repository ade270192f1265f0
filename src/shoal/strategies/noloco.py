"""`noloco`: local steps, then an outer step with one random partner, and never with all.

Kolehmainen et al. 2025, "NoLoCo: No-all-reduce low communication training method for large models",
section 3. The outer momentum has a term that pulls the slow weights of partners together, in place of
DiLoCo's mean over everybody.
"""

from __future__ import annotations

from shoal.strategies.options import NoLoCoOptions
from shoal.strategies.session import TrainingSession
from shoal.strategies.strategy import Strategy
from shoal.tensors import Flat


class NoLoCo(Strategy):
    """`δ ← α·δ + β·mean(θ − φ) − γ·(φ − mean(φ))`, `φ ← φ + δ`, `θ ← φ`: the means are those of a pair.

    θ are the parameters that train, φ the slow weights, α is `outer_momentum`, β `outer_lr` and γ `pull`.
    Pairs are drawn anew in each round, the same on all workers; with an odd number one is left over and takes
    its outer step alone. So does who finds its partner lost, or gone because it has no data left. Buffers are
    averaged at the end.
    """

    name = "noloco"
    survives_loss = True
    has_last_round = True  # slow weights differ even right after an outer step
    Options = NoLoCoOptions
    options: NoLoCoOptions
    slow: Flat
    momentum: Flat

    def start(self, session: TrainingSession) -> None:
        """Begins with slow weights that are what the parameters are."""
        self.slow = session.parameters.clone()
        self.momentum = session.parameters.zeros_like()

    def after_step(self, session: TrainingSession) -> None:
        """Takes an outer step after every so many steps."""
        if not session.is_round:
            return
        options = self.options
        partner = session.random_partner(options.seed)
        # Means are linear, so one vector stands for both: half the bytes, and a partner that is lost in the
        # middle has given both or none.
        sent = (session.parameters - self.slow) * options.outer_lr
        sent.add_(self.slow, alpha=options.pull)
        mean = session.average(sent, [] if partner is None else [partner])
        self.momentum *= options.outer_momentum
        self.momentum += mean
        self.momentum.sub_(self.slow, alpha=options.pull)
        self.slow += self.momentum
        session.parameters.copy_(self.slow)

    def average_all(self, session: TrainingSession) -> None:
        """Averages parameters over the whole group; the slow weights become the same."""
        session.average_parameters()
        self.slow.copy_(session.parameters)
