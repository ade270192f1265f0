"""`shoal bench latency` as a whole, at sizes that take seconds."""

import asyncio
import json
import statistics

import msgspec
import pytest
import torch

from shoal.bench import latency
from shoal.bench.frame import make_scenario
from shoal.bench.latency import (
    LatencyConfig,
    LatencyPoint,
    check_machine,
    config_of,
    curves,
    latency_items,
    parsed_methods,
    summarize_latency,
)
from shoal.bench.processes import latency as latency_workers
from shoal.bench.processes.latency import Baseline, Pings, latencies, rates, run_point
from shoal.cli.program import run
from shoal.core import PeerLost, UsageError
from shoal.core.virtual import run_virtual
from shoal.doctor.machine import Memory
from shoal.report import Curve, Report

SMALL = {"hid_dim": 16, "layers_per_gpu": 2, "batch_size": 4, "linspace_points": 2, "max_ping_s": 0.01}
SMALL |= {"batches_for_latency": 2, "batches_for_throughput": 2, "throughput_runs": 2, "jobs": 4}


def found(method, ping_s, rates, **more):
    return LatencyPoint(
        method=method, passes="forward", ping_s=ping_s, latency_s=[1.0, 2.0], samples_per_s=rates, **more
    )


def test_a_failed_point_is_a_row_and_no_point_of_the_curve():
    failed = LatencyPoint(method="ours", passes="forward", ping_s=0.1, error="nobody answers")
    (row,) = failed.rows()
    assert (row.key["ping_ms"], row.error) == (100.0, "nobody answers")
    (first, second) = [
        curve
        for curve in curves([found("ours", 0.0, [5.0, 6.0]), failed], [0.0, 0.1])
        if curve.metric == "throughput"
    ]
    assert first.starts[0] == {"value": [5.0], "ping_s": [0.0]}
    assert second.starts[0] == {"value": [6.0], "ping_s": [0.0]}


def test_what_has_no_delay_is_a_level_line():
    points = [found("fast", 0.0, [9.0, 9.5]), found("slow", 0.0, [8.0, 7.0]), found("slow", 0.1, [2.0, 1.0])]
    rates = [curve for curve in curves(points, [0.0, 0.1]) if curve.metric == "throughput"]
    assert [(curve.key["method"], curve.starts[0]["value"]) for curve in rates] == [
        ("fast", [9.0, 9.0]),
        ("fast", [9.5, 9.5]),
        ("slow", [8.0, 2.0]),
        ("slow", [7.0, 1.0]),
    ]
    assert all(curve.starts[0]["ping_s"] == [0.0, 0.1] for curve in rates)


@pytest.mark.slow
def test_all_methods_on_real_sockets():
    config = LatencyConfig(**SMALL, max_batch_size=8, passes=("forward", "forward+backward"))
    told = []
    measured = list(make_scenario("latency", msgspec.to_builtins(config), 0).run(told.append))
    rows = [each for each in measured if not isinstance(each, Curve)]
    assert [row.error for row in rows if row.error] == []
    keys = [(row.key["method"], row.key["passes"], row.key["ping_ms"]) for row in rows]
    assert len(dict.fromkeys(keys)) == 2 + 2 * 2 * 2
    by_key = {(*key, row.metric): row.samples for key, row in zip(keys, rows, strict=True)}
    for method in ("slow", "ours"):  # four layers wait 10 ms each, on average
        assert sum(by_key[method, "forward", 10.0, "latency"]) > 2 * 4 * 10e-3 / 4
    assert len(by_key["ours", "forward+backward", 10.0, "throughput"]) == 2
    assert "starting 2 servers of 2 blocks each" in told


@pytest.mark.slow
def test_hosts_that_serve_nothing_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = (
        "--device",
        "cpu",
        "--methods",
        "ours",
        "--hosts",
        "127.0.0.1:1",
        "--layers-per-gpu",
        "1",
        "-j",
        "1",
    )
    code = run(["bench", "latency", *flags])
    out, complaint = capsys.readouterr()
    assert code == 1, complaint
    assert "127.0.0.1:1" in out


