import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_with_servers.py"


def run(*words, timeout=55):
    command = [Path(sys.executable).parent / "shoal", "run", *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy_in(printed):
    return float(re.search(r"test accuracy ([\d.]+)%", printed)[1])


def test_alone_it_trains_without_servers(monkeypatch, capsys):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--epochs", "4"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    torch.set_num_threads(before)
    printed = capsys.readouterr().out
    assert accuracy_in(printed) > 70
    assert "server 0" not in printed


@pytest.mark.slow
def test_two_workers_and_a_server():
    printed = run("-np", "2", "--num-servers", "1", EXAMPLE, "--epochs", "4")
    assert accuracy_in(printed) > 70
    num_applied = int(re.search(r"server 0: (\d+) gradients applied, 0 dropped", printed)[1])
    # 23 batches in each worker's epoch; the other worker may still be at work when this is counted
    assert 4 * 23 <= num_applied <= 2 * 4 * 23


@pytest.mark.slow
@pytest.mark.timeout(130)
def test_servers_and_workers_on_two_machines_with_a_bound():
    words = ["-np", "2", "--num-servers", "2", "--workers-per-machine", "2"]
    printed = run(*words, EXAMPLE, "--epochs", "4", "--mode", "bounded", "--staleness", "1", timeout=120)
    assert accuracy_in(printed) > 70
    leads = re.findall(r"server \d: .* leading by (\d+) rounds at most", printed)
    assert len(leads) == 2
    assert max(map(int, leads)) <= 1


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 120
