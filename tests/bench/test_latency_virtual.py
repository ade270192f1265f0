import msgspec
import pytest

from shoal.bench.latency_config import LatencyConfig
from shoal.bench.latency_virtual import run_point

CONFIG = LatencyConfig(
    gpus=(0, 1),
    layers_per_gpu=3,
    batch_size=8,
    jobs=24,
    max_batch_size=16,
    batches_for_throughput=4,
    throughput_runs=2,
    compute_ms=1.0,
    is_virtual=True,
)
CAPACITY = 8 / (3 * 1e-3)  # of two devices with three blocks each


def simulate(method, ping_s, passes="forward", **changed):
    config = msgspec.structs.replace(CONFIG, **changed)
    task = {"config": msgspec.to_builtins(config), "seed": 3}
    found = run_point({**task, "method": method, "passes": passes, "ping_s": ping_s}, print)
    return found["latency_s"], found["samples_per_s"]


def test_without_delays_a_batch_takes_what_its_blocks_do():
    for method in ("fast", "slow", "ours"):
        latency_s, _ = simulate(method, 0.0)
        assert latency_s == pytest.approx([6e-3] * 5)
    assert simulate("fast", 0.0)[1] == pytest.approx([CAPACITY] * 2)
    assert simulate("slow", 0.0)[1] == pytest.approx([CAPACITY / 2] * 2)


def test_many_clients_hide_the_delay_that_one_batch_at_a_time_cannot():
    ours, slow = ([simulate(method, ping_s)[1] for ping_s in (0.0, 5e-3)] for method in ("ours", "slow"))
    assert min(ours[0]) > 0.9 * CAPACITY
    assert min(ours[1]) > 0.8 * CAPACITY
    assert max(slow[1]) < 0.3 * max(slow[0])
    assert sum(ours[1]) / len(ours[1]) <= 1.02 * CAPACITY


def test_a_backward_costs_more_where_forward_is_computed_again():
    assert simulate("slow", 0.0, "forward+backward")[0] == pytest.approx([6 * 3e-3] * 5)
    assert simulate("ours", 0.0, "forward+backward")[0] == pytest.approx([6 * 4e-3] * 5)


def test_too_few_clients_are_bound_by_their_waits():
    _, rates = simulate("ours", 0.1, jobs=2, batches_for_throughput=40)
    assert sum(rates) / len(rates) == pytest.approx(2 * 8 / (6 * 0.101), rel=0.1)


def test_one_seed_gives_equal_figures():
    assert simulate("ours", 2e-3) == simulate("ours", 2e-3)
