"""Which of two values stays."""

import pytest

from shoal.core import PeerId
from shoal.dht.records import (
    PLAIN,
    Slot,
    Verdict,
    displaced,
    encode_subkey,
    is_reserved,
    judge,
    merge,
    place,
    reserved,
    slots_of,
    value_of,
)

ALICE, BOB = b"a" * 32, b"b" * 32


def plain(expires_at_s, value=b"v", owner=b""):
    return Slot(PLAIN, value, expires_at_s, owner)


def sub(subkey, expires_at_s, value=b"v", owner=b""):
    return Slot(subkey, value, expires_at_s, owner)


def own(owner, expires_at_s, label=None):
    """Under a subkey that is reserved for its owner."""
    return sub(encode_subkey(reserved(PeerId.of_public_key(owner), label)), expires_at_s, owner=owner)


def contents_of(*slots):
    contents = None
    for slot in slots:
        contents = place(contents, slot)
    return contents


DICTIONARY = (sub(b"x", 10.0), sub(b"y", 20.0))


@pytest.mark.parametrize(
    ("held", "slot", "verdict"),
    [
        ((), plain(1.0), Verdict.STORED),
        ((plain(10.0),), plain(10.5), Verdict.STORED),
        ((plain(10.0),), plain(10.0), Verdict.NOT_NEWER),
        ((plain(10.0),), plain(9.0), Verdict.NOT_NEWER),
        # subkeys have an expiration each
        (DICTIONARY, sub(b"x", 11.0), Verdict.STORED),
        (DICTIONARY, sub(b"x", 10.0), Verdict.NOT_NEWER),
        (DICTIONARY, sub(b"y", 19.0), Verdict.NOT_NEWER),
        (DICTIONARY, sub(b"z", 1.0), Verdict.STORED),
        ((sub(b"x", 10.0),), sub(b"z", 1.0), Verdict.STORED),
        # a plain value must be later than the latest subkey, and a subkey than the plain value
        (DICTIONARY, plain(20.5), Verdict.STORED),
        (DICTIONARY, plain(20.0), Verdict.NOT_NEWER),
        (DICTIONARY, plain(15.0), Verdict.NOT_NEWER),
        ((sub(b"x", 10.0),), plain(9.0), Verdict.NOT_NEWER),
        ((plain(10.0),), sub(b"x", 11.0), Verdict.STORED),
        ((plain(10.0),), sub(b"x", 10.0), Verdict.NOT_NEWER),
    ],
)
def test_the_later_one_stays(held, slot, verdict):
    assert judge(displaced(contents_of(*held), slot), slot) is verdict


@pytest.mark.parametrize(
    ("held", "slot", "verdict"),
    [
        ((plain(10.0, owner=ALICE),), plain(20.0, owner=ALICE), Verdict.STORED),
        ((plain(10.0, owner=ALICE),), plain(10.0, owner=ALICE), Verdict.NOT_NEWER),
        ((plain(10.0, owner=ALICE),), plain(20.0), Verdict.NOT_OWNER),
        ((plain(10.0, owner=ALICE),), plain(20.0, owner=BOB), Verdict.NOT_OWNER),
        ((plain(10.0, owner=ALICE),), plain(5.0, owner=BOB), Verdict.NOT_OWNER),
        ((plain(10.0),), plain(20.0, owner=BOB), Verdict.STORED),
        ((sub(b"x", 10.0, owner=ALICE),), sub(b"x", 20.0, owner=BOB), Verdict.NOT_OWNER),
        ((sub(b"x", 10.0, owner=ALICE),), sub(b"y", 20.0, owner=BOB), Verdict.STORED),
        # neither kind of record is a way around the owner
        ((plain(10.0, owner=ALICE),), sub(b"x", 20.0, owner=BOB), Verdict.NOT_OWNER),
        ((plain(10.0, owner=ALICE),), sub(b"x", 20.0, owner=ALICE), Verdict.STORED),
        ((*DICTIONARY, sub(b"z", 5.0, owner=ALICE)), plain(30.0), Verdict.NOT_OWNER),
        ((*DICTIONARY, sub(b"z", 5.0, owner=ALICE)), plain(30.0, owner=BOB), Verdict.NOT_OWNER),
        ((*DICTIONARY, sub(b"z", 5.0, owner=ALICE)), plain(30.0, owner=ALICE), Verdict.STORED),
    ],
)
def test_what_is_owned_yields_to_its_owner_only(held, slot, verdict):
    assert judge(displaced(contents_of(*held), slot), slot) is verdict


