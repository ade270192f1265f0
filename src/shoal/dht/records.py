"""What a record is, who may write it, and which one wins; nothing here knows room, or who holds a record.

A name is hashed into a key. A key holds either one plain value or a dictionary of subkeys, each of them one
`Slot` with an expiration. Names, subkeys and values are MessagePack in which tuples stay tuples. When two
slots want the same place, the later one stays, and what is owned yields to its owner only (`judge`, `merge`):
storage, cache and reads of several replicas all decide here.

What is believed and stored passes `Validator.check` first, but for coordinates of experts and marks of
absence, which nobody signs: may its owner write there (`_check_owner`), and
has it signed this (`_is_signed`). A slot that carries its owner's public key is signed over everything that
it says and where it says it. That alone keeps others from replacing it while it lives, not from being there
first. Reserved places are nobody else's at any time, and a storing peer knows them from the bytes it is
given:

- a reserved subkey is a tuple that names the peer id, so that everybody has a subkey of their own in one
  dictionary (`reserved`);
- a reserved key has the peer id inside: 6 bytes of a hash of its label, the first 10 of the id, and a
  tag that no name's namespace has (`reserved_key`). Every slot below it is that peer's.

A schema says what records of a namespace must look like. A key tells the namespace of its name, so a peer
that has a schema refuses what does not fit without knowing names; a peer that has none takes it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
import re
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shoal.core import Key, LimitExceeded, PeerId, UsageError
from shoal.core.identity import Identity
from shoal.core.ids import ID_BYTES
from shoal.dht.settings import DHTSettings

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


# --- owners: whose a subkey or a key is, and whether a slot may stand there ---

OWNER_MARK: Literal["shoal.owner"] = "shoal.owner"
"""What a reserved subkey begins with."""
_MARK_BYTES = OWNER_MARK.encode()

OwnSubkey = tuple[
    Literal["shoal.owner"],
    Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)],
    str | int | None,
]
"""A reserved subkey; as a schema's `subkey_type` it admits only those."""
_OWN_KEY_TAG = namespace_tag(OWNER_MARK)  # of no name: namespaces end before a dot
_LABEL_BYTES = 6
_OWNER_BYTES = ID_BYTES - NAMESPACE_BYTES - _LABEL_BYTES
_OWNER_AT = slice(_LABEL_BYTES, ID_BYTES - NAMESPACE_BYTES)


def reserved(peer_id: PeerId, label: str | int | None = None) -> OwnSubkey:
    """A subkey that only this peer may write, in any dictionary."""
    return (OWNER_MARK, peer_id.digest, label)


def reserved_key(peer_id: PeerId, label: str) -> Key:
    """A key that only this peer may write; given to `store` and `get` in place of a name."""
    name = hashlib.blake2b(peer_id.digest + label.encode(), digest_size=_LABEL_BYTES, person=b"shoal own key")
    return Key(name.digest() + peer_id.digest[:_OWNER_BYTES] + _OWN_KEY_TAG)


def owner_of_subkey(subkey: Any) -> PeerId | None:
    """The peer that a reserved subkey belongs to; None for any other subkey."""
    match subkey:
        case (str(mark), bytes(digest), str() | int() | None) if (
            mark == OWNER_MARK and len(digest) == ID_BYTES
        ):
            return PeerId(digest)
    return None


def signer_of(slot: Slot) -> PeerId | None:
    """Who has signed it, if a `Validator` finds nothing wrong; None where nobody claims to."""
    return PeerId.of_public_key(slot.owner) if slot.owner else None


def is_reserved(slot: Slot) -> bool:
    """Whether it is under a subkey that is its owner's alone, if its signature is good."""
    if not slot.owner or _MARK_BYTES not in slot.subkey:
        return False
    try:
        return owner_of_subkey(decode_subkey(slot.subkey)) is not None
    except ValueError:
        return False


def _check_owner(key: bytes, slot: Slot) -> Verdict | None:
    """Tells why its owner may not write at this place, or None; signatures are verified by `_is_signed`."""
    if slot.owner or slot.signature:
        path_bytes = len(slot.signature) - SIGNATURE_BYTES
        if len(slot.owner) != PUBLIC_KEY_BYTES or not 0 <= path_bytes <= MAX_PATH_BYTES:
            return Verdict.BAD_SIGNATURE
    if key.endswith(_OWN_KEY_TAG):
        owner = signer_of(slot)
        if owner is None or owner.digest[:_OWNER_BYTES] != key[_OWNER_AT]:
            return Verdict.NOT_OWNER
    if slot.subkey == PLAIN:
        return None
    try:
        subkey = decode_subkey(slot.subkey)
    except ValueError:
        return Verdict.BAD_VALUE
    if isinstance(subkey, tuple) and subkey and subkey[0] == OWNER_MARK:
        owner = owner_of_subkey(subkey)
        if owner is None or owner != signer_of(slot):
            return Verdict.NOT_OWNER
    return None


