"""Training on a Ray cluster of two nodes loses a worker, a server or a node, and resumes with fewer."""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.conftest import Run
from cluster.enduring import STEPS_AFTER
from cluster.test_resuming import KILLED_AT, SAVED_AT, SAVING, loss_of, told
from launch.programs import is_running
from launch.ray_cluster import Cluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]
ENDURING, RESUMING, GROWING = (
    Path(__file__).with_name(f"{name}.py") for name in ("enduring", "resuming", "growing")
)
NAMING_S = 10


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    with (tmp_path_factory.mktemp("ray") / "cluster.log").open("w") as log:
        cluster = Cluster(log, num_cpus=2)
        yield cluster
        cluster.close()


@pytest.fixture
def train(ray):
    """Starts `shoal run --engine ray`; ended with the test."""
    with contextlib.ExitStack() as stack:

        def train(strategy, *words):
            words = ["--engine", "ray", "--address", ray.address, "--strategy", strategy, *words]
            process = subprocess.Popen(
                [sys.executable, "-m", "shoal", "run", *map(str, words)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            run = Run(process)
            stack.callback(run.close)
            return run

        yield train


def finished(run):
    return sorted(line for line in run.out if "without" in line)


def test_a_killed_worker_is_done_without(train):
    run = train("neighbor", "-np", 4, ENDURING, 1)
    pids = run.pids(4)
    began_s = time.monotonic()
    os.kill(pids[2], signal.SIGKILL)
    assert run.finish() == 0, run.err
    assert run.named_s("rank 2 was killed by signal 9 (SIGKILL)", began_s) < NAMING_S
    assert finished(run) == [f"[{rank}] {STEPS_AFTER} steps without [2]" for rank in (0, 1, 3)]


def test_a_killed_server_ends_the_run_and_is_named(train):
    run = train("parameter-server", "-np", 3, "--num-servers", 1, ENDURING, 1)
    pids = run.pids(4)
    began_s = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    assert run.finish() != 0
    assert run.named_s("rank 0 was killed by signal 9 (SIGKILL)", began_s) < NAMING_S
    assert time.monotonic() - began_s < NAMING_S
    assert not any(map(is_running, pids.values()))


def test_a_node_that_dies_is_done_without(ray, train):
    run = train("neighbor", "-np", 4, ENDURING, 2)
    pids = run.pids(4)
    began_s = time.monotonic()
    ray.ask("kill")
    code = run.finish()
    ray.ask("add")
    assert code == 0, run.err
    lost = [rank for rank in range(4) if f"[{rank}] {STEPS_AFTER} steps" not in "\n".join(run.out)]
    assert lost in ([0, 1], [2, 3])
    assert finished(run) == [
        f"[{rank}] {STEPS_AFTER} steps without {lost}" for rank in sorted(pids) if rank not in lost
    ]
    assert run.named_s(f"rank {lost[0]}", began_s) < NAMING_S


def test_a_run_that_loses_a_node_reaches_the_same_loss_on_the_other(ray, train, tmp_path):
    def start(name, *words, stop=0):
        words = ["--checkpoint", tmp_path / name, *SAVING, *words]
        return train("all-reduce", "-np", 4, *words, RESUMING, stop)

    whole = start("whole")
    assert whole.finish() == 0, whole.err
    run = start("checkpoint", "--max-restarts", 1, "--min-np", 2, stop=KILLED_AT)
    run.pids(4)
    began_s = time.monotonic()
    ray.ask("kill")
    code = run.finish()
    ray.ask("add")
    assert code == 0, run.err
    assert run.named_s("is lost with rank", began_s) < NAMING_S
    assert "restart 1 of 1 with 2 workers" in run.err
    assert told(run, "begins")[4:] == [f"begins at {SAVED_AT}"] * 2
    assert loss_of(tmp_path / "checkpoint") == pytest.approx(loss_of(tmp_path / "whole"), abs=1e-5)


def wait_for(run, pattern, num_lines):
    run.wait_for(lambda: sum(bool(re.search(pattern, line)) for line in run.out) >= num_lines, pattern)


def started_later(run):
    return sum(bool(re.search(r"training \d+ size \d from [1-9]", line)) for line in run.out)


def test_an_elastic_run_goes_on_without_a_node_and_uses_those_that_come(ray, train, tmp_path):
    """Each node has room for two workers."""
    run = train("all-reduce", "--elastic", "-np", 4, GROWING, tmp_path)
    wait_for(run, r"training \d+ size 4 from 0", 4)
    ray.ask("kill")
    wait_for(run, "size 2 after", 2)
    ray.ask("add")
    run.wait_for(lambda: started_later(run) == 2, "two more train")
    name = re.search(r"shoal scale (\S+) N", run.err)[1]
    scaled = [sys.executable, "-m", "shoal", "scale", name, "5"]
    assert "1 worker will join the 4" in subprocess.run(scaled, capture_output=True, text=True).stdout
    ray.ask("add")
    run.wait_for(lambda: started_later(run) == 3, "a fifth trains")
    (tmp_path / "end").touch()
    code = run.finish()
    ray.ask("kill")
    assert code == 0, run.err
    assert len({line.split()[2] for line in run.out if " ends " in line}) == 1
    assert len([line for line in run.out if " ends " in line]) == 5
