import random

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from dht.signing import sign
from shoal.core import Key, PeerId
from shoal.core.identity import Identity
from shoal.dht import records
from shoal.dht.records import (
    HASH_BYTES,
    MAX_LEAVES,
    PLAIN,
    SIGNATURE_BYTES,
    Slot,
    Validator,
    Verdict,
    decode_subkey,
    encode_subkey,
    encode_value,
    key_of,
    owner_of_subkey,
    reserved,
    reserved_key,
    sign_many,
    signer_of,
)

ALICE, MALLORY = Identity.from_seed(b"a" * 32), Identity.from_seed(b"m" * 32)
KEY = key_of("ffn.3.14").digest
VALUE = encode_value("10.0.0.7:31337")
UNTIL_S = 1_800_000_000.25
OWN = encode_subkey(reserved(ALICE.peer_id))


def check(key, slot):
    return Validator().check(key, slot)


def own_slot(identity=ALICE, key=KEY, subkey=PLAIN, value=VALUE, expires_at_s=UNTIL_S):
    return sign(identity, key, subkey, value, expires_at_s)


@pytest.mark.parametrize("subkey", [PLAIN, encode_subkey(14), encode_subkey("a"), OWN])
def test_what_its_owner_has_signed_is_good(subkey):
    slot = own_slot(subkey=subkey)
    assert (slot.subkey, slot.value, slot.expires_at_s) == (subkey, VALUE, UNTIL_S)
    assert check(KEY, slot) is None
    assert signer_of(slot) == ALICE.peer_id
    over_the_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(slot), type=Slot)
    assert check(KEY, over_the_wire) is None


@pytest.mark.parametrize("subkey", [PLAIN, encode_subkey(14), encode_subkey("a")])
def test_what_nobody_owns_needs_no_signature(subkey):
    slot = Slot(subkey, VALUE, UNTIL_S)
    assert check(KEY, slot) is None
    assert signer_of(slot) is None


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"value": encode_value("10.6.6.6:1")},
        {"subkey": encode_subkey(15)},
        {"subkey": PLAIN},
        {"subkey": encode_subkey(14)[:0], "value": encode_subkey(14) + VALUE},
        {"expires_at_s": UNTIL_S + 1},
        {"expires_at_s": float("nan")},
        {"owner": MALLORY.public_key.public_bytes_raw()},
        {"owner": bytes(32)},
        {"owner": b"\xff" * 32},
        {"signature": bytes(64)},
        {"owner": b""},
        {"signature": b""},
        {"owner": b"x" * 31},
        {"signature": b"x" * 65},
    ],
    ids=repr,
)
def test_nothing_of_it_can_be_changed(change, is_known):
    own, slot = Validator(), own_slot(subkey=encode_subkey(14))
    if is_known:
        assert own.check(KEY, slot) is None
    assert own.check(KEY, msgspec.structs.replace(slot, **change)) is Verdict.BAD_SIGNATURE


def test_it_cannot_be_moved_to_another_key():
    assert check(key_of("ffn.3.15").digest, own_slot()) is Verdict.BAD_SIGNATURE


def test_what_a_peer_signs_for_something_else_is_no_record():
    slot = own_slot()
    bare = KEY + slot.subkey + slot.value
    assert check(KEY, msgspec.structs.replace(slot, signature=ALICE.sign(bare))) is Verdict.BAD_SIGNATURE


# --- reserved subkeys ---


@pytest.mark.parametrize("label", [None, "gpu 0", 3])
def test_a_reserved_subkey_tells_its_peer_and_survives_encoding(label):
    subkey = reserved(ALICE.peer_id, label)
    assert decode_subkey(encode_subkey(subkey)) == subkey
    assert owner_of_subkey(decode_subkey(encode_subkey(subkey))) == ALICE.peer_id
    assert check(KEY, own_slot(subkey=encode_subkey(subkey))) is None


def test_nobody_else_writes_there():
    assert check(KEY, Slot(OWN, VALUE, UNTIL_S)) is Verdict.NOT_OWNER
    assert check(KEY, own_slot(MALLORY, subkey=OWN)) is Verdict.NOT_OWNER


@pytest.mark.parametrize(
    "subkey",
    [
        ("shoal.owner",),
        ("shoal.owner", ALICE.peer_id.digest),
        ("shoal.owner", ALICE.peer_id.digest[:19], None),
        ("shoal.owner", str(ALICE.peer_id), None),
        ("shoal.owner", ALICE.peer_id.digest, None, 1),
        ("shoal.owner", ALICE.peer_id.digest, (1,)),
    ],
    ids=repr,
)
def test_what_only_looks_reserved_is_nobodys(subkey):
    assert owner_of_subkey(subkey) is None
    assert check(KEY, own_slot(subkey=encode_subkey(subkey))) is Verdict.NOT_OWNER


