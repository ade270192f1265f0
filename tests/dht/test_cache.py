"""What a peer remembers of others' records."""

import random

import pytest

from shoal.dht.records import PLAIN, Slot, Verdict
from shoal.dht.settings import DHTSettings
from shoal.dht.storage import Cache

KEY, OTHER = b"k" * 20, b"o" * 20
ALICE = b"a" * 32


def plain(expires_at_s, value=b"v", owner=b""):
    return Slot(PLAIN, value, expires_at_s, owner)


def sub(subkey, expires_at_s, owner=b""):
    return Slot(subkey, b"v", expires_at_s, owner)


def make(**settings):
    return Cache(DHTSettings(**settings))


class TestRecords:
    def test_the_rules_are_those_of_storage(self):
        cache = make()
        assert cache.store(KEY, [plain(10.0, b"1")], 0.0) == [Verdict.STORED]
        assert cache.store(KEY, [plain(10.0, b"2")], 0.0) == [Verdict.NOT_NEWER]
        assert cache.store(KEY, [plain(20.0, owner=ALICE)], 0.0) == [Verdict.STORED]
        assert cache.store(KEY, [plain(30.0)], 0.0) == [Verdict.NOT_OWNER]
        assert cache.store(KEY, [sub(b"x", 30.0)], 0.0) == [Verdict.NOT_OWNER]
        assert cache.get(KEY, 19.0) == [plain(20.0, owner=ALICE)]
        assert cache.get(KEY, 20.0) == []
        assert (len(cache), cache.num_slots, cache.size_bytes) == (0, 0, 0)

    def test_each_slot_gets_its_own_verdict(self):
        cache = make(max_value_bytes=1, max_lifetime_s=100.0, max_clock_gap_s=1.0)
        cache.store(KEY, [sub(b"x", 50.0)], 0.0)
        slots = [sub(b"w", 10.0), sub(b"x", 50.0), sub(b"y", 5.0), sub(b"z", 500.0), sub(b"zz", 10.0)]
        assert cache.store(KEY, slots, 5.0) == [
            Verdict.STORED,
            Verdict.NOT_NEWER,
            Verdict.EXPIRED,
            Verdict.TOO_LONG,
            Verdict.TOO_LARGE,
        ]
        assert cache.get(KEY, 5.0) == [sub(b"x", 50.0), sub(b"w", 10.0)]

    def test_a_refused_earlier_value_ends_nothing(self):
        cache = make()
        cache.store(KEY, [plain(100.0)], 0.0)
        cache.store(KEY, [plain(10.0)], 0.0)
        assert cache.get(KEY, 50.0) == [plain(100.0)]

    def test_forgetting(self):
        cache = make()
        cache.store(KEY, [plain(100.0)], 0.0)
        cache.forget(KEY)
        cache.forget(OTHER)
        assert KEY not in cache
        assert cache.store(KEY, [plain(10.0)], 0.0) == [Verdict.STORED]


class TestBounds:
    def test_what_expires_soonest_goes_first(self):
        cache = make(max_cached=2)
        cache.store(b"1", [plain(10.0)], 0.0)
        cache.store(b"2", [plain(30.0)], 0.0)
        assert cache.store(b"3", [plain(20.0)], 0.0) == [Verdict.STORED]
        assert [key in cache for key in (b"1", b"2", b"3")] == [False, True, True]
        assert cache.store(b"4", [plain(5.0)], 0.0) == [Verdict.FULL]
        assert [key in cache for key in (b"2", b"3", b"4")] == [True, True, False]

    def test_a_dictionary_goes_as_a_whole_by_its_first_subkey(self):
        cache = make(max_cached=2)
        cache.store(b"1", [sub(b"x", 90.0), sub(b"y", 10.0)], 0.0)
        cache.store(b"2", [plain(30.0)], 0.0)
        cache.store(b"3", [plain(20.0)], 0.0)
        assert cache.get(b"1", 0.0) == []
        assert cache.num_slots == 2

    def test_what_is_larger_than_the_cache_is_not_kept(self):
        cache = make(max_cached_bytes=10_000)
        slots = [Slot(bytes([number]), bytes(1_000), 10.0) for number in range(1, 20)]
        assert set(cache.store(KEY, slots, 0.0)) == {Verdict.FULL}
        assert (len(cache), cache.size_bytes) == (0, 0)

    @pytest.mark.parametrize("seed", range(3))
    def test_bounds_hold(self, seed):
        rng = random.Random(seed)
        cache = make(max_cached=20, max_cached_bytes=30_000)
        num_kept = 0
        for step in range(2_000):
            slots = [
                Slot(bytes([number]), bytes(rng.randrange(1_000)), step + rng.uniform(-1.0, 100.0))
                for number in rng.sample(range(1, 9), rng.randrange(1, 5))
            ]
            key = rng.randbytes(1)
            verdicts = cache.store(key, slots, float(step))
            assert len(cache) <= 20
            assert cache.size_bytes <= 30_000
            kept = cache.get(key, float(step))
            assert [slot in kept for slot in slots] == [verdict is Verdict.STORED for verdict in verdicts]
            assert all(slot.expires_at_s > step for slot in kept)
            num_kept += len(kept)
        assert num_kept > 1_000
        cache.expire(1e9)
        assert (len(cache), cache.num_slots, cache.size_bytes) == (0, 0, 0)


