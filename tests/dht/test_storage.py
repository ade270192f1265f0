"""What a peer keeps for the swarm."""

import math
import random

import pytest

from shoal.core import PeerId
from shoal.dht.records import MAX_SUBKEY_BYTES, PLAIN, Slot, Validator, Verdict, encode_subkey, reserved
from shoal.dht.settings import DHTSettings
from shoal.dht.storage import PUSHED_S, LocalRecords, Storage
from shoal.dht.wire import coordinates_of, number_of, unpack_coordinates

OWN = PeerId(bytes(20))
KEY, OTHER = b"k" * 20, b"o" * 20
ALICE, BOB = b"a" * 32, b"b" * 32
OWN_SUBKEYS = {owner: encode_subkey(reserved(PeerId.of_public_key(owner))) for owner in (ALICE, BOB)}
ROOMY = DHTSettings()


def key_at(distance):
    """A key so far from OWN."""
    return distance.to_bytes(20)


def plain(expires_at_s, value=b"v", owner=b""):
    return Slot(PLAIN, value, expires_at_s, owner)


def sub(subkey, expires_at_s, value=b"v", owner=b""):
    return Slot(subkey, value, expires_at_s, owner)


def own(owner, expires_at_s):
    """Under a subkey that is reserved for its owner."""
    return sub(OWN_SUBKEYS[owner], expires_at_s, owner=owner)


def distances(storage, own):
    keys = storage.keys()
    return {number_of(key) ^ own for key in keys}


def make(**settings):
    return Storage(OWN, DHTSettings(**settings))


