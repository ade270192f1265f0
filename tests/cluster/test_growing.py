"""Runs over two machines that grow and shrink while they train: by `shoal scale`, a crash, and a return."""

import json
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from launch.machines import linked_machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LIMIT_S = 150.0
"""What has not happened by then hangs: the import of torch alone takes half a minute on a busy machine."""
PROGRAM = Path(__file__).with_name("growing.py")


@pytest.fixture
def two(tmp_path):
    (tmp_path / "machines").mkdir()
    with linked_machines(tmp_path / "machines") as machines:
        for machine in machines:
            machine.variables["OMP_NUM_THREADS"] = "1"
        yield machines


@pytest.fixture
def train(run_on, two, tmp_path):
    """Starts an elastic run over both machines, and waits until all its workers train."""

    def train(num_workers, *words, slots=3):
        a, b = two
        hosts = f"{a.address}:{slots},{b.address}:{slots}"
        words = ["--elastic", "-np", num_workers, "-H", hosts, *words, PROGRAM, tmp_path]
        run = run_on(a, *words)
        run.pids(num_workers)
        return run

    return train


def name_of(run):
    run.wait_for(lambda: "`shoal scale" in run.err, "its name")
    return re.search(r"`shoal scale (\S+) N`", run.err)[1]


def scale(machine, run, size):
    name = name_of(run)
    done = machine.run(sys.executable, "-m", "shoal", "scale", name, size)
    assert done.returncode == 0, done.stderr


def wait_for_size(run, size, since=0):
    """Waits until so many train, by the lines that come after the first `since`."""
    run.wait_for(
        lambda: any(f"size {size} after" in line for line in run.out[since:]), f"{size} workers", LIMIT_S
    )


class Watcher:
    """Looks at a run by `shoal top`, again and again, until the block ends."""

    def __init__(self, machine, name):
        self.seen = []
        """What has changed: generation and size, in the order in which they were shown."""
        self.shown = None
        """The last look."""
        self._command = [sys.executable, "-m", "shoal", "top", name, "--json", "-"]
        self._machine = machine
        self._has_ended = threading.Event()
        self._looking = threading.Thread(target=self._look)

    def __enter__(self):
        self._looking.start()
        return self

    def __exit__(self, *error):
        self._has_ended.set()
        self._looking.join()

    def _look(self):
        while not self._has_ended.wait(0.2):
            done = self._machine.run(*self._command)
            if done.returncode == 0:
                self.shown = json.loads(done.stdout)
                result = self.shown["result"]
                now = (result["generation"], result["size"])
                if now not in self.seen[-1:]:
                    self.seen.append(now)

    def wait_for(self, size):
        end_s = time.monotonic() + LIMIT_S
        while not self.seen or self.seen[-1][1] != size or self.shown["result"]["num_workers"] != size:
            assert time.monotonic() < end_s, self.seen
            time.sleep(0.05)


def ends(run, folder):
    (folder / "end").touch()
    assert run.finish() == 0, run.err
    return [line.partition("ends ")[2] for line in run.out if " ends " in line]


def test_a_run_is_scaled_over_two_machines(train, two, tmp_path):
    run = train(2)
    with Watcher(two[0], name_of(run)) as watcher:
        watcher.wait_for(2)
        scale(two[0], run, 6)
        wait_for_size(run, 6)
        watcher.wait_for(6)
        assert {worker.get("place", 0) for worker in watcher.shown["jobs"][0]["workers"]} == set(range(6))
        num_lines = len(run.out)
        scale(two[0], run, 3)
        wait_for_size(run, 3, num_lines)
        watcher.wait_for(3)
    generations, sizes = zip(*watcher.seen, strict=True)
    assert list(generations) == sorted(generations)
    assert [sizes[0], max(sizes), sizes[-1]] == [2, 6, 3]
    told = ends(run, tmp_path)
    assert len(told) == 3, run.err
    assert len(set(told)) == 1, "parameters are equal to the bit"
    assert told[0].endswith("size 3")


def test_a_machine_joins_by_itself_and_leaves(run_on, two, tmp_path):
    a, b = two
    secret = tmp_path / "secret"
    a.run(sys.executable, "-m", "shoal", "keys", "secret", "--file", secret, check=True)
    words = ["--elastic", "-np", 2, "--secret-file", secret, "--elastic-port", 4711, PROGRAM, tmp_path]
    run = run_on(a, *words)
    run.pids(2)
    joining = b.start(*b.shoal_words("--join", f"{a.address}:4711", "--secret-file", secret, "-np", 2))
    wait_for_size(run, 4)
    joining.send_signal(signal.SIGINT)
    wait_for_size(run, 2)
    _, complaint = joining.communicate(timeout=60)
    assert joining.returncode == 0, complaint
    told = ends(run, tmp_path)
    assert len(told) == 2
    assert len(set(told)) == 1, "parameters are equal to the bit"


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_a_machine_that_crashes_takes_its_workers_and_gets_others_when_it_is_back(
    train, two, tmp_path, strategy
):
    run = train(4, "--strategy", strategy, slots=2)
    two[1].crash()
    wait_for_size(run, 2)
    two[1].recover()
    wait_for_size(run, 4)
    told = ends(run, tmp_path)
    assert f"{two[1].address} is back" in run.err
    assert len(told) == 4, run.err
    if strategy == "all-reduce":
        assert len(set(told)) == 1, "parameters are equal to the bit"


def test_a_cut_cable_takes_the_workers_behind_it(run_on, two, tmp_path):
    """The launcher hears nothing more of them either; they end by themselves."""
    a, b = two
    secret = tmp_path / "secret"
    a.run(sys.executable, "-m", "shoal", "keys", "secret", "--file", secret, check=True)
    words = ["--elastic", "-np", 2, "--secret-file", secret, "--elastic-port", 4711, PROGRAM, tmp_path]
    run = run_on(a, *words)
    run.pids(2)
    joining = b.start(*b.shoal_words("--join", f"{a.address}:4711", "--secret-file", secret, "-np", 2))
    wait_for_size(run, 4)
    b.unplug()
    wait_for_size(run, 2)
    said = "".join(joining.communicate(timeout=60))
    assert "has left the run, or the run is over" in said, run.err
    assert not b.pids()
    b.plug_in()
    told = ends(run, tmp_path)
    assert len(told) == 2, run.err
    assert len(set(told)) == 1, "parameters are equal to the bit"


def test_workers_that_reach_only_the_launcher_are_given_up(train, two, tmp_path):
    """Those on both sides of the cut say that they have lost the others: the older ones go on."""
    run = train(4, slots=2)
    two[1].unplug()
    wait_for_size(run, 2)
    two[1].plug_in()
    told = ends(run, tmp_path)
    assert len(told) == 2, run.err
    assert len(set(told)) == 1, "parameters are equal to the bit"
