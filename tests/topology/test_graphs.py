"""The static graphs against what they are said to be."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import UsageError
from shoal.topology import (
    exponential,
    exponential_two,
    full,
    hypercube,
    is_connected,
    is_doubly_stochastic,
    is_regular,
    mesh,
    random_regular,
    ring,
    star,
    symmetric_exponential,
    torus,
)


def test_exponential_two():
    for size in range(1, 34):
        topology = exponential_two(size)
        assert is_doubly_stochastic(topology)
        ahead = [distance for distance in (1, 2, 4, 8, 16, 32) if distance < size]
        for rank in range(size):
            assert set(topology.destinations(rank)) == {(rank + distance) % size for distance in ahead}
            weights = topology.weights(rank, 0)
            assert all(weight == weights.own == 1 / (len(ahead) + 1) for weight in weights.sources.values())


@pytest.mark.parametrize(
    ("base", "size", "farthest"), [(3, 244, 243), (10, 1001, 1000), (5, 126, 125), (2, 9, 8)]
)
def test_no_power_is_missed(base, size, farthest):
    topology = exponential(size, base)
    assert farthest in topology.destinations(0)
    assert farthest not in exponential(farthest, base).destinations(0)
    assert all(farthest % distance == 0 for distance in topology.destinations(0))


def test_symmetric_exponential():
    assert symmetric_exponential(64).destinations(0) == (1, 4, 16, 48, 60, 63)
    assert symmetric_exponential(12).destinations(3) == (2, 4, 7, 11)
    assert symmetric_exponential(8).destinations(0) == (1, 4, 7)
    assert np.array_equal(symmetric_exponential(50).matrix(), symmetric_exponential(50).matrix().T)


def test_ring():
    both, left, right = (ring(5, direction) for direction in ("both", "left", "right"))
    assert both.destinations(0) == (1, 4)
    assert both.matrix()[0].tolist() == [1 / 3, 1 / 3, 0, 0, 1 / 3]
    assert left.destinations(0) == (4,)
    assert right.destinations(0) == (1,)
    assert right.matrix()[0].tolist() == [0.5, 0, 0, 0, 0.5]
    with pytest.raises(UsageError, match=r"no direction 'up'.*\n.*both, left, right"):
        ring(5, "up")


@pytest.mark.parametrize(("size", "center"), [(3, 0), (6, 4), (9, 8)])
def test_star(size, center):
    matrix = star(size, center).matrix()
    leaf = 0 if center else 1
    assert matrix[center].tolist() == [1 / size] * size
    assert matrix[leaf, center] == 1 / size
    assert matrix[leaf, leaf] == 1 - 1 / size
    assert is_doubly_stochastic(matrix)
    with pytest.raises(UsageError, match=f"rank {size} cannot be the centre"):
        star(size, size)


def test_full():
    assert np.array_equal(full(7).matrix(), np.full((7, 7), 1 / 7))


def test_hypercube():
    topology = hypercube(8)
    assert topology.destinations(5) == topology.sources(5) == (1, 4, 7)
    assert topology.matrix()[5, 7] == topology.matrix()[5, 5] == 0.25


@pytest.mark.parametrize("size", [3, 6, 12, 100])
def test_hypercubes_have_a_power_of_two(size):
    with pytest.raises(UsageError, match=f"hypercube of {size} ranks is impossible"):
        hypercube(size)


def test_mesh_weights():
    """A corner counts 3 and a border 4, itself included; the rest stays with the rank."""
    topology = mesh(9)
    assert topology.name == "mesh:3x3"
    assert topology.sources(0) == (1, 3)
    assert topology.sources(4) == (1, 3, 5, 7)
    matrix = topology.matrix()
    assert matrix[0, 1] == matrix[1, 0] == 1 / 4
    assert matrix[1, 4] == matrix[4, 1] == 1 / 5
    assert matrix[0, 0] == pytest.approx(1 - 2 / 4)
    assert matrix[1, 1] == pytest.approx(1 - 2 / 4 - 1 / 5)


@pytest.mark.parametrize(
    ("size", "shape"), [(1, "1x1"), (2, "1x2"), (6, "2x3"), (12, "3x4"), (13, "1x13"), (36, "6x6")]
)
def test_the_closest_factors(size, shape):
    assert mesh(size).name == f"mesh:{shape}"
    assert torus(size).name == f"torus:{shape}"


def test_shapes_of_ones_own():
    assert mesh(6, (3, 2)).sources(0) == (1, 2)
    assert torus(12, (2, 6)).sources(0) == (1, 5, 6)
    for shape in ((2, 2), (-2, -3), (4, 2)):
        with pytest.raises(UsageError, match=f"for {6} ranks"):
            mesh(6, shape)


def test_torus():
    topology = torus(20)
    assert topology.sources(0) == (1, 4, 5, 15)
    assert is_regular(topology)
    assert set(np.unique(topology.matrix().round(12))) == {0, 0.2}


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 30), st.integers(2, 8), st.integers(0, 3))
def test_random_regular(size, degree, seed):
    if size > degree and size * degree % 2:
        with pytest.raises(UsageError, match=f"all of {size} ranks have {degree} neighbours"):
            random_regular(size, degree, seed)
        return
    topology = random_regular(size, degree, seed)
    matrix = topology.matrix()
    assert np.array_equal(matrix, matrix.T)
    assert {len(topology.sources(rank)) for rank in range(size)} == {min(degree, size - 1)}
    assert is_connected(topology)
    assert np.array_equal(matrix, random_regular(size, degree, seed).matrix())


def test_random_regular_is_drawn_by_its_seed():
    assert len({random_regular(12, 4, seed).matrix().tobytes() for seed in range(8)}) > 6
    with pytest.raises(UsageError, match="no connected graph"):
        random_regular(8, 1)


@pytest.mark.parametrize("base", [1, 0, -2])
def test_impossible_bases(base):
    with pytest.raises(UsageError, match=f"{base} is no base"):
        exponential(4, base)
