"""SlowMo (Wang et al. 2020, algorithm 1), written by what docs/write-a-strategy.md says and nothing else."""

from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from msgspec import Meta

from shoal.strategies import Strategy, StrategyOptions, TrainingSession
from shoal.tensors import Flat
from shoal.testing import StrategyCheckFailed, check_strategy, run_workers

PERIOD = 3
RATES = (0.5, 0.25)
"""Of two groups of parameters, as a user may have them."""


class SlowMoOptions(StrategyOptions, frozen=True, kw_only=True):
    """These options describe the slow momentum update."""

    local_steps: Annotated[int, Meta(ge=1, description="steps from one slow update to the next")] = 12
    slow_lr: Annotated[float, Meta(gt=0, description="learning rate of the slow update")] = 1.0
    slow_momentum: Annotated[float, Meta(ge=0, lt=1, description="momentum of the slow update")] = 0.5
    buffers: Annotated[
        Literal["reset", "maintain", "average"],
        Meta(description="what a round does to momentum"),
    ] = "maintain"


class SlowMo(Strategy):
    """`u ← β u + (x − mean of all x_j) / γ`, `x ← x − α γ u`: x is where the round began, γ the rate."""

    name = "slowmo"
    survives_loss = True
    is_equal_after_round = True
    works_alone = True
    common_state = ("slow", "momentum")
    Options = SlowMoOptions
    options: SlowMoOptions
    slow: Flat
    momentum: Flat

    def start(self, session: TrainingSession) -> None:
        self.slow = session.parameters.clone()
        self.momentum = session.parameters.zeros_like()

    def after_step(self, session: TrainingSession) -> None:
        if not session.is_round:
            return
        mean = session.average(session.parameters)
        change = self.slow - mean
        rates = session.learning_rates
        for name, part in change.items():
            part.mul_(1 / rates[name] if rates[name] else 0.0)
        self.momentum *= self.options.slow_momentum
        self.momentum += change
        for (name, slow), (_, momentum) in zip(self.slow.items(), self.momentum.items(), strict=True):
            slow.sub_(momentum, alpha=self.options.slow_lr * rates[name])
        session.parameters.copy_(self.slow)
        if self.options.buffers == "reset":
            session.optimizer.state.clear()
        elif self.options.buffers == "average":
            self.average_momentum(session)

    def average_momentum(self, session):
        own = {}
        for name, parameter in session.named_parameters.items():
            momentum = session.optimizer.state.get(parameter, {}).get("momentum_buffer")
            own[name] = torch.zeros_like(parameter) if momentum is None else momentum
        for name, mean in session.average(Flat.of(own)).items():
            own[name].copy_(mean)


class OneWhoAsksItsOwnState(SlowMo):
    """Leaves the average of momentum out on a worker that has none: whose first steps were all skipped."""

    def average_momentum(self, session):
        if session.optimizer.state:
            super().average_momentum(session)


@pytest.mark.parametrize(
    "options",
    [
        {"slow_lr": 0.7, "slow_momentum": 0.8},
        pytest.param({"slow_momentum": 0.0, "local_steps": 3}, marks=pytest.mark.slow),
        pytest.param({"buffers": "reset"}, marks=pytest.mark.slow),
        pytest.param({"buffers": "average"}, marks=pytest.mark.slow),
    ],
)
def test_it_keeps_the_promises_of_every_strategy(options):
    assert len(check_strategy(SlowMo, **options)) >= 9


def test_a_collective_that_depends_on_the_state_of_the_optimizer_is_found():
    with pytest.raises(StrategyCheckFailed, match="A step that is skipped on one worker stops nobody"):
        check_strategy(OneWhoAsksItsOwnState, buffers="average")


def train(group, num_steps):
    """On bowls whose centers are the ranks; the course of both parameters."""
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in ("near", "far")})
    groups = [{"params": [model[name]], "lr": rate} for name, rate in zip(model, RATES, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    course = []
    with SlowMo(group, local_steps=PERIOD, slow_lr=0.7, slow_momentum=0.6).attach(model, optimizer):
        for _ in range(num_steps):
            optimizer.zero_grad()
            sum((each - group.rank).square().sum() / 8 for each in model.values()).backward()
            optimizer.step()
            course.append([each.detach().numpy().copy() for each in model.values()])
    return course


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_computes_the_formula(size):
    """Reckoned for all workers by numpy; the last round that has only some steps is the mean of all."""
    num_steps, rates = 3 * PERIOD + 2, np.array(RATES)[:, None]
    slow, momentum = np.ones((2, 2)), np.zeros((2, 2))
    x, wanted = np.ones((size, 2, 2)), []
    centers = np.arange(size)[:, None, None]
    for step in range(1, num_steps + 1):
        x = x - rates * (x - centers) / 4
        if step % PERIOD == 0:
            momentum = 0.6 * momentum + (slow - x.mean(0)) / rates
            slow = slow - 0.7 * rates * momentum
            x = np.broadcast_to(slow, x.shape)
        wanted.append(x)
    for rank, course in enumerate(run_workers(lambda group: train(group, num_steps), size)):
        np.testing.assert_allclose(course, [each[rank] for each in wanted], rtol=0, atol=1e-5)
