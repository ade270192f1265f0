"""From names to keys.

The last four bytes of a key tell the namespace of its name, what stands before the first dot or slash: a
storing peer can hold everything in a namespace to its schema without knowing names. They are the lowest bits
of a distance, so that records of a namespace are spread over the swarm like any others.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from shoal.core import Key
from shoal.dht.values import encode_value

TAG_BYTES = 4
_SEPARATORS = re.compile(r"[./]")


def key_of(name: Any) -> Key:
    """The key of a record's name: text, bytes, a Key itself, or anything that MessagePack carries."""
    if isinstance(name, Key):
        return name
    raw = name if isinstance(name, (str, bytes)) else encode_value(name)
    key = Key.of(raw)
    if isinstance(name, str):
        return Key(key.digest[:-TAG_BYTES] + tag_of(namespace_of(name)))
    return key


def namespace_of(name: str) -> str:
    """What stands before the first dot or slash; the whole name where there is none."""
    return _SEPARATORS.split(name, maxsplit=1)[0]


def tag_of(namespace: str) -> bytes:
    """What keys of this namespace end in."""
    return hashlib.blake2b(namespace.encode(), digest_size=TAG_BYTES, person=b"shoal namespace").digest()
