"""Locks between the workers of one machine, which die with their process.

A lock is a range of bytes of a file that all have open; nothing is ever written there. On Linux it belongs
to an open file description of the worker's own, so that workers of one process keep each other out too;
elsewhere to the process. Nobody blocks here: taking succeeds at once or not at all, and waiting is the
engine's. The kernel orders what is written under a lock before what the next holder reads, on all processors.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import sys
import threading

from shoal.core.fork import close_in_children, keep_in_children

_NAMED = 1 << 61
"""Where locks of names begin; those of memory lie at the memory's own place."""
_NAME_STRIDE = 1 << 10
"""Bytes for each name: the lock, and one more for each rank."""
_FLOCK = struct.Struct("@hhqqi0q")
_in_process: dict[tuple[int, int, int], int] = {}


def place_of(kind: str, name: str, owner: int) -> int:
    """Where the lock of a name lies; the bytes of ranks follow it."""
    digest = hashlib.blake2b(f"{kind} {owner} {name}".encode(), digest_size=6).digest()
    return _NAMED + int.from_bytes(digest) * _NAME_STRIDE


class Locks:
    """Those that this worker takes."""

    def __init__(self, descriptor: int) -> None:
        self._file, self._is_own = _reopen(descriptor)
        close_in_children(self._file)
        status = os.fstat(self._file)
        self._key = (0, 0) if self._is_own else (status.st_dev, status.st_ino)
        self._taken = {} if self._is_own else _in_process
        """The thread that has taken a lock, by the lock's place."""
        self._own: list[tuple[int, int, int]] = []
        self._guard = threading.Lock()

    def try_take(self, at: int, num_bytes: int = 1) -> bool:
        """Whether it is this thread's now."""
        with self._guard:
            key = (*self._key, at)
            if key in self._taken or not self._file_lock(at, num_bytes, is_taken=True):
                return False
            self._taken[key] = threading.get_ident()
            self._own.append(key)
            return True

    def release(self, at: int, num_bytes: int = 1) -> None:
        """Give one back; nothing when it was not taken."""
        with self._guard:
            key = (*self._key, at)
            if key in self._own:
                self._file_lock(at, num_bytes, is_taken=False)
                self._own.remove(key)
                del self._taken[key]

    def is_held_here(self, at: int) -> bool:
        """Whether the calling thread itself has it."""
        return self._taken.get((*self._key, at)) == threading.get_ident()

    def first_taken(self, at: int, num_bytes: int) -> int | None:
        """Index of the first byte that another worker has; None also where the system does not say."""
        if not self._is_own or self._file < 0:
            return None
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, num_bytes, 0)
        kind, _, start, _, _ = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else max(0, start - at)

    def close(self) -> None:
        """Give back all that are taken."""
        with self._guard:
            if self._file >= 0:
                keep_in_children(self._file)
                os.close(self._file)
                self._file = -1
                while self._own:
                    self._taken.pop(self._own.pop(), None)

    def _file_lock(self, at: int, num_bytes: int, *, is_taken: bool) -> bool:
        if self._file < 0:
            return not is_taken
        with contextlib.suppress(BlockingIOError, PermissionError):
            if self._is_own:
                kind = fcntl.F_WRLCK if is_taken else fcntl.F_UNLCK
                asked = _FLOCK.pack(kind, os.SEEK_SET, at, num_bytes, 0)
                fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, asked)
            else:
                wanted = fcntl.LOCK_EX | fcntl.LOCK_NB if is_taken else fcntl.LOCK_UN
                fcntl.lockf(self._file, wanted, num_bytes, at)
            return True
        return False


def _reopen(descriptor: int) -> tuple[int, bool]:
    """A descriptor for locks, and whether its description is not shared with other workers."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # /proc may not be mounted
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC), True
    return os.dup(descriptor), False
