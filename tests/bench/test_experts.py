"""`shoal bench experts` at a size that takes seconds: what it starts, counts and says at the end."""

import json
import re

import msgspec
import pytest

from shoal.bench import experts
from shoal.bench.experts import (
    PRESETS,
    ClientFleet,
    ExpertsOutcome,
    Tally,
    config_of,
    ensure_files,
    experts_items,
    long_run,
    summarize_experts,
)
from shoal.bench.frame import make_scenario
from shoal.cli.program import run
from shoal.core import BenchmarkError, UsageError
from shoal.doctor import machine
from shoal.doctor.machine import Gpu, Gpus, default_device
from shoal.report import Report, Row

NAMES = (
    *("samples_per_s", "startup_s", "failed_calls", "p50_ms", "server_processes", "num_clients"),
    *("client_processes", "echo_samples_per_s", "local_samples_per_s", "status"),
)
MOODY = """
import os, torch

class Moody(torch.nn.Module):
    def __init__(self, hidden_dim):
        super().__init__()

    @staticmethod
    def example_inputs(hidden_dim, batch_size):
        is_client = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        return torch.full((batch_size, hidden_dim), 7.0 if is_client else 1.0)

    def forward(self, x):
        if x[0, 0] == 7:
            raise ValueError("not today")
        return x
"""
SMALL = {"hidden_dim": 16, "batch_size": 8, "num_batches_per_client": 3, "device": "cpu"}


def measure(preset="minimalistic", **given):
    config = config_of(preset, {**SMALL, **given})
    rows, errors, told = [], [], []
    for measured in make_scenario("experts", msgspec.to_builtins(config), 0).run(told.append):
        if measured.error is not None:
            errors.append(measured.error)
            continue
        rows.append(measured)
    report = Report(
        benchmark="experts",
        created="2026-01-01T00:00:00+00:00",
        config=msgspec.to_builtins(config),
        rows=rows,
    )
    return summarize_experts(report), errors, told


def test_forward_and_backward_of_several_clients():
    result, errors, told = measure(expert_class="nop", num_clients=3, client_processes=1, num_experts=2)
    assert errors == []
    assert set(NAMES) | {"backward_p50_ms"} <= set(result)
    assert not {"p95_ms", "backward_p95_ms"} & set(result)  # of nine calls
    assert (result["num_clients"], result["client_processes"], result["server_processes"]) == (3, 1, 1)
    assert (result["num_samples"], result["failed_calls"], result["failed_echoes"]) == (3 * 3 * 8, 0, 0)
    for name in ("samples_per_s", "echo_samples_per_s", "local_samples_per_s", "startup_s", "p50_ms"):
        assert result[name] > 0, name
    assert told[:3] == [
        "starting a server of 2 experts",
        "experts without a network",
        "connecting 3 clients in 1 process",
    ]
    assert told[-1] == "experts without a network, once more"


@pytest.mark.slow
def test_calls_that_the_server_cannot_answer_are_counted(tmp_path):
    (tmp_path / "moody.py").write_text(MOODY)
    result, errors, _ = measure(expert_class=f"{tmp_path / 'moody.py'}:Moody", backward=False)
    assert errors[0].startswith("3 of 3 calls failed: RemoteFailure × 3. The first: RemoteFailure: ")
    assert (result["failed_calls"], result["samples_per_s"], result["failed_echoes"]) == (3, 0, 0)
    assert result["failures"] == {"RemoteFailure": 3}


