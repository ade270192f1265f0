import random

import msgspec
import pytest

from shoal.core import Key, PeerId
from shoal.core.identity import Identity
from shoal.dht import ownership
from shoal.dht.names import key_of
from shoal.dht.ownership import Ownership, holder_of, owner_id, reserved, reserved_key, sign
from shoal.dht.records import PLAIN, Slot, Verdict
from shoal.dht.subkeys import decode_subkey, encode_subkey
from shoal.dht.values import encode_value

ALICE, MALLORY = Identity.from_seed(b"a" * 32), Identity.from_seed(b"m" * 32)
KEY = key_of("ffn.3.14").digest
VALUE = encode_value("10.0.0.7:31337")
UNTIL_S = 1_800_000_000.25
OWN = encode_subkey(reserved(ALICE.peer_id))


def check(key, slot):
    return Ownership().check(key, slot)


def own_slot(identity=ALICE, key=KEY, subkey=PLAIN, value=VALUE, expires_at_s=UNTIL_S):
    return sign(identity, key, subkey, value, expires_at_s)


@pytest.mark.parametrize("subkey", [PLAIN, encode_subkey(14), encode_subkey("a"), OWN])
def test_what_its_owner_has_signed_is_good(subkey):
    slot = own_slot(subkey=subkey)
    assert (slot.subkey, slot.value, slot.expires_at_s) == (subkey, VALUE, UNTIL_S)
    assert check(KEY, slot) is None
    assert owner_id(slot) == ALICE.peer_id
    over_the_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(slot), type=Slot)
    assert check(KEY, over_the_wire) is None


@pytest.mark.parametrize("subkey", [PLAIN, encode_subkey(14), encode_subkey("a")])
def test_what_nobody_owns_needs_no_signature(subkey):
    slot = Slot(subkey, VALUE, UNTIL_S)
    assert check(KEY, slot) is None
    assert owner_id(slot) is None


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
    own, slot = Ownership(), own_slot(subkey=encode_subkey(14))
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
    assert holder_of(decode_subkey(encode_subkey(subkey))) == ALICE.peer_id
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
    assert holder_of(subkey) is None
    assert check(KEY, own_slot(subkey=encode_subkey(subkey))) is Verdict.NOT_OWNER


@pytest.mark.parametrize(
    "subkey", [3, "shoal.owner", b"shoal.owner", (1, ("shoal.owner",)), ("shoal.owners", bytes(20), None), ()]
)
def test_other_subkeys_are_anybodys(subkey):
    assert holder_of(subkey) is None
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
            assert holder_of(decode_subkey(bytes(subkey))) is None


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
    really = ownership._is_signed

    def count(slot, message):
        calls.append(slot)
        return really(slot, message)

    monkeypatch.setattr(ownership, "_is_signed", count)
    return calls


def test_a_good_slot_is_verified_once_and_a_bad_one_every_time(verified):
    own, slot = Ownership(), own_slot()
    bad = msgspec.structs.replace(slot, value=b"\x01")
    for _ in range(3):
        assert own.check(KEY, slot) is None
    assert len(verified) == 1
    for _ in range(3):
        assert own.check(KEY, bad) is Verdict.BAD_SIGNATURE
    assert len(verified) == 4
    assert own.check(key_of("other").digest, slot) is Verdict.BAD_SIGNATURE


def test_what_was_not_met_for_longest_is_forgotten_first(verified):
    own = Ownership(max_known=2)
    first, second, third = (own_slot(expires_at_s=UNTIL_S + number) for number in range(3))
    for slot in (first, second, first, third, first):
        assert own.check(KEY, slot) is None
    assert verified == [first, second, third]
    own.check(KEY, second)
    assert verified[3:] == [second]


def test_a_slot_for_somebody_elses_place_costs_no_verification(verified):
    assert check(KEY, own_slot(MALLORY, subkey=OWN)) is Verdict.NOT_OWNER
    assert check(reserved_key(ALICE.peer_id, "home").digest, own_slot(MALLORY)) is Verdict.NOT_OWNER
    assert verified == []


def test_an_owner_is_who_the_transport_proves():
    assert owner_id(own_slot()) == PeerId.of_public_key(ALICE.public_key.public_bytes_raw())
