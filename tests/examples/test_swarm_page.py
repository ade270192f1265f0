"""What docs/swarm.md shows runs: its commands in a short form, and its program."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import shoal
from shoal.cli.program import app
from shoal.data import digits

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "swarm.md").read_text()
COMMANDS = re.findall(r"^(?:shoal|python) .*$", PAGE, re.MULTILINE)
ADDRESS = "192.168.1.7:31337"
OTHER = "192.168.1.8:31337"
TRAIN = """
import torch
import shoal
from shoal.data import digits

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = digits()
group = shoal.init()
strategy = shoal.from_args(group)
torch.manual_seed(group.rank)
with strategy.attach(model, optimizer):
    while strategy.run_steps < 5:
        chosen = torch.randint(len(images), (32,))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
print("rank", group.rank, "steps", strategy.run_steps, "of", strategy.ledger.num_committed, flush=True)
"""


def parsed(words):
    """As the program reads the words, without doing what they say."""
    command = typer.main.get_command(app)
    context = command.make_context("shoal", list(words), resilient_parsing=True)
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, list(words))
        context = command.make_context(name, list(words), parent=context)
    return context


def command_with(*parts):
    (found,) = (command for command in COMMANDS if all(part in command for part in parts))
    return shlex.split(found)


def started(words, folder, **environ):
    """A command of the page as a process, which ends with the block."""
    first, *rest = words
    program = [sys.executable, "-m", "shoal"] if first == "shoal" else [sys.executable]
    rest = [str(ROOT / word) if word.startswith("examples/") else word for word in rest]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*program, *rest], cwd=folder, env=environ, **pipes)


def outputs_of(*processes):
    """What each has printed; all must end well."""
    try:
        outputs = [process.communicate(timeout=150)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), outputs
        return outputs
    finally:
        for process in processes:
            process.kill()


@pytest.fixture
def _in(tmp_path, monkeypatch):
    """A folder with the secret that the page's first command makes."""
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, command_with("keys secret")[1:])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("shoal ")])
def test_flags_are_those_of_the_program(command):
    assert parsed(shlex.split(command)[1:]).params


@pytest.mark.usefixtures("_in")
def test_the_program_runs_and_the_command_shows_it():
    (block,) = re.findall(r"```python\n(swarm = .*?)```", PAGE, re.DOTALL)
    (first,) = re.findall(r"`(shoal\.connect\(listen=.*?\))`", PAGE)
    images, labels = digits(train=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with eval(first.replace(ADDRESS, "127.0.0.1:0"), {"shoal": shoal}) as begun:
        names = {
            "shoal": shoal,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loss_fn": nn.CrossEntropyLoss(),
            "loader": DataLoader(TensorDataset(images, labels), batch_size=36),
        }
        exec(compile(block.replace(ADDRESS, str(begun.address)), "swarm.md", "exec"), names)
        ledger = names["strategy"].ledger
        assert ledger.num_added == len(images)
        assert sum(num for _, num in ledger.lost) == len(images)  # fewer than the target of one step
        words = [
            word.replace(ADDRESS, str(begun.address)) for word in command_with("shoal swarm", "--secret-file")
        ]
        done = CliRunner().invoke(app, [*words[1:], "--once"])
        assert done.exit_code == 1  # it has ended
        assert "Nobody of the run 'digits' answers." in done.output


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("_in")
def test_two_laptops(tmp_path):
    short = ["--steps", "5", "--target-samples", "128", "--min-peers", "2"]
    words = [word.replace(ADDRESS, "127.0.0.1:0") for word in command_with("python", f"--listen {ADDRESS}")]
    first = started([*words, *short], tmp_path)
    address = re.search(r"--join (\S+)", first.stdout.readline())[1]
    words = command_with("python", "--join")
    words = [word.replace(ADDRESS, address).replace(OTHER, "127.0.0.1:0") for word in words]
    for output in outputs_of(first, started([*words, *short], tmp_path)):
        assert "accuracy" in output


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_workers_of_one_launcher_are_one_run(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    words = [
        {"4": "3", "target_samples=4096": "target_samples=96"}.get(word, word)
        for word in command_with("shoal run -np")
    ]
    (output,) = outputs_of(started(words, tmp_path))
    told = re.findall(r"rank (\d) steps (\d+) of (\d+)", output)
    assert sorted(rank for rank, *_ in told) == ["0", "1", "2"], output
    assert all(int(steps) >= 5 for _, steps, _ in told)
    # one run: apart each of them would have needed all samples of five steps for itself
    assert 5 * 96 <= sum(int(num) for *_, num in told) < 3 * 5 * 96


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_launcher_joins_a_run_by_its_address(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    with shoal.connect(listen="127.0.0.1:0") as peer:
        words = [word.replace(ADDRESS, str(peer.address)) for word in command_with("shoal run", "join=")]
        words = [word.replace("target_samples=4096", "target_samples=64") for word in words]
        (output,) = outputs_of(started(words, tmp_path))
    told = re.findall(r"steps (\d+) of (\d+)", output)
    assert all(int(steps) >= 5 for steps, _ in told)
    assert sum(int(num) for _, num in told) >= 5 * 64
