"""Topologies by name, and all else that may stand for one."""

import functools

import numpy as np
import pytest

import shoal.topology
from shoal.core.errors import UsageError
from shoal.topology import TOPOLOGIES, make_topology, ring, star


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("exponential:3", "exponential:3"),
        ("exponential-2", "exponential-2"),
        ("ExponentialTwoGraph", "exponential-2"),
        ("exponential-two-graph", "exponential-2"),
        ("MeshGrid2DGraph", "mesh:3x4"),
        ("fully_connected", "full"),
        ("Ring", "ring"),
        ("ring:left", "ring:left"),
        ("mesh:2x6", "mesh:2x6"),
        ("torus:6X2", "torus:6x2"),
        ("star:3", "star:3"),
        ("random-regular:3", "random-regular:3"),
        ("base:3", "base:3"),
        ("one-peer", "one-peer:exponential-2"),
        ("one-peer:mesh:2x6", "one-peer:mesh:2x6"),
        ("one_peer_exponential", "one-peer-exponential"),
        ("random-matching:7", "random-matching:7"),
        ("inner-outer-exponential", "inner-outer-exponential"),
        ("machine-exponential", "machine-exponential"),
    ],
)
def test_names(spec, name):
    topology = make_topology(spec, 12, local_size=4)
    assert topology.name == name
    assert topology.size == 12
    assert np.array_equal(make_topology(topology.name, 12, local_size=4).matrix(1), topology.matrix(1))


def test_every_name_makes_a_topology():
    for spec in (*TOPOLOGIES, *TOPOLOGIES.values()):
        assert make_topology(spec, 16, local_size=4).size == 16


def test_whatever_else_stands_for_a_topology():
    topology = ring(5)
    assert make_topology(topology, 5) is topology
    assert make_topology(shoal.topology.one_peer_exponential, 5).period == 3
    assert make_topology(functools.partial(star, center=2), 5).name == "star:2"
    assert make_topology(lambda size: np.eye(size), 5).degree() == 0
    assert np.array_equal(make_topology(topology.matrix().tolist(), 5).matrix(), topology.matrix())
    assert make_topology([np.eye(5), topology.matrix()], 5).period == 2


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "rings",
            r"no topology 'rings'. Did you mean 'ring'\?\n.*exponential-2, exponential, .*random-matching",
        ),
        ("", "no topology ''"),
        ("full:3", "'full' takes no parameter"),
        ("exponential:x", r"'x' is no base of 'exponential'.*\n.*'exponential:3'"),
        ("mesh:6", r"'6' is no shape of 'mesh'.*\n.*'mesh:2x3'"),
        ("mesh:2x2", "2x2 has 4 places for 6 ranks"),
        ("ring:up", "no direction 'up'"),
        ("star:9", "rank 9 cannot be the centre"),
        ("hypercube", "hypercube of 6 ranks is impossible"),
        ("base:1", "base-1 graph is impossible"),
        ("one-peer:base:2", "'base:2' changes from turn to turn"),
        ("inner-outer-ring", "at least 3 ranks on each machine, not 1"),
        (np.eye(4), "'matrix' is for 4 ranks, but there are 6"),
        (ring(5), "'ring' is for 5 ranks, but there are 6"),
        (np.zeros((6, 5)), "square"),
        (np.zeros((6, 6)), "sum to 0 instead of 1"),
        (3, "a int is no topology"),
        (None, "a NoneType is no topology"),
        ([[1], [1, 2]], "a list is no topology"),
    ],
)
def test_what_means_no_topology(spec, message):
    with pytest.raises(UsageError, match=message):
        make_topology(spec, 6)


def test_a_size_that_is_none():
    with pytest.raises(UsageError, match="of 0 ranks is impossible"):
        make_topology("ring", 0)
