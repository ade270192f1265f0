import msgspec
import pytest

from shoal.bench.scaling import ScalingConfig, given_options, options_for
from shoal.core import UsageError

CONFIG = ScalingConfig()
STATIC = ScalingConfig(is_dynamic=False, is_adapt_then_combine=True)


@pytest.mark.parametrize(
    ("local_sizes", "topology"),
    [
        ([1], "one-peer-exponential"),
        ([8], "one-peer-exponential"),
        ([2, 2], "one-peer-exponential"),
        ([3, 4], "one-peer-exponential"),
        ([3, 3], "inner-outer-exponential"),
    ],
)
def test_neighbours_take_turns_inside_and_outside_of_equal_machines(local_sizes, topology):
    found = options_for("neighbor_allreduce", CONFIG, local_sizes)
    assert found == {"order": "adapt-while-combine", "topology": topology}


def test_between_machines_one_takes_turns_with_one():
    assert options_for("hierarchical", CONFIG, [4, 4])["topology"] == "one-peer-exponential"


def test_flags_give_a_static_graph_and_combine_after_the_step():
    assert options_for("neighbor", STATIC, [4, 4]) == {
        "order": "adapt-then-combine",
        "topology": "exponential-2",
    }
    assert options_for("win_put", STATIC, [4]) == {"topology": "exponential-2"}
    assert options_for("gradient_allreduce", STATIC, [4]) == {}


def test_a_name_and_a_flag_come_before_the_document():
    assert options_for("allreduce", CONFIG, [4])["topology"] == "full"
    told = msgspec.structs.replace(CONFIG, options={"neighbor": {"topology": "ring"}})
    assert options_for("neighbor", told, [4])["topology"] == "ring"


def test_options_go_to_the_strategies_that_have_them():
    given = given_options(("neighbor", "all-reduce"), {"topology": "ring", "bucket_mib": "5"})
    assert given == {"neighbor": {"topology": "ring"}, "all-reduce": {"bucket_mib": 5.0}}


@pytest.mark.parametrize("given", [{"alpha": "0.1"}, {"order": "none"}])
def test_options_that_nobody_has_or_that_do_not_fit_are_bad_usage(given):
    with pytest.raises(UsageError):
        given_options(("neighbor", "all-reduce"), given)
