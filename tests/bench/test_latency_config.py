import pytest

from shoal.bench import latency_config as module
from shoal.bench.latency_config import LatencyConfig, check_machine, config_of, parsed_methods
from shoal.bench.machine import Memory
from shoal.core import UsageError


def test_pings_go_from_none_to_the_longest():
    config = LatencyConfig(linspace_points=5, max_ping_s=0.2)
    assert config.pings_s == pytest.approx([0.0, 0.05, 0.1, 0.15, 0.2])
    assert LatencyConfig(linspace_points=1).pings_s == [0.0]
    assert LatencyConfig(linspace_points=5, max_ping_s=0.0).pings_s == [0.0]


def test_layers_and_their_memory():
    config = LatencyConfig(gpus=(0, 1, 2, 3), layers_per_gpu=56)
    assert config.num_layers == 224
    assert config.parameter_bytes == 224 * 4 * (1024 * 4096 * 2 + 4096 * 4096)
    trained = LatencyConfig(gpus=(0, 1, 2, 3), passes=("forward", "forward+backward"))
    assert trained.needed_bytes == 4 * config.needed_bytes
    transformer = LatencyConfig(block_type="transformer", layers_per_gpu=1, gpus=(0,))
    assert transformer.parameter_bytes == 4 * (4 * 1024 * 1024 + 2 * 2048 * 1024)
    assert transformer.batch_bytes == 4 * 4 * 512 * 1024


def test_what_delays_add_up_to():
    settings = {"layers_per_gpu": 4, "gpus": (0, 1), "linspace_points": 2, "max_ping_s": 0.1}
    config = LatencyConfig(**settings, batches_for_latency=2, batches_for_throughput=3, throughput_runs=4)
    assert config.waiting_s == pytest.approx(8 * 0.1 * (2 + 1 + 3 * 4 + 1))


def test_defaults_follow_the_devices_and_hosts():
    config = config_of({"device": "cpu"})
    assert (config.gpus, config.jobs, config.batch_size) == ((0, 1), 64, 4)
    assert config.max_batch_size == 64 * 4 // (2 * 2)
    assert config_of({"device": "cpu", "jobs": 1, "batch_size": 7}).max_batch_size == 7
    three = config_of({"device": "cpu", "hosts": ("a:1", "b:2", "c:3")})
    assert three.gpus == (0, 1, 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"hosts": ("a:1", "b:2"), "gpus": (0,)}, "as many --gpus as --hosts"),
        ({"batch_size": 8, "max_batch_size": 4}, "--max-batch-size 8"),
        ({"jobs": 2, "client_processes": 3}, "--client-processes"),
        ({"hosts": ("nowhere",)}, "nowhere"),
    ],
)
def test_what_cannot_be_is_refused(given, says):
    with pytest.raises(UsageError, match=says):
        config_of({"device": "cpu", **given})


def test_a_model_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(module, "memory", lambda: Memory(2 << 30, 1 << 30))
    with pytest.raises(UsageError, match=r"112 blocks need 11\.3 GB"):
        check_machine(LatencyConfig(), should_raise_limit=False)
    check_machine(LatencyConfig(hid_dim=64, jobs=1), should_raise_limit=False)


def test_methods_are_measured_in_one_order():
    assert parsed_methods(["ours", "fast"]) == ("fast", "ours")
    with pytest.raises(UsageError, match="'quick'"):
        parsed_methods(["quick"])