@pytest.mark.slow
def test_two_simulated_runs_are_equal(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = "bench latency --virtual --layers-per-gpu 2 --linspace-points 2 -j 4 --throughput-runs 2"
    reports = []
    for name in ("a.json", "b.json"):
        assert run([*command.split(), "--report", name]) == 0
        report = json.loads((tmp_path / name).read_text())
        reports.append({part: report[part] for part in ("rows", "curves", "result", "config", "seeds")})
    assert reports[0] == reports[1]
    result = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT: "))
    assert result["ours_kept"] > result["slow_kept"]


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
    monkeypatch.setattr(latency, "memory", lambda: Memory(2 << 30, 1 << 30))
    with pytest.raises(UsageError, match=r"112 blocks need 11\.3 GB"):
        check_machine(LatencyConfig(), should_raise_limit=False)
    check_machine(LatencyConfig(hid_dim=64, jobs=1), should_raise_limit=False)


def test_methods_are_measured_in_one_order():
    assert parsed_methods(["ours", "fast"]) == ("fast", "ours")
    with pytest.raises(UsageError, match="'quick'"):
        parsed_methods(["quick"])


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
    monkeypatch.setattr(latency_workers, "num_cores", torch.get_num_threads)
    naps = []
    monkeypatch.setattr(latency_workers.time, "sleep", naps.append)
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


class Pusher:
    """Takes so long for each batch in turn, and then always as long as for the last."""

    def __init__(self, *seconds, fails_at=None):
        self._seconds = list(seconds)
        self._fails_at = fails_at
        self.num_pushed = 0

    async def push(self):
        if self.num_pushed == self._fails_at:
            raise PeerLost("it is gone.")
        await asyncio.sleep(self._seconds[min(self.num_pushed, len(self._seconds) - 1)])
        self.num_pushed += 1


def test_the_first_batch_does_not_count_as_latency():
    assert run_virtual(latencies(Pusher(100.0, 1.0, 2.0, 3.0), 3)) == pytest.approx([1.0, 2.0, 3.0])


def load_of(batch_size, num_batches, num_runs):
    return LatencyConfig(batch_size=batch_size, batches_for_throughput=num_batches, throughput_runs=num_runs)


def test_throughput_leaves_the_first_batches_out_and_runs_follow_each_other():
    clients = [Pusher(50.0, 1.0) for _ in range(4)]
    found = run_virtual(rates(clients, load_of(8, 5, 3)))
    assert found == pytest.approx([8 * 4.0] * 3)


def test_nobody_waits_for_the_slowest_client():
    clients = [Pusher(1.0), Pusher(1e6)]
    found = run_virtual(rates(clients, load_of(1, 5, 2)), limit_s=100.0)
    assert found == pytest.approx([1.0, 1.0])


def test_a_failure_is_raised_and_ends_the_others():
    clients = [Pusher(1.0), Pusher(1.0, fails_at=2)]
    with pytest.raises(PeerLost):
        run_virtual(rates(clients, load_of(1, 5, 2)), limit_s=100.0)


def test_pings_are_exponential_and_each_clients_own():
    one, other = Pings(0.1, 7, "client 1"), Pings(0.1, 7, "client 2")
    drawn = [one.draw_s() for _ in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(0.1, rel=0.1)
    assert statistics.stdev(drawn) == pytest.approx(0.1, rel=0.1)
    assert drawn[:3] != [other.draw_s() for _ in range(3)]
    again = Pings(0.1, 7, "client 1")
    assert drawn[:3] == [again.draw_s() for _ in range(3)]
    assert Pings(0.0, 7, "client 1").draw_s() == 0.0


CONFIG_SUMMARY = LatencyConfig(
    layers_per_gpu=4, gpus=(0, 1), batch_size=10, linspace_points=2, max_ping_s=0.05, jobs=8
)
RATES = {
    ("fast", 0.0): [1000.0, 1002.0],
    ("slow", 0.0): [800.0, 800.0],
    ("slow", 0.05): [8.0, 8.0],
    ("ours", 0.0): [400.0, 400.0],
    ("ours", 0.05): [380.0, 380.0],
}


def report(rates, errors=(), config=CONFIG_SUMMARY, num_starts=5):
    points = [
        LatencyPoint(
            method=method, passes="forward", ping_s=ping_s, latency_s=[0.5, 0.7], samples_per_s=samples
        )
        for (method, ping_s), samples in rates.items()
    ]
    points += [
        LatencyPoint(method=method, passes="forward", ping_s=ping_s, error="lost")
        for method, ping_s in errors
    ]
    found = (row for point in points for row in point.rows())
    rows = [msgspec.structs.replace(row, starts=row.starts * num_starts) for row in found]
    made = Report(
        benchmark="latency",
        created="2026-01-01T00:00:00+00:00",
        config=msgspec.to_builtins(config),
        rows=rows,
    )
    return msgspec.structs.replace(made, result=summarize_latency(made))


def test_what_is_kept_at_the_longest_ping():
    result = report(RATES).result
    assert result["ours_kept"] == pytest.approx(0.95)
    assert result["slow_kept"] == pytest.approx(0.01)
    assert result["ours_over_slow"] == pytest.approx(47.5)
    assert result["ours_over_fast"] == pytest.approx(380 / 1001, rel=1e-3)
    first, *others = result["headline"]
    assert "8 clients of expert servers keep 95 %" in first
    assert not any("-j" in sentence for sentence in others)


def test_from_one_start_nobody_is_said_to_do_more():
    told = report(RATES, num_starts=1).result["headline"]
    assert told[0].startswith("In 1 run, with a mean delay of 50.0 ms at every layer, 8 clients")
    assert told[-1] == (
        "There, in samples a second: expert servers and model parallelism are not told apart, 8.00–380 "
        "(one run of each: a ranking needs 5)."
    )
    assert report(RATES).result["headline"][-1] == (
        "There, expert servers do 47.5 times as many samples a second."
    )


def test_without_a_ping_nothing_is_kept():
    config = msgspec.structs.replace(CONFIG_SUMMARY, max_ping_s=0.0, jobs=1)
    made = report({key: rates for key, rates in RATES.items() if not key[1]}, config=config)
    assert not any("kept" in name or "max_ping" in name for name in made.result if name != "max_ping_s")
    assert made.result["headline"] == [
        "Without delay, model parallelism does 2.00 times as many samples a second."
    ]
    lines = [item for item in latency_items(made) if isinstance(item, str)]
    assert sum(line.startswith(("slow", "ours")) for line in lines) == 2
    assert any("1 client, on cpu" in line for line in lines)


def test_percentages_have_no_exponents():
    result = report({**RATES, ("slow", 0.05): [799.0, 800.0]}).result
    assert any("model parallelism keeps 100 %" in sentence for sentence in result["headline"])


def test_who_has_too_few_clients_is_told_so():
    result = report({**RATES, ("ours", 0.05): [190.0, 190.0]}).result
    assert any("more than 200 samples/s there; more of them (-j) can" in line for line in result["headline"])
    busy = report({**RATES, ("ours", 0.05): [90.0, 90.0]}).result  # far below what their waits allow
    assert not any("-j" in line for line in busy["headline"])


def test_lines_have_mean_and_sample_deviation():
    lines = [item for item in latency_items(report(RATES, num_starts=1)) if isinstance(item, str)]
    (fast,) = [line for line in lines if line.startswith("fast")]
    expected = "fast ping 0.0000 s latency 0.6000 ± 0.141 s throughput 1,001 ± 1.41 samples/s"
    assert " ".join(fast.split()) == expected
    assert sum(line.startswith(("slow", "ours")) for line in lines) == 4


def test_a_point_that_failed_is_told_and_figures_go_without_it():
    rates = {key: value for key, value in RATES.items() if key != ("ours", 0.05)}
    made = report(rates, errors=[("ours", 0.05)])
    assert "ours_kept" not in made.result
    assert made.result["slow_kept"] == pytest.approx(0.01)
    assert made.result["failed"] == 1
    assert ("failed: lost", "red") in latency_items(made)


CONFIG_VIRTUAL = LatencyConfig(
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
    config = msgspec.structs.replace(CONFIG_VIRTUAL, **changed)
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