@pytest.mark.parametrize(
    ("held", "slot", "verdict"),
    [
        # nobody keeps others out of a dictionary by a plain value that lives longer
        ((plain(99.0),), own(ALICE, 10.0), Verdict.STORED),
        ((plain(99.0, owner=ALICE),), own(ALICE, 10.0), Verdict.STORED),
        ((plain(9.0, owner=BOB),), own(ALICE, 10.0), Verdict.NOT_OWNER),
        # nor takes its place
        ((own(ALICE, 10.0),), plain(99.0), Verdict.NOT_OWNER),
        ((own(ALICE, 10.0),), plain(99.0, owner=BOB), Verdict.NOT_OWNER),
        ((own(ALICE, 10.0),), plain(99.0, owner=ALICE), Verdict.NOT_OWNER),
        ((*DICTIONARY, own(ALICE, 10.0)), plain(99.0), Verdict.NOT_OWNER),
        # among subkeys it is one like others
        (DICTIONARY, own(ALICE, 1.0), Verdict.STORED),
        ((own(ALICE, 10.0),), own(ALICE, 11.0), Verdict.STORED),
        ((own(ALICE, 10.0),), own(ALICE, 10.0), Verdict.NOT_NEWER),
        ((own(ALICE, 10.0),), own(BOB, 5.0), Verdict.STORED),
        ((own(ALICE, 10.0),), sub(b"x", 5.0), Verdict.STORED),
        # what looks like one, with nobody's signature, is none
        ((plain(99.0),), sub(own(ALICE, 1.0).subkey, 10.0), Verdict.NOT_NEWER),
    ],
)
def test_plain_values_are_nothing_against_reserved_subkeys(held, slot, verdict):
    assert judge(displaced(contents_of(*held), slot), slot) is verdict


def test_reserved_subkeys_are_told_from_others():
    assert is_reserved(own(ALICE, 1.0))
    assert is_reserved(own(ALICE, 1.0, "label"))
    for subkey in ("shoal.owner", ("shoal.owner",), ("shoal.owner", b"short", None), (1, b"shoal.owner")):
        assert not is_reserved(sub(encode_subkey(subkey), 1.0, owner=ALICE))
    assert not is_reserved(sub(b"\xc1shoal.owner", 1.0, owner=ALICE))
    assert not is_reserved(plain(1.0, owner=ALICE))


def test_a_value_of_the_other_kind_takes_the_whole_place():
    assert slots_of(contents_of(*DICTIONARY, plain(30.0))) == [plain(30.0)]
    assert slots_of(contents_of(plain(5.0), sub(b"x", 10.0))) == [sub(b"x", 10.0)]
    assert slots_of(contents_of(plain(5.0), *DICTIONARY)) == list(DICTIONARY)
    assert slots_of(contents_of(*DICTIONARY, sub(b"x", 30.0))) == [sub(b"x", 30.0), DICTIONARY[1]]
    assert slots_of(None) == []


def test_a_dictionary_expires_with_its_latest_subkey():
    assert value_of(DICTIONARY, 0.0).expires_at_s == 20.0


