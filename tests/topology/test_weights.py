"""One worker's weights, also after peers are gone."""

import numpy as np
import pytest

from shoal.core.errors import UsageError
from shoal.topology import Weights, is_doubly_stochastic, is_row_stochastic, make_topology


def test_uniform_shares_are_equal_and_sum_to_one():
    weights = Weights.uniform([4, 1, 2], [3])
    assert list(weights.sources) == [1, 2, 4]
    assert weights.own == weights.sources[1] == 0.25
    assert weights.destinations == {3: 1.0}
    assert Weights.uniform([]).own == 1
    assert Weights.uniform([]).destinations is None


@pytest.mark.parametrize("peer", [-1, 2, 4])
def test_impossible_peers_are_refused(peer):
    with pytest.raises(UsageError, match=f"rank 2 of 4 cannot exchange with rank {peer}"):
        Weights(0.5, {peer: 0.5}).check(2, 4)
    with pytest.raises(UsageError):
        Weights(0.5, {1: 0.5}, {peer: 1.0}).check(2, 4)
    Weights(0.5, {1: 0.5}, {3: 1.0}).check(2, 4)


def test_the_weight_of_those_gone_stays_with_oneself():
    left = Weights(0.25, {1: 0.25, 2: 0.5}, {1: 1.0, 3: 1.0}).without([1, 7])
    assert left == Weights(0.5, {2: 0.5}, {3: 1.0})
    assert Weights(0.5, {1: 0.5}).without([1]) == Weights(1.0, {})


@pytest.mark.parametrize(
    ("name", "keeps_average"), [("torus", True), ("mesh", True), ("exponential-2", False)]
)
def test_survivors_of_a_loss(name, keeps_average):
    topology = make_topology(name, 12)
    gone = [3, 7]
    alive = [rank for rank in range(12) if rank not in gone]
    matrix = np.zeros((12, 12))
    for rank in alive:
        weights = topology.weights(rank, 0).without(gone)
        matrix[rank, rank] = weights.own
        for source, weight in weights.sources.items():
            matrix[rank, source] = weight
    left = matrix[np.ix_(alive, alive)]
    assert is_row_stochastic(left)
    assert is_doubly_stochastic(left) == keeps_average
