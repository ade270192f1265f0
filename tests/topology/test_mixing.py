"""Weights for graphs that have none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shoal.core.errors import UsageError
from shoal.topology import is_doubly_stochastic, is_row_stochastic, metropolis_hastings, uniform

LINE = np.array([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
graphs = st.integers(1, 12).flatmap(lambda size: arrays.arrays(bool, (size, size)))


def test_metropolis_hastings_on_a_line():
    third = 1 / 3
    expected = [[1 - third, third, 0], [third, third, third], [0, third, 1 - third]]
    assert np.allclose(metropolis_hastings(LINE), expected, atol=1e-15)


def test_uniform_on_a_line():
    assert np.allclose(uniform(LINE), [[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 2, 1 / 2]])


@settings(max_examples=30)
@given(graphs)
def test_metropolis_hastings_is_doubly_stochastic_on_every_undirected_graph(edges):
    matrix = metropolis_hastings(edges | edges.T)
    assert is_doubly_stochastic(matrix)
    assert (matrix.diagonal() > 0).all()
    off = ~np.eye(len(edges), dtype=bool)
    assert np.array_equal(matrix[off] > 0, (edges | edges.T)[off])


@settings(max_examples=30)
@given(graphs)
def test_uniform_is_row_stochastic_on_every_graph(edges):
    assert is_row_stochastic(uniform(edges))


def test_what_is_given_is_left_alone():
    adjacency = np.ones((3, 3), dtype=bool)
    uniform(adjacency)
    metropolis_hastings(adjacency)
    assert adjacency.all()


def test_one_way_edges_have_no_metropolis_hastings_weights():
    with pytest.raises(UsageError, match="rank 0 receives from rank 1, but not 1 from 0"):
        metropolis_hastings([[0, 1], [0, 0]])


@pytest.mark.parametrize(
    "matrix", [[[1, 2, 3], [1, 2, 3]], [1, 2], np.zeros((0, 0)), [[1, 2], [3]], "ring", None]
)
def test_no_square_matrix(matrix):
    with pytest.raises(UsageError, match="matrix"):
        uniform(matrix)