@pytest.mark.parametrize(
    "subkey", [3, "shoal.owner", b"shoal.owner", (1, ("shoal.owner",)), ("shoal.owners", bytes(20), None), ()]
)
def test_other_subkeys_are_anybodys(subkey):
    assert owner_of_subkey(subkey) is None
    assert check(KEY, Slot(encode_subkey(subkey), VALUE, UNTIL_S)) is None


def test_no_other_encoding_of_a_reserved_subkey_gets_past():
    content = b"\x93\xabshoal.owner\xc4\x14" + ALICE.peer_id.digest + b"\xc0"
    assert b"\xc7" + bytes((len(content), 1)) + content == OWN
    longer = b"\xc8" + len(content).to_bytes(2) + b"\x01" + content
    for subkey in (longer, OWN[:-1], OWN + b"\x00", b"\x93" + content[1:], b"\xc1"):
        for slot in (Slot(subkey, VALUE, UNTIL_S), own_slot(MALLORY, subkey=subkey)):
            assert check(KEY, slot) is Verdict.BAD_VALUE


def test_flipped_bits_never_let_mallory_write_for_alice():
    chance = random.Random(0)
    for _ in range(500):
        subkey = bytearray(OWN)
        for _ in range(chance.randint(1, 3)):
            subkey[chance.randrange(len(subkey))] = chance.randrange(256)
        if check(KEY, Slot(bytes(subkey), VALUE, UNTIL_S)) is None:
            assert owner_of_subkey(decode_subkey(bytes(subkey))) is None


# --- reserved keys ---


def test_a_reserved_key_is_one_peers():
    key = reserved_key(ALICE.peer_id, "home").digest
    for subkey in (PLAIN, encode_subkey(1), OWN):
        assert check(key, own_slot(key=key, subkey=subkey)) is None
        assert check(key, own_slot(MALLORY, key=key, subkey=subkey)) is Verdict.NOT_OWNER
        assert check(key, Slot(subkey, VALUE, UNTIL_S)) is Verdict.NOT_OWNER


def test_reserved_keys_differ_by_label_and_peer_and_are_spread_over_the_swarm():
    keys = [
        reserved_key(identity.peer_id, label)
        for identity in (ALICE, MALLORY)
        for label in ("", "home", "home2")
    ]
    assert all(isinstance(key, Key) for key in keys)
    assert len({key.digest for key in keys}) == 6
    assert len({key.digest[:2] for key in keys}) == 6


def test_names_as_text_are_never_reserved():
    for name in ("shoal.owner", "shoal", "shoal.owner.x", "shoal/owner", ""):
        assert check(key_of(name).digest, Slot(PLAIN, VALUE, UNTIL_S)) is None


# --- what is remembered ---


@pytest.fixture
def verified(monkeypatch):
    calls = []

    class CountingPublicKey:
        def __init__(self, owner):
            self.key = Ed25519PublicKey.from_public_bytes(owner)

        from_public_bytes = classmethod(lambda cls, owner: cls(owner))

        def verify(self, signature, message):
            calls.append(signature)
            self.key.verify(signature, message)

    monkeypatch.setattr(records, "Ed25519PublicKey", CountingPublicKey)
    return calls


def test_a_good_slot_is_verified_once_and_a_bad_one_every_time(verified):
    own, slot = Validator(), own_slot()
    bad = msgspec.structs.replace(slot, value=b"\x01")
    for _ in range(3):
        assert own.check(KEY, slot) is None
    assert len(verified) == 1
    for _ in range(3):
        assert own.check(KEY, bad) is Verdict.BAD_SIGNATURE
    assert len(verified) == 4
    assert own.check(key_of("other").digest, slot) is Verdict.BAD_SIGNATURE


def test_what_was_not_met_for_longest_is_forgotten_first(verified):
    own = Validator(max_known=2)
    first, second, third = (own_slot(expires_at_s=UNTIL_S + number) for number in range(3))
    for slot in (first, second, first, third, first):
        assert own.check(KEY, slot) is None
    assert verified == [first.signature, second.signature, third.signature]
    own.check(KEY, second)
    assert verified[3:] == [second.signature]


def test_a_slot_for_somebody_elses_place_costs_no_verification(verified):
    assert check(KEY, own_slot(MALLORY, subkey=OWN)) is Verdict.NOT_OWNER
    assert check(reserved_key(ALICE.peer_id, "home").digest, own_slot(MALLORY)) is Verdict.NOT_OWNER
    assert verified == []


def test_an_owner_is_who_the_transport_proves():
    assert signer_of(own_slot()) == PeerId.of_public_key(ALICE.public_key.public_bytes_raw())


# --- many at once ---


def own_slots(num_slots, identity=ALICE):
    """Keys and slots that were signed together."""
    unsigned = [
        (key_of(f"ffn.{index}").digest, Slot(encode_subkey(index), encode_value(index), UNTIL_S + index))
        for index in range(num_slots)
    ]
    return list(zip([key for key, _ in unsigned], sign_many(identity, unsigned), strict=True))


