"""Contests that nobody has run: configs, and records of runs that went as a test wants."""

import msgspec

from shoal.bench.compare import CompareConfig, Finish, compared
from shoal.bench.frame import _Collected, measured
from shoal.report import Report, Row
from shoal.simulate.job import CourseRecord, Moment, TrainingJob
from shoal.simulate.world import World


def config_of(*strategies, **fields):
    """Two workers on digits, a target of 0.8, two seeds, one rate unless told otherwise."""
    usual = {
        "task": "digits",
        "contenders": compared(strategies or ("all-reduce", "pair"), {}),
        "world": World(num_workers=2),
        "seeds": (5, 6),
        "steps": 40,
        "eval_every": 10,
        "batch_size": 4,
        "learning_rates": (0.1,),
        "target": 0.8,
    }
    return CompareConfig(**{**usual, **fields})


def record_of(*values, task="digits", pace_s=1.0, worst=0.0, **fields):
    """Evaluations with these scores, ten steps, `pace_s` and 1000 bytes apart."""
    job = TrainingJob(
        task=task,
        strategy="all-reduce",
        num_workers=2,
        steps=10 * max(1, len(values) - 1),
        eval_every=10,
    )
    moments = [
        Moment(
            step=10.0 * index,
            at_s=pace_s * index,
            moved_bytes=1000 * index,
            value=value,
            worst=value - worst,
            loss=1.0 - value,
            consensus_distance=0.5,
        )
        for index, value in enumerate(values)
    ]
    return CourseRecord(job=job, moments=moments, **fields)


def report_of(runs, config=None, extra=()):
    """Of what contenders did, as the frame would have collected it."""
    config = config or config_of(*runs, learning_rates=(0.1, 0.2, 0.3))
    collected = _Collected()
    for name, records in runs.items():
        for told in Finish(name, 0.3 if name == "pair" else 0.2, records).told(config):
            if isinstance(told, Row):
                collected.add(0, told)
            else:
                collected.add_curve(told)
    for name in runs:
        key = {"strategy": name, "learning_rate": 0.3 if name == "pair" else 0.2}
        collected.add(0, measured("chosen", key, [1.0]))
    for row in extra:
        collected.add(0, row)
    return Report(
        benchmark="compare",
        created="2026-01-02T03:04:05+00:00",
        config=msgspec.to_builtins(config),
        rows=collected.rows(),
        curves=collected.curves(),
    )


def race_of():
    """One that is first, one that is second, and one that arrives with one seed of two."""
    return report_of(
        {
            "all-reduce": FAST,
            "neighbor": [record_of(0.1, 0.85, 0.88, pace_s=3.0)] * 2,
            "pair": [record_of(0.1, 0.5, 0.85, worst=0.2), record_of(0.1, 0.5, 0.7)],
        }
    )


FAST = [record_of(0.1, 0.85, 0.9, pace_s=2.0)] * 2
