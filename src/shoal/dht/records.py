"""What is stored: slots under keys, each with an expiration; their names, their encoding, and which one wins.

A name is hashed into a key. A key holds either one plain value or a dictionary of subkeys, each of them one
`Slot`. Names, subkeys and values are MessagePack in which tuples stay tuples. When two slots want the same
place, the later one stays, and what is owned yields to its owner only (`judge`, `merge`): storage, cache and
reads of several replicas all decide here. Nothing here knows time, room, or who holds a record; signatures
are for `validation` to check.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from shoal.core import Key, PeerId, UsageError
from shoal.core.ids import ID_BYTES

PLAIN = b""
"""The subkey of a plain value; no encoded subkey is empty."""


class Slot(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One value under a key, as it travels and as it is kept."""

    subkey: bytes
    """Encoded; PLAIN for a value without one."""
    value: bytes
    """Encoded."""
    expires_at_s: float
    """On the wall clock, seconds since 1970."""
    owner: bytes = b""
    """The raw Ed25519 public key of who alone may replace it, or nothing."""
    signature: bytes = b""
    """The owner's, over key, subkey, value and expiration."""


class Verdict(enum.IntEnum):
    """What a peer made of a slot that it was asked to store."""

    STORED = 0
    NOT_NEWER = 1
    """What is there expires at the same time or later."""
    EXPIRED = 2
    TOO_LONG = 3
    """It would live longer than records may."""
    TOO_LARGE = 4
    FULL = 5
    """There is no room, and what is kept is nearer."""
    NOT_OWNER = 6
    """What is there, or the subkey itself, belongs to somebody else."""
    BAD_SIGNATURE = 7
    BAD_VALUE = 8
    """It does not fit the schema of its prefix, or is no MessagePack."""
    NOT_ASKED = 9
    """Nobody answered: of no peer's making."""


class Value(NamedTuple):
    """What a look-up found: a value and when it expires.

    Of a dictionary the value is `{subkey: Value}`, and its expiration the latest of them.
    """

    value: Any
    expires_at_s: float
    owner: Any = None
    """The PeerId that signed it, checked; None where nobody did."""


class Entry(msgspec.Struct, frozen=True):
    """One value to be stored, as a program gives it."""

    name: Any
    value: Any
    expires_at_s: float
    subkey: Any = None
    is_owned: bool = False
    """Signed with this peer's key: nobody else can replace it."""


class Stored(msgspec.Struct, frozen=True):
    """What became of one entry; true when at least one peer holds it now."""

    num_stored: int
    """Peers that took it."""
    verdict: Verdict
    """STORED, or why the first peer that refused did so."""

    def __bool__(self) -> bool:
        return self.num_stored > 0


# --- names and keys ---

NAMESPACE_BYTES = 4
_SEPARATORS = re.compile(r"[./]")


def key_of(name: Any) -> Key:
    """The key of a record's name: text, bytes, a Key itself, or anything that MessagePack carries.

    The last four bytes of a text's key tell its namespace, what stands before the first dot or slash: a
    storing peer can hold everything in a namespace to its schema without knowing names. They are the lowest
    bits of a distance, so that records of a namespace are spread over the swarm like any others.
    """
    if isinstance(name, Key):
        return name
    key = Key.of(name if isinstance(name, (str, bytes)) else encode_value(name))
    if isinstance(name, str):
        return Key(key.digest[:-NAMESPACE_BYTES] + namespace_tag(namespace_of(name)))
    return key


def namespace_of(name: str) -> str:
    """What stands before the first dot or slash; the whole name where there is none."""
    return _SEPARATORS.split(name, maxsplit=1)[0]


def namespace_tag(namespace: str) -> bytes:
    """What keys of this namespace end in."""
    person = b"shoal namespace"
    return hashlib.blake2b(namespace.encode(), digest_size=NAMESPACE_BYTES, person=person).digest()


# --- values ---

_TUPLE = 1  # the code of MessagePack's extension that marks one
_MAX_DEPTH = 32
_TOO_DEEP = f"it is nested deeper than {_MAX_DEPTH} levels"
_SIMPLE_VALUES = (str, bytes, int, float, bool, type(None))
_NESTING = (list, tuple, dict)
_encoder = msgspec.msgpack.Encoder()