@pytest.mark.slow
def test_the_command_prints_its_lines_and_a_result(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = "bench experts --preset ffn_forward --num_clients 4 --client_processes 2 --hidden_dim 32"
    command += " --batch_size 16 --num_batches_per_client 2 --num_experts 3 --num_handlers 2 --device cpu"
    code = run(command.split())
    out, complaint = capsys.readouterr()
    assert code == 0, complaint
    assert "\nStatus: Success\n" in out
    assert re.search(r"^Processed 128 examples in [\d.]+ s$", out, re.MULTILINE)
    result = json.loads(out.splitlines()[-1].removeprefix("RESULT: "))
    assert set(NAMES) <= set(result)
    assert (result["num_handlers"], result["backward"], result["failed_calls"]) == (2, False, 0)
    assert "backward_p50_ms" not in result


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformer", "det_dropout", "lah-ffn"])
def test_experts_of_several_inputs_and_shapes(kind):
    result, errors, _ = measure(expert_class=kind, hidden_dim=64)
    assert errors == []
    assert (result["status"], result["num_samples"]) == ("Success", 3 * 8)


@pytest.mark.slow
def test_an_unknown_class_is_told():
    with pytest.raises(BenchmarkError, match="Did you mean 'ffn'"):
        measure(expert_class="fffn")


FIELDS = ("num_experts", "num_clients", "batch_size", "max_batch_size", "num_handlers", "backward")
DOCUMENT = {
    "default": (16, 128, 2048, 8192, 64, True),
    "ffn_forward_backward": (16, 128, 2048, 8192, 64, True),
    "ffn_forward": (16, 128, 2048, 8192, 64, False),
    "ffn_small_batch": (4, 128, 32, 8192, 64, False),
    "ffn_small_batch_512clients": (1, 512, 1, 8192, 256, True),
    "ffn_small_batch_512clients_32handlers": (1, 512, 1, 8192, 32, True),
    "ffn_massive": (16, 512, 512, 8192, 256, False),
    "minimalistic": (1, 1, 2048, 8192, 1, True),
    "nop": (16, 128, 2048, 8192, 64, False),
}


@pytest.fixture
def cores(monkeypatch):
    """A machine of 16 cores without a GPU, unless a test says otherwise."""

    def cores(number):
        monkeypatch.setattr(experts, "num_cores", lambda: number)

    monkeypatch.setattr(machine, "gpus", lambda _: Gpus())
    cores(16)
    return cores


@pytest.mark.usefixtures("cores")
def test_presets_are_the_documents(monkeypatch, cores):
    cores(10_000)
    monkeypatch.setattr(experts, "MAX_LOOPS", 10_000)
    assert PRESETS.keys() == DOCUMENT.keys()
    for name, row in DOCUMENT.items():
        config = config_of(name, {})
        assert tuple(getattr(config, field) for field in FIELDS) == row, name
        assert (config.hidden_dim, config.num_batches_per_client, config.precision) == (1024, 16, "fp32")
        assert config.expert_class == ("nop" if name == "nop" else "ffn")
    assert [name for name, preset in PRESETS.items() if preset.should_raise_file_limit] == ["ffn_massive"]


@pytest.mark.usefixtures("cores")
def test_flags_override_a_preset_and_what_follows_from_them_follows():
    config = config_of("ffn-forward", {"batch_size": 100, "num_clients": 6, "backward": True, "seed": 3})
    assert (config.preset, config.batch_size, config.max_batch_size) == ("ffn_forward", 100, 400)
    assert (config.num_clients, config.num_handlers, config.client_processes) == (6, 3, 6)
    assert (config.backward, config.num_calls, config.num_samples) == (True, 6 * 16 * 2, 6 * 16 * 100)
    assert config_of("ffn_small_batch", {"batch_size": 9000}).max_batch_size == 9000


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(("num", "loops", "processes"), [(2, 1, 8), (16, 8, 64), (64, 8, 128)])
def test_handlers_and_processes_are_bounded_by_the_cores_unless_they_are_given(num, loops, processes, cores):
    cores(num)
    config = config_of("default", {})
    assert (config.num_handlers, config.client_processes) == (loops, processes)
    given = config_of("default", {"num_handlers": 11, "client_processes": 3})
    assert (given.num_handlers, given.client_processes) == (11, 3)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("ffn_forwards", {}, "Did you mean 'ffn_forward'"),
        ("transformer", {}, "one of default, "),
        ("default", {"max_batch_size": 2000}, "--max-batch-size 2048"),
        ("default", {"num_clients": 2, "client_processes": 3}, "at least one client for each"),
        ("default", {"device": "tpu"}, "cannot be served on 'tpu'"),
    ],
)
def test_what_cannot_be_measured_is_refused(name, given, complaint):
    with pytest.raises(UsageError, match=complaint):
        config_of(name, given)


@pytest.mark.usefixtures("cores")
def test_the_gpu_is_used_where_torch_and_the_driver_know_of_one(monkeypatch):
    assert default_device() == "cpu"
    monkeypatch.setattr(machine, "gpus", lambda _: Gpus((Gpu("NVIDIA H200"),)))
    for module in (experts, machine):
        monkeypatch.setattr(module, "torch_build", lambda: "CUDA 12.8")
    assert config_of("default", {}).device == "cuda"
    assert config_of("default", {"device": "cpu"}).device == "cpu"
    for module in (experts, machine):
        monkeypatch.setattr(module, "torch_build", lambda: "CPU")
    assert default_device() == "cpu"
    with pytest.raises(UsageError, match="no GPU for --device cuda:1"):
        config_of("default", {"device": "cuda:1"})


