"""Networks that are cut in two: one side goes on, the other stops, and each says so."""

import logging

import pytest
import torch

from group.cables import Cables
from group.clusters import open_cluster
from group.hosts import together
from shoal.core import Deadline, NetworkSplit, PeerLost
from shoal.topology import Weights

PATIENCE = 0.2
ROUNDS_AFTER = 20


@pytest.fixture
def cables():
    with Cables() as cables:
        yield cables


def train(group):
    """Rounds as those of a strategy that outlives losses, and some more once it is settled who is where."""
    group.should_survive = True
    others = [rank for rank in range(group.size) if rank != group.rank]
    deadline, after = Deadline.after(20), 0
    try:
        while after < ROUNDS_AFTER:
            deadline.check("a side to be settled")
            if group.split is not None:
                raise group.split
            members = [rank for rank in others if rank in group.members]
            group.exchange(torch.ones(10), Weights.uniform(members, members)).wait(deadline)
            after += bool(group.lost)
        group.leave()
    except PeerLost as error:
        group.close(error)
        return error
    return sorted(group.lost)


def run_cut(machines, side, cables, **settings):
    with open_cluster(machines, cables, patience=PATIENCE, **settings) as groups:
        cables.cut(side)
        return together(groups, train)


def said(caplog):
    return [record.getMessage() for record in caplog.records if "fell silent" in record.getMessage()]


@pytest.mark.parametrize(
    ("machines", "side", "stopping"),
    [
        ([[0, 1], [2, 3]], [0, 1], [2, 3]),  # equal: the side without the lowest rank
        ([[0, 1], [2], [3, 4]], [0, 1], [0, 1]),  # the smaller one, with the lowest rank
        ([[0], [1]], [0], [1]),
    ],
)
def test_one_side_of_a_cut_network_stops(machines, side, stopping, cables, caplog):
    size = sum(map(len, machines))
    num_others = size - len(stopping)
    with caplog.at_level(logging.WARNING):
        ended = run_cut(machines, side, cables)
    for rank in range(size):
        if rank in stopping:
            assert isinstance(ended[rank], NetworkSplit), ended
            assert "fell silent" in str(ended[rank])
            assert "--allow-split" in str(ended[rank])
        else:
            assert ended[rank] == stopping
    assert len(said(caplog)) == num_others, caplog.text
    assert all("this side goes on" in line for line in said(caplog))


def test_both_sides_go_on_where_that_is_allowed(cables, caplog):
    with caplog.at_level(logging.WARNING):
        ended = run_cut([[0, 1], [2, 3]], [0, 1], cables, on_split="continue")
    assert ended == [[2, 3], [2, 3], [0, 1], [0, 1]]
    assert sorted(said(caplog)) == sorted(
        f"rank {rank}: ranks {other} fell silent at once, and ranks {here} are on this side: this side "
        "goes on, by --allow-split, and the other may train another model"
        for rank, here, other in [
            (0, "0 and 1", "2 and 3"),
            (1, "0 and 1", "2 and 3"),
            (2, "2 and 3", "0 and 1"),
            (3, "2 and 3", "0 and 1"),
        ]
    )


def test_workers_that_end_are_no_split(caplog):
    """Also if the lowest ranks end, and more than half of all."""
    with open_cluster([[0], [1], [2], [3]], patience=PATIENCE) as groups:
        for group in groups[:3]:
            group.close(ConnectionAbortedError())
        deadline = Deadline.after(20)
        while len(groups[3].lost) < 3:
            deadline.check("three to be lost")
        assert groups[3].split is None
        assert list(groups[3].members) == [3]
        groups[3].barrier()
        assert not said(caplog)


def test_one_that_has_left_since_the_cut_is_counted_on_its_side(cables):
    """It could tell this worker, and the others take it for silent."""

    def leave_or_train(group):
        if group.rank != 0:
            return train(group)
        return group.leave()

    with open_cluster([[0], [1], [2, 3]], cables, patience=PATIENCE) as groups:
        cables.cut([0, 1])
        ended = together(groups, leave_or_train)
    assert ended[1] == [2, 3]
    assert [type(each) for each in ended[2:]] == [NetworkSplit] * 2


def test_those_that_have_ended_since_the_cut_are_counted_on_their_side(cables):
    """Otherwise one whose loss ends several would seem to be half of those that are left."""
    with open_cluster([[0], [1], [2], [3]], cables, patience=PATIENCE) as groups:
        cables.cut([0])
        deadline = Deadline.after(20)
        while any(0 not in group.lost for group in groups[1:]):
            deadline.check("rank 0 to be lost")
        for group in groups[2:]:
            group.close(ConnectionAbortedError())
        while len(groups[1].lost) < 3:
            deadline.check("three to be lost")
        assert groups[1].split is None
        assert list(groups[1].members) == [1]
