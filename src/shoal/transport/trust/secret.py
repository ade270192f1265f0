"""The secret that the members of a swarm share, and the keys that are made from it.

Its text is hashed into a key when it is read and kept no longer; neither appears in a repr, a message or a
log. Hashing makes a text that can be guessed no harder to guess. Everything that needs a key derives its own,
for a purpose that is written into it.
"""

from __future__ import annotations

import hmac
import os
import struct
from pathlib import Path
from typing import NoReturn

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from shoal.core.errors import IdentityError
from shoal.core.identity import read_private_file

SECRET_VARIABLE = "SHOAL_SECRET"
_MIN_CHARACTERS = 32  # what `shoal keys secret` makes has 43; nothing that a person remembers is enough
_SALT = b"shoal swarm secret"


class SwarmSecret:
    """Proof of membership: who has it may join. Make one with `shoal keys secret`."""

    __slots__ = ("_key",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, key: bytes) -> None:
        self._key = key

    @classmethod
    def load(cls, path: Path) -> SwarmSecret:
        """Read what `shoal keys secret --file` wrote; refuses a file that others may read."""
        content = read_private_file(
            path,
            f"The secret file {path}",
            if_missing=f"copy the swarm's secret there, or make one with: shoal keys secret --file {path}",
            if_exposed=f"shoal keys secret --file {path} --replace, for every peer of the swarm",
        )
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise _unusable(f"The secret file {path}", "it is not text.") from None
        return cls._of(text, f"The secret file {path}")

    @classmethod
    def from_environment(cls) -> SwarmSecret | None:
        """What SHOAL_SECRET holds, None where it is not set."""
        text = os.environ.get(SECRET_VARIABLE)
        return None if text is None else cls._of(text, f"The variable {SECRET_VARIABLE}")

    @classmethod
    def parse(cls, text: str) -> SwarmSecret:
        """The secret that is written so; white space around it does not count."""
        return cls._of(text, "The swarm's secret")

    @classmethod
    def _of(cls, text: str, name: str) -> SwarmSecret:
        text = text.strip()
        if not text:
            raise _unusable(name, "it is empty.")
        if len(text) < _MIN_CHARACTERS:
            raise _unusable(
                name, f"it has {len(text)} characters, fewer than {_MIN_CHARACTERS}: it could be guessed."
            )
        # the extracting half of HKDF (RFC 5869, section 2.2); surrogates: a variable may hold any bytes
        return cls(hmac.digest(_SALT, text.encode(errors="surrogateescape"), "sha256"))

    def derive(self, purpose: str, *parts: bytes, size_bytes: int = 32) -> bytes:
        """A key for one purpose and for these parts alone; who knows it learns nothing of any other.

        It is HKDF-SHA256; each part carries its length, so that no two lists of parts mean the same.
        """
        info = b"".join(struct.pack("<I", len(part)) + part for part in (purpose.encode(), *parts))
        return HKDFExpand(hashes.SHA256(), size_bytes, info).derive(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SwarmSecret) and hmac.compare_digest(self._key, other._key)

    def __repr__(self) -> str:
        return "SwarmSecret(hidden)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a swarm's secret is not copied or sent")


def _unusable(name: str, cause: str) -> IdentityError:
    return IdentityError(
        f"{name} holds no usable secret.",
        cause=cause,
        next_step="make one with: shoal keys secret --file PATH, and give the same to every peer.",
    )