class TestRules:
    def test_a_value_lives_until_it_expires(self):
        storage = make()
        assert storage.get(KEY, 0.0) == []
        assert storage.store(KEY, plain(10.0), 0.0) is Verdict.STORED
        assert storage.get(KEY, 9.999) == [plain(10.0)]
        assert storage.get(KEY, 10.0) == []
        assert (len(storage), len(storage.keys()), storage.size_bytes) == (0, 0, 0)

    @pytest.mark.parametrize("expires_at_s", [99.0, 100.0, -1.0, math.nan, -math.inf])
    def test_what_is_over_when_it_arrives_is_refused(self, expires_at_s):
        storage = make()
        assert storage.store(KEY, plain(expires_at_s), 100.0) is Verdict.EXPIRED
        assert storage.get(KEY, 0.0) == []

    def test_a_later_value_replaces_an_earlier_one(self):
        storage = make()
        storage.store(KEY, plain(10.0, b"1"), 0.0)
        assert storage.store(KEY, plain(20.0, b"2"), 0.0) is Verdict.STORED
        assert storage.store(KEY, plain(20.0, b"3"), 0.0) is Verdict.NOT_NEWER
        assert storage.store(KEY, plain(15.0, b"4"), 0.0) is Verdict.NOT_NEWER
        assert storage.get(KEY, 0.0) == [plain(20.0, b"2")]
        assert len(storage) == 1

    def test_a_refused_earlier_value_ends_nothing(self):
        """D-1: the index by expiration only follows what was accepted."""
        storage = make()
        storage.store(KEY, plain(100.0), 0.0)
        storage.store(OTHER, sub(b"x", 100.0), 0.0)
        assert storage.store(KEY, plain(10.0), 0.0) is Verdict.NOT_NEWER
        assert storage.store(OTHER, sub(b"x", 10.0), 0.0) is Verdict.NOT_NEWER
        storage.expire(50.0)
        assert storage.get(KEY, 50.0) == [plain(100.0)]
        assert storage.get(OTHER, 50.0) == [sub(b"x", 100.0)]

    def test_the_expiration_that_was_replaced_ends_nothing(self):
        storage = make()
        storage.store(KEY, plain(10.0), 0.0)
        storage.store(KEY, plain(100.0), 0.0)
        assert storage.get(KEY, 50.0) == [plain(100.0)]

    def test_subkeys_come_and_go_one_by_one(self):
        storage = make()
        for subkey, expires_at_s in ((b"x", 10.0), (b"y", 20.0), (b"z", 30.0)):
            assert storage.store(KEY, sub(subkey, expires_at_s), 0.0) is Verdict.STORED
        assert storage.store(KEY, sub(b"x", 25.0), 0.0) is Verdict.STORED
        assert storage.get(KEY, 0.0) == [sub(b"x", 25.0), sub(b"y", 20.0), sub(b"z", 30.0)]
        assert storage.get(KEY, 20.0) == [sub(b"x", 25.0), sub(b"z", 30.0)]
        assert storage.get(KEY, 25.0) == [sub(b"z", 30.0)]
        assert storage.get(KEY, 30.0) == []
        assert KEY not in storage

    def test_one_refused_subkey_stops_no_other(self):
        storage = make()
        storage.store(KEY, sub(b"x", 50.0), 0.0)
        slots = [sub(b"w", 10.0), sub(b"x", 10.0), sub(b"y", 10.0)]
        verdicts = [storage.store(KEY, slot, 0.0) for slot in slots]
        assert verdicts == [Verdict.STORED, Verdict.NOT_NEWER, Verdict.STORED]
        assert len(storage) == 3

    def test_a_plain_value_replaces_a_dictionary_that_is_earlier(self):
        storage = make()
        storage.store(KEY, sub(b"x", 10.0), 0.0)
        storage.store(KEY, sub(b"y", 20.0), 0.0)
        assert storage.store(KEY, plain(20.0), 0.0) is Verdict.NOT_NEWER
        assert storage.store(KEY, plain(21.0), 0.0) is Verdict.STORED
        assert storage.get(KEY, 15.0) == [plain(21.0)]
        assert len(storage) == 1

    def test_a_subkey_replaces_a_plain_value_that_is_earlier(self):
        storage = make()
        storage.store(KEY, plain(20.0), 0.0)
        assert storage.store(KEY, sub(b"x", 20.0), 0.0) is Verdict.NOT_NEWER
        assert storage.store(KEY, sub(b"x", 21.0), 0.0) is Verdict.STORED
        assert storage.store(KEY, sub(b"y", 5.0), 0.0) is Verdict.STORED
        assert storage.get(KEY, 0.0) == [sub(b"x", 21.0), sub(b"y", 5.0)]

    def test_only_live_slots_count_against_a_newcomer(self):
        storage = make()
        storage.store(KEY, sub(b"x", 10.0, owner=ALICE), 0.0)
        storage.store(KEY, sub(b"y", 20.0), 0.0)
        assert storage.store(KEY, plain(30.0), 9.0) is Verdict.NOT_OWNER
        assert storage.store(KEY, plain(30.0), 10.0) is Verdict.STORED
        assert storage.store(KEY, sub(b"x", 31.0, owner=BOB), 30.0) is Verdict.STORED

    def test_an_owner_refreshes_and_others_do_not(self):
        storage = make()
        storage.store(KEY, plain(10.0, owner=ALICE), 0.0)
        assert storage.store(KEY, plain(20.0), 0.0) is Verdict.NOT_OWNER
        assert storage.store(KEY, plain(20.0, owner=BOB), 0.0) is Verdict.NOT_OWNER
        assert storage.store(KEY, sub(b"x", 20.0, owner=BOB), 0.0) is Verdict.NOT_OWNER
        assert storage.store(KEY, plain(20.0, owner=ALICE), 0.0) is Verdict.STORED
        assert storage.get(KEY, 15.0) == [plain(20.0, owner=ALICE)]

    def test_what_nobody_owns_can_be_taken_over(self):
        storage = make()
        storage.store(KEY, sub(b"x", 10.0), 0.0)
        assert storage.store(KEY, sub(b"x", 20.0, owner=ALICE), 0.0) is Verdict.STORED
        assert storage.store(KEY, sub(b"x", 30.0), 0.0) is Verdict.NOT_OWNER

    def test_a_plain_value_keeps_nobody_out_of_a_dictionary(self):
        storage = make()
        storage.store(KEY, plain(1_000.0), 0.0)
        assert storage.store(KEY, own(ALICE, 10.0), 0.0) is Verdict.STORED
        assert storage.store(KEY, plain(1_000.0), 0.0) is Verdict.NOT_OWNER
        assert storage.store(KEY, own(BOB, 5.0), 0.0) is Verdict.STORED
        assert storage.store(KEY, plain(1_000.0, owner=ALICE), 0.0) is Verdict.NOT_OWNER
        assert storage.get(KEY, 0.0) == [own(ALICE, 10.0), own(BOB, 5.0)]
        assert (len(storage), len(storage.keys())) == (2, 1)
        assert storage.store(KEY, plain(1_000.0), 10.0) is Verdict.STORED

    def test_a_plain_value_that_somebody_owns_stays(self):
        storage = make()
        storage.store(KEY, plain(10.0, owner=ALICE), 0.0)
        assert storage.store(KEY, own(BOB, 20.0), 0.0) is Verdict.NOT_OWNER
        assert storage.store(KEY, own(ALICE, 5.0), 0.0) is Verdict.STORED


