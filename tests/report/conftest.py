"""Reports made of random samples: a median for each process start, then samples around it."""

import random

import pytest

from shoal.report import Report, Row


def make_row(rng, *, key, num_starts=20, median=0.1, start_spread=0.05, num_samples=9, **fields):
    starts = []
    for _ in range(num_starts):
        centre = median * rng.lognormvariate(0, start_spread)
        starts.append([centre * rng.lognormvariate(0, 0.02) for _ in range(num_samples)])
    return Row(
        **{"key": key, "metric": "sec_per_iter", "unit": "s", "direction": "lower", "starts": starts} | fields
    )


@pytest.fixture
def make_report():
    """A report of `num_rows` random rows; the other arguments are make_row's."""

    def make(rng=None, *, num_rows=1, rows=None, **row_fields):
        rng = rng or random.Random(0)
        if rows is None:
            rows = [make_row(rng, key={"scenario": "echo", "size": i}, **row_fields) for i in range(num_rows)]
        return Report(benchmark="transport", created="2026-03-02T10:00:00Z", rows=rows)

    return make
