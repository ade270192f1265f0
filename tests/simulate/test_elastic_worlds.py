"""Worlds whose workers join, leave and are lost: nobody hangs, models stay equal, no example counts twice."""

import random
from dataclasses import asdict

import pytest
import torch

from shoal.core import UsageError
from shoal.simulate.contest import run_job
from shoal.simulate.exact import run_exact
from shoal.simulate.job import TrainingJob
from shoal.simulate.world import World
from shoal.strategies import BUILT_IN, Strategy
from shoal.transport import FaultScript
from simulate.churning import NUM_EPOCHS, check_ends, check_equal, check_examples, check_listed, run

WITH_SERVERS, OUTSIDE = ("parameter-server", "staleness-aware"), ("ddp", "horovod", "swarm")
STRATEGIES = [name for name in BUILT_IN if name not in OUTSIDE]
OFTEN_LOCAL = ("local-sgd", "diloco", "noloco", "sparse-loco")
"""Their own rounds are longer than these runs."""
JOIN = '[[fault]]\nkind = "join"\nat_s = 0.05\n'
KILL = '[[fault]]\nkind = "kill"\nat_s = 0.2\npeer = "rank:1"\n'
LEAVE = '[[fault]]\nkind = "leave"\nat_s = 0.28\npeer = "rank:2"\n'
CHURN = JOIN + KILL + LEAVE
NUM_TRIES, NUM_QUICK_TRIES = 100, 10


def fault(kind, at_s, number=None):
    named = "" if number is None else f'peer = "rank:{number}"\n'
    return f'[[fault]]\nkind = "{kind}"\nat_s = {at_s}\n{named}'


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_workers_come_and_go_under_every_strategy(strategy):
    options = {"local_steps": 4} if strategy in OFTEN_LOCAL else {}
    num_servers = 2 if strategy in WITH_SERVERS else 0
    outcomes, lives = run(strategy, CHURN, options=options, num_servers=num_servers)
    servers = [outcome for outcome in outcomes if outcome.role == "server"]
    assert [(outcome.rank, outcome.error, outcome.has_left) for outcome in servers] == [
        (number, None, False) for number in range(num_servers)
    ]
    workers = [outcome for outcome in outcomes if outcome.role == "worker"]
    assert check_ends(workers, killed=[1], left=[2]) == [0, 3, 4]
    assert [outcome.rank for outcome in workers] == [0, 1, 2, 3, 4]
    assert workers[1].error is not None
    assert workers[2].has_left
    joined = lives[4]
    assert joined.trail[0][1] > 1  # it went on where the others were
    again, lives_again = run(strategy, CHURN, options=options, num_servers=num_servers)
    assert str(again) == str(outcomes)
    assert {number: asdict(life) for number, life in lives.items()} == {
        number: asdict(life) for number, life in lives_again.items()
    }


@pytest.mark.parametrize("script", [JOIN, KILL, LEAVE, CHURN], ids=["join", "kill", "leave", "all of them"])
def test_all_reduce_stays_equal_and_each_example_counts_once(script):
    outcomes, lives = run("all-reduce", script)
    finished = check_ends(outcomes, killed=[1], left=[2])
    check_equal(lives)
    check_examples(lives, num_most=5)
    assert len({lives[number].final for number in finished}) == 1
    assert len({lives[number].steps for number in finished}) == 1


class Attentive(Strategy):
    """Notes whether its session would let the worker stop in the middle of a step."""

    name = "attentive"

    def start(self, session):
        self._could_stop = []

    def before_step(self, session):
        super().before_step(session)
        self._could_stop.append(session.is_between)


def test_a_worker_that_makes_up_for_a_skipped_step_is_in_the_next_one_after_that():
    def work(worker):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = Attentive(worker.group)
        with strategy.attach(model, optimizer) as session:
            model(torch.ones(1, 2)).sum().backward()
            loss = model(torch.ones(1, 2)).sum()
            optimizer.zero_grad()
            loss.backward()  # before which no forward has told that the step was left out
            optimizer.step()
            return strategy.steps, strategy._could_stop, session.is_between

    outcomes = run_exact(World(num_workers=2, elastic=True), work)
    assert [outcome.value for outcome in outcomes] == [(2, [False, False], True)] * 2


def test_sizes_are_told_and_the_run_grows_at_once():
    _, lives = run("all-reduce", CHURN)
    assert lives[0].sizes == [(4, 5), (5, 4), (4, 3)]
    assert lives[4].sizes == [(4, 5), (5, 4), (4, 3)]  # the first one for the rate that it has taken over
    assert lives[4].attached_s - lives[4].began_s < 0.3


