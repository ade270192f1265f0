"""Matrices and networkx graphs of the user's own."""

import numpy as np
import pytest

from shoal.core.errors import UsageError
from shoal.topology import (
    exponential_two,
    from_graph,
    from_matrices,
    from_matrix,
    is_doubly_stochastic,
    make_topology,
    ring,
)

nx = pytest.importorskip("networkx")


def test_a_matrix_comes_back_as_it_was():
    matrix = np.array([[0.9, 0.1, 0], [0, 0.5, 0.5], [0.25, 0.25, 0.5]])
    topology = from_matrix(matrix)
    assert np.array_equal(topology.matrix(9), matrix)
    assert topology.sources(2) == (0, 1)
    assert topology.destinations(2) == (1,)
    assert topology.weights(0, 0).sources == {1: 0.1}


def test_matrices_in_turn():
    topology = from_matrices([ring(3, "left").matrix(), ring(3, "right").matrix(), np.eye(3)])
    assert topology.period == 3
    assert [topology.sources(0, turn) for turn in range(4)] == [(1,), (2,), (), (1,)]
    with pytest.raises(UsageError, match=r"not of \[2, 3\]"):
        from_matrices([np.eye(3), np.eye(2)])
    with pytest.raises(UsageError, match="matrices of one size"):
        from_matrices([])


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        ([[1, 0, 0], [0, 1, 0]], r"square, not of shape \(2, 3\)"),
        ([[1.5, -0.5], [0, 1]], "rank 0 gives rank 1 the weight -0.5"),
        ([[float("nan"), 1], [0, 1]], "rank 0 gives rank 0 the weight nan"),
        ([[1, 0], [0.5, 0.4]], "weights of rank 1 sum to 0.9 instead of 1"),
        ([[0.5, 0], [0.5, 1]], r"rank \d sum to (0.5|1.5) instead of 1.*\n.*transposed"),
    ],
)
def test_matrices_that_do_not_mix(matrix, message):
    with pytest.raises(UsageError, match=message):
        from_matrix(matrix)


def test_an_edge_is_what_its_end_gives_to_its_start():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (1, 0, 0.75), (0, 0, 0.25), (1, 1, 0.75)])
    assert from_graph(graph).matrix().tolist() == [[0.25, 0.75], [0.25, 0.75]]


def test_without_loops_the_rest_stays():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (1, 2, 0.5), (2, 0, 0.125)])
    assert from_graph(graph).matrix().diagonal().tolist() == [0.875, 0.75, 0.5]


def test_undirected_weights_count_both_ways():
    graph = nx.Graph()
    graph.add_weighted_edges_from([(0, 1, 0.25), (0, 0, 0.75), (1, 1, 0.75)])
    assert from_graph(graph).matrix().tolist() == [[0.75, 0.25], [0.25, 0.75]]


def test_without_weights():
    assert np.allclose(from_graph(nx.cycle_graph(6)).matrix(), ring(6).matrix())
    assert is_doubly_stochastic(from_graph(nx.star_graph(4)))
    assert is_doubly_stochastic(from_graph(nx.path_graph(4).to_directed()))
    one_way = from_graph(nx.DiGraph([(0, 1), (2, 1), (1, 2), (1, 0), (2, 0)]))
    assert np.allclose(one_way.matrix(), [[1 / 3] * 3, [1 / 3] * 3, [0, 1 / 2, 1 / 2]])


def test_a_matrix_through_networkx_and_back():
    """networkx's edge i → j is entry (i, j), which is what j gives to i: the transpose."""
    matrix = exponential_two(7).matrix()
    assert np.array_equal(from_graph(nx.from_numpy_array(matrix.T, create_using=nx.DiGraph)).matrix(), matrix)


@pytest.mark.parametrize("names", [["a", "b"], [1, 2], [0, 2], [0, "1"], [0.5, 1.5], []])
def test_nodes_are_ranks(names):
    graph = nx.DiGraph()
    graph.add_nodes_from(names)
    with pytest.raises(UsageError, match="the nodes of a graph over"):
        from_graph(graph)


def test_half_weighted_graphs():
    graph = nx.DiGraph([(0, 1)])
    graph.add_edge(1, 0, weight=0.5)
    with pytest.raises(UsageError, match="edge from 0 to 1 has no weight"):
        from_graph(graph)


def test_graphs_that_give_more_than_one():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 2, 0.75), (1, 2, 0.75)])
    with pytest.raises(UsageError, match=r"rank 2 gives rank 2 the weight -0.5"):
        from_graph(graph)


def test_the_registry_takes_them():
    assert np.allclose(make_topology(nx.cycle_graph, 6).matrix(), ring(6).matrix())
    assert make_topology(nx.cycle_graph(6), 6).name == "graph"
    with pytest.raises(UsageError, match="'graph' is for 6 ranks, but there are 5"):
        make_topology(nx.cycle_graph(6), 5)
