"""The other side of a dynamic graph."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import UsageError
from shoal.topology import destinations_from_sources, sources_from_destinations


@st.composite
def tables(draw):
    size = draw(st.integers(1, 9))
    ranks = range(size)
    return [sorted(draw(st.sets(st.sampled_from(ranks))) - {rank}) for rank in ranks]


def test_by_hand():
    assert destinations_from_sources([[1, 2], [], [1]]) == [[], [0, 2], [0]]
    assert sources_from_destinations([[1], [0], [0, 1]]) == [[1, 2], [0, 2], []]
    assert destinations_from_sources([[1, 1], []]) == [[], [0]]


@settings(max_examples=30)
@given(tables())
def test_there_and_back(table):
    assert sources_from_destinations(destinations_from_sources(table)) == table
    assert destinations_from_sources(sources_from_destinations(table)) == table


@pytest.mark.parametrize("peer", [-1, 0, 2])
def test_impossible_peers_are_refused(peer):
    with pytest.raises(UsageError, match=rf"rank 0 of 2 names {peer} as a destination"):
        sources_from_destinations([[peer], []])
