import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_digits.py"
BIN = Path(sys.executable).parent


def accuracy_in(output):
    return float(re.search(r"test accuracy ([\d.]+)%", output)[1])


def run(*command):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_alone(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--epochs", "3"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", printed)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert accuracy_in(printed) > 85
    assert "consensus distance 0 (all-reduce, 1 worker)\n" in printed


def test_under_shoal_run():
    printed = run(BIN / "shoal", "run", "-np", "2", "--strategy", "neighbor", EXAMPLE, "--epochs", "3")
    assert "neighbor, 2 workers" in printed
    assert len(re.findall(r"epoch \d+: loss", printed)) == 3
    assert accuracy_in(printed) > 80


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "ddp", "hierarchical", "pair", "sma"])
def test_with_any_strategy(strategy):
    printed = run(BIN / "shoal", "run", "-np", "2", "--strategy", strategy, EXAMPLE, "--epochs", "3")
    assert f"{strategy}, 2 workers" in printed
    assert accuracy_in(printed) > 80


@pytest.mark.slow
def test_under_torchrun():
    printed = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", EXAMPLE, "--epochs", "3")
    assert "all-reduce, 2 workers" in printed
    assert accuracy_in(printed) > 80


def test_it_is_short_and_the_readme_shows_it_as_a_diff():
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 80
    diff = re.search(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1].splitlines()
    shown = [line[1:].strip() for line in diff if line.strip()]
    kept = [line.strip() for line in lines]
    assert [line for line in shown if line not in kept] == []
    assert all(line[0] in "+ " for line in diff if line)
    added = [line for line in diff if line.startswith("+")]
    assert 4 <= len(added) <= 8
