"""What a contest's tasks are called and judged by, and the sizes that suit them; starts without torch.

The tasks themselves are in `tasks`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from shoal.core import UsageError
from shoal.core.errors import did_you_mean


class TaskFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line must know of one task."""

    description: str
    score: str
    """What `Score.value` is called: 'accuracy', 'distance'."""
    direction: Literal["higher", "lower"]
    """Whether higher or lower scores are better."""
    target: float
    """Of the mean of all workers' models, by default."""
    steps: int
    """Of each worker, by default; as all that follows."""
    eval_every: int
    batch_size: int
    momentum: float
    learning_rates: tuple[float, ...]
    """What a contest tries for each strategy."""
    resolution: float = 0.0
    """What one example changes of an accuracy on few of them; two scores are no nearer unless equal."""

    def is_reached(self, value: float, target: float) -> bool:
        """Whether a score is as good as the target, or better."""
        return value >= target if self.direction == "higher" else value <= target

    def worst(self, values: list[float]) -> float:
        """The least good of some scores."""
        return min(values) if self.direction == "higher" else max(values)

    def best(self, values: list[float]) -> float:
        """The best of some scores."""
        return max(values) if self.direction == "higher" else min(values)


FACTS: dict[str, TaskFacts] = {
    "quadratic": TaskFacts(
        description="a least-squares problem for each worker; distance to where the sum of all is least",
        score="distance",
        direction="lower",
        target=0.01,
        steps=200,
        eval_every=10,
        batch_size=1,
        momentum=0.3,
        learning_rates=(0.1, 0.2, 0.5, 1.0),
    ),
    "digits": TaskFacts(
        description="1,797 handwritten digits of 8×8 pixels; accuracy on 360 that nobody trains on",
        score="accuracy",
        direction="higher",
        target=0.9,
        steps=160,
        eval_every=5,
        batch_size=16,
        momentum=0.9,
        learning_rates=(0.01, 0.05, 0.2, 0.8),
        resolution=1 / 360,
    ),
    "mnist": TaskFacts(
        description="handwritten digits of 28×28 pixels; accuracy on 2,000 that nobody trains on",
        score="accuracy",
        direction="higher",
        target=0.95,
        steps=300,
        eval_every=20,
        batch_size=32,
        momentum=0.9,
        learning_rates=(0.01, 0.05, 0.2, 0.8),
        resolution=1 / 2000,
    ),
    "text": TaskFacts(
        description="the next character of Shoal's own documentation; accuracy on pages' ends",
        score="accuracy",
        direction="higher",
        target=0.3,
        steps=300,
        eval_every=20,
        batch_size=32,
        momentum=0.9,
        learning_rates=(0.05, 0.1, 0.2, 0.4),
    ),
}
"""By the name of the task."""


def facts_of(task: str) -> TaskFacts:
    """Those of a task; of a user's own, what suits many. UsageError for a task that there is not."""
    if ":" in task:
        description = f"a task of your own, {task}; accuracy on what nobody trains on"
        return msgspec.structs.replace(FACTS["digits"], description=description, resolution=0.0)
    if task not in FACTS:
        raise UsageError(
            f"There is no task {task!r}.{did_you_mean(task, FACTS)}",
            next_step=f"say one of {', '.join(FACTS)}, or name a function of your own as file.py:NAME.",
        )
    return FACTS[task]
