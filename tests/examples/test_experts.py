"""The examples with experts: against a server in this process, and as they start their own."""

import contextlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal
from shoal.experts import HostingConfig, hosted

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAINING, GATE = EXAMPLES / "train_with_experts.py", EXAMPLES / "gate_over_the_dht.py"


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def server(pattern, num_experts, hidden_dim):
    """A swarm with one server; the address of a peer."""
    with shoal.connect(listen="127.0.0.1:0") as swarm:
        config = HostingConfig(
            hidden_dim=hidden_dim,
            uid_pattern=pattern,
            num_experts=num_experts,
            device="cpu",
            num_loops=1,
            listen="127.0.0.1:0",
            join=(str(swarm.address),),
        )
        with hosted(config):
            yield swarm.address


def run_here(monkeypatch, capsys, example, *arguments):
    monkeypatch.setattr(sys, "argv", [str(example), *map(str, arguments)])
    runpy.run_path(str(example), run_name="__main__")
    return capsys.readouterr().out


def run(example):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.usefixtures("_one_thread")
def test_training_in_a_swarm_that_is_there(monkeypatch, capsys):
    with server("digits.[0:2].[0:4]", 8, 64) as address:
        printed = run_here(monkeypatch, capsys, TRAINING, "--join", address, "--epochs", 1)
    assert float(re.search(r"test accuracy ([\d.]+)%", printed)[1]) > 70
    assert "samples served: 2874 by " in printed
    assert re.search(r"(\d) of \1 experts answered for 360 samples", printed)


@pytest.mark.usefixtures("_one_thread")
def test_a_gate_over_a_swarm_that_is_there(monkeypatch, capsys):
    with server("expert.[0:32].[0:32]", 6, 16) as address:
        printed = run_here(monkeypatch, capsys, GATE, "--join", address, "--hidden-dim", 16)
    assert len(re.findall(r"[4-6] of [4-6] experts answered for 32 samples", printed)) == 2
    assert "output [32, 16]; gradients of " in printed


@pytest.mark.parametrize("example", [TRAINING, GATE])
def test_it_is_short_and_says_how_it_is_run(monkeypatch, capsys, example):
    assert len(example.read_text().splitlines()) < 120
    with pytest.raises(SystemExit, match="0"):
        run_here(monkeypatch, capsys, example, "--help")
    assert f"python examples/{example.name}" in capsys.readouterr().out


@pytest.mark.slow
def test_training_with_servers_of_its_own():
    printed = run(TRAINING)
    accuracies = [float(found) for found in re.findall(r"test accuracy ([\d.]+)%", printed)]
    assert len(accuracies) == 5
    assert accuracies[-1] > 93
    assert len(re.findall(r"\d+ by [0-9a-f]{8} \(", printed)) == 2


@pytest.mark.slow
def test_a_gate_with_servers_of_its_own():
    printed = run(GATE)
    assert printed.count("Serving 8 experts of class ffn (hidden 1024, ") == 2
    assert re.search(r"(\d+) of \1 experts answered for 32 samples", printed)
    assert "output [32, 1024]; gradients of " in printed