def encode_value(value: Any) -> bytes:
    """A name, subkey or value as bytes; UsageError for what MessagePack does not carry."""
    try:
        return _encoder.encode(value if type(value) in _SIMPLE_VALUES else _marked(value, 0))
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
    if value and depth >= _MAX_DEPTH:
        raise ValueError(_TOO_DEEP)
    parts = itertools.chain(value, value.values()) if isinstance(value, dict) else value
    for part in parts:
        if type(part) in _NESTING:
            _check_depth(part, depth + 1)


def _marked(value: Any, depth: int) -> Any:
    """The value with its tuples as extensions; ValueError when it is nested too deeply."""
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


# --- subkeys: integers, text, bytes, and tuples of them ---
#
# Two subkeys are equal to a reader exactly when their bytes are equal to a storing peer: else 1.0 or another
# encoding of 1 would be kept beside an owned 1, and take its place in the reader's dictionary.

MAX_SUBKEY_BYTES = 1024
"""The longest encoded subkey that peers take."""
_MAX_REMEMBERED_BYTES = 128
_SIMPLE_SUBKEYS = (int, str, bytes)


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
        return _remembered_subkey(encoded)
    if len(encoded) > MAX_SUBKEY_BYTES:
        raise ValueError(f"no subkey: {len(encoded)} bytes, of at most {MAX_SUBKEY_BYTES}")
    return _decoded_subkey(encoded)


def _decoded_subkey(encoded: bytes) -> Any:
    subkey = decode_value(encoded)
    if encode_value(subkey) != encoded or not _is_subkey(subkey):
        raise ValueError("no subkey, or one that is encoded in another way than others encode it")
    return subkey


_remembered_subkey = functools.lru_cache(maxsize=8192)(_decoded_subkey)


def _is_subkey(subkey: Any) -> bool:
    if type(subkey) in _SIMPLE_SUBKEYS:
        return True
    return isinstance(subkey, tuple) and all(part is None or _is_subkey(part) for part in subkey)


# --- owners ---

OWNER_MARK: Literal["shoal.owner"] = "shoal.owner"
"""What a reserved subkey begins with."""
_MARK_BYTES = OWNER_MARK.encode()

OwnSubkey = tuple[
    Literal["shoal.owner"],
    Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)],
    str | int | None,
]
"""A reserved subkey; as a schema's `subkey_type` it admits only those."""


def reserved(peer_id: PeerId, label: str | int | None = None) -> OwnSubkey:
    """A subkey that only this peer may write, in any dictionary."""
    return (OWNER_MARK, peer_id.digest, label)


def holder_of(subkey: Any) -> PeerId | None:
    """The peer that a reserved subkey belongs to; None for any other subkey."""
    match subkey:
        case (str(mark), bytes(digest), str() | int() | None) if (
            mark == OWNER_MARK and len(digest) == ID_BYTES
        ):
            return PeerId(digest)
    return None


def owner_id(slot: Slot) -> PeerId | None:
    """Who has signed it, if `validation` finds nothing wrong; None where nobody claims to."""
    return PeerId.of_public_key(slot.owner) if slot.owner else None


def is_reserved(slot: Slot) -> bool:
    """Whether it is under a subkey that is its owner's alone, if its signature is good."""
    if not slot.owner or _MARK_BYTES not in slot.subkey:
        return False
    try:
        return holder_of(decode_subkey(slot.subkey)) is not None
    except ValueError:
        return False


# --- which of two slots stays ---
#
# A slot takes the place of the one under the same subkey; a plain value takes the place of a whole
# dictionary, and a subkey that of a plain value. Reserved subkeys show by themselves that they belong where
# they are, so that no plain value takes their place or keeps them out, unless another peer owns it.

Contents = Slot | dict[bytes, Slot]
"""What one key holds: a slot that is alone, or several by subkey. An only slot may be of either kind."""


