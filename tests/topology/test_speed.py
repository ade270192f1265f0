"""Spectral gap and consensus time against closed forms."""

import math

import numpy as np
import pytest

from shoal.core.errors import UsageError
from shoal.topology import (
    Topology,
    base_graph,
    consensus_time,
    exponential_two,
    from_matrices,
    full,
    hypercube,
    inner_outer_exponential,
    one_peer_exponential,
    random_matching,
    ring,
    spectral_gap,
    star,
    torus,
)


@pytest.mark.parametrize("size", [3, 4, 5, 8, 13, 32, 101])
def test_ring(size):
    assert spectral_gap(ring(size)) == pytest.approx(1 - (1 + 2 * math.cos(2 * math.pi / size)) / 3, rel=1e-9)


@pytest.mark.parametrize("size", [3, 4, 7, 20])
def test_ring_of_one_direction(size):
    """The eigenvalues are (1 + ω) / 2, whose modulus is cos(π/n)."""
    assert spectral_gap(ring(size, "left")) == pytest.approx(1 - math.cos(math.pi / size), rel=1e-9)


@pytest.mark.parametrize("size", [1, 2, 3, 10, 64])
def test_full(size):
    assert spectral_gap(full(size)) == 1
    assert consensus_time(full(size)) == (1 if size > 1 else 0)


@pytest.mark.parametrize("digits", [2, 3, 4, 6])
def test_hypercube(digits):
    assert spectral_gap(hypercube(1 << digits)) == pytest.approx(2 / (digits + 1), rel=1e-9)


@pytest.mark.parametrize("size", [4, 8, 16, 64])
def test_exponential_two_at_powers_of_two(size):
    """As the hypercube (Ying et al. 2021, "Exponential Graph is Provably Efficient")."""
    assert spectral_gap(exponential_two(size)) == pytest.approx(2 / (1 + math.log2(size)), rel=1e-9)


@pytest.mark.parametrize("size", [3, 5, 16])
def test_star(size):
    assert spectral_gap(star(size)) == pytest.approx(1 / size, rel=1e-9)
    assert consensus_time(star(size)) == math.ceil(math.log(1e-3) / math.log(1 - 1 / size))


@pytest.mark.parametrize("side", [3, 5, 8])
def test_torus(side):
    expected = 1 - (1 + 2 + 2 * math.cos(2 * math.pi / side)) / 5
    assert spectral_gap(torus(side * side)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [3, 8, 33])
@pytest.mark.parametrize("reduction", [0.5, 1e-3, 1e-9])
def test_consensus_time_of_a_ring(size, reduction):
    """Its matrix is normal, so the norm of a power is the power of the second-largest modulus."""
    rho = (1 + 2 * math.cos(2 * math.pi / size)) / 3
    expected = 1 if rho < 1e-12 else math.ceil(math.log(reduction) / math.log(rho))
    assert consensus_time(ring(size), reduction) == expected


@pytest.mark.parametrize("size", [5, 6, 12])
def test_consensus_time_of_turns_is_the_first_that_is_near_enough(size):
    topology = inner_outer_exponential(size * 3, 3)
    average = np.full((topology.size, topology.size), 1 / topology.size)
    product, num_turns = np.eye(topology.size), 0
    while np.linalg.norm(product - average, 2) > 1e-3:
        product = topology.matrix(num_turns) @ product
        num_turns += 1
    assert num_turns > topology.period
    assert consensus_time(topology) == num_turns


def test_gap_of_turns_is_the_root_over_a_period():
    topology = inner_outer_exponential(12, 4)
    product = np.linalg.multi_dot(list(topology.matrices())[::-1])
    second = sorted(abs(np.linalg.eigvals(product)))[-2]
    assert spectral_gap(topology) == pytest.approx(1 - second ** (1 / topology.period), rel=1e-6)


@pytest.mark.parametrize(("topology", "turns"), [(one_peer_exponential(16), 4), (base_graph(24, 3), 4)])
def test_exact_averages_have_gap_one(topology, turns):
    assert spectral_gap(topology) == 1
    assert consensus_time(topology) == turns
    assert consensus_time(topology, 1e-9) == turns


def test_long_periods_do_not_vanish_in_round_off():
    """256 turns leave 1e-41 of a disagreement, far below what a sum with the average could hold."""
    assert 0.2 < spectral_gap(random_matching(30)) < 0.5


def test_matrices_that_are_not_symmetric_nor_doubly_stochastic():
    matrix = np.array([[0.5, 0.5], [0.2, 0.8]])
    assert spectral_gap(matrix) == pytest.approx(0.7)
    assert consensus_time(matrix) == math.ceil(math.log(1e-3) / math.log(0.3))


@pytest.mark.parametrize(
    "never",
    [
        np.eye(2),
        [[0, 1], [1, 0]],
        [[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]],
        [[1, 0, 0], [0, 1, 0], [0.5, 0.5, 0]],
    ],
)
def test_what_never_agrees(never):
    assert spectral_gap(never) == 0
    assert consensus_time(never) == math.inf


def test_two_turns_agree_where_neither_does():
    topology = from_matrices(
        [np.kron(np.eye(2), np.full((2, 2), 0.5)), np.kron(np.full((2, 2), 0.5), np.eye(2))]
    )
    assert spectral_gap(topology.matrix(0)) == spectral_gap(topology.matrix(1)) == 0
    assert spectral_gap(topology) == 1
    assert consensus_time(topology) == 2


@pytest.mark.parametrize("reduction", [0, 1, -0.1])
def test_impossible_reductions(reduction):
    with pytest.raises(UsageError, match="reduced to"):
        consensus_time(ring(4), reduction)


def test_what_cannot_be_measured():
    with pytest.raises(UsageError, match="rows of this matrix do not sum to 1"):
        spectral_gap([[1, 1], [0, 1]])
    endless = Topology("endless", 3, 10**9, ring(3).rule)
    with pytest.raises(UsageError, match="'endless' repeats only after"):
        spectral_gap(endless)
