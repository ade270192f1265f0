"""Values as bytes and back."""

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core import UsageError
from shoal.dht.records import PLAIN, decode_value, encode_value

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(0, 99), inner, max_size=4)
    ),
    max_leaves=12,
)


def nested(kind, depth):
    value = kind()
    for _ in range(depth):
        value = kind((value,))
    return value


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_what_goes_in_comes_out(value):
    encoded = encode_value(value)
    assert repr(decode_value(encoded)) == repr(value)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0
    assert encoded != PLAIN


@pytest.mark.parametrize("value", [(), ((),), ([(1,)], {"x": (2, [])}), {(1, 2): 3}, {"x": {"y": ()}}])
def test_tuples_stay_tuples(value):
    assert repr(decode_value(encode_value(value))) == repr(value)


def test_subkeys_that_look_alike_differ():
    subkeys = [1, "1", b"1", (1,), [1], 1.0, True, None, ("1",)]
    assert len({encode_value(subkey) for subkey in subkeys}) == len(subkeys)


def test_a_number_that_is_none():
    assert math.isnan(decode_value(encode_value(math.nan)))


@pytest.mark.parametrize(
    "value",
    [object(), 1j, 2**64, [2**64], {"x": object()}, "\ud800", nested(list, 40), nested(tuple, 2_000)],
    ids=["object", "complex", "large", "large inside", "object inside", "surrogate", "deep", "deeper"],
)
def test_what_messagepack_does_not_carry(value):
    with pytest.raises(UsageError, match="cannot be stored in the DHT"):
        encode_value(value)


@pytest.mark.parametrize("kind", [list, tuple])
def test_nesting_that_is_allowed_comes_back(kind):
    value = nested(kind, 30)
    assert decode_value(encode_value(value)) == value


@pytest.mark.parametrize(
    "encoded",
    [b"\x91" * 33 + b"\x01", b"\x91" * 32 + b"\x81" + b"\x91" * 2 + b"\x01\x01", b"\x81\x01" * 40 + b"\x01"],
    ids=["lists", "a name in a dictionary", "dictionaries"],
)
def test_what_is_nested_too_deep_is_not_read(encoded):
    with pytest.raises(ValueError, match="deeper than 32 levels"):
        decode_value(encoded)
    with pytest.raises(ValueError, match="deeper than 32 levels"):
        decode_value(tuple_in_a_tuple(400))


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_can_be_written_can_be_read(kind):
    deepest = nested(kind, 32)
    assert decode_value(encode_value(deepest)) == deepest
    with pytest.raises(UsageError, match="deeper than 32 levels"):
        encode_value(nested(kind, 33))
    with pytest.raises(UsageError, match="deeper than 32 levels"):
        encode_value({nested(tuple, 40): 1})


def tuple_in_a_tuple(depth):
    size_bytes, heads = 1, []
    for _ in range(depth):
        heads.append(b"\x91\xc9" + size_bytes.to_bytes(4) + b"\x01")
        size_bytes += len(heads[-1])
    return b"".join(reversed(heads)) + b"\x90"


@pytest.mark.parametrize(
    "encoded",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xd4\x05\x00",
        b"\xc7\x01\x01\x01",
        b"\x81\x80\x01",
        b"\x81\xc7\x02\x01\x91\x80\x01",
        b"\x91" * 100_000,
        tuple_in_a_tuple(20_000),
    ],
    ids=[
        "nothing",
        "no such code",
        "more than one value",
        "no text",
        "cut short",
        "unknown extension",
        "a tuple that is a number",
        "a dictionary as a key",
        "a dictionary in a tuple as a key",
        "lists without end",
        "tuples without end",
    ],
)
def test_bytes_that_are_no_value(encoded):
    with pytest.raises(ValueError, match=r"."):
        decode_value(encoded)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_a_value_error(encoded):
    with contextlib.suppress(ValueError):
        decode_value(encoded)
