"""Time-varying topologies with one partner a turn."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import UsageError
from shoal.topology import (
    exponential_two,
    from_matrix,
    full,
    hypercube,
    is_connected,
    is_doubly_stochastic,
    is_row_stochastic,
    mesh,
    one_peer,
    one_peer_exponential,
    random_matching,
    random_regular,
    ring,
    spectral_gap,
    star,
    symmetric_exponential,
    torus,
)


def product(topology, num_turns):
    result = np.eye(topology.size)
    for turn in range(num_turns):
        result = topology.matrix(turn) @ result
    return result


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 64])
def test_one_peer_exponential_is_exact_for_powers_of_two(size):
    topology = one_peer_exponential(size)
    assert topology.period == max(1, size.bit_length() - 1)
    assert np.array_equal(product(topology, topology.period), np.full((size, size), 1 / size))


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12, 33])
def test_one_peer_exponential_is_not_exact_for_others(size):
    topology = one_peer_exponential(size)
    assert topology.period == math.ceil(math.log2(size))
    assert topology.destinations(1, 2 + topology.period) == ((1 + (1 << 2 % topology.period)) % size,)
    assert (product(topology, topology.period) > 0).all()
    assert 0.1 < spectral_gap(topology) < 1


@pytest.mark.parametrize(
    "graph",
    [
        full(6),
        ring(7),
        ring(5, "left"),
        exponential_two(13),
        symmetric_exponential(20),
        torus(12),
        hypercube(16),
        random_regular(15, 4),
        random_regular(10, 5),
    ],
    ids=lambda graph: f"{graph.name}/{graph.size}",
)
def test_one_peer_of_a_regular_graph_meets_every_neighbour_once(graph):
    topology = one_peer(graph)
    assert topology.period == graph.degree()
    for rank in range(graph.size):
        met = [topology.destinations(rank, turn) for turn in range(topology.period)]
        assert sorted(peer for peers in met for peer in peers) == list(graph.destinations(rank))
    for turn in range(topology.period):
        assert {len(topology.sources(rank, turn)) for rank in range(graph.size)} == {1}
        assert topology.weights(0, turn).own == 0.5
    assert is_doubly_stochastic(topology)
    assert is_connected(topology)


@pytest.mark.parametrize("graph", [exponential_two(12), symmetric_exponential(17), full(5)])
def test_one_peer_goes_clockwise_on_circulant_graphs(graph):
    topology = one_peer(graph)
    for rank in range(graph.size):
        ahead = [
            (topology.destinations(rank, turn)[0] - rank) % graph.size for turn in range(topology.period)
        ]
        assert ahead == sorted(ahead)


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 14), st.integers(1, 4), st.randoms(use_true_random=False))
def test_one_peer_of_regular_digraphs(size, degree, random):
    """Unions of disjoint permutations, relabelled at random: no order of the neighbours fits by itself."""
    labels = list(range(size))
    random.shuffle(labels)
    matrix = np.eye(size)
    for distance in range(1, min(degree, size - 1) + 1):
        matrix[labels, np.roll(labels, distance)] = 1
    topology = one_peer(from_matrix(matrix / matrix.sum(axis=1, keepdims=True)))
    assert topology.period == min(degree, size - 1)
    assert is_doubly_stochastic(topology)


@pytest.mark.parametrize("graph", [star(5), mesh(9), mesh(6)], ids=lambda graph: graph.name)
def test_one_peer_of_an_irregular_graph_is_row_stochastic_only(graph):
    topology = one_peer(graph)
    assert is_row_stochastic(topology)
    assert not is_doubly_stochastic(topology)
    for turn in range(topology.period):
        for rank in range(graph.size):
            received = topology.sources(rank, turn)
            weights = topology.weights(rank, turn)
            assert len(topology.destinations(rank, turn)) == 1
            assert weights.own == 1 / (len(received) + 1)
            assert all(weight == weights.own for weight in weights.sources.values())
    assert spectral_gap(topology) > 0.01


def test_one_peer_of_a_star_visits_the_leaves_in_turn():
    topology = one_peer(star(4))
    assert topology.period == 3
    assert [topology.destinations(0, turn) for turn in range(4)] == [(1,), (2,), (3,), (1,)]
    assert topology.sources(0, 1) == (1, 2, 3)


def test_one_peer_with_ranks_that_send_to_nobody():
    topology = one_peer(from_matrix([[0.5, 0.5, 0], [0, 1, 0], [0, 0.5, 0.5]]))
    assert topology.period == 2
    assert topology.matrix(0).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0.5, 0.5]]


def test_one_peer_of_what_changes_already():
    with pytest.raises(UsageError, match="'one-peer-exponential' changes from turn to turn"):
        one_peer(one_peer_exponential(8))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 10**9))
def test_random_matching_pairs_everybody(size, seed, turn):
    topology = random_matching(size, seed)
    again = random_matching(size, seed)
    matrix = topology.matrix(turn)
    assert np.array_equal(matrix, again.matrix(turn))
    assert np.array_equal(matrix, matrix.T)
    pauses = [rank for rank in range(size) if not topology.sources(rank, turn)]
    assert len(pauses) == size % 2
    assert all(topology.weights(rank, turn).own == (1 if rank in pauses else 0.5) for rank in range(size))


def test_random_matching_is_drawn_anew_each_turn_and_with_each_seed():
    drawn = [random_matching(20).matrix(turn).tobytes() for turn in range(30)]
    drawn += [random_matching(20, seed).matrix(0).tobytes() for seed in range(1, 30)]
    assert len(set(drawn)) == len(drawn)
    with pytest.raises(UsageError, match="repeat after 0 turns"):
        random_matching(4, period=0)
