"""`shoal.compare`: a contest from Python."""

import pytest

import shoal
from shoal.core.errors import UsageError


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
