"""What `--elastic` costs while nobody comes or goes: a loop over the elastic group and over a plain one."""

import json
import math
import statistics
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROGRAM = Path(__file__).with_name("elastic_cost_program.py")
MAX_SHARE = 0.01
"""Of the processor time of a step of 1.3 million parameters and 64 examples."""
MAX_MORE_CALLS = 30
"""Of Python functions in a step, which take about a tenth of a microsecond each."""


def median_and_interval(values):
    """The median, and two of the values between which that of all possible ones lies in 19 of 20 cases."""
    ordered, middle = sorted(values), len(values) // 2
    reach = math.ceil(0.98 * math.sqrt(len(values)))  # what is above a median is binomial
    return statistics.median(values), ordered[middle - reach], ordered[middle + reach]


def test_a_step_costs_the_same(shoal_run):
    """It fails where the code costs more than that, and not where the measurement says too little."""
    process = shoal_run("--elastic", "-np", 2, "--max-np", 2, "--no-prefix", PROGRAM)
    out, said = process.communicate(timeout=800)
    assert process.returncode == 0, said
    told = json.loads(out)
    more_us = [mine - theirs for mine, theirs in zip(told["elastic_us"], told["plain_us"], strict=True)]
    cost_us, least_us, most_us = median_and_interval(more_us)
    step_us, num_more = statistics.median(told["large_us"]), told["elastic_calls"] - told["plain_calls"]
    print(
        f"--elastic costs {cost_us:.1f} us of processor time in a step ({least_us:.1f} to {most_us:.1f}) and "
        f"{num_more} calls: {cost_us / step_us:.2%} of a step of {step_us:.0f} us"
    )
    assert num_more <= MAX_MORE_CALLS
    assert least_us <= MAX_SHARE * step_us
