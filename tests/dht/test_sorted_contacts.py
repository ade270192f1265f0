import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.made_contacts import by_distance, made_contact
from shoal.dht.routing_table import SortedContacts
from shoal.dht.wire import ID_BITS

# ids that begin alike for long, as those around the own id do, and ids from all over the space
clustered = st.builds(lambda shift, low: low << shift, st.integers(0, ID_BITS - 8), st.integers(0, 255))
numbers = st.one_of(clustered, st.integers(0, (1 << ID_BITS) - 1))


def sorted_contacts(ids):
    made = SortedContacts()
    for number in ids:
        made.insert(made_contact(number))
    return made


@given(st.lists(numbers, unique=True, max_size=60), numbers, st.integers(1, 25))
def test_nearest_is_what_looking_at_all_of_them_gives(ids, target, limit):
    made = sorted_contacts(ids)
    assert made.nearest(target, limit) == by_distance(made.contacts, target)[:limit]


@pytest.mark.parametrize("shared_bits", [0, 100, 150])
def test_nearest_among_many(shared_bits):
    rng = random.Random(5)
    prefix = rng.getrandbits(shared_bits) << (ID_BITS - shared_bits)
    made = sorted_contacts({prefix | rng.getrandbits(ID_BITS - shared_bits): None for _ in range(500)})
    assert made.numbers == sorted(made.numbers)
    for _ in range(100):
        for target in (rng.getrandbits(ID_BITS), prefix | rng.getrandbits(ID_BITS - shared_bits)):
            assert made.nearest(target, 8) == by_distance(made.contacts, target)[:8]


def test_an_id_is_found_where_it_stands():
    made = sorted_contacts([30, 10, 20])
    assert [made.index(number) for number in (10, 20, 30)] == [0, 1, 2]
    assert [made.index(number) for number in (0, 15, 31)] == [-1, -1, -1]
    assert made.remove_at(1).number == 20
    assert (len(made), made.index(20), made.index(30)) == (2, -1, 1)


def test_a_span_takes_its_low_end_and_leaves_its_high_end():
    made = sorted_contacts([10, 20, 30, 40])
    assert made.span(20, 40) == (1, 3)
    assert made.span(11, 20) == (1, 1)
    assert made.span(0, 1 << ID_BITS) == (0, 4)
