"""Trees of hashes (Merkle 1987): one signature, over the root, for many messages.

A message's way to the root is its index and the hashes beside it, from the leaf up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

MAX_LEAVES = 64
HASH_BYTES = 16
_DEPTH = MAX_LEAVES.bit_length() - 1
MAX_WAY_BYTES = 1 + _DEPTH * HASH_BYTES
_LEAF, _FORK = b"shoal leaf", b"shoal fork"


def grow(messages: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
    """The root over up to MAX_LEAVES messages, and each one's way to it."""
    assert 1 < len(messages) <= MAX_LEAVES
    level = [_hash(message, _LEAF) for message in messages]
    ways = [bytearray((index,)) for index in range(len(messages))]
    depth = 0
    while len(level) > 1:
        if len(level) % 2:
            level.append(level[-1])
        for index, way in enumerate(ways):
            way.extend(level[index >> depth ^ 1])
        level = [_hash(level[at] + level[at + 1], _FORK) for at in range(0, len(level), 2)]
        depth += 1
    return level[0], [bytes(way) for way in ways]


def climb(message: bytes, way: bytes) -> bytes | None:
    """The root that a message's way leads to; None when it is no way."""
    depth, rest = divmod(len(way) - 1, HASH_BYTES)
    if rest or not 0 < depth <= _DEPTH or way[0] >> depth:
        return None
    here, index = _hash(message, _LEAF), way[0]
    for start in range(1, len(way), HASH_BYTES):
        beside = way[start : start + HASH_BYTES]
        here = _hash(beside + here if index & 1 else here + beside, _FORK)
        index >>= 1
    return here


def _hash(content: bytes, kind: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=kind).digest()
