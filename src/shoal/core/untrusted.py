"""Text and data that somebody else wrote: shown so that it steers no terminal, decoded with one error."""

from __future__ import annotations

import unicodedata
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MAX_DEPTH = 100
"""How deeply plain data may be nested. A report uses five levels; code that walks data may call itself."""
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode's categories of what steers a terminal or cannot be seen: control characters, formatting (also text
that runs from right to left, zero-width characters, tags), halves of characters, separators of lines."""


def visible(text: str, *, keeps: str = "\n\t") -> str:
    r"""The text with every character that cannot be seen written out, as `\u001b`; those in `keeps` stay.

    What is written out is what JSON writes, so JSON stays the same document.
    """
    if text.isprintable():
        return text
    return "".join(
        _written_out(character)
        if unicodedata.category(character) in _HIDDEN and character not in keeps
        else character
        for character in text
    )


def visible_line(text: str) -> str:
    """The same without exceptions: a name with a line break in it cannot pretend to be two lines."""
    return visible(text, keeps="")


def _written_out(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[start : start + 4]}" for start in range(0, len(units), 4))


def decode_json(raw: bytes | str, kind: type[T] | Any = Any) -> Any:
    """Decode JSON as `kind`. Raises msgspec.DecodeError for anything that is none, however it is broken."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error
    except UnicodeError as error:
        raise msgspec.DecodeError("it is not UTF-8 text") from error


def depth_exceeds(data: object, limit: int = MAX_DEPTH) -> bool:
    """Whether lists and dictionaries are nested more than `limit` levels deep."""
    level: list[object] = [data]
    for _ in range(limit + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list | tuple)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
