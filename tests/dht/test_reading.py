import pytest

from dht.signing import sign
from shoal.core.identity import Identity
from shoal.dht.records import PLAIN, Slot, Value, encode_subkey, encode_value, key_of, value_of

NOW_S = 1000.0


def slot(value, expires_at_s, subkey=None):
    return Slot(PLAIN if subkey is None else encode_subkey(subkey), encode_value(value), expires_at_s)


def test_a_plain_value_is_itself():
    assert value_of([slot({"a": (1, 2)}, 1001.0)], NOW_S) == Value({"a": (1, 2)}, 1001.0, None)


def test_subkeys_are_a_dictionary_that_lives_as_long_as_the_last_of_them():
    found = value_of([slot("x", 1001.0, 3), slot("y", 1005.0, "b"), slot("z", 1002.0, (1, None))], NOW_S)
    assert found == Value(
        {3: Value("x", 1001.0), "b": Value("y", 1005.0), (1, None): Value("z", 1002.0)}, 1005.0
    )


def test_its_owner_is_told():
    alice = Identity.from_seed(b"a" * 32)
    owned = sign(alice, key_of("name").digest, PLAIN, encode_value(1), 1001.0)
    assert value_of([owned], NOW_S) == Value(1, 1001.0, alice.peer_id)


def test_none_is_a_value_and_nothing_is_none():
    assert value_of([slot(None, 1001.0)], NOW_S) == Value(None, 1001.0)
    assert value_of([], NOW_S) is None


@pytest.mark.parametrize("subkey", [None, 1])
def test_what_is_over_is_not_read(subkey):
    assert value_of([slot(1, 1000.0, subkey)], NOW_S) is None
    assert value_of([slot(1, float("nan"), subkey)], NOW_S) is None


def test_what_cannot_be_read_is_left_out():
    good = slot("good", 1001.0, 1)
    bad = [
        Slot(encode_subkey(2), b"\xc1", 1002.0),
        Slot(b"\xc1", encode_value(2), 1003.0),
        Slot(encode_value(1.0), encode_value(2), 1003.0),
        Slot(encode_value([1]), encode_value(2), 1003.0),
        Slot(encode_value({}), encode_value(2), 1003.0),
    ]
    assert value_of([bad[0], good, *bad[1:]], NOW_S) == Value({1: Value("good", 1001.0)}, 1001.0)
    assert value_of(bad, NOW_S) is None
    assert value_of([Slot(PLAIN, b"", 1001.0)], NOW_S) is None
    assert value_of([Slot(PLAIN, b"", 1001.0), good], NOW_S) == Value({1: Value("good", 1001.0)}, 1001.0)
