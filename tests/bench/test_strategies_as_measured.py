import pytest

from shoal.bench.contenders import (
    beside_none,
    is_ddp,
    is_free_running,
    needs_servers,
    options_of,
    sends_by_itself,
)
from shoal.core import UsageError


def test_what_is_named_is_measured_once_beside_none():
    assert beside_none(["sma", "none", "pair", "sma"]) == ("sma", "pair")
    with pytest.raises(UsageError, match="no strategy to measure beside 'none'"):
        beside_none(["none"])
    with pytest.raises(UsageError, match="no strategy 'magic'"):
        beside_none(["sma", "magic"])


def test_kinds_are_known_by_any_name():
    assert is_ddp("distributed_data_parallel")
    assert needs_servers("ps")
    assert sends_by_itself("hvd")
    assert not any(kind("none") or kind("all-reduce") for kind in (is_ddp, needs_servers, sends_by_itself))


def test_options_go_to_the_strategies_that_have_them():
    options = options_of(("neighbor", "allreduce", "sma"), {"local_steps": "2", "alpha": "0.5"})
    assert [options[name]["local_steps"] for name in options] == [2, 2, 2]
    assert options["neighbor"]["topology"] == "exponential-2"
    assert options["allreduce"]["topology"] == "full"
    assert options["sma"]["alpha"] == 0.5
    assert "alpha" not in options["neighbor"]
    with pytest.raises(UsageError, match="None of neighbor, pair has an option 'alpha'"):
        options_of(("neighbor", "pair"), {"alpha": "0.5"})


def test_pair_is_free_running_unless_it_is_told_to_meet():
    assert is_free_running("none", {})
    assert is_free_running("async_sgd", {})
    assert not is_free_running("neighbor", {})
    assert not is_free_running("pair", {"pair": {"global_average_every": 10}})


@pytest.mark.parametrize(("mode", "is_free"), [("async", True), ("bounded", False), ("sync", False)])
def test_workers_of_a_server_wait_for_each_other_unless_it_is_asynchronous(mode, is_free):
    assert is_free_running("parameter-server", {"parameter-server": {"mode": mode}}) == is_free
    assert not is_free_running("window", {"window": {"force_barrier": True}})
