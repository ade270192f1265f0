"""Runs on two machines that were killed, and go on from their checkpoint with the workers that are left."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from launch.programs import is_running
from shoal.data import digits
from shoal.models.small import small_mlp

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PROGRAM = Path(__file__).with_name("resuming.py")
KILLED_AT, SAVED_AT = 120, 100
SAVING = ["--checkpoint-every", 50]
NAMING_S = 10
STRATEGIES = {
    "all-reduce": [],
    "neighbor": [],
    "diloco": ["--local-steps", 10, "--option", "outer_momentum=0.5"],
    "parameter-server": ["--num-servers", 1],
}
TOLERANCES = {"all-reduce": 1e-5, "neighbor": 0.01, "diloco": 0.02, "parameter-server": 0.02}
"""How far from the loss of the uninterrupted run: all-reduce takes the very same steps."""


@pytest.fixture
def train(run_on, two, tmp_path):
    """Starts a run over machines, which are given as how many workers each takes."""

    def train(strategy, slots, *words, name="checkpoint", stop=0):
        options = STRATEGIES[strategy]
        taken = [slots[0] + ("--num-servers" in options), *slots[1:]]
        hosts = ",".join(f"{machine.address}:{count}" for machine, count in zip(two, taken, strict=False))
        words = ["--strategy", strategy, *options, "--checkpoint", tmp_path / name, *SAVING, *words]
        return run_on(two[0], "-np", sum(slots), "-H", hosts, *words, PROGRAM, stop)

    return train


def loss_of(folder):
    """Of the newest checkpoint's model, over all examples for training."""
    path = max(folder.glob("step-*"))
    model = small_mlp()
    model.load_state_dict(load_file(path / "model.safetensors"))
    images, labels = digits()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(images), labels))


def told(run, what):
    return [line.partition(" ")[2] for line in run.out if what in line]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_workers_reach_the_same_loss(train, tmp_path, strategy):
    whole = train(strategy, [2, 2], name="whole")
    assert whole.finish() == 0, whole.err
    killed = train(strategy, [2, 2], stop=KILLED_AT)
    pids = killed.pids(4 + (strategy == "parameter-server"))
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    assert killed.finish() != 0
    fewer = train(strategy, [2])
    assert fewer.finish() == 0, fewer.err
    assert f"resumed step {SAVED_AT} from" in fewer.err
    assert "saved by 4 workers" in fewer.err
    assert told(fewer, "begins") == [f"begins at {SAVED_AT}"] * 2
    wanted, reached = loss_of(tmp_path / "whole"), loss_of(tmp_path / "checkpoint")
    assert wanted < 0.15  # of 2.3 at the start
    assert reached == pytest.approx(wanted, abs=TOLERANCES[strategy])


def test_a_run_that_loses_a_machine_goes_on_by_itself_with_the_other(train, two, tmp_path):
    whole = train("all-reduce", [2, 2], name="whole")
    assert whole.finish() == 0, whole.err
    run = train("all-reduce", [2, 2], "--max-restarts", 1, "--min-np", 2, stop=KILLED_AT)
    pids = run.pids(4)
    began_s = time.monotonic()
    two[1].kill()
    assert run.finish() == 0, run.err
    assert run.named_s("is lost with ranks 2 and 3", began_s) < NAMING_S
    assert f"restart 1 of 1 with 2 workers on {two[0].address}" in run.err
    assert told(run, "begins")[4:] == [f"begins at {SAVED_AT}"] * 2
    assert loss_of(tmp_path / "checkpoint") == pytest.approx(loss_of(tmp_path / "whole"), abs=1e-5)
    assert not any(map(is_running, pids.values()))


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server"])
def test_a_run_that_loses_a_process_starts_anew_with_all(train, strategy):
    run = train(strategy, [2, 2], "--max-restarts", 1, stop=KILLED_AT)
    pids = run.pids(4 + (strategy == "parameter-server"))
    os.kill(pids[0], signal.SIGKILL)  # the server, where there is one
    assert run.finish() == 0, run.err
    assert "rank 0 was killed by signal 9 (SIGKILL)" in run.err
    assert "restart 1 of 1 with 4 workers" in run.err
    assert told(run, "begins")[4:] == [f"begins at {SAVED_AT}"] * 4
