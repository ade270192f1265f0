"""examples/gpt trains a GPT from text to samples: alone, with others, as a swarm, and from a checkpoint."""

import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parents[2] / "examples" / "gpt"
TINY = shlex.split("--layers 1 --heads 2 --width 16 --block 16 --batch-size 4 --eval-batches 2 --sample 12")
SMALL = shlex.split("--layers 2 --heads 2 --width 48 --block 32 --batch-size 12 --eval-batches 8 --sample 40")


def start(*words, timeout=280):
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def last_loss(printed):
    return float(re.search(r"loss ([\d.]+) after \d+ steps", printed)[1])


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a file of the folder in this process, as `python` would, and gives what it has printed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    torch.set_num_threads(before)
    sys.modules.pop("sample", None)


def test_a_run_that_was_resumed_ends_as_one_that_was_not_and_samples_are_written(run, tmp_path):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    words = (*TINY, "--eval-every", 2, "--accumulate", 2, "--warmup", 2, "--dtype", "bfloat16", "--steps", 6)
    printed = run("train.py", *words, "--out", whole)
    assert re.findall(r"^step (\d+): loss", printed, re.MULTILINE) == ["2", "4", "6"]
    run("train.py", *words, "--out", halves, "--save-every", 4)
    # as if it had been killed before it had saved for the last time
    (halves / "step-00000006" / "manifest.json").unlink()
    resumed = run("train.py", *words, "--out", halves, "--resume")
    assert re.findall(r"^step (\d+): loss", resumed, re.MULTILINE) == ["6"]
    wanted, found = (load_file(folder / "step-00000006" / "model.safetensors") for folder in (whole, halves))
    assert all(torch.equal(tensor, found[name]) for name, tensor in wanted.items())
    written = run("sample.py", whole, "--start", "Shoal", "--num-characters", 10)
    assert written.startswith("Shoal")
    assert len(written) == len("Shoal") + 10 + 1


def test_it_learns_a_text_of_ones_own(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 60)
    printed = run(
        "train.py", *TINY, "--text", text, "--steps", 60, "--eval-every", 20, "--lr", 0.03, "--warmup", 5
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0] < 4.6  # what drawing any of the 96 characters would lose
    assert losses[-1] < 2


def test_a_text_that_is_too_short_is_refused(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n")
    with pytest.raises(SystemExit):
        run("train.py", *TINY, "--text", text)
    assert "is too short" in capsys.readouterr().err


def test_in_virtual_time_strategies_are_compared_on_a_network_that_is_not_here(run):
    words = ("--layers", 1, "--heads", 2, "--width", 16, "--block", 16, "--batch-size", 4, "--workers", 3)
    words = (*words, "--steps", 8, "--eval-every", 4, "--local-steps", 4, "--warmup", 2)
    printed = run("virtual.py", *words)
    rows = {
        name: cells.split("|")
        for name, cells in re.findall(r"^\| `([\w-]+)` \|(.*)\|$", printed, re.MULTILINE)
    }
    assert list(rows) == ["all-reduce", "diloco", "swarm"]
    losses, seconds, sent_mb = ([float(cells[place]) for cells in rows.values()] for place in (0, 1, 3))
    assert max(losses) < 4.7  # what drawing any of the 96 characters would lose, and a little more
    assert seconds[0] > 1.5 * max(seconds[1:])  # it waits for the network in every step
    assert sent_mb[0] > 1.5 * max(sent_mb[1:])
    assert run("virtual.py", *words, "--strategies", "diloco").splitlines()[:2] == re.findall(
        r"^diloco: .*", printed, re.MULTILINE
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "words",
    [
        ["--strategy", "all-reduce"],
        ["--strategy", "diloco", "--local-steps", "25"],
        ["--strategy", "neighbor"],
        ["--strategy", "swarm", "--option", "target_samples=24"],
        ["--strategy", "swarm", "--option", "local_steps=25"],
    ],
    ids=" ".join,
)
def test_two_workers_learn_under_any_strategy(words, tmp_path):
    out = tmp_path / "out"
    printed = start(
        *("-m", "shoal", "run", "-np", "2", *words, FOLDER / "train.py", *SMALL),
        *("--steps", 200, "--eval-every", 100, "--warmup", 20, "--lr", 0.005, "--out", out),
    )
    assert last_loss(printed) < 3.2
    assert "2 workers" in printed
    assert start(FOLDER / "sample.py", out, "--start", "A")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_workers_resume(tmp_path):
    words = ("-m", "shoal", "run", "-np", "2", "--strategy", "diloco", "--local-steps", "5")
    more = (*TINY, "--out", tmp_path, "--save-every", 5, "--resume", "--eval-every", 5)
    start(*words, FOLDER / "train.py", *more, "--steps", 10)
    printed = start(*words, FOLDER / "train.py", *more, "--steps", 15)
    assert "resumed step 10" in printed
    assert re.findall(r"step (\d+): loss", printed) == ["15"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_shells_are_a_swarm():
    """Two launchers that know nothing of each other but an address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    begin = ["-m", "shoal", "run", "-np", "1", "--strategy", "swarm", "--option", "run=gpt"]
    begin += ["--option", "target_samples=8", "--option", "min_peers=2"]
    train = [FOLDER / "train.py", *TINY, "--steps", 30, "--eval-every", 10]
    words = map(str, (sys.executable, *begin, "--option", f"listen={address}", *train))
    first = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        seen = first.stdout.readline()
        joined = start(*begin, "--option", f"join={address}", *train, "--seed", 7)
        seen += first.communicate(timeout=120)[0]
        assert first.returncode == 0, seen
    finally:
        first.kill()
        first.wait()
        first.stdout.close()
    assert "after 30 steps" in seen
    assert "after 30 steps" in joined


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_it_trains_alike():
    """It needs a C++ compiler."""
    words = (FOLDER / "train.py", *TINY, "--steps", 4, "--eval-every", 4)
    plain = start(*words)
    compiled = start(*words, "--compile", timeout=580)
    assert last_loss(compiled) == pytest.approx(last_loss(plain), abs=1e-3)


def test_it_is_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert lines["train.py"] + lines["sample.py"] <= 350
    assert lines["virtual.py"] <= 150
