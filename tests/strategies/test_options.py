"""Names and options of strategies, which the command line reads without torch."""

import subprocess
import sys

import pytest

from shoal.core import UsageError
from shoal.strategies.options import (
    WAITS_FOR_ALL,
    AllReduceOptions,
    DiLoCoOptions,
    NeighborOptions,
    StrategyOptions,
    describe_options,
    read_options,
    signature_of,
)
from shoal.strategies.registry import BUILT_IN, canonical, find


def test_names_and_options_come_without_torch():
    code = "import shoal.strategies, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_options_that_wait_for_all_are_off_by_default():
    assert not any(getattr(StrategyOptions(), name) for name in WAITS_FOR_ALL)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("neighbor_allreduce", "neighbor"),
        ("hierarchical_neighbor_allreduce", "hierarchical"),
        ("sync-sgd", "all-reduce"),
        ("async-sgd", "pair"),
        ("gradient_allreduce", "all-reduce"),
        ("All_Reduce", "all-reduce"),
        ("SMA", "sma"),
        ("win_put", "window"),
        ("stochastic_gradient_push", "sgp"),
        ("CHOCO-SGD", "choco"),
        ("dc_asgd", "staleness-aware"),
        ("localSGD", "local-sgd"),
    ],
)
def test_names_of_other_systems(name, strategy):
    assert canonical(name) == strategy


def test_bluefogs_allreduce_is_of_parameters():
    assert find("allreduce") == (BUILT_IN["neighbor"], {"topology": "full"})


def test_options_that_names_imply_are_options():
    for row in BUILT_IN.values():
        for alias, implied in row.aliases.items():
            assert find(alias.replace("-", "_")) == (row, implied)
            read_options(row.options, implied, alias)


def test_unknown_names():
    with pytest.raises(UsageError, match=r"no strategy 'sgd'.*\n.*all-reduce, ddp, neighbor"):
        find("sgd")


def test_strings_of_a_command_line_are_converted():
    given = {"local-steps": "4", "monitor": "true", "warmup_factor": "0.25", "batch_size": "32"}
    options = read_options(AllReduceOptions, given, "all-reduce")
    assert (options.local_steps, options.monitor, options.warmup_factor, options.batch_size) == (
        4,
        True,
        0.25,
        32,
    )


def test_a_topology_may_be_anything():
    def ring(size):
        return size

    assert read_options(NeighborOptions, {"topology": ring}, "neighbor").topology is ring


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"alpha": 1}, r"neighbor has no option 'alpha'.*\n.*topology, order"),
        ({"local_steps": 0}, "local_steps"),
        ({"local_steps": "many"}, "local_steps"),
        ({"order": "sometimes"}, "order"),
    ],
)
def test_what_does_not_fit_is_refused(values, message):
    with pytest.raises(UsageError, match=message):
        read_options(NeighborOptions, values, "neighbor")


def test_every_option_describes_itself():
    common = StrategyOptions.__struct_fields__
    for row in BUILT_IN.values():
        described = describe_options(row.options)
        assert [option.name for option in described[-len(common) :]] == list(common)
        assert all(option.description for option in described)
    kinds = {option.name: (option.kind, option.default) for option in describe_options(NeighborOptions)}
    assert kinds["order"] == ("adapt-then-combine|adapt-while-combine", "adapt-then-combine")
    assert kinds["topology"] == ("text", "exponential-2")
    assert kinds["batch_size"] == ("int", None)
    assert kinds["monitor"] == ("bool", False)


def test_a_signature_has_every_option_with_its_type_and_default():
    parameters = signature_of(DiLoCoOptions).parameters
    assert list(parameters)[:2] == ["group", "options"]
    assert set(parameters) == {"group", "options", *DiLoCoOptions.__struct_fields__}
    assert (parameters["local_steps"].annotation, parameters["local_steps"].default) == (int, 100)
    assert parameters["batch_size"].annotation == int | None
    signature_of(DiLoCoOptions).bind("a group", local_steps=4, outer_lr=0.5)
    with pytest.raises(TypeError, match="alpha"):
        signature_of(DiLoCoOptions).bind("a group", alpha=1)
