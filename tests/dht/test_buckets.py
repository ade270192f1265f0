import itertools

from hypothesis import given
from hypothesis import strategies as st

from dht.made_contacts import made_contact
from shoal.dht.routing_table import KBuckets
from shoal.dht.wire import ID_BITS

HALF = 1 << (ID_BITS - 1)
EVERYTHING = 1 << ID_BITS
numbers = st.integers(0, EVERYTHING - 1)


@given(st.lists(numbers, max_size=30), numbers)
def test_whatever_is_split_the_buckets_divide_the_whole_space(split_at, number):
    buckets = KBuckets(own=0, depth_modulo=5)
    for place in split_at:
        buckets.split(buckets.of(place))
    ranges = [(bucket.low, bucket.high) for bucket in buckets]
    assert len(buckets) == len(split_at) + 1
    assert ranges[0][0] == 0
    assert ranges[-1][1] == EVERYTHING
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert all(bucket.high - bucket.low == EVERYTHING >> bucket.depth for bucket in buckets)
    bucket = buckets.of(number)
    assert bucket.low <= number < bucket.high


def test_the_id_in_the_middle_belongs_to_the_upper_half():
    buckets = KBuckets(own=0, depth_modulo=5)
    buckets.split(buckets.of(0))
    lower, upper = buckets
    assert buckets.of(HALF) is upper
    assert buckets.of(HALF - 1) is lower
    assert (upper.low, upper.high) == (HALF, EVERYTHING)


def test_a_bucket_splits_around_the_own_id_or_between_multiples_of_the_modulo():
    buckets = KBuckets(own=EVERYTHING - 1, depth_modulo=3)
    assert buckets.may_split(buckets.of(0))
    for _ in range(2):
        buckets.split(buckets.of(0))
        assert buckets.may_split(buckets.of(0))
    buckets.split(buckets.of(0))
    assert buckets.of(0).depth == 3
    assert not buckets.may_split(buckets.of(0))
    for _ in range(10):
        buckets.split(buckets.of(EVERYTHING - 1))
        assert buckets.may_split(buckets.of(EVERYTHING - 1))


def test_a_bucket_of_one_id_does_not_split():
    buckets = KBuckets(own=0, depth_modulo=5)
    while buckets.may_split(buckets.of(0)):
        buckets.split(buckets.of(0))
    assert (buckets.of(0).low, buckets.of(0).high) == (0, 1)


def test_a_split_divides_who_waits_and_keeps_when_it_was_looked_into():
    buckets = KBuckets(own=0, depth_modulo=5)
    whole = buckets.of(0)
    whole.looked_up_s = 7.0
    waiting = [made_contact(number) for number in (1, HALF, 2, HALF + 1)]
    for contact in waiting:
        whole.replacements[contact.number] = contact
    buckets.split(whole)
    lower, upper = buckets
    assert list(lower.replacements.values()) == [waiting[0], waiting[2]]
    assert list(upper.replacements.values()) == [waiting[1], waiting[3]]
    assert (lower.looked_up_s, upper.looked_up_s) == (7.0, 7.0)
