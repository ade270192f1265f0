"""Every strategy learns on several machines: by `shoal run` over ssh, on one that is split, by torchrun.

What goes from machine to machine is counted by the group, and by the machines' own interfaces.
"""

import contextlib
import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cases import CASES
from launch.machines import two_machines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
PROGRAM = Path(__file__).parent / "program.py"
MODEL_BYTES = 4 * (64 * 128 + 128 + 128 * 10 + 10)
EVERY = pytest.mark.parametrize("name", CASES)
LIMIT_S = 150


@dataclass(frozen=True)
class Outcome:
    """What the processes of a run have told, by rank, and what each machine has sent by its cable."""

    told: list
    cable_bytes: tuple = ()

    @property
    def workers(self):
        return [one for one in self.told if one["role"] == "worker"]

    def sent_bytes(self, machine):
        """By the group's own count, from beginning to end."""
        return sum(one["whole"][0] for one in self.told if one["machine"] == machine)

    @property
    def crossing(self):
        """Copies of the model that crossed in one step, by the workers' count; servers are their mirror."""
        sent, received = map(sum, zip(*(worker["training"] for worker in self.workers), strict=True))
        is_mirrored = len(self.workers) < len(self.told)
        return (sent + (received if is_mirrored else 0)) / self.workers[0]["steps"] / MODEL_BYTES


def read(done):
    assert done.returncode == 0, done.stderr
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with two_machines(tmp_path_factory.mktemp("machines")) as machines:
        yield machines


@pytest.fixture(scope="module")
def train(pair):
    """A case by `shoal run` on both machines; a case that several tests look at is run once."""

    @functools.cache
    def train(name):
        case = CASES[name]
        a, b = pair
        slots = [2 + (case.num_servers > 0), 2 + (case.num_servers > 1)]
        hosts = f"{a.address}:{slots[0]},{b.address}:{slots[1]}"
        words = ["-np", 4, "-H", hosts, "--strategy", case.strategy, "--num-servers", case.num_servers]
        before = [machine.sent_bytes for machine in pair]
        done = a.shoal_run(*words, *case.option_words, PROGRAM, *case.own_words, timeout=LIMIT_S)
        cable_bytes = (machine.sent_bytes - was for machine, was in zip(pair, before, strict=True))
        return Outcome(sorted(read(done), key=lambda one: one["rank"]), tuple(cable_bytes))

    return train


def check_learning(outcome, num_servers, num_workers=4):
    assert [one["rank"] for one in outcome.told] == list(range(num_servers + num_workers))
    assert [one["role"] for one in outcome.told] == ["server"] * num_servers + ["worker"] * num_workers
    for worker in outcome.workers:
        assert worker["size"] == num_workers
        assert worker["num_machines"] > 1
        assert worker["after"]["loss"] < 0.7 * worker["before"]["loss"]
        assert worker["after"]["accuracy"] > 0.7 > 0.2 > worker["before"]["accuracy"]


@EVERY
def test_it_learns_on_two_machines(train, name):
    outcome = train(name)
    check_learning(outcome, CASES[name].num_servers)
    assert {one["num_machines"] for one in outcome.told} == {2}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_counted])
def test_as_much_crosses_as_the_rule_needs(train, name):
    case, outcome = CASES[name], train(name)
    if case.is_exact:
        assert outcome.crossing == pytest.approx(case.crossing, rel=0.05)
    else:
        assert 0 < outcome.crossing < 1.3 * case.crossing


@EVERY
def test_the_cable_carries_what_was_counted(train, name):
    outcome = train(name)
    for machine, carried_bytes in enumerate(outcome.cable_bytes):
        counted_bytes = outcome.sent_bytes(machine)
        assert carried_bytes > counted_bytes
        if CASES[name].is_counted:  # heads of packets and of TLS, beats, ssh
            assert carried_bytes < 1.1 * counted_bytes + (1 << 20)


def test_hierarchical_sends_a_fraction_of_what_neighbor_sends(train):
    """At most 1/K with K workers on a machine: only one of them speaks with the other machine."""
    hierarchical, neighbor = train("hierarchical"), train("neighbor")
    assert hierarchical.crossing <= neighbor.crossing / 2
    carried = sum(hierarchical.cable_bytes), sum(neighbor.cable_bytes)
    assert carried[0] <= carried[1] / 2


@EVERY
def test_it_learns_on_a_machine_that_is_split(tmp_path, name):
    case = CASES[name]
    words = ["-np", 4, "--workers-per-machine", 2, "--num-servers", case.num_servers]
    words += ["--strategy", case.strategy, *case.option_words, PROGRAM, *case.own_words]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        cwd=tmp_path,
    )
    outcome = Outcome(sorted(read(done), key=lambda one: one["rank"]))
    check_learning(outcome, case.num_servers)
    assert [one["machine"] for one in outcome.told] == [rank // 2 for rank in range(len(outcome.told))]


@EVERY
def test_it_learns_under_torchrun(pair, tmp_path, name):
    case = CASES[name]
    num_each = 3 if case.num_servers else 2
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", num_each]
    words += ["--master-addr", pair[0].address, "--master-port", 29500]
    words += ["--log-dir", tmp_path / "logs"]  # else torchrun makes a folder, and leaves it there
    own = [
        PROGRAM,
        *case.own_words,
        "--strategy",
        case.strategy,
        "--num-servers",
        case.num_servers,
        *case.option_words,
    ]
    told = []
    with contextlib.ExitStack() as stack:
        running = []
        for index, machine in enumerate(pair):
            process = machine.start(*words, "--node-rank", index, *own, cwd=tmp_path)
            running.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in running:
            out, complaint = process.communicate(timeout=LIMIT_S)
            told += read(subprocess.CompletedProcess(process.args, process.returncode, out, complaint))
    outcome = Outcome(sorted(told, key=lambda one: one["rank"]))
    check_learning(outcome, case.num_servers, 2 * num_each - case.num_servers)
    assert [one["machine"] for one in outcome.told] == [rank // num_each for rank in range(2 * num_each)]
