import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import UsageError
from shoal.data import Part

COUNTS = st.integers(0, 40)
SIZES = st.integers(1, 7)


def parts(size, remainder):
    return [Part(rank, size, remainder) for rank in range(size)]


@given(COUNTS, SIZES, st.sampled_from(["drop", "repeat", "uneven"]))
def test_streams_indices_and_lengths_say_the_same(count, size, remainder):
    if remainder == "drop" and 0 < count < size:
        count = 0
    for part in parts(size, remainder):
        taken = list(part.take(iter(range(count))))
        assert taken == list(part.indices(count))
        assert len(taken) == part.length(count)


@given(COUNTS, SIZES)
def test_uneven_parts_cover_everything_once(count, size):
    taken = [list(part.take(range(count))) for part in parts(size, "uneven")]
    assert sorted(itertools.chain(*taken)) == list(range(count))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


@given(st.integers(1, 6), SIZES, st.integers(0, 6))
def test_drop_loses_less_than_one_each_and_doubles_nothing(each, size, rest):
    count = each * size + rest % size
    taken = [list(part.take(range(count))) for part in parts(size, "drop")]
    assert [len(one) for one in taken] == [each] * size
    assert sorted(itertools.chain(*taken)) == list(range(each * size))


@given(st.integers(1, 40), SIZES)
def test_repeat_covers_everything_and_is_even(count, size):
    taken = [list(part.take(range(count))) for part in parts(size, "repeat")]
    assert len({len(one) for one in taken}) == 1
    everything = list(itertools.chain(*taken))
    assert set(everything) == set(range(count))
    assert len(everything) - count < size


def test_a_step_of_all_workers_takes_the_next_items_of_the_order():
    first, second = (part.take("abcdef") for part in parts(2, "drop"))
    assert list(zip(first, second, strict=True)) == [("a", "b"), ("c", "d"), ("e", "f")]


def test_an_endless_stream_is_read_only_as_far_as_needed():
    assert list(itertools.islice(Part(1, 3).take(itertools.count()), 3)) == [1, 4, 7]


def test_too_few_items_are_refused_rather_than_dropped():
    with pytest.raises(UsageError, match="2 items cannot be divided among 3 workers"):
        list(Part(0, 3).take("ab"))
    with pytest.raises(UsageError, match="remainder='repeat'"):
        Part(0, 3).indices(2)
    assert list(Part(2, 3, "repeat").take("ab")) == ["a"]
    assert list(Part(2, 3, "uneven").take("ab")) == []


def test_impossible_parts_are_refused():
    with pytest.raises(UsageError, match="no part 2 of 2"):
        Part(2, 2)
    with pytest.raises(UsageError, match="drop, repeat, uneven"):
        Part(0, 2, "scatter")
