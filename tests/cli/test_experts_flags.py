import msgspec
import pytest

from shoal.bench import experts as experts_benchmark
from shoal.bench.experts import ExpertsConfig, config_of
from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.report import Report, Row


@pytest.fixture
def experts(monkeypatch, tmp_path, capsys):
    """Run `shoal bench experts`, and give its exit code and what it was told to measure, or its complaint."""
    monkeypatch.chdir(tmp_path)
    measured = []

    def stand_in(benchmark, config, settings, *, tell, versions, starter):
        assert benchmark == "experts"
        measured.append((msgspec.convert(config, ExpertsConfig), settings))
        rows = [Row(key={}, metric="completed", unit="", direction="higher", error="not measured")]
        return [Report(benchmark=benchmark, created="2026-01-02T03:04:05+00:00", config=config, rows=rows)]

    monkeypatch.setattr(module, "run_benchmark", stand_in)

    def experts(*arguments):
        measured.clear()
        code = run(["bench", "experts", *map(str, arguments)])
        complaint = capsys.readouterr().err
        return code, (measured[0] if measured else complaint)

    return experts


def test_every_number_of_a_preset_is_a_flag(experts):
    given = {"num_experts": 3, "num_clients": 5, "client_processes": 2, "num_batches_per_client": 7}
    given |= {"batch_size": 11, "max_batch_size": 13, "hidden_dim": 17, "expert_class": "nop"}
    given |= {"num_handlers": 19, "device": "cpu", "precision": "bf16", "backward": False}
    flags = [f"--{name}={value}" for name, value in given.items() if name != "backward"]
    code, (config, settings) = experts("--preset", "ffn_massive", *flags, "--no-backward", "--starts", 2)
    assert code == 1  # the stand-in has failed
    assert msgspec.to_builtins(config) == {"preset": "ffn_massive", **given}
    assert (settings.num_starts, settings.seed) == (2, 0)


def test_without_flags_it_is_the_default_preset(experts):
    _, (config, settings) = experts("--device", "cpu")
    assert config == config_of("default", {"device": "cpu"})
    assert settings.num_starts == 1
    assert experts("--device", "cpu", "--preset", "nop", "--backward")[1][0].backward is True


def test_a_wrong_preset_or_number_is_refused(experts):
    code, complaint = experts("--preset", "minimal")
    assert code == 2
    assert "minimalistic" in complaint
    code, complaint = experts("--batch-size", 10, "--max-batch-size", 5, "--device", "cpu")
    assert code == 2
    assert "--max-batch-size 10" in complaint
    assert experts("--precision", "fp8")[0] == 2


def test_ffn_massive_raises_the_limit_on_files_by_itself(experts, monkeypatch):
    asked = []

    def ensure(num_files, *, should_raise):
        asked.append(should_raise)
        return "Raised it."

    monkeypatch.setattr(experts_benchmark, "ensure_open_files", ensure)
    experts("--preset", "ffn-massive", "--device", "cpu")
    experts("--preset", "nop", "--device", "cpu")
    experts("--preset", "nop", "--device", "cpu", "--increase-file-limit")
    assert asked == [True, False, True]
