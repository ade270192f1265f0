"""Records that belong to a peer: signing them, checking them, and places that only one peer may write.

A slot that carries its owner's public key is signed over everything that it says and where it says it. That
alone keeps others from replacing it while it lives, not from being there first. Reserved places are nobody
else's at any time, and a storing peer knows them from the bytes it is handed:

- a reserved subkey is a tuple that names the peer id, so that everybody has a subkey of their own in one
  dictionary;
- a reserved key has the peer id inside: 6 bytes of a hash of its label, the first 10 of the id, and a
  tag that no name's namespace has. Every slot below it is that peer's.

Who may replace what is there already is `conflicts`' to say.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shoal.core import Key, PeerId
from shoal.core.identity import Identity
from shoal.core.ids import ID_BYTES
from shoal.dht.names import TAG_BYTES, tag_of
from shoal.dht.records import PLAIN, Slot, Verdict
from shoal.dht.subkeys import decode_subkey
from shoal.dht.trees import MAX_LEAVES, MAX_WAY_BYTES, climb, grow

PUBLIC_KEY_BYTES, SIGNATURE_BYTES = 32, 64

_MARK: Literal["shoal.owner"] = "shoal.owner"
_KEY_TAG = tag_of(_MARK)  # of no name: namespaces end before a dot
_LABEL_BYTES = 6
_HOLDER_BYTES = ID_BYTES - TAG_BYTES - _LABEL_BYTES
_HOLDER = slice(_LABEL_BYTES, ID_BYTES - TAG_BYTES)
_DOMAIN = b"shoal record 1:"
_DOMAIN_MANY = b"shoal records 1:"
_HEAD = struct.Struct(">dI")
_MAX_SIGNATURE = SIGNATURE_BYTES + MAX_WAY_BYTES
_MAX_KNOWN = 4096

OwnSubkey = tuple[
    Literal["shoal.owner"],
    Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)],
    str | int | None,
]
"""A reserved subkey; as a schema's `subkey_type` it admits only those."""


def sign(identity: Identity, key: bytes, subkey: bytes, value: bytes, expires_at_s: float) -> Slot:
    """A slot that `identity` owns; subkey and value are encoded already. About 33 µs."""
    owner = identity.public_key.public_bytes_raw()
    return Slot(subkey, value, expires_at_s, owner, identity.sign(_message(key, subkey, value, expires_at_s)))


def sign_many(identity: Identity, unsigned: Sequence[tuple[bytes, Slot]]) -> list[Slot]:
    """Slots that `identity` owns, of their keys and what they say; one signature for up to 64 of them.

    It is over the root of a tree of hashes (`trees`); each slot carries the way from itself to the root.
    """
    owner = identity.public_key.public_bytes_raw()
    signed = []
    for start in range(0, len(unsigned), MAX_LEAVES):
        some = unsigned[start : start + MAX_LEAVES]
        messages = [_message(key, slot.subkey, slot.value, slot.expires_at_s) for key, slot in some]
        if len(some) == 1:
            signatures = [identity.sign(messages[0])]
        else:
            root, ways = grow(messages)
            signature = identity.sign(_DOMAIN_MANY + root)
            signatures = [signature + way for way in ways]
        signed += [
            Slot(slot.subkey, slot.value, slot.expires_at_s, owner, signature)
            for (_, slot), signature in zip(some, signatures, strict=True)
        ]
    return signed


def owner_id(slot: Slot) -> PeerId | None:
    """Who has signed it, if `check` finds nothing wrong; None where nobody claims to."""
    return PeerId.of_public_key(slot.owner) if slot.owner else None


def reserved(peer_id: PeerId, label: str | int | None = None) -> OwnSubkey:
    """A subkey that only this peer may write, in any dictionary."""
    return (_MARK, peer_id.digest, label)


def holder_of(subkey: Any) -> PeerId | None:
    """Whose a subkey is, when it is a reserved one."""
    match subkey:
        case (str(mark), bytes(digest), str() | int() | None) if mark == _MARK and len(digest) == ID_BYTES:
            return PeerId(digest)
    return None


def reserved_key(peer_id: PeerId, label: str) -> Key:
    """A key that only this peer may write; given to `store` and `get` in place of a name."""
    name = hashlib.blake2b(peer_id.digest + label.encode(), digest_size=_LABEL_BYTES, person=b"shoal own key")
    return Key(name.digest() + peer_id.digest[:_HOLDER_BYTES] + _KEY_TAG)


class Ownership:
    """Checks slots, and remembers those that were good: the same one is not verified twice (105 µs)."""

    def __init__(self, max_known: int = _MAX_KNOWN) -> None:
        self._known: dict[bytes, None] = {}  # least recently met first
        self._max_known = max_known

    def check(self, key: bytes, slot: Slot) -> Verdict | None:
        """None when its owner, if it has one, has signed it and the place is its own; else what is wrong."""
        if not slot.owner and not slot.signature:
            return _check_place(key, slot)
        if (
            len(slot.owner) != PUBLIC_KEY_BYTES
            or not SIGNATURE_BYTES <= len(slot.signature) <= _MAX_SIGNATURE
        ):
            return Verdict.BAD_SIGNATURE
        verdict = _check_place(key, slot)
        if verdict is not None:
            return verdict
        signature, way = slot.signature[:SIGNATURE_BYTES], slot.signature[SIGNATURE_BYTES:]
        message = _message(key, slot.subkey, slot.value, slot.expires_at_s)
        if way:
            root = climb(message, way)
            if root is None:
                return Verdict.BAD_SIGNATURE
            message = _DOMAIN_MANY + root
        digest = hashlib.blake2b(slot.owner + message, digest_size=ID_BYTES, key=signature).digest()
        if digest in self._known:
            del self._known[digest]
        elif not _is_signed(slot.owner, signature, message):
            return Verdict.BAD_SIGNATURE
        elif len(self._known) >= self._max_known:
            del self._known[next(iter(self._known))]
        self._known[digest] = None
        return None


def _check_place(key: bytes, slot: Slot) -> Verdict | None:
    if key.endswith(_KEY_TAG):
        owner = owner_id(slot)
        if owner is None or owner.digest[:_HOLDER_BYTES] != key[_HOLDER]:
            return Verdict.NOT_OWNER
    if slot.subkey == PLAIN:
        return None
    try:
        subkey = decode_subkey(slot.subkey)
    except ValueError:
        return Verdict.BAD_VALUE
    if isinstance(subkey, tuple) and subkey and subkey[0] == _MARK:
        holder = holder_of(subkey)
        if holder is None or holder != owner_id(slot):
            return Verdict.NOT_OWNER
    return None


def _is_signed(owner: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(owner).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _message(key: bytes, subkey: bytes, value: bytes, expires_at_s: float) -> bytes:
    return b"".join((_DOMAIN, key, _HEAD.pack(expires_at_s, len(subkey)), subkey, value))
