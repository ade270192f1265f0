"""Benchmarks of workers that share a GPU, in their shortest form."""

import msgspec
import pytest

from shoal.bench.collectives import OPS, CollectivesConfig
from shoal.bench.frame import make_scenario
from shoal.bench.training import TrainingConfig

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]


def measure(benchmark, config):
    return list(make_scenario(benchmark, msgspec.to_builtins(config), 0).run(lambda _: None))


@pytest.mark.parametrize("num_workers", [2, 4])
def test_every_collective_of_tensors_on_a_gpu_is_right_and_beside_gloo(num_workers):
    rows = measure(
        "collectives",
        CollectivesConfig(workers=(num_workers,), sizes=(4096, 1 << 20), repeats=2, device="cuda"),
    )
    assert [row.error for row in rows if row.error] == []
    found = {(row.metric, row.key["via"]) for row in rows}
    assert {(op, "group") for op in OPS} <= found
    one_sided = ("publish_fetch", "publish_mix")
    assert {(op, "gloo") for op in OPS if op not in one_sided} <= found


def test_workers_that_share_a_gpu_train_beside_those_that_share_nothing():
    names = ("all-reduce", "neighbor", "pair", "sma", "ddp", "parameter-server", "staleness-aware")
    config = TrainingConfig(model="small-mlp", strategies=names, device="cuda", num_pairs=2, block_s=0.1)
    rows = measure("training", config)
    assert [row.error for row in rows if row.error] == []
    fractions = {row.key["strategy"]: row.samples for row in rows if row.metric == "fraction_of_ceiling"}
    assert list(fractions) == list(names)
    assert all(sample > 0 for samples in fractions.values() for sample in samples)
