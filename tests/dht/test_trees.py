import random

import pytest

from shoal.dht.records import HASH_BYTES, MAX_LEAVES, MAX_PATH_BYTES, hash_tree, root_of


def messages_of(num):
    return [f"message {index}".encode() for index in range(num)]


@pytest.mark.parametrize("num", [2, 3, 4, 5, 7, 8, 9, 31, 33, 63, MAX_LEAVES])
def test_every_way_leads_to_the_root(num):
    messages = messages_of(num)
    root, ways = hash_tree(messages)
    assert len(root) == HASH_BYTES
    assert len(ways) == num
    assert [root_of(message, way) for message, way in zip(messages, ways, strict=True)] == [root] * num
    depth = (num - 1).bit_length()
    assert [len(way) for way in ways] == [1 + depth * HASH_BYTES] * num
    assert [way[0] for way in ways] == list(range(num))
    assert len(ways[0]) <= MAX_PATH_BYTES


def test_another_message_order_or_number_of_them_is_another_root():
    messages = messages_of(8)
    roots = [
        hash_tree(messages)[0],
        hash_tree(messages[::-1])[0],
        hash_tree(messages[:7])[0],
        hash_tree([*messages[:7], b"else"])[0],
        hash_tree([b"".join(messages[:2]), *messages[2:]])[0],
    ]
    assert len(dict.fromkeys(roots)) == len(roots)


def test_a_way_is_one_messages_alone():
    messages = messages_of(21)
    root, ways = hash_tree(messages)
    for at, way in enumerate(ways):
        for other, message in enumerate(messages):
            assert (root_of(message, way) == root) == (at == other)


def test_an_odd_end_stands_for_itself_only():
    """Its last leaf is hashed with itself: the doubled one must not count as a further message."""
    messages = messages_of(3)
    root, ways = hash_tree(messages)
    assert root_of(messages[2], bytes((3,)) + ways[2][1:]) == root  # the same message, at most twice
    assert root_of(messages[1], bytes((3,)) + ways[2][1:]) != root


def test_a_fork_is_no_leaf():
    """A hash inside the tree cannot be passed off as a message (second preimage)."""
    messages = messages_of(4)
    root, ways = hash_tree(messages)
    for at in range(4):
        beside = ways[at ^ 1][1 : 1 + HASH_BYTES], ways[at][1 : 1 + HASH_BYTES]
        for inner in (beside[0] + beside[1], beside[1] + beside[0]):
            for index in (0, 1):
                assert root_of(inner, bytes((index,)) + ways[at][1 + HASH_BYTES :]) != root


@pytest.mark.parametrize(
    "way",
    [
        b"",
        b"\x00",
        b"\x00" * HASH_BYTES,
        b"\x00" * (2 + HASH_BYTES),
        b"\x02" + bytes(HASH_BYTES),
        b"\xff" + bytes(6 * HASH_BYTES),
        b"\x00" + bytes(7 * HASH_BYTES),
        bytes(1 + 1000 * HASH_BYTES),
    ],
    ids=len,
)
def test_what_is_no_way_leads_nowhere(way):
    assert root_of(b"message", way) is None


def test_random_bytes_never_lead_to_the_root():
    chance = random.Random(0)
    root, ways = hash_tree(messages_of(40))
    for _ in range(500):
        assert root_of(b"message 3", chance.randbytes(chance.randrange(120))) != root
        way = bytearray(ways[3])
        way[chance.randrange(len(way))] ^= 1 << chance.randrange(8)
        assert root_of(b"message 3", bytes(way)) != root
