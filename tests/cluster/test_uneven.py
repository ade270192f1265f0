"""One slow worker of two, on two machines, with a parameter server."""

import json
from pathlib import Path

import pytest

from cluster.uneven import NUM_STEPS, STEP_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
PROGRAM = Path(__file__).with_name("uneven.py")
SLOW_STEP_S = 5 * STEP_S
BOUND = 3


@pytest.fixture
def train(run_on, two):
    """Runs to the end; what each worker tells, by its rank among the workers."""

    def train(*words, slow_step_s=SLOW_STEP_S):
        a, b = two
        words = ["--strategy", "parameter-server", "--num-servers", 1, *words]
        # both take equally long, but for what they wait for each other
        num_slow_steps = round(NUM_STEPS * STEP_S / slow_step_s)
        run = run_on(
            a, "-np", 2, "-H", f"{a.address}:2,{b.address}:1", *words, PROGRAM, slow_step_s, num_slow_steps
        )
        assert run.finish() == 0, run.err
        told = {line.partition(" ")[0]: json.loads(line.partition(" ")[2]) for line in run.out}
        return [told["[1]"], told["[2]"]]

    return train


def test_the_other_keeps_its_pace_in_async(train):
    alike, _ = train(slow_step_s=STEP_S)
    uneven, _ = train()
    assert alike["elapsed_s"] / uneven["elapsed_s"] >= 0.9


@pytest.mark.parametrize("bound", [0, BOUND])
def test_the_bound_of_staleness_holds_exactly(train, bound):
    quick, slow = train("--option", "mode=bounded", "--option", f"staleness={bound}")
    last = max(quick["server"], slow["server"], key=lambda counts: counts["num_applied"])
    num_slow = round(NUM_STEPS * STEP_S / SLOW_STEP_S)
    assert last["num_applied"] == last["num_pushes"] == NUM_STEPS + num_slow
    assert last["leads"]["max_behind"] == bound
    # the quick one had to wait for the slow one, until that had left
    assert quick["elapsed_s"] > (num_slow - bound - 1) * SLOW_STEP_S
