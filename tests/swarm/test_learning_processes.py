"""Processes on real sockets learn while some are killed and others join, as well as if nobody had been."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from swarm.learning_peer import TARGET_SAMPLES
from swarm.swarms import virtual
from swarm.test_training import learn

PEER = Path(__file__).with_name("learning_peer.py")
NUM_PEERS = 8
EVERY_S, NUM_KILLS = 5.0, 12


class LearningProcess:
    """A peer's process, and the steps of the run that it has printed."""

    def __init__(self, join, number):
        command = [sys.executable, PEER, join, str(number)]
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lines = []
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self):
        self.lines += map(json.loads, iter(self.child.stdout.readline, ""))

    def wait_for(self, condition, timeout_s):
        until_s = time.monotonic() + timeout_s
        while not condition(self):
            assert self.child.poll() is None
            assert time.monotonic() < until_s, self.lines[-3:]
            time.sleep(0.05)

    @property
    def steps(self):
        return self.lines[1:]

    def end(self):
        self.child.kill()
        self.child.wait()
        self._reading.join()
        self.child.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_processes_of_which_one_is_killed_and_one_joins_every_five_seconds_learn_as_well_as_all():
    """Eight peers, twelve kills of whoever is there for longest; judged beside eight in virtual time."""
    first = LearningProcess("-", 0)
    alive, ended = [first], []
    try:
        first.wait_for(lambda one: one.lines, 60)
        contact = first.lines[0]["address"]
        alive += [LearningProcess(contact, number) for number in range(1, NUM_PEERS)]
        for one in alive:
            one.wait_for(lambda one: one.steps and one.steps[-1]["members"] == NUM_PEERS, 300)
        for number in range(NUM_PEERS, NUM_PEERS + NUM_KILLS):
            next_s = time.monotonic() + EVERY_S
            victim = alive.pop(0)
            victim.end()
            ended.append(victim)
            alive.append(LearningProcess(alive[-1].lines[0]["address"], number))
            # who takes the place must be in before its address is of use to the next
            alive[-1].wait_for(lambda one: one.steps, 120)
            time.sleep(max(0.0, next_s - time.monotonic()))
        last = alive[0].steps[-1]["steps"] + 3
        for one in alive:
            one.wait_for(lambda one: one.steps and one.steps[-1]["steps"] >= last, 120)
    finally:
        for one in alive:
            one.end()
    seen = [step for one in [*alive, *ended] for step in one.steps]
    assert len({step["fork"] for step in seen}) == 1
    by_step = {}
    for step in seen:
        by_step.setdefault(step["steps"], set()).add(step["bits"])
    assert all(len(bits) == 1 for bits in by_step.values())
    assert all(step["is_balanced"] for step in seen)
    final = max(seen, key=lambda step: step["steps"])
    assert final["samples"] >= TARGET_SAMPLES * final["steps"] * 0.9
    calm, _, _ = virtual(learn("digits", num_samples=final["samples"]))
    print(
        f"{final['samples']} samples, {final['steps']} steps: {final['accuracy']:.3f}, undisturbed {calm:.3f}"
    )
    assert calm > 0.8
    assert final["accuracy"] >= calm - 0.02  # six of the 300 digits: they learn from others than those do