@pytest.mark.parametrize("num_slots", [0, 1, 2, 3, 63, 64, 65, 66, 130])
def test_each_of_many_is_good_by_itself(num_slots):
    signed = own_slots(num_slots)
    assert len(signed) == num_slots
    for index, (key, slot) in enumerate(signed):
        assert (slot.subkey, slot.value, slot.expires_at_s) == (
            encode_subkey(index),
            encode_value(index),
            UNTIL_S + index,
        )
        assert check(key, slot) is None
        assert signer_of(slot) == ALICE.peer_id


def test_up_to_64_share_a_signature():
    signatures = [slot.signature[:SIGNATURE_BYTES] for _, slot in own_slots(130)]
    assert [len(dict.fromkeys(signatures[start : start + 64])) for start in (0, 64, 128)] == [1, 1, 1]
    assert len(dict.fromkeys(signatures)) == 3


def test_one_alone_is_signed_as_ever():
    (key, slot), *_ = own_slots(1)
    assert slot == sign(ALICE, key, slot.subkey, slot.value, slot.expires_at_s)


def swapped_way(slot, other):
    return slot.signature[:SIGNATURE_BYTES] + other.signature[SIGNATURE_BYTES:]


def with_index(slot, index):
    way = slot.signature[SIGNATURE_BYTES:]
    return slot.signature[:SIGNATURE_BYTES] + bytes((index,)) + way[1:]


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("num_slots", [2, 7, 64])
def test_nothing_of_one_of_many_can_be_changed(num_slots, is_known):
    own, signed = Validator(), own_slots(num_slots)
    key, slot = signed[1]
    if is_known:
        assert own.check(key, slot) is None
    other_key, other = signed[0]
    changes = [
        {"value": encode_value("else")},
        {"subkey": encode_subkey("else")},
        {"subkey": PLAIN},
        {"expires_at_s": slot.expires_at_s + 1},
        {"owner": MALLORY.public_key.public_bytes_raw()},
        {"signature": bytes(SIGNATURE_BYTES) + slot.signature[SIGNATURE_BYTES:]},
        {"signature": slot.signature[:SIGNATURE_BYTES]},
        {"signature": swapped_way(slot, other)},
        *({"signature": with_index(slot, index)} for index in (0, 2, 3, 64, 129, 255)),
    ]
    for change in changes:
        assert own.check(key, msgspec.structs.replace(slot, **change)) is Verdict.BAD_SIGNATURE, change
    assert own.check(other_key, slot) is Verdict.BAD_SIGNATURE


@pytest.mark.parametrize("change_bytes", [-HASH_BYTES, -1, 1, HASH_BYTES, 6 * HASH_BYTES, 100_000])
def test_a_way_of_another_length_leads_nowhere(change_bytes):
    key, slot = own_slots(7)[3]
    longer = slot.signature + bytes(max(0, change_bytes))
    signature = longer[: len(slot.signature) + change_bytes]
    assert check(key, msgspec.structs.replace(slot, signature=signature)) is Verdict.BAD_SIGNATURE


def test_flipped_bits_of_a_way_never_pass():
    chance, (key, slot) = random.Random(0), own_slots(33)[17]
    for _ in range(300):
        signature = bytearray(slot.signature)
        signature[chance.randrange(len(signature))] ^= 1 << chance.randrange(8)
        changed = msgspec.structs.replace(slot, signature=bytes(signature))
        assert check(key, changed) is Verdict.BAD_SIGNATURE


def test_a_tree_is_signed_in_its_own_name():
    """What was signed for one record is not a root, nor the other way round."""
    key, slot = own_slots(2)[0]
    alone = sign(ALICE, key, slot.subkey, slot.value, slot.expires_at_s)
    mixed = alone.signature + slot.signature[SIGNATURE_BYTES:]
    assert check(key, msgspec.structs.replace(slot, signature=mixed)) is Verdict.BAD_SIGNATURE


def test_a_root_is_verified_once_for_all_its_slots(verified):
    own, signed = Validator(), own_slots(MAX_LEAVES + 6)
    for _ in range(2):
        for key, slot in signed:
            assert own.check(key, slot) is None
    assert len(verified) == 2
    key, slot = signed[0]
    for _ in range(2):
        bad = msgspec.structs.replace(slot, value=b"\x01")
        assert own.check(key, bad) is Verdict.BAD_SIGNATURE
    assert len(verified) == 4


def test_reserved_places_are_kept_for_their_peer_also_among_many():
    key = reserved_key(ALICE.peer_id, "home").digest
    unsigned = [(key, Slot(PLAIN, VALUE, UNTIL_S)), (KEY, Slot(OWN, VALUE, UNTIL_S))]
    for (place, _), slot in zip(unsigned, sign_many(ALICE, unsigned), strict=True):
        assert check(place, slot) is None
    for (place, _), slot in zip(unsigned, sign_many(MALLORY, unsigned), strict=True):
        assert check(place, slot) is Verdict.NOT_OWNER
