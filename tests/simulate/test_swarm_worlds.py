"""A contest's workers as members of a swarm: they learn, come, go and are killed in virtual time, and each
seed replays to the bit."""

import msgspec
import pytest

from shoal.core import UsageError
from shoal.simulate.contest import run_job
from shoal.simulate.job import TrainingJob
from shoal.simulate.swarm import run_swarm
from shoal.simulate.world import Compute, World
from shoal.transport import FaultScript, Profile
from shoal.transport.network.distributions import Exponential

pytestmark = pytest.mark.timeout(300)  # each second of processor time is many on a busy machine
GRADIENTS = {"target_samples": 64}
LOCAL = {"local_steps": 8}
STREAMING = {"local_steps": 8, "overlap": "streaming", "codec": "int4"}
CHURN = """
[[fault]]
kind = "kill"
peer = "rank:1"
at_s = 3.0

[[fault]]
kind = "join"
count = 2
at_s = 4.0

[[fault]]
kind = "leave"
peer = "rank:0"
at_s = 9.0
"""


def job(options=GRADIENTS, *, num_workers=4, **fields):
    sizes = {"steps": 60, "eval_every": 20, "learning_rate": 0.1, "momentum": 0.9}
    return TrainingJob(
        task="digits", strategy="swarm", options=options, num_workers=num_workers, **{**sizes, **fields}
    )


def world(script=None, *, num_workers=4, **fields):
    faults = None if script is None else FaultScript.parse(script)
    return World(
        num_workers=num_workers, faults=faults, profile=fields.pop("profile", Profile.load("lan")), **fields
    )


def plain(record):
    return msgspec.json.encode(record.plain())


@pytest.mark.parametrize(
    "options", [GRADIENTS, LOCAL, STREAMING], ids=["gradients", "local steps", "streaming"]
)
def test_members_learn_and_each_seed_replays_to_the_bit(options):
    shaky = world(compute=Compute(step_ms=Exponential(10.0), factors={1: 2.0}))
    first, again = (run_job(job(options), shaky) for _ in range(2))
    assert plain(first) == plain(again)
    assert first.error == ""
    assert first.ended == {}
    assert first.moments[-1].value > first.moments[0].value + 0.3
    assert first.moments[-1].moved_bytes > 0


def test_members_are_killed_join_and_leave_and_it_replays_to_the_bit():
    changing = world(CHURN, compute=Compute(step_ms=100.0))  # to join takes seconds
    steps = {"steps": 240, "eval_every": 60, "num_joining": 2}
    first, again = (run_job(job(**steps), changing) for _ in range(2))
    assert plain(first) == plain(again)
    assert first.error == ""
    assert sorted(first.ended) == [0, 1]
    assert "killed" in first.ended[1]
    assert first.ended[0] == "it has left."
    assert first.num_joined == 2
    assert first.moments[-1].value > 0.8
    assert first.moments[-1].consensus_distance < 0.2


def test_who_is_cut_off_or_held_up_for_seconds_comes_back():
    script = """
    [[fault]]
    kind = "partition"
    peers = ["rank:3"]
    at_s = 1.0
    for_s = 4.0

    [[fault]]
    kind = "pause"
    peer = "rank:2"
    at_s = 8.0
    for_s = 2.0

    [[fault]]
    kind = "drop"
    probability = 0.02
    at_s = 8.0
    """
    record = run_job(job(steps=150, eval_every=50), world(script, compute=Compute(step_ms=100.0)))
    assert record.error == ""
    assert record.ended == {}
    assert record.moments[-1].value > 0.8
    assert record.moments[-1].at_s < 60


def test_a_swarm_of_one_is_plain_training():
    alone = run_job(job({"target_samples": 16}, num_workers=1), world(num_workers=1))
    plain_job = msgspec.structs.replace(job(num_workers=1), strategy="all-reduce", options={})
    other = run_job(plain_job, world(num_workers=1))
    assert [moment.value for moment in alone.moments] == pytest.approx(
        [moment.value for moment in other.moments], abs=0.02
    )


def test_another_seed_goes_otherwise():
    first, other = (run_job(job(LOCAL, seed=seed, steps=20), world()) for seed in (0, 1))
    assert plain(first) != plain(other)


def test_slow_links_and_slow_workers_cost_time():
    few = job(steps=20)
    quick = run_job(few, world())
    far = run_job(few, world(profile=Profile.parse("[ways.default]\ndelay_ms = 40")))
    slow = run_job(few, world('[[fault]]\nkind = "slow"\nat_s = 0.0\nfactor = 5\npeers = ["rank:2"]\n'))
    assert far.moments[-1].at_s > 2 * quick.moments[-1].at_s
    assert slow.moments[-1].at_s > 2 * quick.moments[-1].at_s


def test_a_rounds_description_is_asked_for():
    record = run_job(job({}), world())
    assert record.moments == []
    assert "Nothing says what a round of the swarm is" in record.error


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('[[fault]]\nkind = "kill"\npeer = "rank:1"\nat_step = 3\n', "at a step"),
        ('[[fault]]\nkind = "kill"\npeer = "rank:9"\nat_s = 1.0\n', "no worker is called 'rank:9'"),
        ('[[fault]]\nkind = "partition"\npeers = ["machine:0"]\nat_s = 1.0\n', "not of the ends"),
    ],
)
def test_what_cannot_happen_to_a_swarm_is_refused(script, why):
    with pytest.raises(UsageError, match=why):
        run_swarm(world(script), lambda worker: None)
