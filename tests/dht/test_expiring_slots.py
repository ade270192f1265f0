"""Slots by key and by expiration."""

import random

from shoal.dht.records import PLAIN, Slot, displaced
from shoal.dht.settings import DHTSettings
from shoal.dht.storage import KEY_BYTES, Cache, ExpiringSlots, memory_bytes


def put(shelf, key, expires_at_s, subkey=PLAIN, value=b""):
    slot = Slot(subkey, value, expires_at_s)
    held = shelf.held.get(key)
    shelf.put(key, slot, 0.0, displaced(held.contents if held else None, slot))


def test_counts_follow_what_is_there():
    shelf, rng = ExpiringSlots(DHTSettings()), random.Random(1)
    for step in range(2_000):
        key, subkey = rng.randbytes(1), rng.choice([PLAIN, b"x", b"y"])
        put(shelf, key, step + rng.uniform(1.0, 300.0), subkey, bytes(rng.randrange(50)))
        shelf.expire(float(step))
        if step % 7 == 0 and shelf.held:
            shelf.drop(rng.choice(list(shelf.held)))
        everything = [slot for key in shelf.held for slot in shelf.get(key, float(step))]
        assert shelf.num_slots == len(everything)
        assert shelf.size_bytes == sum(map(memory_bytes, everything)) + KEY_BYTES * len(shelf.held)
        assert shelf.size_bytes == sum(held.size_bytes for held in shelf.held.values())


def test_the_index_of_a_record_that_is_refreshed_for_ever_stays_small():
    shelf = ExpiringSlots(DHTSettings())
    for step in range(10_000):
        put(shelf, b"k", step + 10_000.0)
        assert len(shelf._by_expiration) < 25
    shelf.expire(19_998.0)
    assert shelf.num_slots == 1
    shelf.expire(19_999.0)
    assert (shelf.num_slots, shelf.size_bytes, len(shelf._by_expiration)) == (0, 0, 0)


def test_the_soonest_key_is_that_of_a_live_slot():
    shelf = ExpiringSlots(DHTSettings())
    assert shelf.soonest() is None
    put(shelf, b"k", 1.0)
    put(shelf, b"k", 9.0)
    put(shelf, b"l", 5.0, b"x")
    put(shelf, b"l", 99.0, b"y")
    assert shelf.soonest() == b"l"
    shelf.drop(b"l")
    assert shelf.soonest() == b"k"


def test_keys_that_expire_by_a_time_are_due_the_soonest_first():
    rng = random.Random(2)
    for before_s in (0.0, 3.0, 40.0, 100.0):
        cache, soonest_s = Cache(DHTSettings()), {}
        for _ in range(500):
            key, slot = rng.randbytes(1), Slot(rng.randbytes(1), b"", rng.uniform(0.0, 100.0))
            cache.store(key, [slot], 0.0)
        for key in cache.held:
            soonest_s[key] = min(slot.expires_at_s for slot in cache.get(key, 0.0, is_use=True))
        due = sorted((at_s, key) for key, at_s in soonest_s.items() if at_s <= before_s)
        assert cache.due_for_refresh(0.0, before_s) == [key for _, key in due]
