import signal
from dataclasses import dataclass

import pytest

from shoal.core.status import Status
from shoal.launch.failures import SETTLE_S, Stops

LIMIT_S = 5.0
PATIENT_S = LIMIT_S + SETTLE_S


@dataclass
class Fake:
    """As much of a worker as is looked at."""

    rank: int
    told: Status
    stop_signal: int | None = None
    stopped_s: float = 0.0
    is_alive: bool = True
    pid: int = 7
    host: str = ""
    word: str = "rank"

    def stop(self, now_s=0.0):
        self.stop_signal, self.stopped_s = signal.SIGSTOP, now_s


class Run:
    """Looks five times a second."""

    def __init__(self, *told):
        self.workers = [Fake(rank, Status(answer)) for rank, answer in enumerate(told)]
        self.said = []
        self.stops = Stops(self.workers, LIMIT_S, self.said.append)
        self.now_s = 0.0
        self.stops.look(self.now_s)

    def go_on_for(self, seconds):
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.2
            self.stops.look(self.now_s)
        return self.stops.in_the_way()


def test_who_is_waited_for_too_long_by_one_that_cannot_do_without_it():
    run = Run(False, True, False)
    run.workers[1].stop()
    assert run.go_on_for(LIMIT_S - 0.5) is None
    assert run.said == []
    assert run.go_on_for(1.0) is None
    (said,) = run.said
    assert said.startswith(f"rank 1 has been stopped by signal {signal.SIGSTOP:d} (SIGSTOP) for 5 s")
    assert "`kill -CONT 7`" in said
    assert run.go_on_for(SETTLE_S) is run.workers[1]
    assert len(run.said) == 1


@pytest.mark.parametrize("told", [None, True])
def test_nobody_is_in_the_way_of_those_who_have_not_said_so(told):
    run = Run(told, False, told)
    run.workers[1].stop()
    assert run.go_on_for(10 * PATIENT_S) is None


def test_the_first_of_several_is_in_the_way():
    run = Run(False, False, False)
    run.workers[2].stop(0.0)
    run.workers[1].stop(0.1)
    assert run.go_on_for(2 * PATIENT_S) is run.workers[2]


def test_stopped_together_they_do_not_wait_for_each_other():
    run = Run(False, False)
    for worker in run.workers:
        worker.stop()
    assert run.go_on_for(10 * PATIENT_S) is None
    run.workers[0].stop_signal = None
    assert run.go_on_for(1.0) is None
    assert run.go_on_for(PATIENT_S) is run.workers[1]


def test_a_launcher_that_was_stopped_itself_has_seen_nobody_wait():
    run = Run(False, False)
    run.workers[1].stop()
    run.go_on_for(1.0)
    run.now_s += 3600
    assert run.go_on_for(1.0) is None


def test_each_stop_counts_from_its_beginning():
    run = Run(False, False)
    for _ in range(5):
        run.workers[1].stop(run.now_s)
        assert run.go_on_for(PATIENT_S / 2) is None


def test_those_left_over_are_stopped_for_long_when_all_others_have_ended():
    run = Run(None, None, None)
    run.workers[0].is_alive = False
    run.workers[1].stop()
    run.go_on_for(2 * LIMIT_S)
    assert run.stops.left_over(run.now_s) == []
    run.workers[2].is_alive = False
    assert run.stops.left_over(LIMIT_S - 1) == []
    assert run.stops.left_over(run.now_s) == [run.workers[1]]
