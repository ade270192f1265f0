"""CommonDraws that all machines agree on."""

from collections import Counter

from shoal.topology.graphs import CommonDraws


def test_the_name_decides():
    assert (
        CommonDraws("a").shuffled(range(30))
        == CommonDraws("a").shuffled(range(30))
        != CommonDraws("b").shuffled(range(30))
    )


def test_the_numbers_stay_from_release_to_release():
    """Two peers of different versions of Python must draw the same graph."""
    assert CommonDraws("shoal").shuffled(range(8)) == [0, 6, 2, 4, 1, 5, 7, 3]


def test_below_is_uniform():
    draws = CommonDraws("die")
    counts = Counter(draws.below(6) for _ in range(6000))
    assert sorted(counts) == list(range(6))
    assert all(800 < count < 1200 for count in counts.values())


def test_shuffling_keeps_the_items():
    assert sorted(CommonDraws("x").shuffled([3, 1, 2])) == [1, 2, 3]
    assert CommonDraws("x").shuffled([]) == []
