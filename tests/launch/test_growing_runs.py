"""Real workers that come and go while a run trains: no restart, equal models, each example once."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from launch.growing import GrowingRun
from shoal.core import UsageError
from shoal.launch.live import ask_launcher
from shoal.strategies import BUILT_IN

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc"),
    pytest.mark.timeout(600),
]
NUM_EXAMPLES = 203
NUM_TRIES = int(os.environ.get("SHOAL_NUM_CHANGES", "20"))
NAMES = sorted(name for name in BUILT_IN if name not in ("ddp", "horovod", "swarm"))
MORE = {
    "hierarchical": ["--workers-per-machine", 2],
    "parameter-server": ["--num-servers", 2],
    "staleness-aware": ["--num-servers", 1],
}
"""What a strategy needs beside its name."""


def test_a_run_grows_loses_a_worker_and_shrinks_without_a_restart(tmp_path):
    with GrowingRun(tmp_path, 2, "--strategy", "all-reduce") as run:
        run.wait_for_size(2)
        first = run.pids()
        assert run.scale(3).what == "1 worker will join the 2 that are there"
        run.wait_for_size(3)
        (joiner,) = set(run.pids()) - set(first)
        lost_s = time.time()
        os.kill(joiner, signal.SIGKILL)
        run.wait_for_size(2, lost_s)
        assert run.scale(1).what == "1 of 2 workers will leave"
        run.wait_for_size(1)
        assert not run.scale(9).is_done
        assert run.finish() == 0
        (last,) = [note["pid"] for note in run.notes() if note.get("finished")]
        sizes = [note["resized"] for note in run.notes() if "resized" in note and note["pid"] == last]
        assert sizes == [[2, 3], [3, 2], [2, 1]]
        apart = [step for step, models in run.models_by_step().items() if len(models) > 1]
        assert apart == []
        run.check_examples(NUM_EXAMPLES)
        assert not [line for line in run.lines if "restart" in line]


@pytest.mark.slow
def test_a_run_is_scaled_from_two_to_six_to_three(tmp_path):
    with GrowingRun(tmp_path, 2, "--strategy", "all-reduce", pause_s=0.02) as run:
        run.wait_for_size(2)
        assert run.scale(6).what == "4 workers will join the 2 that are there"
        run.wait_for_size(6)
        smaller_s = time.time()
        assert run.scale(3).what == "3 of 6 workers will leave"
        run.wait_for_size(3, smaller_s)
        assert run.finish() == 0, run.lines
        assert len([note for note in run.notes() if note.get("finished")]) == 3
        apart = [step for step, models in run.models_by_step().items() if len(models) > 1]
        assert apart == []
        run.check_examples(NUM_EXAMPLES)


def test_a_run_that_nobody_knows_cannot_be_scaled():
    with pytest.raises(UsageError, match="No launcher of a run nobody"):
        ask_launcher("nobody", 3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", NAMES)
def test_every_strategy_grows_and_goes_on_after_a_loss(tmp_path, strategy):
    with GrowingRun(tmp_path, 3, "--strategy", strategy, *MORE.get(strategy, ()), pause_s=0.02) as run:
        run.wait_for_size(3)
        lost_s = time.time()
        os.kill(run.alive()[0], signal.SIGKILL)
        run.wait_for_size(2, lost_s)
        came_s = time.time()
        run.scale(4)
        run.wait_for_size(4, came_s)
        left_s = time.time()
        run.scale(2)
        run.wait_for_size(2, left_s)
        assert run.finish() == 0
        run.check_examples(NUM_EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_TRIES))
def test_losses_while_a_run_changes(tmp_path, monkeypatch, seed):
    """While a worker takes its state it is killed, or one that gives it, or two at once, or one after the
    other, or one is stopped."""
    monkeypatch.setenv("GROWING_LEAF_S", "0.1")
    kind = ("joiner", "donor", "two", "one after the other", "stopped")[seed % 5]
    dice = random.Random(f"growing {seed}")
    with GrowingRun(tmp_path, 3, "--strategy", "all-reduce", "--patience", "0.4", task=200_000) as run:
        run.wait_for_size(3)
        known = run.pids()
        run.scale(dice.choice([4, 5]))
        run.wait_until(lambda: any("giving" in note for note in run.notes()), "a state that is given")
        time.sleep(dice.uniform(0, 0.15))  # it takes three times as long
        notes = run.notes()
        giving = list(dict.fromkeys(note["pid"] for note in notes if "giving" in note))
        taking = list(dict.fromkeys(note["pid"] for note in notes if "taking" in note))
        assert {*giving} <= {*known}
        victims = {
            "joiner": taking[:1],
            "donor": giving[:1],
            "two": [giving[0], taking[0]],
            "one after the other": dice.sample(known, 2),
            "stopped": [dice.choice([*giving, *taking])],
        }
        lost_s = time.time()
        for pid in victims[kind]:
            os.kill(pid, signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
            if kind == "one after the other":
                time.sleep(dice.uniform(0.05, 0.5))  # the others notice the first loss, and form a group
        hit = [note for note in run.steps() if note["pid"] in taking and note["at_s"] < lost_s]
        assert not hit, "the state was there before"
        run.wait_until(
            lambda: len({note["pid"] for note in run.steps(lost_s + 3)}) >= 2, f"steps after a loss: {kind}"
        )
        assert run.finish() == 0, run.lines
        apart = [step for step, models in run.models_by_step().items() if len(models) > 1]
        assert apart == [], kind
        run.check_examples(NUM_EXAMPLES)