def displaced(contents: Contents | None, slot: Slot) -> list[Slot]:
    """The slots whose place it would take."""
    if contents is None:
        return []
    subkey = slot.subkey
    if isinstance(contents, dict):
        if subkey == PLAIN:
            return list(contents.values())
        held = contents.get(subkey)
        return [] if held is None else [held]
    is_same_place = subkey in (contents.subkey, PLAIN) or contents.subkey == PLAIN
    return [contents] if is_same_place else []


def judge(held: Sequence[Slot], slot: Slot) -> Verdict:
    """Whether it may take the place of live slots: as the latest, and the only owner of those owned.

    A reserved subkey need not be later than a plain value, which never takes a reserved one's place.
    """
    for other in held:
        if other.owner and other.owner != slot.owner:
            return Verdict.NOT_OWNER
    if slot.subkey == PLAIN and any(map(is_reserved, held)):
        return Verdict.NOT_OWNER
    for other in held:
        if other.expires_at_s >= slot.expires_at_s and not (other.subkey == PLAIN and is_reserved(slot)):
            return Verdict.NOT_NEWER
    return Verdict.STORED


def place(contents: Contents | None, slot: Slot) -> Contents:
    """What the key holds once the slot is there; a dictionary is changed in place."""
    subkey = slot.subkey
    if contents is None or subkey == PLAIN:
        return slot
    if isinstance(contents, dict):
        contents[subkey] = slot
        return contents
    if contents.subkey in (subkey, PLAIN):
        return slot
    return {contents.subkey: contents, subkey: slot}


def slots_of(contents: Contents | None) -> list[Slot]:
    """All slots of a key."""
    if contents is None:
        return []
    return list(contents.values()) if isinstance(contents, dict) else [contents]


def merge(replicas: Iterable[Iterable[Slot]], now_s: float) -> list[Slot]:
    """One view of what several peers hold of a key; among equals the first one told stays.

    A replica that lies cannot hide what is owned behind a later value of its own, nor a dictionary with
    reserved subkeys behind any plain value. Otherwise a plain value and a dictionary are told apart by how
    many replicas tell each.
    """
    told = [[slot for slot in slots if slot.expires_at_s > now_s] for slots in replicas]
    is_plain = _is_plain(told)
    best: dict[bytes, Slot] = {}
    live = [slot for slots in told for slot in slots if (slot.subkey == PLAIN) is is_plain]
    for slot in sorted(live, key=lambda slot: (not slot.owner, -slot.expires_at_s)):
        best.setdefault(slot.subkey, slot)
    return list(best.values())


def _is_plain(told: Sequence[Sequence[Slot]]) -> bool:
    """Whether a plain value stands against a dictionary: what is reserved, more often told, owned, later."""
    plain = [slot for slots in told for slot in slots if slot.subkey == PLAIN]
    others = [slot for slots in told for slot in slots if slot.subkey != PLAIN]
    if not plain or not others:
        return bool(plain)
    if any(map(is_reserved, others)):
        return False
    num_plain = sum(all(slot.subkey == PLAIN for slot in slots) for slots in told if slots)
    num_others = sum(all(slot.subkey != PLAIN for slot in slots) for slots in told if slots)
    return _weight(num_plain, plain) > _weight(num_others, others)


def _weight(num_replicas: int, slots: Sequence[Slot]) -> tuple[int, bool, float]:
    latest_s = max(slot.expires_at_s for slot in slots)
    return num_replicas, any(slot.owner for slot in slots), latest_s


def value_of(slots: Sequence[Slot], wall_s: float) -> Value | None:
    """The value, or dictionary of values, that live slots make; None when there is none that can be read."""
    found: dict[Any, Value] = {}
    for slot in slots:
        if not slot.expires_at_s > wall_s:  # NaN is over too
            continue
        try:
            value = Value(decode_value(slot.value), slot.expires_at_s, owner_id(slot))
            if slot.subkey == PLAIN:
                return value
            found[decode_subkey(slot.subkey)] = value
        except ValueError:  # some peer's nonsense
            continue
    return Value(found, max(value.expires_at_s for value in found.values())) if found else None
