"""Topologies that know which ranks share a machine."""

import numpy as np
import pytest

from shoal.core.errors import UsageError
from shoal.topology import (
    consensus_time,
    inner_outer_exponential,
    inner_outer_ring,
    is_doubly_stochastic,
    machine_exponential,
    one_peer_exponential,
    over_machines,
    ring,
    spectral_gap,
)

CLUSTERS = [(2, 3), (2, 4), (3, 6), (4, 4), (5, 3), (7, 5), (8, 4), (9, 4)]


def turns_until_all_know_all(topology, start):
    known, turn = np.eye(topology.size) > 0, start
    while not known.all():
        known = topology.matrix(turn) @ known > 0
        turn += 1
    return turn - start


@pytest.mark.parametrize(("machines", "local"), CLUSTERS)
def test_exponential_information_reaches_everybody(machines, local):
    topology = inner_outer_exponential(machines * local, local)
    assert is_doubly_stochastic(topology)
    assert turns_until_all_know_all(topology, 0) <= topology.period + 1
    assert turns_until_all_know_all(topology, local + 1) <= topology.period + 1


@pytest.mark.parametrize(("machines", "local"), CLUSTERS)
def test_every_rank_sends_outside_over_every_distance(machines, local):
    """Also where the local ranks and the distances have a common factor, as 4 ranks and 2 distances."""
    topology = inner_outer_exponential(machines * local, local)
    distances = [1 << power for power in range((machines - 1).bit_length())]
    for rank in range(topology.size):
        outside = {
            (peer // local - rank // local) % machines
            for turn in range(topology.period)
            for peer in topology.destinations(rank, turn)
        }
        assert outside - {0} == set(distances)


@pytest.mark.parametrize(("machines", "local"), CLUSTERS)
def test_ring_information_reaches_everybody(machines, local):
    topology = inner_outer_ring(machines * local, local)
    assert topology.period == local
    assert is_doubly_stochastic(topology)
    assert turns_until_all_know_all(topology, 0) <= machines * local


def test_ring_by_hand():
    topology = inner_outer_ring(12, 4)
    assert [topology.destinations(rank, 1) for rank in range(4)] == [(2,), (5,), (3,), (0,)]
    assert topology.destinations(9, 1) == (1,)
    assert topology.sources(1, 1) == (9,)
    assert topology.weights(1, 1).own == 0.5


def test_exponential_by_hand():
    """5 local ranks: inside the distances 1 and 2, and one farther where that steps over the outsider."""
    topology = inner_outer_exponential(20, 5)
    assert [topology.destinations(rank, 0) for rank in range(5)] == [(5,), (2,), (3,), (4,), (1,)]
    assert [topology.destinations(rank, 1) for rank in range(5)] == [(3,), (11,), (4,), (0,), (2,)]


def test_one_local_rank_goes_outside_each_turn():
    topology = inner_outer_exponential(12, 4)
    for turn in range(topology.period):
        outsiders = [rank for rank in range(12) if topology.destinations(rank, turn)[0] // 4 != rank // 4]
        assert [rank % 4 for rank in outsiders] == [turn % 4] * 3


def test_on_a_single_machine():
    assert np.array_equal(inner_outer_ring(5, 5).matrix(3), ring(5, "right").matrix())
    single, plain = inner_outer_exponential(8, 8), one_peer_exponential(8)
    assert single.period == plain.period
    assert all(
        np.array_equal(ours, theirs) for ours, theirs in zip(single.matrices(), plain.matrices(), strict=True)
    )


@pytest.mark.parametrize("make", [inner_outer_ring, inner_outer_exponential])
def test_inner_outer_needs_three_on_each_machine(make):
    with pytest.raises(UsageError, match="at least 3 ranks on each machine, not 2"):
        make(8, 2)
    for local in (3, 0, -4):
        with pytest.raises(UsageError, match=f"8 ranks do not fill machines of {local}"):
            make(8, local)


@pytest.mark.parametrize(("machines", "local"), [(4, 2), (8, 3), (3, 4), (5, 1)])
def test_machine_exponential_mixes_machine_averages(machines, local):
    topology = machine_exponential(machines * local, local)
    x = np.random.default_rng(0).normal(size=machines * local)
    averages = x.reshape(machines, local).mean(axis=1)
    for turn in range(4):
        distance = 1 << turn % (machines - 1).bit_length()
        expected = (averages + np.roll(averages, distance)) / 2
        assert np.allclose(topology.matrix(turn) @ x, expected.repeat(local))


def test_machine_exponential_is_exact_for_powers_of_two():
    topology = machine_exponential(24, 3)
    assert spectral_gap(topology) == 1
    assert consensus_time(topology) == 3
    with pytest.raises(UsageError, match="8 ranks do not fill machines of 3"):
        machine_exponential(8, 3)


def test_over_machines():
    topology = over_machines(ring(4), 3)
    assert topology.size == 12
    assert topology.name == "machines:ring"
    assert np.allclose(topology.matrix(), np.kron(ring(4).matrix(), np.full((3, 3), 1 / 3)))
    assert spectral_gap(topology) == pytest.approx(spectral_gap(ring(4)))
