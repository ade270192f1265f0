""""""

import time

import pytest
import torch

from shoal.bench.processes.compare import Pace, RealContest, RealTrial, shaped
from shoal.core import Address, UsageError
from shoal.group.opening import WithServers
from shoal.group.solo import SoloGroup
from shoal.simulate.contest import run_job
from shoal.simulate.job import TrainingJob
from shoal.simulate.world import Compute, StepCosts, World
from shoal.transport import FaultScript, Profile

FAR = Profile.parse("[ways.default]\ndelay_ms = 10")


def job(strategy, **fields):
    sizes = {"num_workers": 2, "steps": 20, "eval_every": 5, "learning_rate": 0.5, "momentum": 0.0}
    return TrainingJob(
        **{"task": "quadratic", "strategy": strategy, "split": "dirichlet:1", **sizes, **fields}
    )


def world(**fields):
    return World(**{"num_workers": 2, "profile": FAR, "compute": Compute(step_ms=20), **fields})


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_real_workers_learn_what_virtual_ones_do_in_about_the_same_time():
    with RealContest(2) as contest:
        for strategy in ("all-reduce", "neighbor"):
            real, virtual = contest.run(job(strategy), world()), run_job(job(strategy), world())
            assert [moment.step for moment in real.moments] == [moment.step for moment in virtual.moments]
            for ours, theirs in zip(real.moments, virtual.moments, strict=True):
                assert ours.value == pytest.approx(theirs.value, rel=1e-9)
                assert ours.worst == pytest.approx(theirs.worst, rel=1e-9)
                assert ours.consensus_distance == pytest.approx(theirs.consensus_distance, abs=1e-9)
                assert ours.moved_bytes == theirs.moved_bytes
            assert real.moments[-1].at_s == pytest.approx(virtual.moments[-1].at_s, rel=0.25)
        seldom = job("neighbor", options={"order": "adapt-while-combine", "local_steps": 3})
        real, virtual = contest.run(seldom, world()), run_job(seldom, world())
        assert virtual.moments[-1].consensus_distance > 1e-3
        for ours, theirs in zip(real.moments, virtual.moments, strict=True):
            assert ours.consensus_distance == pytest.approx(theirs.consensus_distance, abs=1e-9)
        served = contest.run(job("parameter-server", learning_rate=0.1), world(num_servers=1))
        assert served.error == ""
        assert served.moments[-1].value < served.moments[0].value
        assert sum(served.staleness.values()) == 2 * 20
        refused = contest.run(job("parameter-server"), world())
        assert "no server" in refused.error


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_virtual_and_real_contests_have_the_same_winners():
    """The page docs/compare.md shows a larger one."""
    size = {"num_workers": 4, "steps": 24, "learning_rate": 0.2}
    network = Profile.parse("[ways.default]\ndelay_ms = 30\nmbit_s = 100")
    place = world(num_workers=4, profile=network, compute=Compute(step_ms=40))
    strategies = ("all-reduce", "gradient-tracking", "neighbor", "local-sgd")
    with RealContest(4) as contest:
        real_s = {name: contest.run(job(name, **size), place).moments[-1].at_s for name in strategies}
    virtual_s = {name: run_job(job(name, **size), place).moments[-1].at_s for name in strategies}
    assert sorted(strategies, key=real_s.__getitem__) == sorted(strategies, key=virtual_s.__getitem__)
    assert real_s == pytest.approx(virtual_s, rel=0.25)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_workers": 3}, "2 processes"),
        ({"faults": FaultScript.parse("[[fault]]\nkind = 'kill'\npeer = 'rank:1'")}, "virtual time alone"),
        ({"num_servers": 1, "between": "machines"}, "no machine"),
    ],
)
def test_what_real_workers_cannot_be_given_is_refused(fields, reason):
    with RealContest(2) as contest, pytest.raises(UsageError, match=reason):
        contest.run(job("neighbor"), world(**fields))


JOB = TrainingJob(task="quadratic", strategy="neighbor", num_workers=1, steps=1, eval_every=1)


def test_a_step_takes_as_long_as_the_world_says():
    world = World(num_workers=1, compute=Compute(step_ms=30, forward_share=0.5))
    model = torch.nn.Linear(2, 1)
    pace = Pace(SoloGroup(), StepCosts(world, 0), world.compute.forward_share)
    with pace.charged(model):
        began_s = time.perf_counter()
        output = model(torch.ones(1, 2))
        forward_s = time.perf_counter() - began_s
        output.sum().backward()
        step_s = time.perf_counter() - began_s
    assert forward_s >= 0.015
    assert step_s >= 0.03
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_errand_goes_by_plain_values():
    trial = RealTrial(number=3, job=JOB, world=World(num_workers=4, compute=Compute(factors={1: 2.0})))
    assert RealTrial.read(trial.plain()) == trial


def test_servers_and_workers_are_where_they_are_in_virtual_time():
    profile = Profile.load("three-continents")
    world = World(num_workers=1, num_servers=1, profile=profile)
    group = shaped(WithServers(SoloGroup(), SoloGroup(), 1), world)
    places = group.everybody._conditions.profile
    assert places.place_of(Address("rank", 0)) == profile.place_of(Address("server", 0))
    assert places.place_of(Address("rank", 1)) == profile.place_of(Address("rank", 0))
