import pytest

from shoal.bench.workers import run_tasks
from shoal.core import BenchmarkError, UsageError

HERE = "bench.test_tasks_in_processes:double"


def double(task, tell):
    """Told and answered in one breath, as fast as it goes."""
    for number in range(task.get("num_told", 0)):
        tell(f"{task['value']}: {number + 1} of {task['num_told']}")
    if task["value"] < 0:
        raise ValueError("below zero")
    return 2 * task["value"]


def test_answers_come_in_the_order_of_the_tasks(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))
    told = []
    tasks = [{"value": 1, "num_told": 200}, {"value": 2}, {"value": -1, "num_told": 3}, {"value": 3}]
    first, second, failed, last = run_tasks(HERE, tasks, num_processes=2, tell=told.append)
    assert (first, second, last) == (2, 4, 6)
    assert isinstance(failed, BenchmarkError)
    assert "below zero" in str(failed)
    assert sum(text.startswith("1/4 1: ") for text in told) == 200


def test_nobody_to_work():
    with pytest.raises(UsageError):
        next(run_tasks(HERE, [{"value": 1}], num_processes=0, tell=print))
