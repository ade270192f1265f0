"""Fetch a file from the first of several mirrors that has it; what it must hold is left to the caller."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Callable, Sequence
from typing import TypeVar

from shoal.core import Deadline, ShoalError
from shoal.data.errors import DataError

T = TypeVar("T")

CONNECT_TIMEOUT_S = 20.0
"""For a connection, and for each silence on it."""
_CHUNK_BYTES = 1 << 18


def download(
    urls: Sequence[str], check: Callable[[bytes, str], T], deadline: Deadline, max_bytes: int
) -> tuple[bytes, T]:
    """The bytes of the first of `urls` that passes `check(contents, url)`, and what that returned.

    DataError tells what was wrong with each.
    """
    reasons = []
    for url in urls:
        try:
            contents = _fetch(url, deadline, max_bytes)
            return contents, check(contents, url)
        except (OSError, http.client.HTTPException, ValueError) as error:
            reasons.append(f"{url}: {getattr(error, 'reason', None) or error or type(error).__name__}")
        except ShoalError as error:
            reasons.append(error.what)
    raise DataError("No mirror has the file.\n    " + "\n    ".join(reasons))


def _fetch(url: str, deadline: Deadline, max_bytes: int) -> bytes:
    timeout_s = min(CONNECT_TIMEOUT_S, deadline.remaining_s)
    contents = bytearray()
    with urllib.request.urlopen(url, timeout=timeout_s or CONNECT_TIMEOUT_S) as answer:
        while chunk := answer.read(_CHUNK_BYTES):
            contents += chunk
            if len(contents) > max_bytes:
                raise DataError(f"{url}: more than {max_bytes:,} bytes.")
            if deadline.is_past:
                raise DataError(f"{url}: too slow, {len(contents):,} bytes until the deadline.")
    return bytes(contents)
