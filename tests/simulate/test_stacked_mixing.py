"""The product of all workers' values with a round's matrix."""

import pytest
import torch

from shoal.simulate.stacked.model import Everybody, MachineRounds, Rounds
from shoal.topology import from_matrix, make_topology

SIZE = 24


def values_of(dtype=torch.float64):
    return torch.randn(SIZE, 5, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(
    "name", ["ring", "star", "full", "exponential-2", "one-peer-exponential", "random-matching"]
)
def test_it_is_the_matrix_of_the_turn(name):
    topology = make_topology(name, SIZE)
    rounds = Rounds(topology)
    for number in (0, 1, topology.period + 1):
        expected = torch.from_numpy(topology.matrix(number)) @ values_of()
        torch.testing.assert_close(rounds[number](values_of()), expected)
        edges = rounds[number].edges
        assert [tuple(sources) for sources in edges.sources] == [
            topology.sources(rank, number) for rank in range(SIZE)
        ]
        assert edges.num_sent.sum() == edges.num_needed.sum() == len(edges.senders)


def test_values_keep_their_dtype_and_stay_as_they_are():
    values = values_of(torch.float32)
    mixed = Rounds(make_topology("ring", SIZE))[0](values)
    assert mixed.dtype == torch.float32
    assert torch.equal(values, values_of(torch.float32))


def test_machines_give_the_means_of_their_workers():
    machines = [rank // 6 for rank in range(SIZE)]
    topology = make_topology("exponential-2", 4)
    mixed = MachineRounds(topology, machines)[0](values_of())
    means = values_of().view(4, 6, 5).mean(1)
    torch.testing.assert_close(mixed, (torch.from_numpy(topology.matrix()) @ means)[machines])


def test_everybody_moves_a_share_of_the_way_to_the_mean():
    values = values_of()
    torch.testing.assert_close(Everybody(SIZE, 0.25)(values), 0.75 * values + 0.25 * values.mean(0))
    assert Everybody(SIZE).edges.num_sent.tolist() == [SIZE - 1] * SIZE


def test_a_matrix_whose_rows_are_unequal():
    matrix = [[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.25, 0.25, 0.5]]
    values = torch.eye(3, dtype=torch.float64)
    expected = torch.tensor(matrix, dtype=torch.float64)
    torch.testing.assert_close(Rounds(from_matrix(matrix))[0](values), expected)
