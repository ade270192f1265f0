"""Between Python's values and their bytes: MessagePack, in which tuples stay tuples."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from shoal.core import UsageError

_TUPLE = 1  # the code of MessagePack's extension that marks one
_MAX_DEPTH = 32
_TOO_DEEP = f"it is nested deeper than {_MAX_DEPTH} levels"
_SIMPLE = (str, bytes, int, float, bool, type(None))
_NESTING = (list, tuple, dict)
_encoder = msgspec.msgpack.Encoder()


def encode_value(value: Any) -> bytes:
    """A name, subkey or value as bytes; UsageError for what MessagePack does not carry."""
    try:
        return _encoder.encode(value if type(value) in _SIMPLE else _marked(value, 0))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"A {type(value).__name__} cannot be stored in the DHT: {error}",
            cause="names, subkeys and values are what MessagePack carries.",
            next_step="store numbers, text, bytes, and lists, tuples and dicts of them.",
        ) from error


def decode_value(encoded: bytes) -> Any:
    """The value again; ValueError when the bytes are none that `encode_value` makes."""
    try:
        value = _decoder.decode(encoded)
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if type(value) in _NESTING:
        _check_depth(value, 0)
    return value


def _check_depth(value: Any, depth: int) -> None:
    """Of a list, tuple or dict, as `_marked` does it."""
    if value and depth >= _MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    parts = itertools.chain(value, value.values()) if isinstance(value, dict) else value
    for part in parts:
        if type(part) in _NESTING:
            _check_depth(part, depth + 1)


def _marked(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    if isinstance(value, tuple):
        return msgspec.msgpack.Ext(_TUPLE, _encoder.encode([_marked(item, depth + 1) for item in value]))
    if isinstance(value, list):
        return [_marked(item, depth + 1) for item in value]
    if isinstance(value, dict):
        for name in value:
            if isinstance(name, tuple):
                _check_depth(name, depth + 1)
        return {name: _marked(item, depth + 1) for name, item in value.items()}
    if isinstance(value, (set, frozenset)):
        raise TypeError("a set has no order, so its bytes would differ from peer to peer")
    return value


def _unmarked(code: int, data: memoryview) -> Any:
    if code != _TUPLE:
        raise ValueError(f"an extension of MessagePack that is not known, {code}")
    items = _decoder.decode(data)
    if not isinstance(items, list):
        raise ValueError("a tuple that is none")
    return tuple(items)


_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ext_hook=_unmarked)
