import msgspec
import pytest

from shoal.bench.dht_config import DhtConfig, ExpertsPlan, KeysPlan, config_of
from shoal.core import UsageError
from shoal.core.placement import num_cores


def test_the_defaults_are_those_of_the_two_benchmarks():
    experts, keys = config_of(None, {}), config_of("keys", {"num_experts": None})
    assert (experts.mode, experts.num_peers, experts.initial_peers) == ("experts", 32, 1)
    assert experts.plan == ExpertsPlan(256, 32, 0.0, 0.0)
    assert (keys.mode, keys.num_peers, keys.initial_peers) == ("keys", 16, 4)
    assert keys.plan == KeysPlan(None, 16, 8, 8, 10, 0.1, 0.0, 0.0, True)
    assert experts.num_processes == keys.num_processes == min(num_cores(), 16)
    assert experts.expiration_s == keys.expiration_s == 300
    assert keys.num_victims == 2
    assert experts.num_victims == 0


def test_a_number_of_keys_is_stored_and_got_once_each_and_a_virtual_world_has_keys():
    between = config_of("keys", {"num_keys": 10_000, "failure_rate": 0.2, "num_peers": 256})
    assert between.plan == KeysPlan(10_000, 16, 1, 1, 10, 0.2, latest=False)
    assert between.num_victims == 51
    world = config_of(None, {"num_peers": 10_000}, is_virtual=True)
    assert (world.mode, world.profile, world.num_processes) == ("keys", "wan", 1)
    assert world.plan == KeysPlan(1000, 16, 1, 1, 10, 0.0, latest=False)
    assert config_of("experts", {"profile": "home"}, is_virtual=True).profile == "home"


def test_a_config_survives_the_way_to_another_process():
    for config in (config_of(None, {}), config_of(None, {}, is_virtual=True)):
        assert msgspec.convert(msgspec.to_builtins(config), DhtConfig) == config


@pytest.mark.parametrize(
    ("mode", "given", "complaint"),
    [
        ("experts", {"failure_rate": 0.1}, "--failure-rate belongs to --mode keys"),
        ("keys", {"expert_batch_size": 64}, "--expert-batch-size belongs to --mode experts"),
        (None, {"latest": False}, "--latest belongs to --mode keys, not to --mode experts"),
        ("keys", {"num_keys": 10, "total_num_rounds": 10}, "two orders of the same work"),
        ("keys", {"failure_rate": 0.95}, "15 would be killed"),
        (None, {"profile": "wan"}, "runs on sockets"),
        (None, {"num_peers": 2, "num_processes": 3}, "no swarm to measure"),
        (None, {"expiration": 604_801}, "at most 604800 s"),
        ("keys", {"num_keys": 10, "wait_after_iteration": 1}, "rests between rounds"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(mode, given, complaint):
    with pytest.raises(UsageError, match=complaint):
        config_of(mode, given)


@pytest.mark.parametrize(
    ("num_peers", "num_processes", "num_ranks"), [(7, 2, 2), (8, 2, 3), (8, 1, 1), (9, 8, 8), (10, 8, 9)]
)
def test_those_that_ask_have_a_further_process_where_that_leaves_peers_for_the_others(
    num_peers, num_processes, num_ranks
):
    config = config_of("experts", {"num_peers": num_peers, "num_processes": num_processes})
    assert config.num_ranks == num_ranks
    assert config.has_askers_apart == (num_ranks > num_processes)
    assert config_of("keys", {"num_peers": 16, "num_processes": 2}).num_ranks == 2


def test_a_virtual_world_is_one_process_on_a_known_network():
    with pytest.raises(UsageError, match="one process"):
        config_of(None, {"num_processes": 2}, is_virtual=True)
    with pytest.raises(UsageError, match="wann"):
        config_of(None, {"profile": "wann"}, is_virtual=True)
