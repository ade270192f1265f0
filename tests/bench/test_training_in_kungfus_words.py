import json

import pytest

from shoal.bench.tables.training import becomes_text, figure_lines
from shoal.bench.training import OPTIMIZERS, optimizer_named
from shoal.core import UsageError
from shoal.report import Report, Row
from shoal.strategies import BUILT_IN


def speed(strategy, samples, rank=0):
    key = {"strategy": strategy, "rank": rank}
    return Row(key=key, metric="examples_per_s_per_worker", unit="1/s", direction="higher", starts=[samples])


def test_every_optimizer_of_kungfu_is_a_strategy_here():
    assert all(OPTIMIZERS[name] in BUILT_IN for name in OPTIMIZERS)
    assert OPTIMIZERS[optimizer_named("async_sgd")] == "pair"
    with pytest.raises(UsageError, match="no optimizer 'adaptive-sgd'"):
        optimizer_named("adaptive-sgd")


def test_what_a_name_becomes_is_said():
    assert becomes_text("async-sgd") == "async-sgd is the strategy pair here."
    assert becomes_text("sync-sgd-hierarchical-nccl") == (
        "sync-sgd-hierarchical-nccl is the strategy all-reduce here: the group itself carries it, on GPUs "
        "as on CPUs, inside each machine first."
    )


def test_the_figure_is_the_first_workers_rate_and_says_what_ran():
    config = {"num_workers": 4, "batch_size": 64, "model": "resnet50", "kungfu": None}
    rows = [
        speed("none", [9.0]),
        speed("all-reduce", [10.0, 14.0]),
        speed("all-reduce", [99.0], rank=1),
        speed("ddp", [1.0]),
    ]
    first, second = figure_lines(Report(benchmark="training", created="", config=config, rows=rows))
    assert first.startswith("FIGURE: 12.000000 +-3.920000 {")
    facts = json.loads(first.partition("{")[1] + first.partition("{")[2])
    assert facts | {"framework": "shoal", "np": 4, "strategy": "all-reduce", "bs": 64} == facts
    assert (facts["model"], facts["kf-opt"]) == ("resnet50", "sync-sgd")
    assert '"kf-opt":null' in second


def test_the_figure_has_the_name_that_was_asked_for():
    config = {"kungfu": "sync-sgd-nccl"}
    (line,) = figure_lines(
        Report(benchmark="training", created="", config=config, rows=[speed("all-reduce", [1.0])])
    )
    assert '"kf-opt":"sync-sgd-nccl"' in line
