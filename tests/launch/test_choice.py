import pytest

from shoal.cli.run import check_choice, parse_options
from shoal.core import UsageError


def test_values_are_what_they_read_as():
    words = ["alpha=0.5", "monitor=true", "topology=ring:left", "order = x", "seed=3", "name=a=b"]
    assert parse_options(words) == {
        "alpha": 0.5,
        "monitor": True,
        "topology": "ring:left",
        "order": " x",
        "seed": 3,
        "name": "a=b",
    }


@pytest.mark.parametrize("word", ["alpha", "=3"])
def test_an_option_needs_a_name_and_a_value(word):
    with pytest.raises(UsageError, match="name=value"):
        parse_options([word])


def test_other_names_mean_a_strategy_and_its_options():
    assert check_choice("async_sgd", {"local-steps": 4}, 2, None) == ("pair", {"local_steps": 4})
    assert check_choice("allreduce", {}, 2, None) == ("neighbor", {"topology": "full"})
    assert check_choice(None, {"local_steps": 4}, 2, None) == (None, {"local_steps": 4})


@pytest.mark.parametrize(
    ("strategy", "options", "per_machine", "complaint"),
    [
        ("swim", {}, None, "neighbor, hierarchical, pair"),
        ("pair", {"depth": 3}, None, "local_steps"),
        ("sma", {"alpha": 3}, None, "alpha"),
        ("neighbor", {"topology": "swim"}, None, "one-peer-exponential"),
        ("neighbor", {"order": "first"}, None, "order"),
        (None, {"topology": "ring"}, None, "topology"),
        ("pair", {}, 0, "--workers-per-machine"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(strategy, options, per_machine, complaint):
    with pytest.raises(UsageError) as refused:
        check_choice(strategy, options, 4, per_machine)
    assert complaint in str(refused.value)


def test_the_topology_of_hierarchical_is_one_of_machines():
    assert check_choice("hierarchical", {"topology": "hypercube"}, 6, 3)[0] == "hierarchical"
    with pytest.raises(UsageError):
        check_choice("neighbor", {"topology": "hypercube"}, 6, 3)
