"""What `shoal run` was asked for reaches a script."""

import logging

import pytest
import torch

from shoal.core import UsageError
from shoal.core.run_options import RunOptions
from shoal.group.solo import SoloGroup
from shoal.strategies import (
    BUILT_IN,
    DiLoCo,
    GradientAllReduce,
    TorchDDP,
    from_args,
    load_class,
    make_strategy,
)
from strategies.fakes import Mirror


@pytest.fixture
def asked(monkeypatch):
    def ask(strategy=None, **options):
        for name, value in RunOptions(strategy=strategy, options=options).to_environment().items():
            monkeypatch.setenv(name, value)

    return ask


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_name_makes_its_strategy(name):
    strategy = make_strategy(SoloGroup(), name)
    assert strategy.name == name
    assert type(strategy) is load_class(BUILT_IN[name])


@pytest.mark.parametrize("row", BUILT_IN.values(), ids=BUILT_IN)
def test_a_row_says_what_its_class_does(row):
    kind = load_class(row)
    assert (kind.name, kind.Options) == (row.name, row.options)
    assert row.summary.endswith(".")


def test_all_reduce_by_default(monkeypatch):
    monkeypatch.delenv("SHOAL_RUN", raising=False)
    assert type(from_args(SoloGroup())) is GradientAllReduce


def test_name_and_options_of_the_run(asked):
    asked("DDP", **{"bucket-mib": "4", "local_steps": 3})
    strategy = from_args(SoloGroup())
    assert type(strategy) is TorchDDP
    assert (strategy.options.bucket_mib, strategy.options.local_steps) == (4.0, 3)


def test_arguments_in_code_win(asked):
    asked("all-reduce", local_steps="3", bucket_mib="2")
    strategy = from_args(SoloGroup(), local_steps=5)
    assert (strategy.options.local_steps, strategy.options.bucket_mib) == (5, 2.0)


def test_a_strategy_in_code_takes_the_options_that_it_has(asked):
    asked("neighbor", topology="ring", local_steps="2")
    strategy = from_args(SoloGroup(), strategy="sync_sgd")
    assert strategy.name == "all-reduce"
    assert strategy.options.local_steps == 2


def test_options_that_the_strategy_does_not_have(asked):
    asked("all-reduce", topology="ring")
    with pytest.raises(UsageError, match=r"no option 'topology'"):
        from_args(SoloGroup())
    with pytest.raises(UsageError, match=r"no option 'speed'"):
        make_strategy(SoloGroup(), "ddp", speed=9)


@pytest.fixture
def warnings_of(caplog):
    """Attaches a strategy to a model, and gives the warnings."""

    def attach(strategy):
        caplog.clear()
        model = torch.nn.Linear(2, 1)
        with caplog.at_level(logging.WARNING, logger="shoal"):
            strategy.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), stays=True).close()
        return [record.getMessage() for record in caplog.records]

    return attach


def test_flags_that_a_program_ignores_are_told(asked, warnings_of):
    assert warnings_of(DiLoCo(SoloGroup())) == []
    asked("neighbor", topology="ring", local_steps="4")
    (told,) = warnings_of(DiLoCo(SoloGroup()))
    assert "asked for --strategy neighbor --option topology=ring --option local_steps=4" in told
    assert "the program uses diloco" in told
    assert "`strategy = shoal.from_args(group)`" in told
    assert len(warnings_of(make_strategy(SoloGroup(), "neighbor"))) == 1  # with other options
    assert len(warnings_of(from_args(SoloGroup(), strategy="diloco"))) == 1
    asked(local_steps="4")
    assert len(warnings_of(DiLoCo(SoloGroup()))) == 1


def test_flags_that_a_program_takes_up_are_not_told(asked, warnings_of):
    asked("gradient-allreduce", local_steps="4")
    assert warnings_of(from_args(SoloGroup())) == []
    assert warnings_of(from_args(SoloGroup(), local_steps=2)) == []
    assert warnings_of(GradientAllReduce(SoloGroup(), local_steps=4)) == []
    asked(local_steps="4")
    assert warnings_of(from_args(SoloGroup(), strategy="diloco")) == []
    assert warnings_of(DiLoCo(SoloGroup(), local_steps=4)) == []


def test_one_worker_alone_tells_of_flags(asked, warnings_of):
    asked("neighbor")
    group = Mirror()
    group.rank = 1
    assert warnings_of(GradientAllReduce(group)) == []