class TestMerging:
    def test_nothing(self):
        assert merge([], 0.0) == merge([[], []], 0.0) == []

    def test_the_latest_plain_value_whoever_tells_it(self):
        told = [[plain(10.0, b"old")], [plain(30.0, b"new")], [plain(20.0, b"older")]]
        assert merge(told, 0.0) == [plain(30.0, b"new")]

    def test_dictionaries_subkey_by_subkey(self):
        told = [[sub(b"x", 10.0), sub(b"y", 20.0)], [sub(b"x", 15.0), sub(b"z", 5.0)], []]
        merged = {slot.subkey: slot.expires_at_s for slot in merge(told, 0.0)}
        assert merged == {b"x": 15.0, b"y": 20.0, b"z": 5.0}

    def test_the_later_kind_wins(self):
        dictionary = [sub(b"x", 10.0), sub(b"y", 20.0)]
        for told in ([dictionary, [plain(15.0)]], [[plain(15.0)], dictionary]):
            assert sorted(slot.subkey for slot in merge(told, 0.0)) == [b"x", b"y"]
        for told in ([dictionary, [plain(25.0)]], [[plain(25.0)], dictionary]):
            assert merge(told, 0.0) == [plain(25.0)]

    def test_what_is_over_is_left_out(self):
        assert merge([[sub(b"x", 10.0), sub(b"y", 20.0)]], 10.0) == [sub(b"y", 20.0)]
        assert merge([[plain(10.0)], [sub(b"x", 5.0)]], 7.0) == [plain(10.0)]

    def test_the_first_told_of_equals(self):
        assert merge([[plain(10.0, b"1")], [plain(10.0, b"2")]], 0.0) == [plain(10.0, b"1")]

    def test_no_later_lie_hides_what_is_owned(self):
        honest = [sub(b"x", 10.0, b"true", ALICE), sub(b"y", 12.0)]
        lies = [sub(b"x", 99.0, b"false"), plain(99.0, b"false"), sub(b"y", 99.0)]
        for told in ([honest, lies], [lies, honest]):
            assert set(merge(told, 0.0)) == {sub(b"x", 10.0, b"true", ALICE), sub(b"y", 99.0)}

    def test_of_several_owners_the_one_that_most_replicas_tell_wins(self):
        honest, lie = [sub(b"x", 10.0, b"true", ALICE)], [sub(b"x", 99.0, b"false", BOB)] * 3
        for told in ([honest, lie, honest], [lie, honest, honest]):
            assert merge(told, 0.0) == honest
        later = [sub(b"x", 12.0, b"newer", ALICE)]
        assert merge([honest, later, honest, lie], 0.0) == later

    @pytest.mark.parametrize("owner", [b"", BOB])
    def test_no_plain_value_hides_reserved_subkeys(self, owner):
        honest = [own(ALICE, 10.0), sub(b"x", 5.0)]
        lie = [plain(99.0, b"false", owner)]
        for told in ([honest, lie], [lie, honest], [lie, lie, lie, honest]):
            assert set(merge(told, 0.0)) == set(honest)
        assert merge([lie, honest], 10.0) == lie

    def test_the_kind_that_more_replicas_tell_wins(self):
        dictionary, later = [sub(b"x", 10.0), sub(b"y", 12.0)], [plain(99.0)]
        for told in ([dictionary, later, dictionary], [later, dictionary, [], [sub(b"y", 12.0)]]):
            assert sorted(slot.subkey for slot in merge(told, 0.0)) == [b"x", b"y"]
        for told in ([[plain(5.0)], dictionary, [plain(6.0)]], [[plain(6.0)], [plain(6.0)], dictionary]):
            assert merge(told, 0.0) == [plain(6.0)]

    def test_who_tells_both_kinds_has_no_say_in_which(self):
        both = [plain(99.0), sub(b"y", 99.0)]
        assert merge([both, both, [plain(5.0)], [sub(b"x", 10.0)], [sub(b"x", 10.0)]], 0.0) == [
            sub(b"y", 99.0),
            sub(b"x", 10.0),
        ]

    def test_what_is_given_stays_as_it_was(self):
        told = [[sub(b"x", 10.0)], [sub(b"x", 20.0), sub(b"y", 20.0)]]
        merge(told, 0.0)
        assert told == [[sub(b"x", 10.0)], [sub(b"x", 20.0), sub(b"y", 20.0)]]
