"""Parameters are found again from what they predict."""

import pytest

from shoal.bench.calibration import fit


def test_parameters_are_found_where_a_maximum_hides_one_at_first():
    def model(parameters):
        pace, overhead = parameters
        return [max(1.0, size * pace) + overhead for size in (1, 2, 4)]

    found = fit(model, model([0.8, 0.1]), [(0.01, 1.0), (0.5, 1.0)])
    assert found == pytest.approx([0.8, 0.1], rel=1e-3)


def test_nothing_is_fitted_below_zero():
    found = fit(lambda parameters: [1 + parameters[0], 1 + parameters[0]], [0.9, 0.8], [(0.1,)])
    assert found == [0.0]
