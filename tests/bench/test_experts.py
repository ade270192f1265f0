"""`shoal bench experts` at a size that takes seconds: what it starts, counts and says at the end."""

import json
import re

import msgspec
import pytest

from shoal.bench.experts_config import config_of
from shoal.bench.experts_summary import summarize_experts
from shoal.bench.frame import make_scenario
from shoal.cli.program import run
from shoal.core import BenchmarkError
from shoal.report import Report, Row

NAMES = (
    *("samples_per_s", "startup_s", "failed_calls", "p50_ms", "p95_ms", "server_processes", "num_clients"),
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
        fields = {name: getattr(measured, name) for name in ("key", "metric", "unit", "direction")}
        rows.append(Row(**fields, starts=[measured.samples]))
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
    assert set(NAMES) | {"backward_p50_ms", "backward_p95_ms"} <= set(result)
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
    with pytest.raises(BenchmarkError, match="did you mean 'ffn'"):
        measure(expert_class="fffn")
