import random

import msgspec
import pytest

from shoal.core import UsageError
from shoal.dht import records
from shoal.dht.records import MAX_SUBKEY_BYTES, decode_subkey, encode_subkey, encode_value

GOOD = [0, 1, -1, 2**64 - 1, "", "alice", b"", b"\x00" * 20, (), (1, "a"), ("a", None, (b"b", -3))]
BAD = [None, True, 1.0, 0.5, float("nan"), [1], {}, {"a": 1}, (1.0,), (True,), ((1, [2]),)]


@pytest.mark.parametrize("subkey", GOOD, ids=repr)
def test_there_and_back(subkey):
    again = decode_subkey(encode_subkey(subkey))
    assert again == subkey
    assert type(again) is type(subkey)
    assert hash(again) == hash(subkey)


def test_subkeys_are_short():
    longest = bytes(MAX_SUBKEY_BYTES - 3)
    assert decode_subkey(encode_subkey(longest)) == longest
    with pytest.raises(UsageError, match="too long"):
        encode_subkey(longest + b"1")
    with pytest.raises(ValueError, match="no subkey"):
        decode_subkey(encode_value(longest + b"1"))


def test_long_ones_of_strangers_are_not_remembered():
    before = records._remembered_subkey.cache_info().currsize
    for number in range(5):
        decode_subkey(encode_subkey("x" * 500 + str(number)))
        with pytest.raises(ValueError, match="no subkey"):
            decode_subkey(encode_value("x" * 5_000 + str(number)))
    assert records._remembered_subkey.cache_info().currsize == before


@pytest.mark.parametrize("subkey", BAD, ids=repr)
def test_what_readers_could_take_for_another_is_none(subkey):
    with pytest.raises(UsageError, match="cannot be a subkey"):
        encode_subkey(subkey)
    with pytest.raises(ValueError, match="no subkey"):
        decode_subkey(encode_value(subkey))


def tuple_of(code, content):
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, content))


@pytest.mark.parametrize(
    "encoded",
    [
        b"\xcc\x01",  # 1 in two bytes
        b"\xd3" + bytes(7) + b"\x01",  # and in nine
        b"\xd9\x01a",  # text with a longer header
        b"\xc5\x00\x01a",
        tuple_of(1, b"\x92\x01\xcc\x02"),  # inside of a tuple
        tuple_of(1, b"\xdc\x00\x01\x01"),
        b"\xc8\x00\x02\x01\x91\x01",  # the tuple's own header
    ],
)
def test_every_subkey_has_one_encoding(encoded):
    with pytest.raises(ValueError, match="another way"):
        decode_subkey(encoded)


@pytest.mark.parametrize("encoded", [b"", b"\xa5al", b"\x01\x01", tuple_of(9, b"\x90"), tuple_of(1, b"\x01")])
def test_damaged_bytes_are_a_value_error(encoded):
    with pytest.raises(ValueError, match=r"."):
        decode_subkey(encoded)


def test_deep_nesting_is_a_value_error():
    encoded = b"\x90"
    for _ in range(400):
        encoded = b"\x91" + tuple_of(1, encoded)
    with pytest.raises(ValueError, match=r"."):
        decode_subkey(tuple_of(1, encoded))


def test_any_bytes_are_a_subkey_with_these_bytes_or_a_value_error():
    chance = random.Random(0)
    num_good = 0
    for _ in range(3000):
        encoded = bytearray(encode_subkey(chance.choice(GOOD)))
        encoded[chance.randrange(len(encoded))] = chance.randrange(256)
        try:
            subkey = decode_subkey(bytes(encoded))
        except ValueError:
            continue
        num_good += 1
        assert encode_subkey(subkey) == encoded
    assert num_good > 100
