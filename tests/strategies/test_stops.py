"""Workers that are stopped for about as long as the others wait for them, and two that are lost at once.

Whatever the moment at which one wakes up: nobody hangs, all name the same worker, which names itself, and the
parameters are those of the steps that were done.
"""

import random

import pytest

from shoal.core.run_options import SILENCE_S
from strategies.stopping import NUM_STEPS, train

PATIENCE = 0.2
GROUPS = [("host", {}), ("torch", {"workers_per_machine": 1})]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(workers, kind, strategy, victims=(), stop_s=0.0, size=3, patience=PATIENCE):
    kind, settings = kind
    return workers.run(
        train,
        size,
        {"strategy": strategy, "victims": list(victims), "stop_s": stop_s},
        kind=kind,
        timeout_s=60.0,
        settings={**settings, "patience": patience},
    )


def assert_right(outcomes, undisturbed, victims, strategy, stopping=()):
    """Of one run, in which the victims were stopped, and these may end because of that."""
    for rank, outcome in enumerate(outcomes):
        if outcome["peer"] is not None:
            blamed = [rank] if victims == [rank] else victims
            assert outcome["peer"] in blamed, describe(outcomes)
        if rank not in victims:
            assert set(outcome["lost"]) <= {*victims, *echoes(outcomes)}, describe(outcomes)
        if strategy != "neighbor" or not any(each["lost"] for each in outcomes):
            # what was done was done with everybody
            done = outcome["digests"]
            assert done == undisturbed[rank]["digests"][: len(done)], f"rank {rank}: {describe(outcomes)}"
        if strategy == "neighbor" and rank not in victims and rank not in stopping:
            assert len(outcome["digests"]) == NUM_STEPS + 1, describe(outcomes)
    if strategy != "neighbor" and any(outcome["lost"] for outcome in outcomes):
        assert all(outcome["peer"] is not None for outcome in outcomes), describe(outcomes)


def describe(outcomes):
    return [(len(each["digests"]) - 1, each["peer"], each["what"], each["lost"]) for each in outcomes]


def echoes(outcomes):
    """Those that ended because of somebody else's loss, and so are lost themselves."""
    return [rank for rank, outcome in enumerate(outcomes) if outcome["peer"] is not None]


def check_stops(workers, kind, strategy, patience, num_runs):
    silence_s = SILENCE_S * patience
    undisturbed = run(workers, kind, strategy, patience=patience)
    generator = random.Random(f"{kind} {strategy}")
    num_lost = 0
    for _ in range(num_runs):
        victim = generator.randrange(3)
        # looks are up to two beats apart: one is given up so much later
        stop_s = generator.uniform(0.92 * silence_s, silence_s + 0.5)
        outcomes = run(workers, kind, strategy, [victim], stop_s, patience=patience)
        assert_right(outcomes, undisturbed, [victim], strategy)
        num_lost += any(outcome["lost"] for outcome in outcomes)
    return num_lost


@pytest.mark.parametrize("strategy", ["all-reduce", "neighbor", "sma"])
@pytest.mark.parametrize("kind", GROUPS, ids=["one machine", "three machines"])
def test_one_that_wakes_up_as_it_is_given_up(workers, kind, strategy):
    num_runs = 50 if kind[0] == "host" else 25
    num_lost = check_stops(workers, kind, strategy, PATIENCE, num_runs)
    print(f"{num_lost} of {num_runs} were lost")
    assert num_lost, "no stop was long enough to show anything"


@pytest.mark.parametrize("strategy", ["all-reduce", "neighbor", "sma"])
@pytest.mark.parametrize("kind", GROUPS, ids=["one machine", "three machines"])
def test_the_same_with_the_patience_of_every_run(workers, kind, strategy):
    check_stops(workers, kind, strategy, 1.0, num_runs=3)


@pytest.mark.parametrize("strategy", ["all-reduce", "neighbor", "sma"])
@pytest.mark.parametrize("victims", [[2, 3], [0, 1], [1, 2]])
@pytest.mark.parametrize(
    "kind",
    [("host", {}), ("torch", {"workers_per_machine": 1}), ("torch", {"workers_per_machine": 2})],
    ids=["one machine", "four machines", "two machines"],
)
def test_two_that_are_lost_at_once(workers, kind, victims, strategy):
    undisturbed = run(workers, kind, strategy, size=4)
    outcomes = run(workers, kind, strategy, victims, 3 * SILENCE_S * PATIENCE, size=4)
    # on several machines the half without the lowest rank stops, and the other one goes on when it wakes up
    stopping = [2, 3] if kind[0] == "torch" and victims == [0, 1] else []
    assert_right(outcomes, undisturbed, victims, strategy, stopping)
    # a worker may hear of the loss from another of its machine, which fails of it, before it notices itself
    survivors = [outcomes[rank] for rank in range(4) if rank not in victims]
    assert all(one["lost"] or one["peer"] in victims for one in survivors), describe(outcomes)
    if strategy == "neighbor" and stopping:
        assert [outcome["peer"] is not None for outcome in outcomes] == [False, False, True, True]
