"""The sweep, its rows, and what becomes of a stage that fails."""

import contextlib

import msgspec
import pytest
from torch import distributed

from shoal.bench.ddp import (
    DdpConfig,
    DdpScenario,
    DdpWorker,
    SweepStage,
    bucket_size_of,
    ddp_items,
    encode_ddp,
    iteration_s,
    numbered,
    options_of,
    skew,
    sweep,
)
from shoal.bench.frame import RunSettings, run_benchmark
from shoal.bench.workers import BenchPlace
from shoal.core import BenchmarkError, UsageError
from shoal.report import compare, load, save
from shoal.report.pytorch import diff_lines

TINY = DdpConfig(models=("small-mlp",), batch_size=4, image_size=8, num_warmup=1, num_iters=3)


def labels(*sizes):
    machines = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    return [(stage.label, stage.num_ranks) for stage in sweep(machines)]


def test_one_machine_is_filled_by_doubling_and_then_wholly():
    assert labels(1) == [("no ddp", 1), ("1M/1G", 1)]
    assert labels(3) == [("no ddp", 1), ("1M/1G", 1), ("1M/2G", 2), ("1M/3G", 3)]
    assert labels(8) == [("no ddp", 1), ("1M/1G", 1), ("1M/2G", 2), ("1M/4G", 4), ("1M/8G", 8)]


def test_then_come_whole_machines():
    assert labels(8, 8, 8)[-3:] == [("1M/8G", 8), ("2M/8G", 16), ("3M/8G", 24)]
    assert labels(2, 2, 1)[-3:] == [("1M/2G", 2), ("2M/2G", 4), ("3M/1-2G", 5)]
    assert labels(1, 1) == [("no ddp", 1), ("1M/1G", 1), ("2M/1G", 2)]


def test_ranks_that_were_dealt_out_in_turns_are_refused():
    with pytest.raises(BenchmarkError, match="do not follow each other"):
        sweep([0, 1, 0, 1])


def test_machines_are_numbered_as_they_appear():
    assert numbered([["b", 0], ["b", 0], ["b", 1], ["a", 0]]) == [0, 0, 1, 2]


def test_the_bucket_size_is_an_option_of_strategies_that_have_buckets():
    assert options_of("ddp", {}, 1)["bucket_mib"] == 1
    assert options_of("all-reduce", {}, bucket_size_of("all-reduce", None))["bucket_mib"] == 25
    assert "bucket_mib" not in options_of("neighbor", {"topology": "ring"}, bucket_size_of("neighbor", None))
    assert options_of("ddp", {"gradient_as_bucket_view": "true"}, 1)["gradient_as_bucket_view"] is True
    for strategy, option in (("ddp", "local_steps"), ("all-reduce", "topology")):
        with pytest.raises(UsageError, match=option):
            options_of(strategy, {option: "2"}, 1)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"strategy": "ps"}, "needs servers"),
        ({"distributed_backend": "nccl"}, "between GPUs"),
        ({"num_workers": 3, "workers_per_machine": 2}, "do not fill"),
        ({"num_iters": 0}, "nothing is measured"),
        ({"models": ()}, "nothing is measured"),
    ],
)
def test_what_cannot_be_measured_is_refused(changed, says):
    with pytest.raises(UsageError, match=says):
        msgspec.structs.replace(TINY, **changed)


def test_skew_is_of_each_iteration():
    assert skew([[1.0, 2.0], [1.5, 2.0], [3.0, 1.0]]) == [3.0, 2.0]


class FakeWorkers:
    """Workers on paper: `hosts` by rank; a stage of `fails_at` ranks ends them all."""

    def __init__(self, hosts, fails_at=None):
        self.hosts, self.fails_at = hosts, fails_at
        self.is_running = False
        self.orders = []
        self.groups = []

    def ask(self, order, among=None, **details):
        self.is_running = True
        self.orders.append((order, among))
        return getattr(self, order)(among, **details)

    def place(self, among):
        names = list(dict.fromkeys(self.hosts))
        return [{"machine": [names.index(host), 0], "host_id": host} for host in self.hosts]

    def machine(self, among):
        firsts = [host not in self.hosts[:rank] for rank, host in enumerate(self.hosts)]
        return [
            {
                "machine": host,
                "processor": "p",
                "cores": 8 if host != "odd" else 4,
                "device": "cpu",
                "topology": f"topology of {'odd' if host == 'odd' else 'all'}",
                "versions": {},
            }
            if is_first
            else None
            for host, is_first in zip(self.hosts, firsts, strict=True)
        ]

    def warm_up(self, among, model):
        return [None for _ in self.hosts]

    def measure(self, among, model, num_ranks, group_name):
        self.groups.append(group_name)
        if num_ranks == self.fails_at:
            self.is_running = False
            raise BenchmarkError("rank 1 failed.\nBadly.")
        return [[rank + 1.0, rank + 2.0] for rank in range(num_ranks)]


def run(crew, **changed):
    config = msgspec.structs.replace(TINY, num_workers=len(crew.hosts), num_iters=2, **changed)
    scenario = DdpScenario(msgspec.to_builtins(config), 0)
    scenario.open_workers = lambda settings: contextlib.nullcontext(crew)
    told = []
    return list(scenario.run(told.append)), told


