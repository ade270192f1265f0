"""What a slot of a dictionary is called: integers, text, bytes, and tuples of them.

Two subkeys are equal to a reader exactly when their bytes are equal to a storing peer: else 1.0 or another
encoding of 1 would be kept beside an owned 1, and take its place in the reader's dictionary.
"""

from __future__ import annotations

import functools
from typing import Any

from shoal.core import UsageError
from shoal.dht.values import decode_value, encode_value

MAX_SUBKEY_BYTES = 1024
"""Encoded."""
_MAX_REMEMBERED_BYTES = 128
_SIMPLE = (int, str, bytes)


def encode_subkey(subkey: Any) -> bytes:
    """A subkey as bytes; UsageError when it cannot be one."""
    encoded = encode_value(subkey)  # first: it bounds the depth
    if not _is_subkey(subkey):
        raise UsageError(
            f"{subkey!r} cannot be a subkey.",
            cause="subkeys are integers, text, bytes, and tuples of these and None.",
        )
    if len(encoded) > MAX_SUBKEY_BYTES:
        raise UsageError(
            f"A subkey of {len(encoded)} bytes is too long.",
            cause=f"peers take subkeys of up to {MAX_SUBKEY_BYTES} bytes.",
            next_step="use a hash of it, and store what it stands for in the value.",
        )
    return encoded


def decode_subkey(encoded: bytes) -> Any:
    """The subkey again; ValueError when the bytes are none that `encode_subkey` makes."""
    if len(encoded) <= _MAX_REMEMBERED_BYTES:
        return _remembered(encoded)
    if len(encoded) > MAX_SUBKEY_BYTES:
        raise ValueError(f"no subkey: {len(encoded)} bytes, of at most {MAX_SUBKEY_BYTES}")
    return _decoded(encoded)


@functools.lru_cache(maxsize=8192)
def _remembered(encoded: bytes) -> Any:
    return _decoded(encoded)


def _decoded(encoded: bytes) -> Any:
    subkey = decode_value(encoded)
    if encode_value(subkey) != encoded or not _is_subkey(subkey):
        raise ValueError("no subkey, or one that is encoded in another way than others encode it")
    return subkey


def _is_subkey(subkey: Any) -> bool:
    if type(subkey) in _SIMPLE:
        return True
    return isinstance(subkey, tuple) and all(part is None or _is_subkey(part) for part in subkey)
