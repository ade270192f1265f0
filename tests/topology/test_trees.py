"""The trees of `relay`: who meets whom, in which color, and how many lie beyond."""

import pytest

from shoal.topology.graphs import branches, num_colors


@pytest.mark.parametrize("kind", ["binary", "chain"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_every_rank_reaches_all_others_once(kind, size):
    tree = branches(kind, size)
    for rank, own in enumerate(tree):
        assert [branch.color for branch in own] == sorted({branch.color for branch in own})
        assert 1 + sum(branch.size for branch in own) == size
        for branch in own:
            assert beyond(tree, rank, branch.partner) == branch.size
            (back,) = [other for other in tree[branch.partner] if other.partner == rank]
            assert back.color == branch.color
    assert num_colors(tree) == max(map(len, tree)) <= (3 if kind == "binary" else 2)


def beyond(tree, came_from, rank):
    return 1 + sum(beyond(tree, rank, branch.partner) for branch in tree[rank] if branch.partner != came_from)
