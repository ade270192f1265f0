"""Workers on machines that no launcher watches: networks that are cut, and who is blamed for a loss."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest

from cluster.conftest import Run
from cluster.enduring import STEPS_AFTER
from launch.machines import two_machines
from shoal.core.run_options import RunOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PROGRAM = Path(__file__).with_name("enduring.py")
PATIENCE = 0.8
START_S = 150


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with two_machines(tmp_path_factory.mktemp("machines"), 4, has_sshd=False) as machines:
        yield machines


class Workers:
    """Four processes on the first of these machines, evenly, as a launcher on each would start them."""

    def __init__(self, machines, strategy, num_lost, **options):
        options = RunOptions(run_id=f"test {id(self)}", strategy=strategy, patience=PATIENCE, **options)
        per_machine = 4 // len(machines)
        self.machines = machines
        self.runs = []
        for rank in range(4):
            index, local_rank = divmod(rank, per_machine)
            variables = {
                **options.to_environment(),
                "SHOAL_RUN_ID": options.run_id,
                "SHOAL_MASTER_ADDR": machines[0].address,
                "SHOAL_MASTER_PORT": "29871",  # of a network that nobody else is in
                "SHOAL_WORLD_SIZE": 4,
                "SHOAL_LOCAL_WORLD_SIZE": per_machine,
                "SHOAL_RANK": rank,
                "SHOAL_LOCAL_RANK": local_rank,
                "SHOAL_MACHINE": index,
                "OMP_NUM_THREADS": 1,
            }
            words = ["env", *(f"{name}={value}" for name, value in variables.items())]
            self.runs.append(Run(machines[index].start(*words, sys.executable, PROGRAM, num_lost)))

    def __enter__(self):
        try:
            for rank, run in enumerate(self.runs):
                run.wait_for(lambda run=run: run.out, f"rank {rank} trains", START_S)
        except BaseException as error:
            self.__exit__()
            for rank, run in enumerate(self.runs):
                error.add_note(f"rank {rank}: {run.out}\n{run.err}")
            raise
        return self

    def __exit__(self, *_):
        for machine in self.machines:
            machine.plug_in()
        for run in self.runs:
            run.close()

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self.runs[rank].process.pid, number)

    def wait_for_loss(self, rank, lost):
        run = self.runs[rank]
        run.wait_for(lambda: f"rank {lost} is lost" in run.err, f"rank {rank} loses rank {lost}")

    def assert_finishes(self, rank, lost):
        run = self.runs[rank]
        assert run.finish() == 0, run.err
        assert run.out[-1] == f"{STEPS_AFTER} steps without {lost}", run.err

    def split_lines(self, rank):
        return [line for line in self.runs[rank].err.splitlines() if "fell silent at once" in line]


@pytest.mark.parametrize("strategy", ["neighbor", "pair", "push-sum", "window", "local-sgd", "diloco"])
def test_one_half_of_a_cut_network_stops(four, strategy):
    with Workers(four[:2], strategy, 2) as workers:
        four[1].unplug()
        for rank in (0, 1):
            workers.assert_finishes(rank, [2, 3])
            (line,) = workers.split_lines(rank)
            assert "ranks 2 and 3" in line
            assert "this side goes on" in line
        for rank in (2, 3):
            run = workers.runs[rank]
            assert run.finish() == 1, run.err
            (line,) = workers.split_lines(rank)
            assert line.startswith("shoal.core.errors.NetworkSplit: ranks 0 and 1"), run.err
            assert "this side stops" in line


def test_both_halves_go_on_where_that_is_allowed(four):
    with Workers(four[:2], "neighbor", 2, allow_split=True) as workers:
        four[1].unplug()
        for rank in range(4):
            workers.assert_finishes(rank, [2, 3] if rank < 2 else [0, 1])
            (line,) = workers.split_lines(rank)
            assert "--allow-split" in line


def test_workers_that_are_killed_one_by_one_are_no_split(four):
    with Workers(four[:2], "neighbor", 3) as workers:
        for rank in (0, 1, 2):
            workers.kill(rank)
            workers.wait_for_loss(3, rank)
        workers.assert_finishes(3, [0, 1, 2])
        assert not workers.split_lines(3)


@pytest.mark.parametrize("how", ["killed", "stopped", "unplugged"])
@pytest.mark.parametrize("strategy", ["all-reduce", "sma"])
@pytest.mark.parametrize("victim", [0, 2])
def test_all_blame_the_one_that_was_lost(four, strategy, victim, how):
    """Not one of those that end because of it, whoever hears of whom first."""
    with Workers(four, strategy, 1) as workers:
        if how == "unplugged":
            four[victim].unplug()
        else:
            workers.kill(victim, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        others = [rank for rank in range(4) if rank != victim]
        for rank in others:
            assert workers.runs[rank].finish() == 1, workers.runs[rank].err
        errors = [last_error(workers.runs[rank]) for rank in others]
        assert all(error.startswith(f"rank {victim} is lost") for error in errors), errors
        if how == "stopped":
            workers.kill(victim, signal.SIGCONT)
        if how != "killed":
            assert workers.runs[victim].finish() == 1
            own = last_error(workers.runs[victim])
            is_cut = "fell silent at once" in own or "is lost: silent for" in own
            assert is_cut if how == "unplugged" else f"rank {victim}, this worker," in own, own


def last_error(run):
    """What the traceback ends with: Python writes its last line in pieces, between which others may come."""
    found = re.findall(r"(?:PeerLost|NetworkSplit): (.*)", run.err)
    assert found, run.err
    return found[-1]
