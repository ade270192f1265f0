import msgspec
import pytest

from shoal.bench.latency import LatencyConfig
from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.report import Report, Row


@pytest.fixture
def latency(monkeypatch, tmp_path, capsys):
    """Run `shoal bench latency`, and give its exit code, what it was told to measure, and what it says."""
    monkeypatch.chdir(tmp_path)
    measured = []

    def stand_in(benchmark, config, settings, *, tell, versions, starter):
        assert benchmark == "latency"
        measured.append(msgspec.convert(config, LatencyConfig))
        rows = [Row(key={}, metric="completed", unit="", direction="higher", error="not measured")]
        return [Report(benchmark=benchmark, created="2026-01-02T03:04:05+00:00", config=config, rows=rows)]

    monkeypatch.setattr(module, "run_benchmark", stand_in)

    def latency(arguments):
        measured.clear()
        code = run(["bench", "latency", "--device", "cpu", *arguments.split()])
        return code, (measured[0] if measured else None), capsys.readouterr().err

    return latency


def test_the_documents_command_line_is_taken_as_it_is(latency):
    flags = "--block_type transformer --gpus 0 1 2 3 --hid_dim 64 --batch_size 4 --layers_per_gpu 5"
    flags += " --batches_for_latency 6 --batches_for_throughput 7 --throughput_runs 8 --linspace_points 9"
    code, config, _ = latency(f"{flags} --max_ping 0.1 -j 11 --hosts a:1 b:2 c:3 d:4")
    assert code == 1  # the stand-in has failed
    assert (config.block_type, config.gpus, config.hid_dim, config.batch_size) == (
        *("transformer", (0, 1, 2, 3), 64, 4),
    )
    assert (config.layers_per_gpu, config.batches_for_latency, config.batches_for_throughput) == (5, 6, 7)
    assert (config.throughput_runs, config.linspace_points, config.max_ping_s) == (8, 9, 0.1)
    assert (config.jobs, config.hosts) == (11, ("a:1", "b:2", "c:3", "d:4"))


def test_lists_may_have_commas_and_flags_of_their_own(latency):
    _, config, _ = latency("--gpus 0,1 --gpus 1 --hosts a:1,b:2,c:3 --hid-dim 8 --passes both --virtual")
    assert (config.gpus, config.hosts) == ((0, 1, 1), ("a:1", "b:2", "c:3"))
    assert config.passes == ("forward", "forward+backward")
    assert config.is_virtual


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--gpus zero", "--gpus zero is no device"),
        ("--hid-dim 8 7", "'7' belongs to no flag"),
        ("--methods fast,medium", "'medium'"),
    ],
)
def test_what_is_no_flag_is_refused(latency, flags, says):
    code, config, complaint = latency(flags)
    assert (code, config) == (2, None)
    assert says in complaint


def test_who_would_wait_for_long_is_told_before(latency):
    small = "--hid-dim 8 --layers-per-gpu 2 -j 2"
    assert "--virtual takes none of it" in latency(f"{small} --max-ping 2")[2]
    assert "--virtual" not in latency(f"{small} --max-ping 0.01")[2]
    assert "delays" not in latency(f"{small} --max-ping 2 --virtual")[2]
