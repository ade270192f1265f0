"""Where the board of `shoal top` may be: folders of this user, in places that nobody else can move them from.

`$XDG_RUNTIME_DIR/shoal`, or a folder in shared memory or among the temporary files.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

_MEMORY = Path("/dev/shm")
_SESSIONS = Path("/run/user")


def folders() -> list[Path]:
    """Where boards may be made, the preferred one first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    own = [Path(runtime) / "shoal"] if runtime and _is_private(Path(runtime)) else []
    # on a disk a file that takes another one's place is written out at once: ten times as slow
    shared = [place for place in (_MEMORY, Path(tempfile.gettempdir())) if _is_orderly(place)]
    return [*own, *(place / f"shoal-{_user()}" for place in shared)]


def folders_to_read() -> list[Path]:
    """Those, and without XDG_RUNTIME_DIR the one that others of this user's sessions have it name."""
    usual = _SESSIONS / str(_user())
    if os.environ.get("XDG_RUNTIME_DIR") or not _is_private(usual):
        return folders()
    return [usual / "shoal", *folders()]


def make_folder() -> Path | None:
    """The first that can be used, made where there is none."""
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            if is_own(folder):
                return folder
    return None


def is_own(folder: Path) -> bool:
    """Whether nobody else can have put anything there."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_private = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    return stat.S_ISDIR(found.st_mode) and is_private


def _is_private(place: Path) -> bool:
    """Whether it is this user's, and others can change nothing in it."""
    try:
        found = place.stat()
    except OSError:
        return False
    is_safe = os.name != "posix" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    return stat.S_ISDIR(found.st_mode) and is_safe


def _is_orderly(place: Path) -> bool:
    """Whether others, if they can write there, can move and remove only what is theirs."""
    try:
        is_sticky = bool(place.stat().st_mode & stat.S_ISVTX)
    except OSError:
        return False
    return _is_private(place) or (is_sticky and place.is_dir())


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0