# --- owners: signatures ---

PUBLIC_KEY_BYTES, SIGNATURE_BYTES = 32, 64
_DOMAIN = b"shoal record 1:"
_DOMAIN_MANY = b"shoal records 1:"
_HEAD = struct.Struct(">dI")


def sign_many(identity: Identity, unsigned: Sequence[tuple[bytes, Slot]]) -> list[Slot]:
    """Slots that `identity` owns, of their keys and what they say; one signature for up to 64 of them.

    It is over the root of a tree of hashes; each slot carries the path from itself to the root. A signature
    takes about 33 µs.
    """
    owner = identity.public_key.public_bytes_raw()
    signed = []
    for start in range(0, len(unsigned), MAX_LEAVES):
        some = unsigned[start : start + MAX_LEAVES]
        messages = [_message(key, slot) for key, slot in some]
        if len(some) == 1:
            signatures = [identity.sign(messages[0])]
        else:
            root, paths = hash_tree(messages)
            signature = identity.sign(_DOMAIN_MANY + root)
            signatures = [signature + path for path in paths]
        signed += [
            Slot(slot.subkey, slot.value, slot.expires_at_s, owner, signature)
            for (_, slot), signature in zip(some, signatures, strict=True)
        ]
    return signed


def _message(key: bytes, slot: Slot) -> bytes:
    """What a slot's signature is over."""
    head = _HEAD.pack(slot.expires_at_s, len(slot.subkey))
    return b"".join((_DOMAIN, key, head, slot.subkey, slot.value))


# --- trees of hashes (Merkle 1987): one signature, over the root, for many messages ---

MAX_LEAVES = 64
HASH_BYTES = 16
_MAX_TREE_DEPTH = MAX_LEAVES.bit_length() - 1
MAX_PATH_BYTES = 1 + _MAX_TREE_DEPTH * HASH_BYTES
"""A message's path to the root is its index and the hashes beside it, from the leaf up."""
_LEAF, _FORK = b"shoal leaf", b"shoal fork"


def hash_tree(messages: Sequence[bytes]) -> tuple[bytes, list[bytes]]:
    """The root over up to MAX_LEAVES messages, and each one's path to it."""
    assert 1 < len(messages) <= MAX_LEAVES
    level = [_hash(message, _LEAF) for message in messages]
    paths = [bytearray((index,)) for index in range(len(messages))]
    depth = 0
    while len(level) > 1:
        if len(level) % 2:
            level.append(level[-1])
        for index, path in enumerate(paths):
            path.extend(level[index >> depth ^ 1])
        level = [_hash(level[at] + level[at + 1], _FORK) for at in range(0, len(level), 2)]
        depth += 1
    return level[0], [bytes(path) for path in paths]


def root_of(message: bytes, path: bytes) -> bytes | None:
    """The root that a message's path leads to; None when it is no path."""
    depth, rest = divmod(len(path) - 1, HASH_BYTES)
    if rest or not 0 < depth <= _MAX_TREE_DEPTH or path[0] >> depth:
        return None
    here, index = _hash(message, _LEAF), path[0]
    for start in range(1, len(path), HASH_BYTES):
        beside = path[start : start + HASH_BYTES]
        here = _hash(beside + here if index & 1 else here + beside, _FORK)
        index >>= 1
    return here


