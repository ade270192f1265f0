"""Other processes of this machine, by number: when they began, whether they run, whose numbers these are.

And what a process that Shoal has started puts right at its start.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Literal

State = Literal["running", "stopped", "gone"]
_HAS_PROC = Path("/proc/self/stat").exists()
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


def obey_interrupts() -> None:
    """Let SIGINT interrupt this process again where it was started with that signal ignored.

    A shell has it ignored by what it starts in the background, and whatever is started from there inherits
    that, though nobody wished it for them. For the main thread of a process that Shoal has started.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name; empty where there is none."""
    with contextlib.suppress(OSError):
        # a name is any bytes
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode("ascii", "replace").split()
    return []


def started(pid: int) -> str:
    """When a process began, so that a number that is used again names another one; empty where unknown."""
    fields = stat_fields(pid)
    return fields[19] if len(fields) > 19 else ""


def namespace() -> str:
    """Within which a number names a process: containers count for themselves; empty where unknown."""
    with contextlib.suppress(OSError):
        return f"{_BOOT.read_text().strip()}/{_NAMESPACE.stat().st_ino}"
    return ""


def state_of(pid: int, began: str) -> State:
    """Of the process with this number that began then, as `started` said."""
    fields = stat_fields(pid)
    if fields:
        is_same = not began or (len(fields) > 19 and fields[19] == began)
        if not is_same or fields[0] in ("Z", "X", "x"):
            return "gone"
        return "stopped" if fields[0] in ("T", "t") else "running"
    if _HAS_PROC:
        return "gone"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        pass
    return "running"
