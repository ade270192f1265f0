import random

import pytest

from shoal.dht.records import PLAIN, Slot, encode_subkey
from shoal.dht.wire import coordinates_of, pack_coordinates, unpack_coordinates


def slot(subkey):
    return Slot(PLAIN if subkey is None else encode_subkey(subkey), b"\x01", 1.0)


def test_only_numbers_are_coordinates():
    slots = map(slot, [7, "7", -1, None, b"\x07", (7,), 0, -2, 2**63 - 1, 2**63, 2**64 - 1, 3])
    assert coordinates_of(slots) == [-1, 0, 3, 7, 2**63 - 1]


def test_numbers_of_every_size_are_coordinates():
    ends = [end for bits in (7, 8, 16, 32) for end in (2**bits - 1, 2**bits)]
    others = ["a", "ab", "abcd", "x" * 8, b"", b"6chars", (), (1,), -128, -200, -(2**31), -(2**63)]
    assert coordinates_of(map(slot, [*others, *reversed(ends)])) == ends


def test_a_grid_takes_a_byte_each():
    packed = pack_coordinates(range(256))
    assert len(packed) <= 256 + 3
    assert unpack_coordinates(packed) == list(range(256))


@pytest.mark.parametrize(
    "coordinates", [[], [-1], [0], [-1, 0, 1], [2**63 - 1], [-1, 2**63 - 1], [126, 127, 255]]
)
def test_ends_of_the_range_come_back(coordinates):
    assert unpack_coordinates(pack_coordinates(coordinates)) == coordinates


def test_random_ones_come_back():
    chance = random.Random(1)
    for _ in range(80):
        largest = 1 << chance.randrange(1, 64)
        given = sorted({chance.randrange(-1, largest) for _ in range(chance.randrange(300))})
        assert unpack_coordinates(pack_coordinates(given)) == given


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"\x91\x00", ">= 1"),
        (b"\x92\x01\x00", ">= 1"),
        (b"\x91\xff", ">= 1"),
        (b"\x91\xcb" + bytes(8), "int"),
        (b"\x92\x05", "truncated"),
        (b"\x91\x05\x05", "trailing"),
        (b"\x80", "array"),
        (bytes(300_000), "more coordinates"),
    ],
)
def test_nonsense_is_told_from_coordinates(packed, why):
    with pytest.raises(ValueError, match=why):
        unpack_coordinates(packed)


def test_random_bytes_are_coordinates_or_told_from_them():
    chance = random.Random(0)
    num_read = 0
    for _ in range(2000):
        size = chance.randrange(15)
        packed = bytes((0x90 | size,)) + bytes(chance.randrange(140) for _ in range(size))
        try:
            found = unpack_coordinates(packed)
        except ValueError:
            continue
        num_read += 1
        assert found == sorted(set(found))
        assert all(-1 <= coordinate < 2**7 * len(packed) for coordinate in found)
    assert num_read > 100