@pytest.mark.usefixtures("cores")
def test_too_few_files_are_told_in_terms_of_clients(monkeypatch):
    config = config_of("ffn_massive", {})
    assert config.num_files > 512

    def refuse(num_files, *, should_raise):
        assert num_files == config.num_files
        raise UsageError(f"A process needs up to {num_files} open files.", cause="peers", next_step="peers")

    monkeypatch.setattr(experts, "ensure_open_files", refuse)
    with pytest.raises(UsageError) as told:
        ensure_files(config.num_files, should_raise=False)
    assert "--increase-file-limit" in told.value.next_step
    with pytest.raises(UsageError) as told:
        ensure_files(config.num_files, should_raise=True)
    assert "--num-clients" in told.value.next_step
    assert "peers" not in str(told.value)


@pytest.fixture
def _sample_clients(monkeypatch, request):
    monkeypatch.setenv("PYTHONPATH", str(request.config.rootpath / "tests"))
    monkeypatch.setattr(experts, "_ATTEND", "bench.sample_clients:attend")


def fleet(uid="expert0", num_clients=5, client_processes=2):
    given = {"num_clients": num_clients, "client_processes": client_processes, "batch_size": 10}
    config = config_of("minimalistic", {**given, "num_batches_per_client": 3, "device": "cpu"})
    return ClientFleet(config, 0, {"port": 1, "uids": [uid]})


@pytest.mark.usefixtures("_sample_clients")
def test_clients_are_spread_and_what_they_did_is_added_up():
    looks = []
    with fleet() as clients:
        clients.connect()
        tally, seconds = clients.phase("experts", lambda: looks.append(1))
    assert tally.num_samples == 5 * 3 * 10
    assert sorted(tally.forward_us) == [1000, 1001, 1002, 1003, 1004]
    assert tally.failures == {"PeerBusy": 2}
    assert tally.first_failure == "PeerBusy: later"
    assert seconds > 0
    assert looks
    assert clients.num_lost == 0


@pytest.mark.usefixtures("_sample_clients")
@pytest.mark.parametrize("uid", ["deadly", "silent"])
def test_a_process_that_dies_or_hangs_is_counted_and_the_others_go_on(uid, monkeypatch):
    with fleet(uid) as clients:
        clients.connect()
        if uid == "silent":
            monkeypatch.setattr(experts, "_ANSWER_S", 0.3)
            monkeypatch.setattr(experts, "_CALL_S", 0)
        tally, _ = clients.phase("experts")
    assert clients.num_lost == 3
    assert tally.num_samples == 2 * 3 * 10
    assert tally.failures == {"PeerBusy": 1, "LostClient": 3 * 3 * 2}
    assert ("signal 9" if uid == "deadly" else "did not answer 'experts'") in clients.complaint


@pytest.mark.usefixtures("_sample_clients")
def test_a_fleet_without_anybody_left_is_a_failure():
    with fleet("deadly", num_clients=1, client_processes=1) as clients:
        clients.connect()
        with pytest.raises(BenchmarkError, match="Client process 1 of 1 ended with signal 9"):
            clients.phase("experts")


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
    return ExpertsOutcome(**{**values, **changes})


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


def test_a_preset_prints_the_documents_figure_beside_its_own():
    told = {}
    for preset, more in (("default", {}), ("ffn_forward", {}), ("nop", {}), ("default", {"batch_size": 10})):
        numbers = {"num_experts": None, "num_clients": None, "num_batches_per_client": None}
        asked = {"client_processes": 2, "batch_size": None, "backward": None, **more}
        report = report_of(outcome(), preset=preset, **numbers, **asked)
        lines = [line for line in text_of(report).splitlines() if line.startswith("hivemind's document")]
        result = summarize_experts(report)
        told[preset, *more] = (*lines, result.get("published_samples_per_s"))
    assert told == {
        ("default",): ("hivemind's document, on a GeForce GTX 1080 Ti: 28,581 samples/s", 28581.213),
        ("ffn_forward",): ("hivemind's document, on a GeForce GTX 1080 Ti: 97,604 samples/s", 97604.282),
        ("nop",): (None,),
        ("default", "batch_size"): (None,),
    }


def test_a_run_that_computing_alone_makes_long_says_so_before_it_begins():
    config = config_of("default", {"device": "cpu", "client_processes": 8})
    assert "computing 4,194,304 samples takes 70 minutes or more on cpu" in long_run(config, 1000.0)
    assert long_run(config, 1e6) is None


def test_a_gpu_tells_its_name_and_memory(monkeypatch):
    for module in (experts, machine):
        monkeypatch.setattr(module, "torch_build", lambda: "CUDA 12.8")
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
