"""How many files and sockets a process may hold open, and how to be allowed more."""

from __future__ import annotations

import sys

from shoal.core import UsageError


def ensure_open_files(num_files: int, *, should_raise: bool) -> str | None:
    """See that this process, and those it starts, may open so many; what was changed, in words.

    UsageError when they may not, and `should_raise` is not set or does not help.
    """
    if sys.platform == "win32":
        return None  # sockets are not files there
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _allows(soft, num_files):
        return (
            f"The limit on open files is {soft if soft >= 0 else 'none'} already." if should_raise else None
        )
    is_possible = _allows(hard, num_files)
    if not should_raise or not is_possible:
        raise UsageError(
            f"A process of this benchmark needs up to {num_files} open files, and may have {soft}.",
            cause="every peer has a UDP and a TCP socket of its own.",
            next_step=f"add --increase-file-limit, or run `ulimit -n {num_files}` first."
            if is_possible
            else f"use more --num-processes or fewer --num-peers: the system's own limit is {hard}.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return f"Raised the limit on open files from {soft} to {num_files}."


def _allows(limit: int, num_files: int) -> bool:
    import resource

    return limit == resource.RLIM_INFINITY or limit >= num_files
