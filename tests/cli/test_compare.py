import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from shoal.cli import bench as module
from shoal.cli.program import run
from shoal.report import load
from shoal.simulate import tasks as classified
from shoal.simulate.task_facts import facts_of
from shoal.transport.network.distributions import Exponential


@pytest.fixture
def call(monkeypatch, capsys):
    """Run `shoal compare`: exit code, stderr, and the contest that was to be run."""
    asked = []
    monkeypatch.setattr(module, "run_and_tell", lambda typed, _, plan: asked.append(plan.config))

    def call(*arguments):
        code = run(["compare", *map(str, arguments)])
        return code, capsys.readouterr().err, asked[-1] if asked else None

    return call


def test_without_flags_everybody_competes_at_the_tasks_own_sizes(call):
    code, _, config = call()
    facts = facts_of("digits")
    assert code == 0
    assert len(config.contenders) == 21
    assert (config.steps, config.eval_every, config.target) == (facts.steps, facts.eval_every, facts.target)
    assert (config.learning_rates, config.momentum) == (facts.learning_rates, facts.momentum)
    assert config.seeds == (0, 1, 2)
    assert (config.world.num_workers, config.world.workers_per_machine) == (8, 4)
    assert config.world.profile.name == "lan"
    assert "ddp and horovod" in config.notes[0]
    assert any("make a machine" in note for note in config.notes)


def test_flags_reach_the_contest(call, tmp_path, monkeypatch):
    looked = []

    def found(train, folder):
        looked.append((train, folder))
        return torch.zeros(100, 784), torch.arange(100) % 10

    monkeypatch.setattr(classified, "_mnist", found)
    script = tmp_path / "churn.toml"
    script.write_text('[[fault]]\nkind = "kill"\npeers = ["rank:3"]\nat_s = 2.0\n')
    flags = ["--task", "mnist", "--workers", 16, "--profile", "three-continents", "--between", "machines"]
    flags += ["--target-accuracy", 0.8, "--split", "dirichlet:0.1", "--seeds", 2, "--seed", 7, "--steps", 50]
    flags += ["--eval-every", 5, "--batch-size", 4, "--lr-grid", "0.1,0.2,0.1", "--momentum", 0]
    flags += ["--compute-ms", "exponential:3", "--stragglers", "1:10,2:4", "--faults", script]
    flags += ["--num-servers", 2, "--data-dir", tmp_path, "--option", "local-steps=2", "--executor", "exact"]
    code, error, config = call(*flags, "--strategies", "neighbor topology=ring,parameter-server")
    assert code == 0, error
    assert [contender.name for contender in config.contenders] == [
        "neighbor topology=ring",
        "parameter-server",
    ]
    assert [contender.options["local_steps"] for contender in config.contenders] == [2, 2]
    assert (config.target, config.split, config.seeds) == (0.8, "dirichlet:0.1", (7, 8))
    assert (config.steps, config.eval_every, config.batch_size, config.momentum) == (50, 5, 4, 0)
    assert (config.learning_rates, config.num_servers, config.executor) == ((0.1, 0.2), 2, "exact")
    world = config.world
    assert (world.num_workers, world.workers_per_machine, world.between) == (16, 4, "machines")
    assert world.profile.name == "three-continents"
    assert (world.compute.step_ms, world.compute.factors) == (Exponential(mean=3.0), {1: 10.0, 2: 4.0})
    assert world.faults.fault[0].peers == ["rank:3"]
    assert config.data_dir == str(tmp_path)
    assert looked == [(True, str(tmp_path)), (False, str(tmp_path))]


def test_one_rate_for_all_and_a_quick_look(call):
    _, _, config = call("--short", "--lr", 0.3, "--profile", "ideal", "--strategies", "pair")
    assert config.learning_rates == (0.3,)
    assert config.world.profile.name == ""
    assert (config.world.num_workers, config.seeds) == (4, (0,))
    assert config.notes == (
        "A short look: few steps, rates and seeds. Leave --short out for figures to keep.",
    )
    assert config.steps < facts_of("digits").steps


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--strategies", "ddp"], "ddp cannot be compared"),
        (["--strategies", "best"], "no strategy 'best'"),
        (["--lr", "0.1", "--lr-grid", "0.1,0.2"], "leave one of them out"),
        (["--lr-grid", "fast"], "no list of numbers"),
        (["--lr", "-1"], "no learning rate"),
        (["--target-accuracy", "95"], "no share"),
        (["--task", "quadratic", "--target", "0"], "no distance"),
        (["--profile", "moon"], "no profile 'moon'"),
        (["--compute-ms", "soon"], "no cost of a step"),
        (["--stragglers", "9:2"], "no rank 9"),
        (["--split", "even"], "no split"),
        (["--executor", "stacked"], "stacked executor"),
        (["--data-dir", "x"], "needs none"),
        (["--strategies", "pair", "--num-servers", "2"], "parameter-server"),
        (["--faults", "no-such.toml"], "no-such.toml"),
        (["--target", "nan"], "no share"),
        (["--task", "quadratic", "--target", "nan"], "no distance"),
        (["--seed", "-5"], "-5 is no seed"),
        (["--compute-ms", "nan"], "no cost of a step"),
        (["--strategies", "neighbor topology=rong"], "no topology 'rong'"),
        (["--strategies", "neighbor", "--workers", "2000"], "cannot be divided"),
        (["--workers", "1000"], "leave pair"),
        (["--real", "--between", "machines"], "parameter-server, staleness-aware: servers"),
    ],
)
def test_what_cannot_be_is_refused(call, flags, message):
    code, error, config = call(*flags)
    assert code == 2
    assert message in error
    assert config is None


def test_every_command_of_the_page_is_understood(call, monkeypatch, tmp_path):
    some = torch.zeros(100, 784), torch.arange(100) % 10
    monkeypatch.setattr(classified, "_mnist", lambda train, folder: some)
    page = Path(__file__).parents[2] / "docs" / "compare.md"
    block = "".join(re.findall(r"```shoal\n(.*?)```", page.read_text(), re.DOTALL))
    (churn,) = re.findall(r"```toml\n(# churn.toml\n.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "churn.toml").write_text(churn)
    (own,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "waves.py").write_text(own)
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line) for line in block.splitlines() if line.startswith("shoal compare")]
    assert len(commands) >= 6
    for _, _, *flags in commands:
        code, error, _ = call(*flags)
        assert code == 0, error


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_contest_from_the_command_line(capsys, tmp_path):
    flags = [
        "--task",
        "quadratic",
        "--workers",
        3,
        "--strategies",
        "all-reduce,neighbor,momentum",
        "--seeds",
        2,
        "--momentum",
        0,
    ]
    flags += ["--steps", 40, "--lr-grid", "0.2,1", "--target", 2, "--profile", "wan"]

    def contest(name):
        files = ["--report", tmp_path / f"{name}.json", "--latex", tmp_path / f"{name}.tex"]
        code = run(["compare", *map(str, (*flags, *files))])
        return code, capsys.readouterr().out, load(tmp_path / f"{name}.json")

    code, out, first = contest("first")
    assert code == 0
    result = json.loads(out.rsplit("RESULT: ", 1)[1])
    assert set(result["ranking"]["seconds"]) == {"all-reduce", "neighbor"}
    assert "momentum" in result["not_reached"]
    assert r"\begin{tabular}" in (tmp_path / "first.tex").read_text()
    _, _, second = contest("second")
    assert (first.rows, first.curves, first.config) == (second.rows, second.curves, second.config)
    assert first.result == second.result
