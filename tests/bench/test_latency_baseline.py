import pytest
import torch

from shoal.bench import latency_baseline as module
from shoal.bench.latency_baseline import Baseline
from shoal.bench.latency_config import LatencyConfig
from shoal.bench.latency_flow import Pings

CONFIG = LatencyConfig(
    gpus=(0, 1),
    hid_dim=8,
    layers_per_gpu=2,
    batch_size=2,
    batches_for_latency=2,
    batches_for_throughput=3,
    throughput_runs=2,
    passes=("forward", "forward+backward"),
)


@pytest.fixture
def slept(monkeypatch):
    """What was waited for, instead of waiting."""
    monkeypatch.setattr(module, "num_cores", torch.get_num_threads)
    naps = []
    monkeypatch.setattr(module.time, "sleep", naps.append)
    return naps


@pytest.mark.parametrize(("passes", "num_waits"), [("forward", 4), ("forward+backward", 8)])
def test_a_batch_waits_after_every_block_of_each_pass(slept, passes, num_waits):
    baseline = Baseline(CONFIG, 0)
    baseline.place(in_turn=True)
    assert len(baseline.latencies(passes, Pings(0.1, 0, "slow"))) == 2
    assert len(slept) == (2 + 1) * num_waits
    assert len(baseline.rates(passes, Pings(0.1, 0, "slow"))) == 2
    assert len(slept) == (2 + 1 + 1 + 2 * 3) * num_waits
    again = Pings(0.1, 0, "slow")
    assert slept[:num_waits] == [again.draw_s() for _ in range(num_waits)]


def test_what_is_fast_waits_for_nothing_and_what_is_trained_learns(slept):
    baseline = Baseline(CONFIG, 0)
    baseline.place(in_turn=False)
    before = [parameter.clone() for parameter in baseline._blocks[0].parameters()]
    rates = baseline.rates("forward")
    assert len(rates) == CONFIG.throughput_runs
    assert min(rates) > 0
    unchanged = zip(before, baseline._blocks[0].parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in unchanged)
    assert min(baseline.rates("forward+backward")) > 0
    changed = zip(before, baseline._blocks[0].parameters(), strict=True)
    assert all(not torch.equal(old, new) for old, new in changed)
    assert slept == []