class TestViews:
    def test_keys_in_order_of_arrival(self):
        storage = make()
        for distance in (5, 1, 9):
            storage.store(key_at(distance), plain(10.0 * distance), 0.0)
        storage.store(key_at(1), plain(99.0), 0.0)
        assert storage.keys() == [key_at(5), key_at(1), key_at(9)]
        storage.expire(60.0)
        assert storage.keys() == [key_at(1), key_at(9)]

    def test_keys_are_told_while_the_storage_changes(self):
        storage = make()
        for distance in range(1, 10):
            storage.store(key_at(distance), plain(10.0), 0.0)
        told = []
        for key in storage.keys():  # noqa: SIM118
            told.append((key, storage.get(key, 0.0)))
            storage.store(key_at(100 + number_of(key)), plain(10.0), 0.0)
        assert told == [(key_at(distance), [plain(10.0)]) for distance in range(1, 10)]

    def test_when_a_key_was_stored_last(self):
        storage = make()
        assert storage.stored_at_s(KEY) == -math.inf
        storage.store(KEY, sub(b"x", 10.0), 1.0)
        storage.store(KEY, sub(b"y", 10.0), 2.0)
        assert storage.stored_at_s(KEY) == 2.0
        storage.store(KEY, sub(b"y", 9.0), 3.0)
        storage.store(KEY, sub(b"y", 10.0, b"other"), 3.0)
        assert storage.stored_at_s(KEY) == 2.0

    def test_the_same_slot_again_counts_as_stored_now(self):
        """Republished by another replica: nothing new, but this peer need not do it too."""
        storage = make()
        storage.store(KEY, sub(b"x", 10.0), 1.0)
        assert storage.store(KEY, sub(b"x", 10.0), 4.0) is Verdict.STORED
        assert storage.store(KEY, sub(b"x", 10.0, b"other"), 5.0) is Verdict.NOT_NEWER
        assert storage.stored_at_s(KEY) == 4.0

    def test_coordinates_follow_what_is_there(self):
        storage, rng = make(), random.Random(3)
        assert storage.coordinates(KEY, 0.0) == b""
        for now_s in range(500):
            subkey = (
                PLAIN if rng.random() < 0.02 else encode_subkey(rng.choice([rng.randrange(300), "x", (1,)]))
            )
            storage.store(KEY, sub(subkey, now_s + rng.uniform(1.0, 90.0)), now_s)
            held = coordinates_of(storage.get(KEY, now_s))
            assert unpack_coordinates(storage.coordinates(KEY, now_s)) == held
        storage.store(KEY, sub(b"\x01", 2_000.0), 600.0)
        first = storage.coordinates(KEY, 600.0)
        storage.store(KEY, sub(b"\x01", 3_000.0), 600.0)
        assert storage.coordinates(KEY, 600.0) is first
        assert unpack_coordinates(first) == [1]

    def test_what_get_gives_is_a_copy(self):
        storage = make()
        storage.store(KEY, sub(b"x", 10.0), 0.0)
        storage.get(KEY, 0.0).clear()
        assert storage.get(KEY, 0.0) == [sub(b"x", 10.0)]


