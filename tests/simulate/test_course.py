import math

import msgspec
import pytest
import torch

from shoal.simulate.contest import course_of, states_of
from shoal.simulate.job import CourseRecord, ModelSnapshot, Moment, TrainingJob, WorkerLog
from shoal.simulate.tasks import make_task

JOB = TrainingJob(task="quadratic", strategy="pair", num_workers=2, steps=20, eval_every=10)


def log(rank, times, *, points=None, every=10, **fields):
    """A worker with a snapshot at each of the times."""
    points = points or [0.0] * len(times)
    snapshots = [
        ModelSnapshot(
            step=every * index,
            at_s=at_s,
            sent_bytes=100 * index,
            received_bytes=10 * index,
            tensors=[torch.full((16,), float(point), dtype=torch.float64)],
        )
        for index, (at_s, point) in enumerate(zip(times, points, strict=True))
    ]
    return WorkerLog(rank=rank, snapshots=snapshots, waited_s=[0.0, 0.0], **fields)


def steps_of(state):
    return {rank: snapshot.step for rank, snapshot in state.latest.items()}


def test_who_keeps_pace_is_seen_when_the_last_one_is_there():
    states = list(states_of([log(0, [5, 7, 9]), log(1, [5, 7.5, 9.5])], 10))
    assert [state.at_s for state in states] == [0.0, 2.5, 4.5]
    assert [state.mean_step for state in states] == [0, 10, 20]
    assert [state.moved_bytes for state in states] == [0, 220, 440]


def test_of_workers_with_paces_of_their_own_each_is_seen_with_its_last_model():
    fast, slow = log(0, [0, 1, 2]), log(1, [0, 4, 8])
    states = list(states_of([fast, slow], 10))
    assert [(state.at_s, steps_of(state)) for state in states] == [
        (0.0, {0: 0, 1: 0}),
        (2.0, {0: 20, 1: 0}),
        (8.0, {0: 20, 1: 20}),
    ]


def test_who_has_ended_counts_until_then_and_its_bytes_for_ever():
    dead = log(0, [0, 1], ended="it was killed", ended_at_s=1.5)
    states = list(states_of([dead, log(1, [0, 2, 3])], 10))
    assert [list(state.latest) for state in states] == [[0, 1], [1], [1]]
    assert states[-1].moved_bytes == 110 + 220


def test_what_ends_between_two_moments_is_seen_once_more_at_its_end():
    states = list(states_of([log(0, [0, 1, 2]), log(1, [0, 1], ended="lost", ended_at_s=9)], 10))
    assert [state.mean_step for state in states] == [0, 10, 15]


def test_mean_and_worst_and_distance_are_of_all_models():
    task = make_task(JOB)
    record = course_of(task, [log(0, [0, 1], points=[0, 1]), log(1, [0, 1], points=[0, -3])])
    model = task.model()
    values = []
    for point in (-1.0, 1.0, -3.0):
        with torch.no_grad():
            model.x.fill_(point)
        values.append(task.evaluate(model).value)
    moment = record.moments[1]
    assert moment.value == values[0]
    assert moment.worst == max(values[1:])
    assert moment.consensus_distance == pytest.approx(math.sqrt(16 * 4))
    assert record.moments[0].consensus_distance == 0.0
    assert record.moments[0].worst == record.moments[0].value


def with_rounds(log, points):
    """Gives each snapshot of a worker a round that has ended before it, with all parameters at one value."""
    for snapshot, point in zip(log.snapshots, points, strict=True):
        snapshot.at_round = [torch.full((16,), float(point), dtype=torch.float64)]
    return log


def test_distance_is_of_the_last_round_and_of_one_that_all_have_ended():
    fast = with_rounds(log(0, [0, 1, 2], points=[0, 1, 2]), [0, 5, 9])
    slow = with_rounds(log(1, [0, 4, 8], points=[0, 3, 4]), [0, 6, 9])
    distances = {
        strategy: [
            moment.consensus_distance
            for moment in course_of(
                make_task(msgspec.structs.replace(JOB, strategy=strategy)), [fast, slow]
            ).moments
        ]
        for strategy in ("local-sgd", "pair")
    }
    # the second state has the fast one after 20 steps, and the slow one before its first
    assert distances["local-sgd"] == [0.0, 0.0, 0.0]
    assert distances["pair"] == pytest.approx([0.0, math.sqrt(16 * 4.5**2), 0.0])


def test_who_has_joined_since_is_not_compared_with_those_who_lag():
    late = log(2, [0, 1.5], every=20, is_joining=True)
    late.snapshots = late.snapshots[1:]
    states = list(states_of([log(0, [0, 1, 2]), log(1, [0, 4, 8]), late], 10))
    behind = next(state for state in states if steps_of(state) == {0: 10, 1: 0, 2: 20})
    assert {rank: each.step for rank, each in behind.comparable.items()} == {0: 0, 1: 0}


def test_a_course_ends_where_models_are_no_longer_finite_and_says_so():
    logs = [log(0, [0, 1, 2], points=[0, 1, math.nan]), log(1, [0, 1, 2])]
    record = course_of(make_task(JOB), logs)
    assert len(record.moments) == 2
    assert "diverged" in record.error
    assert "20 steps" in record.error


def test_workers_that_have_not_begun_leave_a_reason():
    logs = [log(rank, [], ended="parameter-server has no server among its workers.") for rank in range(2)]
    record = course_of(make_task(JOB), logs)
    assert record.moments == []
    assert "no server" in record.error
    assert list(record.ended) == [0, 1]


def test_staleness_is_of_all_workers_and_of_the_server():
    logs = [log(0, [0], staleness={-1: 1, 0: 2}), log(1, [0], staleness={2: 3})]
    record = course_of(make_task(JOB), logs, {0: 4, 5: 2})
    assert record.staleness == {-1: 1, 0: 6, 2: 3, 5: 2}
    assert record.mean_staleness == pytest.approx((2 * 3 + 5 * 2) / 12)


def test_a_standstill_is_the_records_error_and_its_course_stays():
    record = course_of(
        make_task(JOB), [log(0, [0, 1]), log(1, [0, 1])], broken="Nothing can happen any more."
    )
    assert "Nothing can happen" in record.error
    assert [moment.step for moment in record.moments] == [0, 10]


def test_who_did_all_its_steps_has_not_ended_early():
    late = log(0, [0, 1, 2], ended="the goodbye failed")
    record = course_of(make_task(JOB), [late, log(1, [0, 1], ended="lost", ended_at_s=1.5)])
    assert record.ended == {1: "lost"}
    assert not record.has_ended_early


def test_a_record_knows_when_the_target_was_reached_and_survives_json():
    values = [1.0, 0.5, 0.2, 0.3]
    moments = [
        Moment(step=i, at_s=i / 2, moved_bytes=i, value=value, worst=1.0, loss=0.0, consensus_distance=0.0)
        for i, value in enumerate(values)
    ]
    record = CourseRecord(job=JOB, moments=moments, staleness={-1: 2}, ended={1: "lost"})
    assert record.reached(0.5) == moments[1]
    assert record.reached(0.1) is None
    assert record.best == moments[2]
    assert CourseRecord.read(record.plain()) == record
