import math

import msgspec
import pytest

from bench.sample_contests import config_of
from shoal.bench.compare_settings import (
    SHORT_ROUNDS,
    CompareConfig,
    compared,
    compute_of,
    left_out,
    notes_of,
    read_config,
    stragglers_of,
    without_servers,
)
from shoal.core import UsageError
from shoal.simulate.world import Compute, World
from shoal.strategies import BUILT_IN
from shoal.transport import FaultScript
from shoal.transport.network.distributions import Exponential, Normal


def test_all_is_every_strategy_but_those_that_pass_their_group_by():
    contenders = compared(["all"], {})
    assert left_out() == ["ddp", "horovod"]
    assert [each.strategy for each in contenders] == [name for name in BUILT_IN if name not in left_out()]
    with pytest.raises(UsageError, match="ddp cannot be compared"):
        compared(["all", "ddp"], {})


def test_all_shortens_rounds_that_a_contest_is_too_short_for_and_says_so():
    local_steps = SHORT_ROUNDS["diloco"]["local_steps"]
    for texts, common, expected in (
        (["all"], {}, local_steps),
        (["all"], {"local_steps": "3"}, 3),
        (["all", "diloco"], {}, 100),
        (["diloco"], {}, 100),
    ):
        named = {each.name: each for each in compared(texts, common)}
        assert named["diloco"].options["local_steps"] == expected
        told = any("diloco local_steps=8" in note for note in notes_of(texts, common))
        assert told == (expected == local_steps)


def test_who_is_left_out_is_said():
    assert "ddp and horovod" in notes_of(["all"], {})[0]
    assert notes_of(["neighbor"], {}) == []


def test_a_strategy_may_take_part_beside_all_with_options_of_its_own():
    contenders = compared(["all", "neighbor topology=ring"], {})
    assert [each.options["topology"] for each in contenders if each.strategy == "neighbor"] == [
        "exponential-2",
        "ring",
    ]


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("10", 10.0),
        ("exponential:12.5", Exponential(mean=12.5)),
        ("normal:10:2", Normal(mean=10.0, deviation=2.0)),
    ],
)
def test_a_step_costs_a_number_or_a_distribution(text, cost):
    assert compute_of(text) == cost


@pytest.mark.parametrize("text", ["fast", "-1", "exponential", "exponential:0", "normal:10", "weibull:1"])
def test_other_costs_are_refused(text):
    with pytest.raises(UsageError, match="no cost of a step"):
        compute_of(text)


def test_stragglers_are_ranks_with_factors():
    assert stragglers_of(["1:10", "3:2.5"]) == {1: 10.0, 3: 2.5}
    for text in ("1", "a:2", "1:0"):
        with pytest.raises(UsageError, match="--stragglers"):
            stragglers_of([text])


def test_a_config_survives_a_report():
    world = World(num_workers=4, compute=Compute(step_ms=Exponential(mean=3.0), factors={1: 2.0}))
    config = config_of("all-reduce", "neighbor topology=ring", world=world)
    again = read_config(msgspec.json.decode(msgspec.json.encode(config)))
    assert again == config
    assert isinstance(again, CompareConfig)


def test_servers_are_there_for_those_that_need_them_and_chances_follow_the_seed():
    config = config_of("all-reduce", "parameter-server", num_servers=2)
    plain, served = (config.world_of(contender, 6) for contender in config.contenders)
    assert (plain.num_servers, served.num_servers) == (0, 2)
    assert plain.seed == 6
    assert config.tuning_seed not in config.seeds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": ()}, "nothing is compared"),
        ({"steps": 0}, "nothing is trained"),
        ({"learning_rates": (0.1, -1.0)}, "no learning rate"),
        ({"split": "even"}, "no split"),
        ({"is_real": True, "world": World(num_workers=2, faults=FaultScript())}, "virtual time alone"),
        ({"seeds": (-5, -4)}, "-5 is no seed"),
        ({"target": math.nan}, "no target"),
        ({"momentum": math.nan}, "no momentum"),
        (
            {
                "is_real": True,
                "contenders": compared(["pair", "staleness-aware"], {}),
                "world": World(num_workers=2, between="machines"),
            },
            "^staleness-aware: servers",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        config_of(**fields)


def test_strategies_with_servers_do_not_take_part_while_workers_come_and_go():
    contenders, notes = without_servers(compared(["all"], {}), ["all"])
    assert "parameter-server" not in [each.name for each in contenders]
    assert "parameter-server and staleness-aware" in notes[0]
    with pytest.raises(UsageError, match="parameter-server cannot be compared while workers come and go"):
        without_servers(compared(["parameter-server"], {}), ["parameter-server"])
