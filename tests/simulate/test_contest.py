import msgspec
import pytest

from shoal.core import ShoalError, UsageError
from shoal.simulate.contest import Trial, run_job, run_task
from shoal.simulate.job import CourseRecord, TrainingJob
from shoal.simulate.world import Compute, World
from shoal.transport import FaultScript, Profile
from shoal.transport.network.distributions import Exponential

SHAKY = Profile.parse('[ways.default]\nmbit_s = 10\n[ways.default.delay_ms]\nkind = "exponential"\nmean = 30')

FAR = Profile.parse("[ways.default]\ndelay_ms = 7")


def job(strategy="neighbor", **fields):
    sizes = {"num_workers": 4, "steps": 20, "eval_every": 5, "learning_rate": 0.5, "momentum": 0.0}
    return TrainingJob(
        **{"task": "quadratic", "strategy": strategy, "split": "dirichlet:1", **sizes, **fields}
    )


def world(**fields):
    return World(**{"num_workers": 4, "profile": SHAKY, **fields})


@pytest.mark.parametrize("strategy", ["all-reduce", "pair"])
def test_one_seed_gives_one_record_and_another_seed_another(strategy):
    shaky = world(compute=Compute(step_ms=Exponential(20.0), factors={1: 3.0}))
    first, again = (msgspec.json.encode(run_job(job(strategy), shaky).plain()) for _ in range(2))
    other = run_job(job(strategy, seed=1), shaky)
    assert first == again != msgspec.json.encode(other.plain())


@pytest.mark.parametrize("strategy", ["pair", "push-sum", "choco", "parameter-server"])
def test_a_record_does_not_depend_on_what_the_process_ran_before(strategy):
    """Names and versions are counted for a group, not for a process: they travel, and bytes take time."""
    slow = world(profile=SHAKY, num_servers=1 if strategy == "parameter-server" else 0)
    first, *_, last = (msgspec.json.encode(run_job(job(strategy), slow).plain()) for _ in range(12))
    assert first == last


def test_steps_seconds_and_bytes_are_those_of_the_world():
    record = run_job(job("neighbor", options={"topology": "ring"}), world(profile=FAR))
    assert [moment.step for moment in record.moments] == [0, 5, 10, 15, 20]
    assert [round(moment.at_s, 9) for moment in record.moments] == [0.0, 0.085, 0.17, 0.255, 0.34]
    assert [moment.moved_bytes for moment in record.moments] == [
        step * 4 * 2 * 128 for step in (0, 5, 10, 15, 20)
    ]
    values = [moment.value for moment in record.moments]
    assert values == sorted(values, reverse=True)
    assert all(moment.worst >= moment.value for moment in record.moments)
    assert record.moments[-1].consensus_distance > 0
    assert record.ended == {}
    assert record.error == ""


@pytest.mark.parametrize("executor", ["exact", "stacked"])
def test_agreement_is_that_of_the_last_round_wherever_evaluations_fall(executor):
    """Between two rounds workers go apart, so that distances would rise and fall with the steps since."""
    uneven = world(profile=Profile(), compute=Compute(factors={1: 2.5}))
    for eval_every in (5, 8, 40):
        seldom = job("local-sgd", steps=40, eval_every=eval_every, options={"local_steps": 8})
        moments = run_job(seldom, uneven, executor).moments
        assert moments[-1].step == 40
        assert max(moment.consensus_distance for moment in moments) < 1e-9
    assert moments[-1].worst == pytest.approx(moments[-1].value)
    # a round has ended 4 steps before the last evaluation, and the models are as they have become since
    apart = run_job(job("local-sgd", steps=20, options={"local_steps": 16}), uneven, executor).moments[-1]
    assert apart.consensus_distance < 1e-9
    assert apart.worst > 1.001 * apart.value


def test_who_is_slow_is_waited_for():
    record = run_job(job("all-reduce"), world(profile=Profile(), compute=Compute(factors={2: 5.0})))
    assert record.moments[-1].at_s == pytest.approx(20 * 0.05)
    assert [[round(waited_s, 6) for waited_s in row] for row in record.waited_s] == [
        [0, 0, 0.8, 0],
        [0, 0, 0.8, 0],
        [0, 0, 0, 0],
        [0, 0, 0.8, 0],
    ]