def test_rates_that_follow_the_number_of_workers_leave_models_equal():
    """Whoever comes has the others' rate of before, and follows the change by which it has come."""
    outcomes, lives = run("all-reduce", CHURN, training={"scales_rate": True})
    check_equal(lives)
    for number in check_ends(outcomes, killed=[1], left=[2]):
        assert lives[number].rate == pytest.approx(0.05 * 3 / 4)


def test_running_means_are_each_workers_own_and_a_new_one_takes_some(caplog):
    """They differ from worker to worker, which does not make anybody's model another one."""
    outcomes, lives = run("all-reduce", CHURN, training={"has_running_means": True})
    finished = check_ends(outcomes, killed=[1], left=[2])
    check_equal(lives)
    assert len({lives[number].final for number in finished}) == 1
    assert "differs from most" not in caplog.text
    (mean,) = lives[4].means_at_first
    assert mean.abs().max() > 0


def test_a_new_workers_model_may_hold_anything():
    """Also where means are taken: it has no part in them."""
    outcomes, lives = run("local-sgd", CHURN, training={"new_ones_hold": float("nan")})
    for number in check_ends(outcomes, killed=[1], left=[2]):
        assert lives[number].is_finite


def test_the_next_step_follows_a_loss_soon():
    _, lives = run("all-reduce", KILL)
    following = [at_s for _, _, _, at_s in lives[0].trail if at_s > lives[1].ended_s]
    assert following[0] - lives[1].ended_s < 0.2


def test_a_world_that_is_asked_to_be_elastic_survives_a_kill_and_others_do_not():
    outcomes, _ = run("all-reduce", KILL)
    assert check_ends(outcomes, killed=[1]) == [0, 2, 3]
    job = {"task": "quadratic", "strategy": "all-reduce", "num_workers": 4, "steps": 40, "eval_every": 10}
    faults = FaultScript.parse(KILL)
    for elastic in (False, True):
        record = run_job(TrainingJob(**job), World(num_workers=4, faults=faults, elastic=elastic))
        assert record.has_ended_early is not elastic


def test_who_comes_when_the_others_are_done_is_sent_home():
    _, lives = run("all-reduce", "")
    nearly = lives[0].ended_s - 0.02
    outcomes, lives = run("all-reduce", fault("join", nearly))
    assert check_ends(outcomes, left=[4]) == [0, 1, 2, 3]
    outcomes, _ = run("all-reduce", fault("join", 100.0))
    assert [outcome.rank for outcome in outcomes] == [0, 1, 2, 3]


def test_all_leave_but_one_and_one_is_left_alone():
    script = "".join(fault("leave", 0.1, number) for number in (0, 1, 2))
    outcomes, lives = run("all-reduce", script)
    assert check_ends(outcomes, left=[0, 1, 2]) == [3]
    check_examples(lives, num_most=5)


def test_a_loss_before_the_first_step_divides_the_data_anew():
    outcomes, lives = run("all-reduce", fault("kill", 0.007, 0) + fault("kill", 0.008, 2))
    assert check_ends(outcomes, killed=[0, 2]) == [1, 3]
    assert lives[0].attached_s is None
    check_equal(lives)
    check_examples(lives, num_most=2)


@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd"])
def test_who_was_left_alone_gives_all_that_it_has_learned(strategy):
    """Its steps count on, and a taker with one donor alone takes parameters, too."""
    script = "".join(fault("kill", 0.1, number) for number in (0, 1, 3)) + fault("join", 0.25)
    outcomes, lives = run(strategy, script)
    assert check_ends(outcomes, killed=[0, 1, 3]) == [2, 4]
    steps = [step for _, step, _, _ in lives[2].trail]
    assert steps == sorted(steps)
    if strategy == "all-reduce":
        check_equal(lives)
        assert lives[2].final == lives[4].final


def test_steps_of_a_script_are_those_of_its_worker():
    script = '[[fault]]\nkind = "leave"\nat_step = 20\npeer = "rank:2"'
    outcomes, _ = run("all-reduce", script)
    assert check_ends(outcomes, left=[2]) == [0, 1, 3]
    assert outcomes[2].has_left


