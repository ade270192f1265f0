"""`shoal bench latency` as a whole, at sizes that take seconds."""

import json

import msgspec
import pytest

from shoal.bench.frame import MeasuredCurve, make_scenario
from shoal.bench.latency import Found, curves
from shoal.bench.latency_config import LatencyConfig
from shoal.cli.program import run

SMALL = {"hid_dim": 16, "layers_per_gpu": 2, "batch_size": 4, "linspace_points": 2, "max_ping_s": 0.01}
SMALL |= {"batches_for_latency": 2, "batches_for_throughput": 2, "throughput_runs": 2, "jobs": 4}


def found(method, ping_s, rates, **more):
    return Found(
        method=method, passes="forward", ping_s=ping_s, latency_s=[1.0, 2.0], samples_per_s=rates, **more
    )


def test_a_failed_point_is_a_row_and_no_point_of_the_curve():
    failed = Found(method="ours", passes="forward", ping_s=0.1, error="nobody answers")
    (row,) = failed.rows()
    assert (row.key["ping_ms"], row.error) == (100.0, "nobody answers")
    (first, second) = [
        curve
        for curve in curves([found("ours", 0.0, [5.0, 6.0]), failed], [0.0, 0.1])
        if curve.metric == "throughput"
    ]
    assert first.points == {"value": [5.0], "ping_s": [0.0]}
    assert second.points == {"value": [6.0], "ping_s": [0.0]}


def test_what_has_no_delay_is_a_level_line():
    points = [found("fast", 0.0, [9.0, 9.5]), found("slow", 0.0, [8.0, 7.0]), found("slow", 0.1, [2.0, 1.0])]
    rates = [curve for curve in curves(points, [0.0, 0.1]) if curve.metric == "throughput"]
    assert [(curve.key["method"], curve.points["value"]) for curve in rates] == [
        ("fast", [9.0, 9.0]),
        ("fast", [9.5, 9.5]),
        ("slow", [8.0, 2.0]),
        ("slow", [7.0, 1.0]),
    ]
    assert all(curve.points["ping_s"] == [0.0, 0.1] for curve in rates)


@pytest.mark.slow
def test_all_methods_on_real_sockets():
    config = LatencyConfig(**SMALL, max_batch_size=8, passes=("forward", "forward+backward"))
    told = []
    measured = list(make_scenario("latency", msgspec.to_builtins(config), 0).run(told.append))
    rows = [each for each in measured if not isinstance(each, MeasuredCurve)]
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
