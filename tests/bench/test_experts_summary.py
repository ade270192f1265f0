import msgspec
import pytest

from shoal.bench import experts_config
from shoal.bench.experts import Outcome
from shoal.bench.experts_config import config_of
from shoal.bench.experts_summary import experts_items, summarize_experts
from shoal.bench.experts_tally import Tally
from shoal.report import Report, Row

MIB = 1 << 20
SERVER_LINE = (
    "Server: num_experts=1, expert_class=ffn, hidden_dim=1024, max_batch_size=40, num_handlers=1, "
    "device=cpu, precision=fp32"
)
GIVEN = {"num_clients": 2, "client_processes": 2, "num_batches_per_client": 50, "batch_size": 10}


def outcome(**changes):
    latencies = {"forward_us": [1000 * n for n in range(1, 101)], "backward_us": [3000] * 100}
    values = {
        "launch_s": 2.0,
        "experts_s": 0.5,
        "networking_s": 0.25,
        "echo": Tally(num_samples=2000),
        "echo_samples_per_s": [3000.0, 5000.0],
        "asked": Tally(num_samples=1000, **latencies),
        "asked_s": 2.0,
        "local_samples_per_s": [700.0, 900.0],
        "rss_bytes": [100 * MIB, 110 * MIB, 110 * MIB],
        "server": {"num_processes": 1},
    }
    return Outcome(**{**values, **changes})


def report_of(*outcomes, preset="minimalistic", **given):
    config = config_of(preset, {"device": "cpu", **GIVEN, **given})
    starts, errors = {}, []
    for found in outcomes:
        for row in found.rows(config, 9.0):
            if row.error is not None:
                errors.append(row)
                continue
            fields = (row.metric, row.unit, row.direction)
            starts.setdefault((tuple(row.key.items()), *fields), []).append(row.samples)
    rows = [
        Row(key=dict(key), metric=metric, unit=unit, direction=direction, starts=samples)
        for (key, metric, unit, direction), samples in starts.items()
    ]
    rows += [
        Row(key=row.key, metric=row.metric, unit=row.unit, direction=row.direction, error=row.error)
        for row in errors
    ]
    return Report(
        benchmark="experts",
        created="2026-01-01T00:00:00+00:00",
        config=msgspec.to_builtins(config),
        environment={"device": "cpu"},
        rows=rows,
    )


def text_of(report):
    return "\n".join(item if isinstance(item, str) else item[0] for item in experts_items(report))


def test_the_result_of_one_start():
    result = summarize_experts(report_of(outcome()))
    assert result["status"] == "Success"
    assert (result["samples_per_s"], result["echo_samples_per_s"], result["local_samples_per_s"]) == (
        500,
        4000,
        800,
    )
    assert (result["startup_s"], result["startup_experts_s"], result["startup_networking_s"]) == (
        0.75,
        0.5,
        0.25,
    )
    assert (result["p50_ms"], result["p95_ms"]) == (50.5, 95.05)
    assert (result["backward_p50_ms"], result["backward_p95_ms"]) == (3, 3)
    assert (result["failed_calls"], result["server_processes"]) == (0, 1)
    assert (result["num_clients"], result["client_processes"]) == (2, 2)
    assert [result[f"server_rss_{when}mib"] for when in ("before_", "half_", "")] == [100, 110, 110]
    assert not {"gpu_allocated_mib", "failures", "failed"} & set(result)


def test_several_starts_give_medians():
    report = report_of(*(outcome(asked_s=seconds) for seconds in (1.0, 2.0, 4.0)))
    assert summarize_experts(report)["samples_per_s"] == 500
    assert "Start 3 of 3\n" in text_of(report)


def test_the_lines_hold_what_the_document_prints():
    text = text_of(report_of(outcome()))
    for line in (
        "Status: Success",
        SERVER_LINE,
        "Clients: num_clients=2, client_processes=2, num_batches_per_client=50, batch_size=10, backward=True",
        "Server start-up: 0.750 s (0.500 s experts + 0.250 s networking)",
        "Processed 1,000 examples in 2.000 s",
        "Throughput, forward + backward: 500 samples/s",
        "Latency of a forward call (ms): p50 50.5, p95 95.05",
        "Failed calls: 0 of 200",
        "Total time: 9.000 s",
        "Device: cpu",
    ):
        assert f"\n{line}\n" in text, line
    assert "Warning" not in text
    forward = text_of(report_of(outcome(), backward=False))
    assert "\nThroughput, forward: 500 samples/s\n" in forward


def test_a_gpu_tells_its_name_and_memory(monkeypatch):
    monkeypatch.setattr(experts_config, "torch_build", lambda: "CUDA 12.8")
    server = {"num_processes": 1, "allocated_bytes": 2 * 10**9, "reserved_bytes": 3 * 10**9}
    report = report_of(outcome(server=server), device="cuda")
    report = msgspec.structs.replace(report, environment={"device": "NVIDIA H200"})
    assert "\nDevice: cuda (NVIDIA H200), 2.000 GB allocated, 3.000 GB reserved\n" in text_of(report)
    assert summarize_experts(report)["gpu_allocated_mib"] == pytest.approx(2e9 / MIB, rel=1e-3)


def test_calls_that_failed_make_a_failure_with_figures_and_a_reason():
    tally = Tally(num_samples=900, forward_us=[1000] * 90)
    tally.note(TimeoutError("too late"))
    tally.fail("LostClient", 9)
    report = report_of(outcome(asked=tally, num_lost=1, complaint="It ended with signal 9."))
    result = summarize_experts(report)
    assert (result["status"], result["failed_calls"], result["failed"]) == ("Failure", 10, 1)
    assert result["failures"] == {"TimeoutError": 1, "LostClient": 9}
    assert (result["samples_per_s"], result["lost_clients"]) == (450, 1)
    text = text_of(report)
    assert (
        "failed: 10 of 200 calls failed: TimeoutError × 1, LostClient × 9. 1 of 2 clients were lost: It"
        in text
    )
    assert "The first: TimeoutError: too late" in text
    assert "Warning: calls failed" in text


def test_nothing_that_came_through_is_still_a_result():
    tally = Tally(failures={"PeerLost": 200})
    result = summarize_experts(report_of(outcome(asked=tally)))
    assert (result["status"], result["samples_per_s"], result["failed_calls"]) == ("Failure", 0, 200)
    assert "p50_ms" not in result


def test_a_run_without_a_single_start_says_what_was_asked():
    error = Row(key={"scenario": "start"}, metric="completed", unit="", direction="higher", error="it broke")
    report = msgspec.structs.replace(report_of(outcome()), rows=[error])
    result = summarize_experts(report)
    assert (result["status"], result["failed"], result["num_clients"]) == ("Failure", 1, 2)
    assert "samples_per_s" not in result
    assert "failed: it broke" in text_of(report)
    trace = "It broke.\n  Likely cause: Traceback (most recent call last):\n  File a, line 1"
    report = msgspec.structs.replace(report, rows=[msgspec.structs.replace(error, error=trace)])
    assert text_of(report).rstrip().endswith("failed: It broke.")
