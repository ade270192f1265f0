"""What all topologies have in common, static and time-varying."""

import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal.topology
from shoal.core.errors import UsageError
from shoal.topology import (
    TOPOLOGIES,
    Topology,
    Weights,
    is_connected,
    is_doubly_stochastic,
    make_topology,
    ring,
)

SPECS = [*TOPOLOGIES, "exponential:3", "ring:left", "base:3", "one-peer:torus", "one-peer:ring"]


def fitting_sizes(spec, num_machines, local_size):
    """A size for which the topology exists, and its ranks on a machine."""
    size = num_machines * local_size
    return (1 << size.bit_length(), local_size) if spec == "hypercube" else (size, local_size)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(SPECS), st.integers(1, 6), st.integers(3, 6), st.integers(0, 10**6))
def test_both_sides_agree_in_every_turn_and_the_average_stays(spec, num_machines, local_size, turn):
    size, local_size = fitting_sizes(spec, num_machines, local_size)
    topology = make_topology(spec, size, local_size)
    assert topology.size == size
    for rank in range(size):
        topology.weights(rank, turn).check(rank, size)
        for source in topology.sources(rank, turn):
            assert rank in topology.destinations(source, turn)
        for destination in topology.destinations(rank, turn):
            assert rank in topology.sources(destination, turn)
        assert set((topology.weights(rank, turn).destinations or {}).values()) <= {1.0}
    assert is_doubly_stochastic(topology.matrix(turn))
    assert is_connected(topology)
    assert np.array_equal(topology.matrix(turn), topology.matrix(turn + topology.period))


def test_alone_and_in_pairs():
    for spec in SPECS:
        assert make_topology(spec, 1).weights(0, 5) == Weights(1.0, {}, {}), spec
        if "inner-outer" not in spec:
            assert np.array_equal(make_topology(spec, 2).matrix(7), np.full((2, 2), 0.5)), spec


def test_a_matrix_row_is_what_a_rank_gives():
    topology = Topology.static("own", (Weights(0.75, {1: 0.25}, {}), Weights(1.0, {}, {0: 1.0})))
    assert topology.matrix().tolist() == [[0.75, 0.25], [0, 1]]
    assert topology.sources(0) == (1,)
    assert topology.destinations(1) == (0,)
    assert topology.degree() == 1


def test_a_cycle_repeats():
    one, other = ring(3, "left"), ring(3, "right")
    topology = Topology.cycle("swing", [one.rule(0), other.rule(0)])
    assert topology.period == 2
    assert topology.sources(0, 4) == (1,)
    assert topology.sources(0, 5) == topology.sources(0, -1) == (2,)


def test_turns_are_made_when_asked_for():
    asked = []

    def rule(turn):
        asked.append(turn)
        return (Weights(1.0),)

    topology = Topology("lazy", 1, 10**9, rule)
    topology.weights(0, 10**9 + 3)
    topology.weights(0, 3)
    assert asked == [3]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_is_not_there(rank):
    with pytest.raises(UsageError, match=f"no rank {rank} in the topology 'ring' of 4"):
        ring(4).weights(rank, 0)


@pytest.mark.parametrize("size", [0, -3])
def test_no_topology_without_ranks(size):
    for spec, make in TOPOLOGIES.items():
        with pytest.raises(UsageError, match=f"of {size} ranks is impossible"):
            make(size, **({"local_size": 4} if "inner-outer" in spec else {}))


def test_all_is_exact():
    public = {
        name
        for name, value in vars(shoal.topology).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(shoal.topology.__all__)


def test_the_room_needs_numpy_alone():
    code = "import sys, shoal.topology; print([m for m in ('torch', 'networkx') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"
