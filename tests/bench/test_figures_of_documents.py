import pytest

from shoal.bench.contenders import Spread, iteration_text, workers_text


def test_deviations_are_the_population_s():
    assert Spread.of([1.0, 3.0]).mean == 2.0
    assert Spread.of([1.0, 3.0]).error == pytest.approx(1.96)
    assert str(Spread.of([5.0])) == "5.0 +-0.0"


def test_words_for_workers():
    assert iteration_text(3, 12.34) == "Iter #3: 12.3 img/sec per GPU"
    assert (workers_text(1), workers_text(2)) == ("1 worker", "2 workers")
