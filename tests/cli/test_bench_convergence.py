import json

import pytest

from shoal import data
from shoal.bench import convergence
from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.doctor.machine import Memory

PLENTY = 10**12


@pytest.fixture
def call(monkeypatch, capsys):
    """Run `shoal bench convergence`: exit code, stderr, and the config that was to be measured."""
    asked = []
    monkeypatch.setattr(module, "run_and_tell", lambda typed, _, plan: asked.append((plan.config, plan.run)))
    monkeypatch.setattr(data, "mnist", lambda train, folder: None)
    monkeypatch.setattr(convergence, "device_of", lambda device: "cpu" if device == "auto" else device)

    def call(*arguments, free_bytes=PLENTY):
        monkeypatch.setattr(convergence, "memory", lambda: Memory(free_bytes, free_bytes))
        code = run(["bench", "convergence", *map(str, arguments)])
        return code, capsys.readouterr().err, *(asked[-1] if asked else (None, None))

    return call


def test_without_flags_it_is_the_document_s_setting(call):
    code, told, config, settings = call()
    assert code == 0
    assert config.setup == "dmoe 64×4 dim 512, 64 trainers, 1000 ms"
    assert (config.steps, config.eval_every, config.num_active, config.batch_size) == (20480, 1024, 4, 4)
    assert list(config.seeds) == [1337, 1338, 1339]
    assert settings.starts == 1
    assert "Memory: about 28" in told
    assert "that fits." in told


def test_flags_reach_the_experiment(call, tmp_path):
    flags = [
        "--num_experts",
        8,
        "--layer-dim",
        64,
        "--delay-ms",
        10,
        "--compute-ms",
        5,
        "--failure-rate",
        0.1,
    ]
    more = [
        "--steps",
        100,
        "--eval-every",
        7,
        "--faithful",
        "--seeds",
        5,
        "--data-dir",
        tmp_path,
        "--seed",
        3,
    ]
    _, _, config, _ = call(*flags, *more, "--backward-failure-rate", 0.2, "--update-every-inputs", 16)
    assert (config.num_experts, config.layer_dim, config.delay_ms, config.compute_ms) == (8, 64, 10, 5)
    assert (config.failure_rate, config.backward_failure_rate, config.update_every_inputs) == (0.1, 0.2, 16)
    assert (config.steps, config.eval_every, config.is_faithful) == (100, 7, True)
    assert list(config.seeds) == [3, 4, 5, 6, 7]
    assert config.data_dir == str(tmp_path)


def test_the_large_network_is_wider_and_has_no_experts(call):
    _, _, config, _ = call("--model", "large-ffn")
    assert config.layer_dim == 1024
    code, told, _, _ = call("--model", "large-ffn", "--num-active", 2)
    assert code == 2
    assert "--num-active is of mixtures of experts" in told


def test_a_short_look_has_one_seed_and_a_few_evaluations(call):
    _, _, config, _ = call("--short")
    assert (config.steps, config.eval_every, config.num_seeds) == (1024, 256, 1)


def test_too_little_memory_is_refused_unless_forced(call):
    code, told, config, _ = call(free_bytes=10**9)
    assert code == 2
    assert config is None
    assert "that does NOT fit" in told
    assert "--force" in told
    code, _, config, _ = call("--force", free_bytes=10**9)
    assert code == 0
    assert config is not None


@pytest.mark.slow
def test_two_runs_give_one_report_but_for_its_environment(tmp_path, capsys):
    flags = ["--num-experts", "4", "--layer-dim", "16", "--num-layers", "2", "--num-trainers", "4"]
    more = ["--steps", "96", "--eval-every", "32", "--seeds", "2", "--device", "cpu"]
    documents = []
    for number in range(2):
        path = tmp_path / f"{number}.json"
        assert run(["bench", "convergence", *flags, *more, "--report", str(path)]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix("RESULT: "))
        assert result["wall_s"] > 0
        assert result["mean_staleness"] > 0
        document = json.loads(path.read_text())
        assert document["environment"]["wall_s"] == result["wall_s"]
        for name in ("environment", "created", "command"):
            del document[name]
        documents.append(document)
    assert documents[0] == documents[1]
