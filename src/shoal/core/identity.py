"""A peer's Ed25519 key: made on first use, kept in the user's state folder, readable by that user alone."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from shoal.core.errors import IdentityError, UsageError
from shoal.core.ids import PeerId

IDENTITY_FILE = "identity.pem"
SECRET_BYTES = 32
SEED_BYTES = 32
_MAX_PRIVATE_BYTES = 64 << 10  # no key or secret is larger


@dataclass(frozen=True, slots=True)
class Identity:
    """An Ed25519 key pair; its private half never appears in a repr, a message or a log."""

    private_key: Ed25519PrivateKey = field(repr=False, compare=False)
    peer_id: PeerId

    @classmethod
    def generate(cls) -> Identity:
        """A new key that is kept nowhere."""
        return cls._of(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The same key for the same 32 bytes: for simulated worlds and tests, since the seed is the key."""
        if len(seed) != SEED_BYTES:
            raise UsageError(
                f"An identity's seed has {SEED_BYTES} bytes, not {len(seed)}.",
                next_step="hash what you have to that length.",
            )
        return cls._of(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key that `save` wrote; refuses a file that others may read."""
        pem = read_private_file(
            path,
            f"The identity file {path}",
            if_missing=f"make one with: shoal keys new --file {path}",
            if_exposed=f"shoal keys new --file {path} --replace",
        )
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise IdentityError(
                f"The identity file {path} holds no usable key.",
                cause="it is damaged, encrypted, or not a PEM file.",
                next_step=f"restore it, or make another with: shoal keys new --file {path} --replace",
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityError(
                f"The identity file {path} holds a key of another kind.",
                cause="Shoal's identities are Ed25519 keys.",
                next_step=f"make one with: shoal keys new --file {path} --replace",
            )
        return cls._of(key)

    @classmethod
    def load_or_create(cls, path: Path | None = None) -> Identity:
        """The identity of this user on this machine; two processes that start at once get the same one."""
        path = path or default_identity_path()
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):  # another process was first: its key is the one to use
                cls.generate().save(path)
        return cls.load(path)

    def save(self, path: Path, *, replace: bool = False) -> None:
        """Write the key with mode 0600 in one step; FileExistsError unless `replace`."""
        pem = self.private_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        write_private_file(path, pem, replace=replace)

    def sign(self, message: bytes) -> bytes:
        """A 64-byte Ed25519 signature; about 33 µs."""
        return self.private_key.sign(message)

    @property
    def public_key(self) -> Ed25519PublicKey:
        """The half that others may know."""
        return self.private_key.public_key()

    @classmethod
    def _of(cls, key: Ed25519PrivateKey) -> Identity:
        return cls(key, PeerId.of_public_key(key.public_key().public_bytes_raw()))


def default_identity_path() -> Path:
    """Where this user's identity lies."""
    return state_folder() / IDENTITY_FILE


def state_folder() -> Path:
    """Where Shoal keeps what outlives a process: `SHOAL_STATE`, else the platform's folder for it."""
    if given := os.environ.get("SHOAL_STATE"):
        return Path(given)
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "shoal"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / "shoal"
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "shoal"
    except RuntimeError as error:
        raise IdentityError(
            "There is no folder for Shoal's state.",
            cause="this user has no home folder, as in some containers.",
            next_step="set SHOAL_STATE to a folder that only this user can read.",
        ) from error


def new_secret() -> str:
    """A fresh swarm secret, 256 bits as text."""
    return secrets.token_urlsafe(SECRET_BYTES)


def read_private_file(path: Path, name: str, *, if_missing: str, if_exposed: str) -> bytes:
    """The content of a file that only this user may read; IdentityError when it cannot be read or others can.

    `name` is what messages call it, `if_missing` and `if_exposed` what they say to do.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MAX_PRIVATE_BYTES)
    except OSError as error:
        raise IdentityError(f"{name} cannot be read: {error.strerror}.", next_step=if_missing) from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise IdentityError(
            f"{name} can be read by other users.",
            cause=f"its mode is {stat.S_IMODE(mode):o}, not 600.",
            next_step=f"chmod 600 {path}; if others have read it: {if_exposed}",
        )
    return content


def write_private_file(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a file that only this user may read, whole or not at all; FileExistsError unless `replace`."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        _make_folder(path.parent)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                draft.replace(path)
            else:
                os.link(draft, path)  # fails when the name is taken, unlike a rename
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError:
        raise
    except OSError as error:
        raise IdentityError(
            f"{path} cannot be written: {error.strerror}.",
            next_step="check the folder's owner and free space, or set SHOAL_STATE to another folder.",
        ) from error


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError as error:  # the caller's FileExistsError means the file itself
        raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file, not a folder") from error
