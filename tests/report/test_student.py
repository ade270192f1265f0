import math

import pytest

from shoal.core.errors import UsageError
from shoal.report.student import quantile, survival


@pytest.mark.parametrize("t", [-40.0, -1.0, -1e-9, 0.0, 0.3, 1.0, 2.5, 30.0, 1e6])
def test_one_and_two_degrees_of_freedom_have_closed_forms(t):
    assert survival(t, 1) == pytest.approx(0.5 - math.atan(t) / math.pi, rel=1e-9, abs=1e-12)
    if t > 0:
        two = 1 / (math.sqrt(t * t + 2) * (math.sqrt(t * t + 2) + t))
    else:
        two = 0.5 - t / (2 * math.sqrt(t * t + 2))
    assert survival(t, 2) == pytest.approx(two, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("freedom", "tail", "t"),
    # the printed table of Student's distribution
    [
        (3, 0.05, 2.353),
        (4, 0.005, 4.604),
        (8, 0.005, 3.355),
        (10, 0.025, 2.228),
        (19, 0.001, 3.579),
        (30, 0.0005, 3.646),
        (120, 0.005, 2.617),
        (1e7, 0.025, 1.960),
    ],
)
def test_quantiles_are_those_of_the_table(freedom, tail, t):
    assert quantile(tail, freedom) == pytest.approx(t, abs=6e-4)
    assert survival(quantile(tail, freedom), freedom) == pytest.approx(tail, rel=1e-8)


def test_many_degrees_of_freedom_are_normal():
    assert survival(1.5, 1e8) == pytest.approx(math.erfc(1.5 / math.sqrt(2)) / 2, rel=1e-6)


@pytest.mark.parametrize("freedom", [0.7, 1.0, 4.35, 17.2, 400.0])
def test_survival_is_symmetric_and_falls(freedom):
    values = [survival(t / 4, freedom) for t in range(-40, 41)]
    assert values == sorted(values, reverse=True)
    assert all(a + b == pytest.approx(1, abs=1e-12) for a, b in zip(values, reversed(values), strict=True))
    assert survival(math.inf, freedom) == 0


@pytest.mark.parametrize(
    "call", [lambda: survival(1, 0), lambda: survival(math.nan, 3), lambda: quantile(0, 3)]
)
def test_nonsense_is_refused(call):
    with pytest.raises(UsageError):
        call()