class TestLimits:
    def test_lifetimes(self):
        storage = make(max_lifetime_s=60.0, max_clock_gap_s=3.0)
        assert storage.store(KEY, plain(1063.5), 1000.0) is Verdict.TOO_LONG
        assert storage.store(KEY, plain(math.inf), 1000.0) is Verdict.TOO_LONG
        assert storage.store(KEY, plain(1063.0), 1000.0) is Verdict.STORED  # by a clock 3 s ahead

    def test_sizes(self):
        storage = make(max_value_bytes=10)
        assert storage.store(KEY, plain(9.0, bytes(11)), 0.0) is Verdict.TOO_LARGE
        assert storage.store(KEY, sub(bytes(11), 9.0), 0.0) is Verdict.TOO_LARGE
        assert storage.store(KEY, Slot(PLAIN, b"", 9.0, b"", bytes(11)), 0.0) is Verdict.TOO_LARGE
        assert storage.store(KEY, plain(9.0, bytes(10)), 0.0) is Verdict.STORED

    def test_subkeys_are_short(self):
        storage = make()
        assert storage.store(KEY, sub(bytes(MAX_SUBKEY_BYTES + 1), 9.0), 0.0) is Verdict.TOO_LARGE
        assert storage.store(KEY, sub(bytes(MAX_SUBKEY_BYTES), 9.0), 0.0) is Verdict.STORED

    def test_subkeys_of_one_key(self):
        storage = make(max_slots_a_key=3)
        for subkey in (b"x", b"y", b"z"):
            storage.store(KEY, sub(subkey, 10.0), 0.0)
        assert storage.store(KEY, sub(b"more", 20.0), 0.0) is Verdict.FULL
        assert storage.store(KEY, sub(b"y", 20.0), 0.0) is Verdict.STORED
        assert storage.store(KEY, sub(b"more", 20.0), 10.0) is Verdict.STORED
        assert storage.store(KEY, plain(30.0), 10.0) is Verdict.STORED

    def test_the_farthest_goes_when_there_are_too_many(self):
        storage = make(max_records=3)
        for distance in (50, 10, 30):
            storage.store(key_at(distance), plain(10.0), 0.0)
        assert storage.store(key_at(60), plain(99.0), 0.0) is Verdict.FULL
        assert storage.store(key_at(20), plain(10.0), 0.0) is Verdict.STORED
        assert storage.keys() == [key_at(10), key_at(30), key_at(20)]
        assert storage.store(key_at(40), plain(99.0), 0.0) is Verdict.FULL

    def test_what_is_over_makes_room_first(self):
        storage = make(max_records=2)
        storage.store(key_at(1), plain(10.0), 0.0)
        storage.store(key_at(2), plain(99.0), 0.0)
        assert storage.store(key_at(3), plain(99.0), 10.0) is Verdict.STORED
        assert storage.keys() == [key_at(2), key_at(3)]

    def test_a_full_storage_takes_replacements(self):
        storage = make(max_records=2)
        storage.store(key_at(1), plain(10.0), 0.0)
        storage.store(key_at(2), plain(10.0), 0.0)
        assert storage.store(key_at(2), plain(20.0), 0.0) is Verdict.STORED
        assert storage.keys() == [key_at(1), key_at(2)]

    def test_the_farthest_key_does_not_grow_at_the_cost_of_nearer_ones(self):
        storage = make(max_records=2)
        storage.store(key_at(1), sub(b"x", 10.0), 0.0)
        storage.store(key_at(2), sub(b"x", 10.0), 0.0)
        assert storage.store(key_at(2), sub(b"y", 10.0), 0.0) is Verdict.FULL
        assert storage.store(key_at(1), sub(b"y", 10.0), 0.0) is Verdict.STORED
        assert storage.get(key_at(1), 0.0) == [sub(b"x", 10.0), sub(b"y", 10.0)]
        assert storage.keys() == [key_at(1)]

    def test_nothing_goes_for_what_would_not_fit_anyway(self):
        storage = make(max_bytes=10_000)
        storage.store(key_at(1), plain(10.0, bytes(8_000)), 0.0)
        storage.store(key_at(9), plain(10.0), 0.0)
        storage.store(key_at(8), plain(10.0), 0.0)
        assert storage.store(key_at(5), plain(10.0, bytes(5_000)), 0.0) is Verdict.FULL
        assert len(storage.keys()) == 3
        assert storage.store(key_at(7), plain(10.0, bytes(500)), 0.0) is Verdict.STORED
        assert storage.keys() == [key_at(1), key_at(8), key_at(7)]

    def test_a_key_that_was_dropped_can_come_again(self):
        storage = make(max_records=1)
        for round_s in range(0, 1_000, 10):
            assert storage.store(key_at(2), plain(round_s + 10.0), round_s) is Verdict.STORED
            assert storage.store(key_at(1), plain(round_s + 5.0), round_s) is Verdict.STORED
            assert storage.store(key_at(2), plain(round_s + 10.0), round_s) is Verdict.FULL
            assert storage.store(key_at(2), plain(round_s + 10.0), round_s + 5.0) is Verdict.STORED

    @pytest.mark.parametrize("seed", range(3))
    def test_bounds_hold_and_the_nearest_are_kept(self, seed):
        rng = random.Random(seed)
        settings = DHTSettings(max_records=40, max_bytes=40_000, max_slots_a_key=8)
        own = rng.getrandbits(160)
        storage = Storage(PeerId(own.to_bytes(20)), settings)
        keys = [rng.randbytes(20) for _ in range(100)]
        seen, num_drops = dict.fromkeys(Verdict, 0), 0
        for step in range(3_000):
            key = rng.choice(keys)
            subkey = rng.choice([PLAIN, *(bytes([number]) for number in range(1, 12))])
            slot = Slot(subkey, bytes(rng.randrange(2_000)), step + rng.uniform(0.0, 500.0))
            storage.expire(float(step))
            before = distances(storage, own)
            verdict = storage.store(key, slot, float(step))
            assert len(storage) <= 40
            assert storage.size_bytes <= 40_000
            slots = storage.get(key, float(step))
            assert (slot in slots) is (verdict is Verdict.STORED)
            assert len(slots) <= 8
            after = distances(storage, own)
            seen[verdict] += 1
            if before - after:
                assert verdict is Verdict.STORED
                assert min(before - after) > max(after)
                num_drops += 1
        assert num_drops > 20
        assert min(seen[verdict] for verdict in (Verdict.STORED, Verdict.FULL, Verdict.NOT_NEWER)) > 40
        storage.expire(1e9)
        assert (len(storage), len(storage.keys()), storage.size_bytes) == (0, 0, 0)


