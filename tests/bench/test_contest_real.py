import pytest

from shoal.bench.contest_real import RealContest
from shoal.core import UsageError
from shoal.simulate.contest import run_job
from shoal.simulate.job import Job
from shoal.simulate.world import Compute, World
from shoal.transport import FaultScript, Profile

FAR = Profile.parse("[ways.default]\ndelay_ms = 10")


def job(strategy, **fields):
    sizes = {"num_workers": 2, "steps": 20, "eval_every": 5, "learning_rate": 0.5, "momentum": 0.0}
    return Job(**{"task": "quadratic", "strategy": strategy, "split": "dirichlet:1", **sizes, **fields})


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
