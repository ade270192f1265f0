"""The tasks of a contest by name."""

from __future__ import annotations

from shoal.simulate.classified import Digits, Mnist, Text
from shoal.simulate.job import Job
from shoal.simulate.quadratic import Quadratic
from shoal.simulate.task import Batch, Score, Task
from shoal.simulate.task_facts import facts_of

__all__ = ["TASKS", "Batch", "Score", "Task", "make_task"]

TASKS: dict[str, type[Task]] = {
    "quadratic": Quadratic,
    "digits": Digits,
    "mnist": Mnist,
    "text": Text,
}


def make_task(job: Job) -> Task:
    """What the job trains; DataError where its data is not there, UsageError for a task that there is not."""
    facts_of(job.task)
    return TASKS[job.task](job)
