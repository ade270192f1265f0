"""What a peer believes and stores: records that are rightly signed, in their place, and of the right type.

A slot that carries its owner's public key is signed over everything that it says and where it says it. That
alone keeps others from replacing it while it lives, not from being there first. Reserved places are nobody
else's at any time, and a storing peer knows them from the bytes it is given:

- a reserved subkey is a tuple that names the peer id, so that everybody has a subkey of their own in one
  dictionary (`records.reserved`);
- a reserved key has the peer id inside: 6 bytes of a hash of its label, the first 10 of the id, and a
  tag that no name's namespace has. Every slot below it is that peer's.

A schema says what records of a namespace must look like. A key tells the namespace of its name, so a peer
that has a schema refuses what does not fit without knowing names; a peer that has none takes it.

Who may replace what is there already is for `records.judge` to say.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shoal.core import Key, LimitExceeded, PeerId, UsageError
from shoal.core.identity import Identity
from shoal.core.ids import ID_BYTES
from shoal.dht.records import (
    NAMESPACE_BYTES,
    OWNER_MARK,
    PLAIN,
    Slot,
    Verdict,
    decode_subkey,
    decode_value,
    holder_of,
    namespace_of,
    namespace_tag,
    owner_id,
)
from shoal.dht.settings import DHTSettings

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
        verdict = _check_place(key, slot)
        if verdict is None and (slot.owner or slot.signature) and not self._is_signed(key, slot):
            verdict = Verdict.BAD_SIGNATURE
        schemas = self._schemas.get(key[-NAMESPACE_BYTES:])
        if verdict is None and schemas is not None and not any(schema.fits(slot) for schema in schemas):
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


# --- owners ---

PUBLIC_KEY_BYTES, SIGNATURE_BYTES = 32, 64
_OWN_KEY_TAG = namespace_tag(OWNER_MARK)  # of no name: namespaces end before a dot
_LABEL_BYTES = 6
_HOLDER_BYTES = ID_BYTES - NAMESPACE_BYTES - _LABEL_BYTES
_HOLDER = slice(_LABEL_BYTES, ID_BYTES - NAMESPACE_BYTES)
_DOMAIN = b"shoal record 1:"
_DOMAIN_MANY = b"shoal records 1:"
_HEAD = struct.Struct(">dI")


def reserved_key(peer_id: PeerId, label: str) -> Key:
    """A key that only this peer may write; given to `store` and `get` in place of a name."""
    name = hashlib.blake2b(peer_id.digest + label.encode(), digest_size=_LABEL_BYTES, person=b"shoal own key")
    return Key(name.digest() + peer_id.digest[:_HOLDER_BYTES] + _OWN_KEY_TAG)


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


def _check_place(key: bytes, slot: Slot) -> Verdict | None:
    """Whether its owner and signature can be any, and the slot may stand under this key and subkey at all."""
    if slot.owner or slot.signature:
        path_bytes = len(slot.signature) - SIGNATURE_BYTES
        if len(slot.owner) != PUBLIC_KEY_BYTES or not 0 <= path_bytes <= MAX_PATH_BYTES:
            return Verdict.BAD_SIGNATURE
    if key.endswith(_OWN_KEY_TAG):
        owner = owner_id(slot)
        if owner is None or owner.digest[:_HOLDER_BYTES] != key[_HOLDER]:
            return Verdict.NOT_OWNER
    if slot.subkey == PLAIN:
        return None
    try:
        subkey = decode_subkey(slot.subkey)
    except ValueError:
        return Verdict.BAD_VALUE
    if isinstance(subkey, tuple) and subkey and subkey[0] == OWNER_MARK:
        holder = holder_of(subkey)
        if holder is None or holder != owner_id(slot):
            return Verdict.NOT_OWNER
    return None


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

    def fits(self, slot: Slot) -> bool:
        """Whether a slot's subkey, if it has one, and value are of these types."""
        try:
            subkey = None if slot.subkey == PLAIN else decode_value(slot.subkey)
            value = decode_value(slot.value)
        except ValueError:
            return False
        if slot.subkey != PLAIN and subkey is None:
            return False
        if (subkey is None) != (self.subkey_type is None):
            return False
        return _is_of(value, self.value_type) and (subkey is None or _is_of(subkey, self.subkey_type))


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
