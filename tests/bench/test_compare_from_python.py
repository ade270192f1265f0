"""`shoal.compare`: a contest from Python."""

import re
from pathlib import Path

import pytest

import shoal
from shoal.core.errors import UsageError

PAGE = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()


def test_strategies_are_compared_and_drawn():
    told = []
    report = shoal.compare(
        ["all-reduce", "local-sgd"],
        task="quadratic",
        num_workers=2,
        seeds=1,
        more={"steps": 20, "learning_rate": 0.1},
        tell=told.append,
    )
    assert report.benchmark == "compare"
    assert any("not told apart" in sentence for sentence in report.result["headline"])
    assert told
    assert [line.name for line in report.figure("distance").data if line.name] == ["all-reduce", "local-sgd"]


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UsageError, match="ddp cannot be compared"):
        shoal.compare(["ddp"])
    with pytest.raises(UsageError, match="no learning rate"):
        shoal.compare(["pair"], more={"learning_rate": -1.0})


def test_the_task_of_the_page_is_compared_with_a_model_of_ones_own(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "waves.py").write_text(code)
    report = shoal.compare(
        ["all-reduce", "local-sgd"],
        task=f"{tmp_path / 'waves.py'}:waves",
        num_workers=3,
        seeds=1,
        more={"steps": 40, "learning_rate": 0.1},
    )
    final = {row.key["strategy"]: row.starts[0][0] for row in report.rows if row.metric == "final_accuracy"}
    assert all(final[name] > 0.9 for name in ("all-reduce", "local-sgd"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def task(): return 1", "gives no task"),
        (
            "def task(): return nn.Linear(2, 2), (torch.ones(3, 2), torch.ones(3)), 0",
            "no inputs with a class",
        ),
        (
            "def task(): return nn.Linear(2, 2), (torch.ones(3, 2), [0, 1]), (torch.ones(1, 2), [0])",
            "no inputs with a class",
        ),
        ("def tusk(): pass", "has no 'task'. Did you mean 'tusk'"),
    ],
)
def test_what_is_no_task_is_told(tmp_path, code, message):
    (tmp_path / "mine.py").write_text(f"import torch\nfrom torch import nn\n{code}\n")
    with pytest.raises(UsageError, match=message):
        shoal.compare(["pair"], task=f"{tmp_path / 'mine.py'}:task", num_workers=2, seeds=1)


def test_a_task_that_there_is_not_is_asked_about():
    with pytest.raises(UsageError, match=r"no task 'digit'\. Did you mean 'digits'"):
        shoal.compare(["pair"], task="digit")