class TestRefresh:
    def test_only_what_was_used_is_due(self):
        cache = make()
        cache.store(KEY, [plain(100.0)], 0.0)
        cache.store(OTHER, [plain(99.0)], 0.0)
        cache.get(KEY, 0.0, is_use=True)
        cache.get(OTHER, 0.0)
        assert cache.due_for_refresh(90.0, 5.0) == []
        assert cache.due_for_refresh(95.0, 5.0) == [KEY]

    def test_each_is_told_once_until_something_new_is_cached_and_used(self):
        cache = make()
        cache.store(KEY, [plain(100.0)], 0.0)
        cache.get(KEY, 0.0, is_use=True)
        assert cache.due_for_refresh(96.0, 5.0) == [KEY]
        cache.get(KEY, 96.0, is_use=True)
        cache.store(KEY, [plain(100.0)], 96.0)
        assert cache.due_for_refresh(96.0, 5.0) == []
        cache.store(KEY, [plain(101.0)], 97.0)
        assert cache.due_for_refresh(98.0, 5.0) == []
        cache.get(KEY, 98.0, is_use=True)
        assert cache.due_for_refresh(98.0, 5.0) == [KEY]

    def test_a_dictionary_is_due_before_its_first_gap(self):
        cache = make()
        cache.store(KEY, [sub(b"x", 1_000.0), sub(b"y", 100.0)], 0.0)
        cache.get(KEY, 0.0, is_use=True)
        assert cache.due_for_refresh(96.0, 5.0) == [KEY]

    def test_the_soonest_is_first_and_what_is_over_is_not_due(self):
        cache = make()
        for number, expires_at_s in enumerate((50.0, 40.0, 10.0, 45.0)):
            cache.store(bytes([number]), [plain(expires_at_s)], 0.0)
            cache.get(bytes([number]), 0.0, is_use=True)
        assert cache.due_for_refresh(20.0, 100.0) == [b"\x01", b"\x03", b"\x00"]

    def test_using_what_is_not_there(self):
        cache = make()
        assert cache.get(KEY, 0.0, is_use=True) == []
        cache.store(KEY, [plain(1.0)], 0.0)
        assert cache.due_for_refresh(0.0, 5.0) == []


class TestAbsence:
    def test_a_marker_lasts_until_its_time(self):
        cache = make()
        assert not cache.is_absent(KEY, 0.0)
        cache.mark_absent(KEY, 10.0)
        assert cache.is_absent(KEY, 9.9)
        assert not cache.is_absent(OTHER, 9.9)
        assert not cache.is_absent(KEY, 10.0)
        assert len(cache.absent) == 0

    def test_storing_ends_it(self):
        cache = make()
        cache.mark_absent(KEY, 10.0)
        cache.store(KEY, [plain(0.0)], 1.0)
        assert cache.is_absent(KEY, 1.0)  # nothing was stored
        cache.store(KEY, [plain(5.0)], 1.0)
        assert not cache.is_absent(KEY, 1.0)
        assert not cache.is_absent(KEY, 6.0)

    def test_it_is_ended_from_outside(self):
        cache = make()
        cache.mark_absent(KEY, 10.0)
        cache.forget_absence(KEY)
        cache.forget_absence(OTHER)
        assert not cache.is_absent(KEY, 0.0)

    def test_it_hides_nothing_that_is_cached(self):
        cache = make()
        cache.store(KEY, [plain(5.0)], 0.0)
        cache.mark_absent(KEY, 10.0)
        assert not cache.is_absent(KEY, 0.0)

    def test_a_flood_of_markers_pushes_out_the_oldest(self):
        cache = make(max_cached=10)
        for number in range(10):
            cache.mark_absent(bytes([number]), 100.0)
        cache.mark_absent(b"\x00", 200.0)
        for number in range(10, 19):
            cache.mark_absent(bytes([number]), 100.0)
        assert len(cache.absent) == 10
        marked = [number for number in range(19) if cache.is_absent(bytes([number]), 0.0)]
        assert marked == [0, *range(10, 19)]