def test_servers_take_part_and_count_staleness():
    uneven = world(num_servers=1, profile=FAR, compute=Compute(step_ms=Exponential(20.0)))
    record = run_job(job("parameter-server", learning_rate=0.05), uneven)
    assert record.moments[-1].moved_bytes > 4 * 20 * 2 * 128
    assert record.moments[-1].value < record.moments[0].value
    assert sum(record.staleness.values()) == 4 * 20
    assert record.mean_staleness > 0.5


def test_staleness_is_counted_exactly():
    record = run_job(
        job("parameter-server", num_workers=8, learning_rate=0.01), World(num_workers=8, num_servers=1)
    )
    assert max(record.staleness) == 7
    assert record.mean_staleness == pytest.approx(
        sum(behind * count for behind, count in record.staleness.items()) / (8 * 20)
    )
    assert record.mean_staleness > 6


def test_what_diverges_is_a_record_that_says_so():
    record = run_job(job("all-reduce", learning_rate=1e80, task="quadratic"), world())
    assert "diverged" in record.error
    assert [moment.step for moment in record.moments] == [0]


def test_what_cannot_start_is_a_record_that_says_why():
    record = run_job(job("parameter-server"), world())
    assert "has no server" in record.error
    assert record.moments == []


def test_who_is_killed_has_a_reason_and_the_others_go_on():
    script = FaultScript.parse('[[fault]]\nkind = "kill"\nat_s = 0.3\npeer = "rank:3"')
    record = run_job(job("neighbor"), world(profile=Profile(), faults=script, compute=Compute(step_ms=30)))
    assert list(record.ended) == [3]
    assert "killed" in record.ended[3]
    assert record.moments[-1].step == 20


def test_without_a_worker_that_all_need_everybody_ends():
    script = FaultScript.parse('[[fault]]\nkind = "kill"\nat_s = 0.3\npeer = "rank:3"')
    record = run_job(job("all-reduce"), world(profile=Profile(), faults=script, compute=Compute(step_ms=30)))
    assert list(record.ended) == [0, 1, 2, 3]
    assert 5 <= record.moments[-1].step < 20
    assert "rank 3" in record.ended[0]


@pytest.mark.parametrize("strategy", ["all-reduce", "pair", "parameter-server"])
def test_faults_count_from_the_first_step_whatever_came_before(strategy):
    kill = FaultScript.parse('[[fault]]\nkind = "kill"\nat_s = 0.0\npeer = "rank:3"')
    far = Profile.parse("[ways.default]\ndelay_ms = 500")
    one = job(strategy, steps=4, eval_every=1, learning_rate=0.05)
    num_servers = 1 if strategy == "parameter-server" else 0
    record = run_job(one, world(profile=far, faults=kill, num_servers=num_servers))
    assert "killed" in record.ended[3]
    assert record.moments[0].step == 0


def test_all_waiting_for_each_other_is_a_record_that_says_so(monkeypatch):
    def stuck(world, live):
        raise ShoalError("Nothing can happen any more at 3 s of virtual time.")

    monkeypatch.setattr("shoal.simulate.contest.run_exact", stuck)
    assert "Nothing can happen" in run_job(job(), world()).error


def test_a_stacked_strategy_that_does_not_fit_is_a_record_too():
    record = run_job(job("momentum"), world(), "stacked")
    assert "momentum buffers" in record.error
    with pytest.raises(UsageError, match="stacked executor"):
        run_job(job("pair"), world(), "stacked")


def test_a_task_of_the_pool_goes_by_plain_values():
    trial = Trial(job=job(), world=world(compute=Compute(factors={1: 2.0})))
    plain = msgspec.json.decode(msgspec.json.encode(trial.plain()))
    told = msgspec.json.decode(msgspec.json.encode(run_task(plain, print)))
    assert CourseRecord.read(told) == run_job(trial.job, trial.world)


def test_a_world_of_another_size_is_refused():
    with pytest.raises(UsageError, match="does not fit a world of 3"):
        run_job(job(), world(num_workers=3))


def test_either_executor_gives_the_same_course():
    exact, stacked = (run_job(job(), world(), executor) for executor in ("exact", "stacked"))
    for one, other in zip(exact.moments, stacked.moments, strict=True):
        assert (one.step, one.moved_bytes) == (other.step, other.moved_bytes)
        assert one.at_s == pytest.approx(other.at_s, abs=1e-9)
        assert one.value == pytest.approx(other.value, rel=1e-9)