def tries_of(seed):
    """A script, who is killed in it, and who leaves.

    In turns: anything at any time; a giver of state is killed, or a taker; two are lost at once; one is lost
    while the run grows.
    """
    draw = random.Random(seed)
    kind = seed % 5
    if kind == 0:
        script, killed, left, num_workers = "", [], [], 4
        for _ in range(draw.randint(2, 5)):
            what, at_s = draw.choice(["join", "kill", "leave"]), draw.uniform(0.0, 0.4)
            if what == "join":
                script, num_workers = script + fault(what, at_s), num_workers + 1
            else:
                number = draw.randrange(1, num_workers)  # one stays
                script += fault(what, at_s, number)
                (killed if what == "kill" else left).append(number)
        return script, killed, left
    if kind == 3:
        first, second = draw.sample(range(4), 2)
        at_s = draw.uniform(0.0, 0.4)
        return fault("kill", at_s, first) + fault("kill", at_s, second), [first, second], []
    join = fault("join", draw.uniform(0.0, 0.3))
    _, lives = run("all-reduce", join)
    # the state is taken right before the new worker is attached
    begins_s = lives[4].attached_s - 0.06 if kind in (1, 2) else lives[4].began_s
    number = 4 if kind == 2 else draw.randrange(4)
    at_s = draw.uniform(begins_s, lives[4].attached_s)
    return join + fault("kill", at_s, number), [number], []


def check_try(seed, strategy):
    script, killed, left = tries_of(seed)
    num_servers = 2 if strategy in WITH_SERVERS else 0
    outcomes, lives = run(strategy, script, num_servers=num_servers)
    num_workers = 1 + max(lives)
    assert [outcome.error for outcome in outcomes if outcome.role == "server"] == [None] * num_servers
    workers = [outcome for outcome in outcomes if outcome.role == "worker"]
    finished = check_ends(workers, killed, [*left, *range(4, num_workers)])
    assert finished
    if strategy == "all-reduce":
        check_equal(lives)
        check_examples(lives, num_most=max(num_workers, 5))
        assert max(max(life.trained, default=0) for life in lives.values()) == NUM_EPOCHS - 1


@pytest.mark.parametrize("seed", range(NUM_QUICK_TRIES))
def test_losses_at_random_times(seed):
    check_try(seed, "all-reduce")


@pytest.mark.slow
@pytest.mark.timeout(1200)  # half a minute each on a quiet machine
@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd", "neighbor", "parameter-server"])
def test_a_hundred_losses_at_random_times(strategy):
    for seed in range(NUM_TRIES):
        check_try(seed, strategy)


@pytest.mark.parametrize("strategy", ["local-sgd", "noloco", "neighbor", "pair", "push-sum"])
def test_what_a_lost_worker_had_not_shared_is_listed(strategy):
    """Whether the group or the coordinator of the run has noticed the loss first."""
    local_steps = 4 if strategy in OFTEN_LOCAL else 1
    for seed in range(NUM_QUICK_TRIES):
        draw = random.Random(f"listed {seed}")
        number, at_s = draw.randrange(4), draw.uniform(0.05, 0.25)
        outcomes, lives = run(strategy, fault("kill", at_s, number), options={"local_steps": local_steps})
        check_ends(outcomes, killed=[number])
        check_listed(lives, number, local_steps)


def test_who_comes_later_lists_what_was_lost_before():
    script = fault("kill", 0.1, 1) + fault("join", 0.2)
    _, lives = run("local-sgd", script, options={"local_steps": 4})
    assert lives[0].lost
    assert lives[4].lost == lives[0].lost


# Contests.


def job_of(strategy="all-reduce", **changes):
    given = {"task": "quadratic", "num_workers": 4, "num_joining": 1, "steps": 60, "eval_every": 10}
    return TrainingJob(**{**given, "strategy": strategy, **changes})


def test_a_contest_under_churn():
    world = World(num_workers=4, faults=FaultScript.parse(CHURN))
    record = run_job(job_of(), world)
    assert record.ended.keys() == {1, 2}
    assert record.ended[2] == "it has left."
    assert record.num_joined == 1
    assert not record.has_ended_early
    assert not record.error
    assert record.moments[-1].step == 60
    assert record.moments[-1].consensus_distance < 1e-12
    assert record == run_job(job_of(), world)


def test_what_cannot_be():
    faults = FaultScript.parse(CHURN)
    world = World(num_workers=4, faults=faults)
    with pytest.raises(UsageError, match="knows no workers that come and go"):
        run_job(job_of(), world, "stacked")
    with pytest.raises(UsageError, match="and 0 that join, does not fit a world of 4 and 1"):
        run_job(job_of(num_joining=0), world)
    cut = '[[fault]]\nkind = "partition"\nat_s = 0.1\npeers = ["rank:1"]\n'
    with pytest.raises(UsageError, match="Fault 3 cannot happen where parameter servers keep the model"):
        World(num_workers=4, num_servers=1, faults=FaultScript.parse(CHURN + cut))
    with pytest.raises(UsageError, match="no worker is called 'rank:5'"):
        run_exact(World(num_workers=4, faults=FaultScript.parse(CHURN + fault("kill", 1, 5))), lambda _: None)