def test_all_ranks_are_pooled_one_after_another_and_their_skew_is_kept():
    crew = FakeWorkers(["a"] * 2)
    rows, _ = run(crew)
    found = {(row.metric, row.key["label"]): row for row in rows}
    assert list(found) == [
        ("sec_per_iter", "no ddp"),
        ("sec_per_iter", "1M/1G"),
        ("sec_per_iter", "1M/2G"),
        ("slowest_over_fastest", "1M/2G"),
    ]
    pooled = found["sec_per_iter", "1M/2G"]
    assert pooled.samples == [1.0, 2.0, 2.0, 3.0]
    assert pooled.key == {
        "model": "small-mlp", "batch_size": 4, "image_size": 8, "label": "1M/2G", "num_ranks": 2,
    }  # fmt: skip
    assert found["slowest_over_fastest", "1M/2G"].samples == [2.0, 1.5]
    assert crew.groups[0] is None
    assert len({*crew.groups}) == 3
    assert crew.orders[1:] == [("warm_up", None), ("measure", 1), ("measure", 1), ("measure", 2)]


def test_a_stage_that_fails_is_a_row_and_new_workers_are_warmed_up():
    crew = FakeWorkers(["a"] * 3, fails_at=2)
    rows, told = run(crew)
    assert [row.key["label"] for row in rows if row.error] == ["1M/2G"]
    assert next(row.error for row in rows if row.error) == "rank 1 failed. Badly."
    assert [row.key["label"] for row in rows if row.samples][-1] == "1M/3G"
    assert [order for order, _ in crew.orders].count("warm_up") == 2
    assert any("1M/2G failed" in text for text in told)


def test_machines_are_compared_with_the_first():
    rows, told = run(FakeWorkers(["a", "b", "odd"]))
    alike = {row.key["host"]: row for row in rows if row.metric == "like_machine_0"}
    assert alike["b"].samples == [1.0]
    assert alike["odd"].samples == [0.0]
    assert alike["odd"].key["differs_in"] == "cores, topology"
    assert any("topology of odd" in text for text in told)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A worker that is alone, in this process."""
    # what a process of its own is set to would stay with the tests that follow
    monkeypatch.setattr(BenchPlace, "set_up_process", lambda self: None)

    def alone(**changed):
        place = BenchPlace(0, 1, "test-ddp", str(tmp_path))
        config = msgspec.structs.replace(TINY, num_workers=1, **changed)
        return DdpWorker(place, msgspec.to_builtins(config), contextlib.ExitStack())

    return alone


def test_a_lone_worker_has_torchs_wrapper_around_its_model(alone, monkeypatch):
    from shoal.strategies import ddp

    wrapped = []
    real = ddp.DistributedDataParallel
    monkeypatch.setattr(
        ddp, "DistributedDataParallel", lambda *args, **named: wrapped.append(named) or real(*args, **named)
    )
    bench = alone(options={"bucket_mib": 1.0})
    assert len(bench.measure("small-mlp", 1, None)) == 3
    assert not wrapped
    times_s = bench.measure("small-mlp", 1, "ddp-1")
    assert len(times_s) == 3
    assert min(times_s) > 0
    assert wrapped[0]["bucket_cap_mb"] == 1.0
    assert wrapped[0].get("broadcast_buffers", wrapped[0].get("forward_sync_buffers")) is False


def test_the_wrapper_uses_the_backend_that_its_group_has_opened(alone, monkeypatch):
    monkeypatch.setattr(DdpWorker, "_is_usual", False)
    assert len(alone().measure("small-mlp", 1, "ddp-gloo")) == 3
    assert not distributed.is_initialized()


def test_a_wrapper_that_talks_by_another_backend_than_the_report_says_is_refused(alone):
    with pytest.raises(UsageError, match="by nccl, and gloo was opened"):
        alone(distributed_backend="nccl", device="cuda")._check_backend("gloo")


def test_gradients_do_not_add_up(alone):
    trainee = alone()._trainee("small-mlp")
    iteration_s(trainee)
    first = next(trainee.model.parameters()).grad.clone()
    iteration_s(trainee)
    assert next(trainee.model.parameters()).grad.norm() < 1.5 * first.norm()


def test_backends_are_asked_for_where_they_are_not_the_devices_own(alone, monkeypatch):
    asked = []
    monkeypatch.setattr(BenchPlace, "open_group", lambda place, name, **named: asked.append(named["backend"]))
    for changed in (
        {},
        {"strategy": "all-reduce", "distributed_backend": "shoal"},
        {"strategy": "all-reduce"},
        {"device": "cuda", "distributed_backend": "nccl"},
        {"device": "cuda", "distributed_backend": "gloo"},
        {"device": "cuda", "distributed_backend": "nccl", "strategy": "all-reduce"},
    ):
        alone(**changed)._open_group("name", 1)
    assert asked == [None, None, "gloo", None, "gloo", "nccl"]


def test_a_stage_knows_whether_something_is_wrapped_around_the_model():
    assert SweepStage("no ddp", 1).is_alone
    assert not SweepStage("1M/1G", 1).is_alone


@pytest.mark.slow
def test_a_sweep_of_two_starts_is_reported_compared_and_written_as_pytorchs(tmp_path):
    config = msgspec.to_builtins(msgspec.structs.replace(TINY, options=options_of("ddp", {}, 25)))
    [report] = run_benchmark("ddp", config, RunSettings(2), tell=lambda _: None)
    assert not report.failed
    assert [len(row.starts) for row in report.rows] == [2] * 4
    assert [len(start) for start in report.rows[2].starts] == [6, 6]
    assert any("1M/2G:" in str(item) for item in ddp_items(report))
    path = save(report, tmp_path / "report.json")
    assert len(compare(load(path), load(path)).rows) == 4
    pooled = tmp_path / "pytorch.json"
    pooled.write_bytes(encode_ddp(report))
    lines = diff_lines(compare(load(pooled), load(pooled)))
    assert any(line.startswith("   2 GPUs:  p75:") for line in lines)
