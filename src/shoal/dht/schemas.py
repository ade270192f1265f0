"""What records of a namespace must look like: types that a storing peer holds them to.

A key tells the namespace of its name (`names`), so a peer that has a schema refuses what does not fit without
knowing names; a peer that has none takes it. Types are msgspec's, checked without coercion.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.core import LimitExceeded, UsageError
from shoal.dht.names import TAG_BYTES, namespace_of, tag_of
from shoal.dht.records import PLAIN, Slot, Verdict
from shoal.dht.values import decode_value

MAX_SCHEMAS = 1024
_COERCED = {int: float, list: tuple, tuple: list}  # what msgspec takes for another when it is strict


@dataclass(frozen=True, slots=True)
class Schema:
    """The type of values under names that begin with `prefix`, up to the first dot or slash."""

    prefix: str
    value_type: Any
    subkey_type: Any = None
    """None: only plain values. A type: only dictionaries with such subkeys (`ownership.OwnSubkey` for
    subkeys of their writers' own)."""

    def __post_init__(self) -> None:
        if not self.prefix or namespace_of(self.prefix) != self.prefix:
            raise UsageError(
                f"{self.prefix!r} is no prefix of a schema.",
                cause="a key tells what stands before the first dot or slash of its name, and no more.",
                next_step="give that part alone, for example 'ffn' for ffn.3.14.",
            )
        for kind in (self.value_type, self.subkey_type):
            _check_type(kind)

    def fits(self, subkey: Any, value: Any) -> bool:
        """Whether a decoded subkey (None for a plain value) and value are of these types."""
        if (subkey is None) != (self.subkey_type is None):
            return False
        return _is_of(value, self.value_type) and (subkey is None or _is_of(subkey, self.subkey_type))


class Schemas:
    """The schemas of one peer. Of several with one prefix, one that fits is enough."""

    def __init__(self, schemas: Iterable[Schema] = ()) -> None:
        self._by_tag: dict[bytes, list[Schema]] = {}
        self._num_schemas = 0
        for schema in schemas:
            self.add(schema)

    def __len__(self) -> int:
        return self._num_schemas

    def add(self, schema: Schema) -> None:
        """Hold records to this one too, from now on; what is stored already stays."""
        if self._num_schemas >= MAX_SCHEMAS:
            raise LimitExceeded(
                f"A peer holds records to at most {MAX_SCHEMAS:,} schemas.",
                next_step="give one schema with a union of types instead of many.",
            )
        known = self._by_tag.setdefault(tag_of(schema.prefix), [])
        if schema not in known:
            known.append(schema)
            self._num_schemas += 1

    def check(self, key: bytes, slot: Slot) -> Verdict | None:
        """None when the slot fits or nothing is asked of its namespace, else BAD_VALUE."""
        if not self._by_tag:
            return None
        schemas = self._by_tag.get(key[-TAG_BYTES:])
        if schemas is None:
            return None
        try:
            subkey = None if slot.subkey == PLAIN else decode_value(slot.subkey)
            value = decode_value(slot.value)
        except ValueError:
            return Verdict.BAD_VALUE
        if slot.subkey != PLAIN and subkey is None:
            return Verdict.BAD_VALUE
        return None if any(schema.fits(subkey, value) for schema in schemas) else Verdict.BAD_VALUE


def _is_of(value: Any, kind: Any) -> bool:
    try:
        made = msgspec.convert(value, kind, builtin_types=(bytes,))
        return _is_same(value, msgspec.to_builtins(made, builtin_types=(bytes,)))
    except (msgspec.ValidationError, RecursionError):
        return False


def _is_same(given: Any, made: Any) -> bool:
    if _COERCED.get(type(given)) is type(made):
        return False
    if isinstance(given, dict) and isinstance(made, dict):
        return all(_is_same(value, made[name]) for name, value in given.items() if name in made)
    if isinstance(given, (list, tuple)) and isinstance(made, (list, tuple)):
        return all(_is_same(*pair) for pair in zip(given, made, strict=False))
    return True


def _check_type(kind: Any) -> None:
    try:
        is_known = kind is None or not isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)
    except (TypeError, NotImplementedError) as error:
        raise _no_type(kind, str(error)) from error
    if not is_known:
        raise _no_type(kind, "msgspec does not know it.")


def _no_type(kind: Any, cause: str) -> UsageError:
    return UsageError(
        f"{kind!r} is no type that a schema can check.",
        cause=cause,
        next_step="use msgspec.Struct, int, float, str, bytes, lists, tuples and dicts of them.",
    )