class Model:
    """The rules as plainly as they can be written; nothing is ever indexed or dropped."""

    def __init__(self):
        self.held = {}

    def get(self, key, now_s):
        live = {s: slot for s, slot in self.held.get(key, {}).items() if slot.expires_at_s > now_s}
        self.held[key] = live
        return live

    def store(self, key, slot, now_s):
        live = self.get(key, now_s)
        if slot.expires_at_s <= now_s:
            return Verdict.EXPIRED
        is_plain = slot.subkey == PLAIN
        rivals = [held for s, held in live.items() if is_plain or s in (PLAIN, slot.subkey)]
        if any(rival.owner not in (b"", slot.owner) for rival in rivals):
            return Verdict.NOT_OWNER
        if is_plain and any(rival.subkey in OWN_SUBKEYS.values() for rival in rivals):
            return Verdict.NOT_OWNER
        if slot.subkey in OWN_SUBKEYS.values():
            if any(rival.expires_at_s >= slot.expires_at_s for rival in rivals if rival.subkey != PLAIN):
                return Verdict.NOT_NEWER
        elif any(rival.expires_at_s >= slot.expires_at_s for rival in rivals):
            return Verdict.NOT_NEWER
        for rival in rivals:
            if rival.subkey != slot.subkey:
                del live[rival.subkey]
        live[slot.subkey] = slot
        return Verdict.STORED


@pytest.mark.parametrize("seed", range(5))
def test_it_does_what_a_simple_model_does(seed):
    rng = random.Random(seed)
    storage, model = Storage(PeerId(rng.randbytes(20)), ROOMY), Model()
    keys = [rng.randbytes(20) for _ in range(6)]
    now_s, seen = 1_000.0, dict.fromkeys(Verdict, 0)
    for _ in range(4_000):
        now_s += rng.choice([0.0, 0.0, 1.0, 5.0])
        key = rng.choice(keys)
        slot = Slot(
            rng.choice([PLAIN, b"x", b"x", b"y", b"z", b"w"]),
            rng.randbytes(2),
            now_s + rng.randrange(-2, 40),  # whole numbers, so that some are equal
            rng.choice([b"", b"", b"", ALICE, BOB]),
        )
        if slot.owner and rng.random() < 0.3:
            slot = Slot(OWN_SUBKEYS[slot.owner], slot.value, slot.expires_at_s, slot.owner)
        verdict = storage.store(key, slot, now_s)
        assert verdict is model.store(key, slot, now_s)
        seen[verdict] += 1
        other = rng.choice(keys)
        assert storage.get(other, now_s) == list(model.get(other, now_s).values())
        live = {key: model.get(key, now_s) for key in keys}
        assert len(storage) == sum(len(slots) for slots in live.values())
        assert len(storage.keys()) == sum(1 for slots in live.values() if slots)
    assert min(seen[v] for v in (Verdict.STORED, Verdict.NOT_NEWER, Verdict.EXPIRED, Verdict.NOT_OWNER)) > 50
    storage.expire(now_s + 1_000)
    assert storage.size_bytes == 0


@pytest.mark.parametrize("subkeys", [(PLAIN,), (encode_subkey(1), encode_subkey(2))])
def test_what_others_leave_is_told_for_a_while_and_never_read(subkeys):
    """However long it would live, and also where it is left again, or another slot takes its place."""
    records = LocalRecords(OWN, ROOMY, Validator())

    def leave(now_s):
        for subkey in subkeys:
            assert records.store(KEY, sub(subkey, now_s + 5000.0), now_s, is_pushed=True) is Verdict.STORED

    leave(1000.0)
    leave(1000.0 + PUSHED_S - 1.0)
    assert [slot.subkey for slot in records.get(KEY, 1000.0 + PUSHED_S - 0.5)] == list(subkeys)
    assert records.get(KEY, 1000.0 + PUSHED_S - 0.5, is_use=True) == []
    assert records.get(KEY, 1000.0 + PUSHED_S) == []
    assert (records.pushed.num_slots, records.pushed.size_bytes) == (0, 0)
    leave(1000.0 + PUSHED_S)
    assert len(records.get(KEY, 1000.0 + PUSHED_S)) == len(subkeys)
