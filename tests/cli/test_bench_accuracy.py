import pytest

from shoal import data
from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.doctor import machine


@pytest.fixture
def call(monkeypatch, capsys):
    """Run `shoal bench accuracy`: exit code, stderr, and the config and settings that were to be measured."""
    asked = []
    monkeypatch.setattr(module, "run_and_tell", lambda typed, _, plan: asked.append((plan.config, plan.run)))

    def call(*arguments):
        code = run(["bench", "accuracy", *map(str, arguments)])
        return code, capsys.readouterr().err, *(asked[-1] if asked else (None, None))

    return call


def test_without_flags_it_is_the_experiment_with_tricks(call):
    code, _, config, settings = call()
    assert code == 0
    assert (config.task, config.num_workers, config.steps, config.eval_every) == ("digits", 8, 300, 30)
    assert config.splits == ("iid", "dirichlet:0.1")
    assert len(config.contenders) == 11
    assert len(config.tricks) == 4
    assert settings.starts == 3


@pytest.mark.parametrize(
    ("found", "flags", "device"), [("cuda", (), "cuda"), ("cpu", (), "cpu"), ("cuda", ("cpu",), "cpu")]
)
def test_gpus_are_taken_where_there_are_any_unless_told(call, monkeypatch, found, flags, device):
    monkeypatch.setattr(machine, "default_device", lambda: found)
    monkeypatch.setattr(machine, "gpus", lambda _: machine.Gpus((machine.Gpu("A"),)))
    _, err, config, _ = call("--np", 2, *(("--device", *flags) if flags else ()))
    assert config.device == device
    assert ("2 workers share 1 GPU." in err) == (device == "cuda")


def test_a_gpu_that_is_not_there_is_asked_for_in_vain(call, monkeypatch):
    monkeypatch.setattr(machine, "default_device", lambda: "cpu")
    code, complaint, config, _ = call("--device", "cuda")
    assert (code, config) == (2, None)
    assert "There is no GPU" in complaint


def test_strategies_take_the_place_of_tricks(call):
    names = "all-reduce,neighbor order=adapt-while-combine,pair"
    flags = ["--np", 4, "--splits", "iid", "--seeds", 1, "--option", "local-steps=2", "--topology", "ring"]
    _, _, config, settings = call("--strategies", names, *flags, "--global-average-every", 5)
    assert [contender.name for contender in config.contenders] == names.split(",")
    assert [contender.options["local_steps"] for contender in config.contenders] == [2, 2, 2]
    assert config.contenders[1].options["topology"] == "ring"
    assert config.contenders[1].options["order"] == "adapt-while-combine"
    assert config.contenders[1].options["global_average_every"] == 5
    assert config.tricks == []
    assert settings.starts == 1


def test_flags_reach_the_benchmark(call, tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(data, "mnist", lambda train, folder: looked.append((train, folder)))
    flags = ["--task", "mnist", "--model", "small-cnn", "--data-dir", tmp_path, "--target_accuracy", 0.8]
    rates = [
        "--lr",
        0.2,
        "--momentum",
        0,
        "--batch-size",
        4,
        "--eval-every",
        7,
        "--order",
        "adapt-then-combine",
    ]
    _, _, config, _ = call(*flags, *rates, "--topology", "ring", "--global-average-every", 5)
    assert (config.task, config.model, config.data_dir) == ("mnist", "small-cnn", str(tmp_path))
    assert (config.learning_rate, config.momentum, config.batch_size) == (0.2, 0.0, 4)
    assert (config.steps, config.eval_every, config.target_accuracy) == (600, 7, 0.8)
    options = {contender.name: contender.options for contender in config.contenders}
    assert "awc" not in options
    assert options["atc+average"]["global_average_every"] == 5
    assert options["atc"]["topology"] == "ring"
    assert looked == [(True, tmp_path), (False, tmp_path)]


def test_a_short_run_has_fewer_steps_and_one_seed(call):
    _, _, config, settings = call("--short")
    assert config.steps == 120
    assert settings.starts == 1
    _, _, config, settings = call("--short", "--seeds", 2, "--steps", 5)
    assert (config.steps, config.eval_every, settings.starts) == (5, 1, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--option", "topology=ring"], "--option is for --strategies"),
        (["--topology", "foo"], "no topology 'foo'"),
        (["--splits", "foo"], "no split 'foo'"),
        (["--data-dir", "."], "digits needs none"),
        (["--num-servers", "2"], "staleness-aware, which are not measured"),
        (["--splits", ","], "Without a split"),
        (["--strategies", "foo"], "no strategy 'foo'"),
        (["--target-accuracy", "95"], "no share"),
        (["--task", "mnist", "--data-dir", "nowhere"], "nowhere has no MNIST"),
    ],
)
def test_what_cannot_be_trained_is_bad_usage(call, arguments, says):
    code, complaint, config, _ = call(*arguments)
    assert code != 0
    assert says in complaint
    assert config is None
