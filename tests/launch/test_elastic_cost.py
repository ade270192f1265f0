"""What `--elastic` costs while nobody comes or goes: runs of one loop with it and without, in turns."""

import re
import statistics
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).with_name("elastic_cost_program.py")
NUM_PAIRS = 3
MAX_RATIO = 1.05
"""Of processor time; the cost itself is less than 0.01, and runs of one kind differ by more than that."""
MAX_MORE_CALLS = 120
"""Of Python functions in a step, which take about a tenth of a microsecond each."""


def measure(shoal_run, *words):
    """The processor time of a step in microseconds, and the function calls in one."""
    process = shoal_run(*words, "-np", 2, "--strategy", "all-reduce", "--no-prefix", PROGRAM)
    out, said = process.communicate(timeout=200)
    found = re.search(r"cpu_us ([\d.]+) .* calls (\d+)", out)
    assert found, said
    return float(found[1]), int(found[2])


def test_a_step_costs_the_same(shoal_run):
    plain, elastic = [], []
    for _ in range(NUM_PAIRS):
        plain.append(measure(shoal_run))
        elastic.append(measure(shoal_run, "--elastic", "--max-np", 2))
    ratio = statistics.median(mine / theirs for (mine, _), (theirs, _) in zip(elastic, plain, strict=True))
    num_more = min(calls for _, calls in elastic) - min(calls for _, calls in plain)
    print(f"processor time {ratio:.3f} of a plain run's, {num_more} more calls in a step: {plain} {elastic}")
    assert num_more <= MAX_MORE_CALLS
    assert ratio <= MAX_RATIO
