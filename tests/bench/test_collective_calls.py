from types import SimpleNamespace

import pytest
import torch

from shoal.bench.collective_calls import Expected, Stage, difference, pattern
from shoal.topology.weights import Weights


def stage(size):
    return Stage(SimpleNamespace(rank=0, size=size), 8)


@pytest.mark.parametrize(
    ("size", "heard"), [(2, [1]), (3, [2, 1]), (4, [3, 2]), (5, [4, 3, 1]), (8, [7, 6, 4])]
)
def test_neighbours_are_those_of_the_exponential_graph(size, heard):
    neighbours = stage(size).neighbours()
    assert neighbours[0] == heard
    assert neighbours[1] == [(rank + 1) % size for rank in heard]


def test_partners_are_two_and_two():
    assert stage(4).partners() == [1, 0, 3, 2]
    assert stage(5).partners() == [1, 0, 3, 2, 3]


def test_an_average_is_expected_by_its_weights():
    given = [pattern(2000) + rank for rank in range(3)]
    weights = Weights(0.5, {0: 0.3, 2: 0.2})
    average = 0.5 * given[1] + 0.3 * given[0] + 0.2 * given[2]
    assert difference(average, Expected.average(weights, 1)) == ""


def test_a_wrong_element_is_named():
    result = 2 * pattern(3000) + 1
    assert difference(result, Expected(2, 1)) == ""
    result[1500] += 3
    assert difference(result, Expected(2, 1)) == "element 1500 is 962 and should be 959"
    result[7] = torch.nan
    assert "nan" in difference(result, Expected(2, 1))