def _hash(content: bytes, kind: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=kind).digest()


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

    A store that is replayed, or comes late, replaces nothing: what it says does not expire later (NOT_NEWER;
    for the very slot that is there `Storage.store` says STORED).
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

    A replica that lies cannot hide what is owned behind a later value, unsigned or signed by itself: of
    several owners the one that most replicas tell counts. Nor can it hide a dictionary with reserved subkeys
    behind any plain value. Otherwise a plain value and a dictionary are told apart by how many tell each.
    """
    told = [[slot for slot in slots if slot.expires_at_s > now_s] for slots in replicas]
    is_plain = _is_plain(told)
    best: dict[bytes, Slot] = {}
    live = [slot for slots in told for slot in slots if (slot.subkey == PLAIN) is is_plain]
    num_replicas = Counter(
        place for slots in told for place in {(slot.subkey, slot.owner): None for slot in slots if slot.owner}
    )
    for slot in sorted(
        live, key=lambda slot: (not slot.owner, -num_replicas[slot.subkey, slot.owner], -slot.expires_at_s)
    ):
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
            value = Value(decode_value(slot.value), slot.expires_at_s, signer_of(slot))
            if slot.subkey == PLAIN:
                return value
            found[decode_subkey(slot.subkey)] = value
        except ValueError:  # some peer's nonsense
            continue
    return Value(found, max(value.expires_at_s for value in found.values())) if found else None


# --- what is believed ---

_MAX_BAD = 3  # slots of one answer that are wrong before the rest is left unread
_MAX_KNOWN = 4096
MAX_SCHEMAS = 1024


class Validator:
    """Checks what others store here, and what they answer with: signatures and places, then schemas.

    Slots whose signature was good are remembered: the same one is not verified twice (105 µs). Of several
    schemas with one prefix, one that fits is enough.
    """

    def __init__(
        self, schemas: Iterable[Schema] = (), settings: DHTSettings | None = None, max_known: int = _MAX_KNOWN
    ) -> None:
        self._settings = settings or DHTSettings()
        self._known: dict[bytes, None] = {}  # digests of good signatures, least recently met first
        self._max_known = max_known
        self._schemas: dict[bytes, list[Schema]] = {}  # by the tags of their namespaces
        for schema in schemas:
            self.add_schema(schema)

    def add_schema(self, schema: Schema) -> None:
        """Hold records to this one too, from now on; what is stored already stays."""
        if sum(map(len, self._schemas.values())) >= MAX_SCHEMAS:
            raise LimitExceeded(
                f"A peer holds records to at most {MAX_SCHEMAS:,} schemas.",
                next_step="give one schema with a union of types instead of many.",
            )
        known = self._schemas.setdefault(namespace_tag(schema.prefix), [])
        if schema not in known:
            known.append(schema)

    def check(self, key: bytes, slot: Slot) -> Verdict | None:
        """Why a slot is not to be believed, whoever holds it; None when it is."""
        verdict = _check_owner(key, slot)
        if verdict is None and (slot.owner or slot.signature) and not self._is_signed(key, slot):
            verdict = Verdict.BAD_SIGNATURE
        schemas = self._schemas.get(key[-NAMESPACE_BYTES:])
        if verdict is None and schemas is not None and not _fits_one(slot, schemas):
            verdict = Verdict.BAD_VALUE
        return verdict

    def believed(self, key: bytes, slots: Sequence[Slot], wall_s: float) -> list[Slot]:
        """Of what another peer tells, what lives, but not for too long, and is rightly signed and typed."""
        settings = self._settings
        latest_s = wall_s + settings.max_lifetime_s + settings.max_clock_gap_s
        believed: list[Slot] = []
        num_bad = 0
        for slot in slots[: settings.max_slots_a_key]:
            if wall_s < slot.expires_at_s <= latest_s:
                if self.check(key, slot) is None:
                    believed.append(slot)
                else:
                    num_bad += 1
            if num_bad >= _MAX_BAD:
                break
        return believed

    def _is_signed(self, key: bytes, slot: Slot) -> bool:
        """Whether its owner has signed the slot, alone or in a tree with others."""
        signature, path = slot.signature[:SIGNATURE_BYTES], slot.signature[SIGNATURE_BYTES:]
        message = _message(key, slot)
        if path:
            root = root_of(message, path)
            if root is None:
                return False
            message = _DOMAIN_MANY + root
        digest = hashlib.blake2b(slot.owner + message, digest_size=ID_BYTES, key=signature).digest()
        if digest in self._known:
            del self._known[digest]
        else:
            try:
                Ed25519PublicKey.from_public_bytes(slot.owner).verify(signature, message)
            except (InvalidSignature, ValueError):
                return False
            if len(self._known) >= self._max_known:
                del self._known[next(iter(self._known))]
        self._known[digest] = None
        return True


# --- schemas: msgspec's types, checked without coercion ---

_COERCED = {int: float, list: tuple, tuple: list}  # what msgspec takes for another when it is strict


@dataclass(frozen=True, slots=True)
class Schema:
    """The type of values under names that begin with `prefix`, up to the first dot or slash."""

    prefix: str
    value_type: Any
    subkey_type: Any = None
    """None: only plain values. A type: only dictionaries with such subkeys (`OwnSubkey` for subkeys of their
    writers' own)."""

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


def _fits_one(slot: Slot, schemas: Sequence[Schema]) -> bool:
    try:
        subkey = None if slot.subkey == PLAIN else decode_value(slot.subkey)
        value = decode_value(slot.value)
    except ValueError:
        return False
    is_plain_or_named = slot.subkey == PLAIN or subkey is not None
    return is_plain_or_named and any(schema.fits(subkey, value) for schema in schemas)


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
    cause = "msgspec does not know it."
    try:
        if kind is None or not isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType):
            return
    except (TypeError, NotImplementedError) as error:
        cause = str(error)
    raise UsageError(
        f"{kind!r} is no type that a schema can check.",
        cause=cause,
        next_step="use msgspec.Struct, int, float, str, bytes, lists, tuples and dicts of them.",
    )
