"""The example as processes that nobody launches: two; four of which one is killed and another joins."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_in_a_swarm.py"
PAGE = ROOT / "docs" / "swarm.md"


class Shell:
    """One `python train_in_a_swarm.py …`, and what it has printed."""

    def __init__(self, *words, program=EXAMPLE):
        self.printed = ""
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, program, *map(str, words)]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, cwd=ROOT)

    def read_until(self, pattern):
        while (found := re.search(pattern, self.printed)) is None:
            line = self.child.stdout.readline()
            assert line, self.printed
            self.printed += line
        return found

    @property
    def address(self):
        return self.read_until(r"--join (\S+)")[1]

    @property
    def accuracy(self):
        return float(self.read_until(r"accuracy on unseen digits: ([\d.]+)%")[1])

    def check_samples(self):
        words = r"samples: (\d+) computed, (\d+) counted, (\d+) lost"
        computed, counted, lost = map(int, self.read_until(words).groups())
        assert computed == counted + lost
        assert counted > 0
        assert self.child.wait(60) == 0


@contextlib.contextmanager
def shells():
    """A list to which they are added; none of them outlives the test."""
    started = []
    try:
        yield started
    finally:
        for shell in started:
            shell.child.kill()
            shell.child.wait()
            shell.child.stdout.close()


@pytest.mark.slow  # two minutes on a busy machine
@pytest.mark.timeout(300)
def test_two_shells():
    words = ("--min-peers", 2, "--steps", 10, "--target-samples", 128, "--minority-after", 5)
    with shells() as two:
        two.append(Shell(*words))
        two.append(Shell("--join", two[0].address, *words))
        for shell in two:
            assert shell.accuracy > 20
            shell.check_samples()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_program_of_the_page_in_two_shells(tmp_path):
    (code,) = re.findall(r"```python\n(import sys\n.*?)```", PAGE.read_text(), re.DOTALL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = tmp_path / "member.py"
    program.write_text(code.replace("127.0.0.1:31337", address).replace("< 200", "< 60"))
    with shells() as two:
        two.append(Shell(program=program))
        two[0].read_until("in the run, at step 0\n")
        two.append(Shell(address, program=program))
        for shell in two:
            shell.read_until(": 2 members, loss ")
            shell.check_samples()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_one_of_four_killed_and_one_joining_learns_as_well():
    """At equal steps of the run, and so at equal samples; within a point of nobody coming and going."""
    words = ("--steps", 600, "--target-samples", 256, "--minority-after", 20)
    reached = []
    for has_churn in (False, True):
        with shells() as members:
            members.append(Shell(*words, "--min-peers", 3))
            join = ("--join", members[0].address, "--min-peers", 3)
            members.extend(Shell(*words, *join) for _ in range(3))
            if has_churn:
                members[1].read_until(r"step \d\d:")
                members[3].child.kill()
                members.insert(3, Shell(*words, *join))
            survivors = members[:4] if has_churn else members
            reached.append(sum(shell.accuracy for shell in survivors) / len(survivors))
            for shell in survivors:
                shell.check_samples()
    calm, churned = reached
    assert calm > 85
    assert churned > calm - 1
