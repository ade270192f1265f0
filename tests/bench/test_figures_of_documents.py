import pytest

from shoal.bench.contenders import Spread, iteration_text


def test_deviations_are_the_population_s():
    assert Spread.of([1.0, 3.0]).mean == 2.0
    assert Spread.of([1.0, 3.0]).error == pytest.approx(1.96)
    assert str(Spread.of([5.0])) == "5.0 +-0.0"


def test_the_line_of_an_iteration():
    assert iteration_text(3, 12.34) == "Iter #3: 12.3 img/sec per GPU"
