"""TOML that people write: read into structs with refusals that help, and written back.

Every refusal names the key by its path in the document and, for a name that nobody knows, the nearest one
that somebody does.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from shoal.core import UsageError

T = TypeVar("T", bound=msgspec.Struct)

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_PLACE = re.compile(r"^(?P<what>.*) - at `(?:key in )?\$(?P<path>[^`]*)`$", re.DOTALL)
_SOME_KEY = "[...]"  # where msgspec does not say which
_MAX_NAMES = 12
_WORDS = {" | null": "", "object": "table", "Object": "table", "array": "list", "float": "number"}


def read(text: str, kind: type[T], what: str) -> T:
    """The struct that a document describes; UsageError says where it is wrong, `what` names it."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{what} is not TOML: {error}.", next_step="correct the line it names.") from error
    _check(document, inspect.type_info(kind), "", what)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        match = _PLACE.match(str(error))
        reason, path = (match["what"], match["path"].lstrip(".")) if match else (str(error), "")
        if _SOME_KEY in path:
            path = _named(document, kind, path)
        for theirs, ours in _WORDS.items():
            reason = reason.replace(theirs, ours)
        refuse(what, path, reason[:1].lower() + reason[1:])


def _named(document: dict[str, Any], kind: type[msgspec.Struct], path: str) -> str:
    """A path with the key of the table that it leads through: the first that is wrong on its own."""
    name, _, rest = path.partition(_SOME_KEY)
    for key, item in document.get(name, {}).items():
        try:
            msgspec.convert({**document, name: {key: item}}, kind)
        except msgspec.ValidationError:
            return f"{_join(name, key)}{rest}"
    return path


def read_file(path: Path, kind: type[T], what: str) -> T:
    """Read a document from a file, as `read` does from text."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"Cannot read {what} {str(path)!r}: {reason}.") from error
    return read(text, kind, f"{what} {str(path)!r}")


def refuse(what: str, path: str, reason: str) -> NoReturn:
    """Say that a document is wrong, and where."""
    raise UsageError(f"{what} is wrong at {path or 'its top'}: {reason}{'' if reason.endswith('?') else '.'}")


def suggest(name: str, known: Iterable[str]) -> str:
    """For the end of a refusal: the nearest name, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name[:64], names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    listed = ", ".join(map(repr, names[:_MAX_NAMES])) + (", …" if len(names) > _MAX_NAMES else "")
    return f"known are {listed}" if names else "none is known"


def _check(value: Any, kind: inspect.Type, path: str, what: str) -> None:
    """Refuse keys and kinds that nobody knows, and numbers that are none."""
    if isinstance(value, float) and not math.isfinite(value):
        refuse(what, path, f"{value} is no number to work with")
    if isinstance(value, list):
        item_kind = _first(kind, inspect.ListType)
        for index, item in enumerate(value):
            _check(item, item_kind.item_type if item_kind else kind, f"{path}[{index}]", what)
    elif isinstance(value, dict):
        if (mapping := _first(kind, inspect.DictType)) is not None:
            for key, item in value.items():
                _check(item, mapping.value_type, _join(path, key), what)
        elif structs := [each for each in _types(kind) if isinstance(each, inspect.StructType)]:
            _check_struct(value, _choose(value, structs, path, what), path, what)


def _check_struct(value: dict[str, Any], struct: inspect.StructType, path: str, what: str) -> None:
    fields = {field.encode_name: field for field in struct.fields}
    keys = [*([struct.tag_field] if struct.tag_field else []), *fields]
    for key, item in value.items():
        if key not in keys:
            owner = f" of {struct.tag!r}" if struct.tag_field else ""
            refuse(what, path, f"{key!r} is no key{owner}, {suggest(key, keys)}")
        if key in fields:
            _check(item, fields[key].type, _join(path, key), what)


def _choose(
    value: dict[str, Any], structs: list[inspect.StructType], path: str, what: str
) -> inspect.StructType:
    """The struct that the document's tag names."""
    tag_field = structs[0].tag_field
    if tag_field is None:
        return structs[0]
    by_tag = {str(struct.tag): struct for struct in structs}
    tag = value.get(tag_field)
    if tag is None:
        refuse(what, path, f"it needs a {tag_field!r}, one of {', '.join(map(repr, by_tag))}")
    if not isinstance(tag, str) or tag not in by_tag:
        refuse(what, _join(path, tag_field), f"{tag!r} is not known, {suggest(str(tag), by_tag)}")
    return by_tag[tag]


def _types(kind: inspect.Type) -> Collection[inspect.Type]:
    return kind.types if isinstance(kind, inspect.UnionType) else (kind,)


Node = TypeVar("Node", bound=inspect.Type)


def _first(kind: inspect.Type, wanted: type[Node]) -> Node | None:
    return next((each for each in _types(kind) if isinstance(each, wanted)), None)


def _join(path: str, key: str) -> str:
    return f"{path}.{_key(key)}" if path else _key(key)


# --- writing ---


def write(document: msgspec.Struct) -> str:
    """The document as TOML; `read` gives the same struct back."""
    lines: list[str] = []
    _write_table(msgspec.to_builtins(document), "", lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: dict[str, Any], path: str, lines: list[str]) -> None:
    below: list[tuple[str, Any]] = []
    for key, value in table.items():
        if value is None:
            continue
        if _is_section(value):
            below.append((_join(path, key), value))
        else:
            lines.append(f"{_key(key)} = {_value(value)}")
    for below_path, value in below:
        for each in value if isinstance(value, list) else [value]:
            if isinstance(value, list):
                lines += ["", f"[[{below_path}]]"]
            elif not each or not all(map(_is_section, each.values())):
                lines += ["", f"[{below_path}]"]
            _write_table(each, below_path, lines)


def _is_section(value: Any) -> bool:
    """What has a section of its own; a distribution, which says its kind, stands in one line."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, dict) for each in value)
    return isinstance(value, dict) and "kind" not in value


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    pairs = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
    return f"{{ {', '.join(pairs)} }}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace(
        "\x7f", "\\u007f"
    )  # JSON lets DEL stand, TOML does not


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)
