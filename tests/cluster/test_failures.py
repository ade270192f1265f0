"""Training on two machines loses a worker, a server, the worker that speaks for its machine, or a machine.

What can go on goes on and finishes; what cannot ends within ten seconds and says who it was.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from cluster.enduring import STEPS_AFTER
from launch.programs import is_running
from shoal.launch.worker import name_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROGRAM = Path(__file__).with_name("enduring.py")
NAMING_S = 10
SURVIVORS = {
    "neighbor": [],
    "pair": [],
    "push-sum": [],
    "window": [],
    "local-sgd": ["--local-steps", 4],
    "diloco": ["--local-steps", 4],
    "diloco coded": ["--local-steps", 4, "--option", "codec=int8"],
    "local-sgd coded, with momentum": [
        *["--local-steps", 4, "--option", "codec=int8", "--option", "average_momentum=true"]
    ],
    "parameter-server": ["--num-servers", 1],
    "parameter-server two": ["--num-servers", 2],
    "parameter-server bounded": ["--num-servers", 1, "--option", "mode=bounded"],
    "parameter-server sync": ["--num-servers", 1, "--option", "mode=sync"],
}
OTHERS = {"all-reduce": [], "ddp": [], "sma": [], "hierarchical": []}
VICTIMS = {"worker": [3], "leader of machine 1": [2], "leader": [0], "machine 1": [2, 3], "machine 0": [0, 1]}
"""Ranks among the four workers; the first two are on machine 0."""


class Training:
    """Four workers on two machines; servers are on the first."""

    def __init__(self, run_on, machines, strategy, words, victim):
        self.machines = machines
        self.is_unplugged = False
        self.num_servers = words[words.index("--num-servers") + 1] if "--num-servers" in words else 0
        a, b = machines
        words = ["-np", 4, "-H", f"{a.address}:{2 + self.num_servers},{b.address}:2", *words]
        head = machines[1 if victim == "machine 0" else 0]
        program = [PROGRAM, len(VICTIMS[victim])]
        self.run = run_on(head, *words, "--strategy", strategy.split()[0], *program)
        self.pids = self.run.pids(4 + self.num_servers)

    def lose(self, ranks):
        """Kill processes, by their ranks among all."""
        self.victims = ranks
        self.began_s = time.monotonic()
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGKILL)

    def lose_machine(self, index, how="kill"):
        bounds = [0, 2 + self.num_servers, 4 + self.num_servers]
        self.victims = list(range(bounds[index], bounds[index + 1]))
        self.began_s = time.monotonic()
        self.is_unplugged = how == "unplug"
        getattr(self.machines[index], how)()

    def meet(self, victim):
        if victim.startswith("machine"):
            self.lose_machine(int(victim[-1]))
        else:
            self.lose([rank + self.num_servers for rank in VICTIMS[victim]])

    def assert_others_finish(self):
        assert self.run.finish() == 0, self.run.err
        # rank 0 of the workers comes after the servers
        lost = [rank - self.num_servers for rank in self.victims]
        others = [rank for rank in range(self.num_servers, 4 + self.num_servers) if rank not in self.victims]
        told = [line for line in self.run.out if "training" not in line]
        wanted = [f"[{rank}] {STEPS_AFTER} steps without {lost}" for rank in others]
        assert sorted(told) == wanted, self.run.err
        assert self.run.err.endswith(f"shoal run: finished without {name_ranks(self.victims)}\n")
        self.assert_named()

    def assert_ends(self):
        assert self.run.finish() != 0, self.run.err
        elapsed_s = time.monotonic() - self.began_s
        assert elapsed_s < NAMING_S, self.run.err
        assert not any("without" in line for line in self.run.out)
        self.assert_named()

    def assert_named(self):
        who = (
            f"is lost with {name_ranks(self.victims)}" if len(self.victims) > 1 else "was killed by signal 9"
        )
        named_s = self.run.named_s(who, self.began_s)
        assert f"rank {self.victims[0]}" in self.run.err
        assert named_s < NAMING_S
        unheard = self.victims if self.is_unplugged else []
        assert not any(is_running(pid) for rank, pid in self.pids.items() if rank not in unheard)


@pytest.fixture
def train(run_on, two):
    """Starts a run, and waits until all of it trains."""

    def train(strategy, victim):
        words = {**SURVIVORS, **OTHERS}[strategy]
        return Training(run_on, two, strategy, words, victim)

    return train


EACH = ("leader", "machine 1")
SURVIVED = [
    *[("neighbor", victim) for victim in VICTIMS],
    *[
        (strategy, victim)
        for strategy in ("pair", "push-sum", "window", "local-sgd", "diloco")
        for victim in EACH
    ],
    *[
        (strategy, victim)
        for strategy in ("diloco coded", "local-sgd coded, with momentum")
        for victim in ("leader", "leader of machine 1", "machine 1")
    ],
    *[("parameter-server", victim) for victim in ("leader", "leader of machine 1", "machine 1")],
    *[(f"parameter-server {mode}", "worker") for mode in ("bounded", "sync")],
]
ENDED = [
    *[("all-reduce", victim) for victim in VICTIMS],
    *[(strategy, "leader of machine 1") for strategy in ("ddp", "sma", "hierarchical")],
    ("hierarchical", "machine 1"),
]


@pytest.mark.parametrize(("strategy", "victim"), SURVIVED)
def test_what_can_go_on_finishes_without_them(train, strategy, victim):
    run = train(strategy, victim)
    run.meet(victim)
    run.assert_others_finish()


@pytest.mark.parametrize(("strategy", "victim"), ENDED)
def test_what_cannot_go_on_ends_soon_and_says_who(train, strategy, victim):
    run = train(strategy, victim)
    run.meet(victim)
    run.assert_ends()


@pytest.mark.parametrize("strategy", ["parameter-server", "parameter-server two"])
def test_a_lost_server_ends_the_run_and_is_named(train, strategy):
    run = train(strategy, "leader")
    run.lose([run.num_servers - 1])
    run.assert_ends()


def test_a_machine_that_nobody_hears_of_is_done_without(train):
    run = train("neighbor", "machine 1")
    run.lose_machine(1, "unplug")
    run.assert_others_finish()


def test_a_machine_that_nobody_hears_of_ends_what_needs_it(train):
    run = train("all-reduce", "machine 1")
    run.lose_machine(1, "unplug")
    run.assert_ends()
