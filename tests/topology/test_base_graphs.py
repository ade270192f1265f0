"""Base-(k+1) graphs: exact averages for any number of ranks."""

import math

import numpy as np
import pytest

from shoal.core.errors import UsageError
from shoal.topology import base_graph, is_doubly_stochastic


@pytest.mark.parametrize("base", [2, 3, 4, 5, 7])
def test_one_period_is_the_exact_average(base):
    for size in [*range(1, 31), 64, 97]:
        topology = base_graph(size, base)
        product = np.eye(size)
        for matrix in topology.matrices():
            product = matrix @ product
        assert np.allclose(product, 1 / size, atol=1e-13), size
        assert topology.degree() <= base - 1
        assert is_doubly_stochastic(topology)
        assert topology.period <= 2 * math.log(size, base) + 2


def test_exchanges_go_both_ways():
    assert all(np.array_equal(matrix, matrix.T) for matrix in base_graph(23, 3).matrices())


@pytest.mark.parametrize(
    ("size", "base", "num_turns"),
    [(8, 2, 3), (27, 3, 3), (36, 6, 2), (5, 5, 1), (6, 2, 4), (5, 2, 5), (5, 3, 3), (7, 3, 4), (1, 2, 1)],
)
def test_number_of_turns(size, base, num_turns):
    assert base_graph(size, base).period == num_turns


@pytest.mark.parametrize("base", [1, 0, -1])
def test_impossible_bases(base):
    with pytest.raises(UsageError, match=f"base-{base} graph is impossible"):
        base_graph(5, base)
