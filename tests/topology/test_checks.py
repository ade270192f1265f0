"""Stochasticity, connection, regularity."""

import numpy as np
import pytest

from shoal.topology import (
    exponential_two,
    from_matrices,
    full,
    is_column_stochastic,
    is_connected,
    is_doubly_stochastic,
    is_equivalent,
    is_regular,
    is_row_stochastic,
    mesh,
    one_peer,
    one_peer_exponential,
    ring,
    star,
    torus,
)

ROWS_ONLY = np.array([[0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0.5, 0.5]])


@pytest.mark.parametrize(
    ("matrix", "rows", "columns"),
    [
        (np.eye(3), True, True),
        (ROWS_ONLY, True, False),
        (ROWS_ONLY.T, False, True),
        ([[2.0, -1.0], [-1.0, 2.0]], False, False),
        ([[0.5, 0.4], [0.4, 0.5]], False, False),
        (np.full((3, 3), 1 / 3, dtype=np.float32), True, True),
    ],
)
def test_stochasticity(matrix, rows, columns):
    assert is_row_stochastic(matrix) is rows
    assert is_column_stochastic(matrix) is columns
    assert is_doubly_stochastic(matrix) is (rows and columns)


def test_every_turn_counts():
    topology = from_matrices([np.eye(3), ROWS_ONLY])
    assert is_row_stochastic(topology)
    assert not is_column_stochastic(topology)
    assert not is_doubly_stochastic(topology)


def test_connected_means_there_and_back():
    assert is_connected([[1.0]])
    assert is_connected(ring(7, "left"))
    assert not is_connected(np.eye(2))
    assert not is_connected([[1, 0], [0.5, 0.5]])
    assert not is_connected([[0.5, 0.5], [0, 1]])


def test_connected_over_a_period_though_in_no_turn():
    topology = one_peer_exponential(8)
    assert is_connected(topology)
    assert not is_connected(topology.matrix(1))


def test_regular():
    assert is_regular(full(5))
    assert is_regular(torus(12))
    assert is_regular(one_peer_exponential(5))
    assert not is_regular(star(5))
    assert not is_regular(mesh(9))
    assert not is_regular([[1, 1, 0], [1, 1, 0], [0, 1, 1]])


def test_equivalent_whatever_the_weights():
    assert is_equivalent(ring(5), torus(5))
    assert is_equivalent(ring(3), full(3))
    assert not is_equivalent(ring(4), ring(4, "left"))
    assert not is_equivalent(ring(4), ring(5))
    assert is_equivalent(star(3), [[0, 0.1, 0.9], [1, 0, 0], [1, 0, 0]])
    assert is_equivalent(one_peer(exponential_two(6)), one_peer_exponential(6))
    assert not is_equivalent(ring(6), one_peer(ring(6)))
