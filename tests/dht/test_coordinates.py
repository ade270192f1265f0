import random

import pytest

from shoal.dht.records import PLAIN, Slot, encode_subkey
from shoal.dht.wire import BEFORE_ALL, PAGE_BYTES, coordinates_of, pack_page, unpack_page


def slot(subkey):
    return Slot(PLAIN if subkey is None else encode_subkey(subkey), b"\x01", 1.0)


def paged(coordinates, max_bytes=PAGE_BYTES):
    """All of them, page by page, and how many pages it took."""
    found, after, num_pages = [], BEFORE_ALL, 0
    while True:
        packed, has_more = pack_page(coordinates, after, max_bytes)
        assert len(packed) <= max_bytes
        page = unpack_page(packed, after)
        found += page
        num_pages += 1
        if not has_more:
            return found, num_pages
        assert page
        after = page[-1]


def test_only_numbers_are_coordinates():
    slots = map(slot, [7, "7", -1, None, b"\x07", (7,), 0, -2, 2**64 - 1, 3])
    assert coordinates_of(slots) == [-1, 0, 3, 7, 2**64 - 1]


def test_numbers_of_every_size_are_coordinates():
    ends = [end for bits in (7, 8, 16, 32) for end in (2**bits - 1, 2**bits)]
    others = ["a", "ab", "abcd", "x" * 8, b"", b"6chars", (), (1,), -128, -200, -(2**31), -(2**63)]
    assert coordinates_of(map(slot, [*others, *reversed(ends)])) == ends


def test_a_grid_takes_a_byte_each():
    packed, has_more = pack_page(range(256), BEFORE_ALL)
    assert len(packed) == 256
    assert not has_more
    assert unpack_page(packed, BEFORE_ALL) == list(range(256))


@pytest.mark.parametrize(
    "coordinates", [[], [-1], [0], [-1, 0, 1], [2**64 - 1], [-1, 2**64 - 1], [126, 127, 255]]
)
def test_ends_of_the_range_due_for_retry(coordinates):
    assert paged(coordinates) == (coordinates, 1)


@pytest.mark.parametrize("max_bytes", [10, 11, 64, PAGE_BYTES])
def test_random_ones_due_for_retry_page_by_page(max_bytes):
    chance = random.Random(max_bytes)
    for _ in range(20):
        largest = 1 << chance.randrange(1, 64)
        given = sorted({chance.randrange(-1, largest) for _ in range(chance.randrange(300))})
        found, num_pages = paged(given, max_bytes)
        assert found == given
        assert num_pages <= 1 + 10 * len(given) // (max_bytes - 9)


def test_a_page_begins_beyond_the_one_before():
    assert unpack_page(pack_page([3, 5, 9], 5)[0], 5) == [9]
    assert pack_page([3, 5, 9], 9) == (b"", False)


@pytest.mark.parametrize(
    ("packed", "why"),
    [
        (b"\x00", "twice"),
        (b"\x01\x00\x01", "twice"),
        (b"\x80", "cut off"),
        (b"\x05\xff", "cut off"),
        (b"\xff" * 11, "too large"),
        (b"\x80" * 10 + b"\x01", "too large"),
    ],
)
def test_nonsense_is_told_from_a_page(packed, why):
    with pytest.raises(ValueError, match=why):
        unpack_page(packed, BEFORE_ALL)


def test_random_bytes_are_pages_or_told_from_them():
    chance = random.Random(0)
    num_pages = 0
    for _ in range(2000):
        packed = chance.randbytes(chance.randrange(30))
        try:
            page = unpack_page(packed, BEFORE_ALL)
        except ValueError:
            continue
        num_pages += 1
        assert page == sorted(set(page))
        assert all(-1 <= coordinate < 2**71 * len(packed) for coordinate in page)
    assert num_pages > 100
