import msgspec
import pytest

from shoal.bench.latency import Found
from shoal.bench.latency_config import LatencyConfig
from shoal.bench.latency_summary import latency_items, summarize_latency
from shoal.report import Report, Row

CONFIG = LatencyConfig(
    layers_per_gpu=4, gpus=(0, 1), batch_size=10, linspace_points=2, max_ping_s=0.05, jobs=8
)
RATES = {
    ("fast", 0.0): [1000.0, 1002.0],
    ("slow", 0.0): [800.0, 800.0],
    ("slow", 0.05): [8.0, 8.0],
    ("ours", 0.0): [400.0, 400.0],
    ("ours", 0.05): [380.0, 380.0],
}


def report(rates, errors=(), config=CONFIG):
    points = [
        Found(method=method, passes="forward", ping_s=ping_s, latency_s=[0.5, 0.7], samples_per_s=samples)
        for (method, ping_s), samples in rates.items()
    ]
    points += [
        Found(method=method, passes="forward", ping_s=ping_s, error="lost") for method, ping_s in errors
    ]
    rows = []
    for measured in (row for point in points for row in point.rows()):
        fields = {name: getattr(measured, name) for name in ("key", "metric", "unit", "direction", "error")}
        rows.append(Row(**fields, starts=[] if measured.error else [measured.samples]))
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


def test_without_a_ping_nothing_is_kept():
    config = msgspec.structs.replace(CONFIG, max_ping_s=0.0, jobs=1)
    made = report({key: rates for key, rates in RATES.items() if not key[1]}, config=config)
    assert not any("kept" in name or "max_ping" in name for name in made.result if name != "max_ping_s")
    assert made.result["headline"] == [
        "Without delay, expert servers do 0.500 times as many samples a second."
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
    lines = [item for item in latency_items(report(RATES)) if isinstance(item, str)]
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
