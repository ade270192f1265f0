"""What the system says: of other processes, by number, and of this machine, which tells it from others.

When processes began, whether they run, whose numbers these are; when the machine began, and the addresses of
its network interfaces. And what a process that Shoal has started puts right at its start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from pathlib import Path
from typing import Literal

State = Literal["running", "stopped", "gone"]
_HAS_PROC = Path("/proc/self/stat").exists()
_NAMESPACE = Path("/proc/self/ns/pid")
_SIOCGIFADDR = 0x8915
_REQUEST_BYTES = 256
_NAME_BYTES = 15
_IPV4_AT = slice(20, 24)
_LINK_LOCAL = "fe80"


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
        return f"{boot_id()}/{_NAMESPACE.stat().st_ino}"
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


def boot_id() -> str:
    """Another one on each machine and after each start of it; empty where Linux does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def own_addresses() -> dict[str, list[str]]:
    """By interface, IPv4 first; on Linux. Elsewhere what this host's name stands for, without a name."""
    if sys.platform != "linux":
        return {"": _named_addresses()}
    found: dict[str, list[str]] = {}
    for _, name in socket.if_nameindex():
        addresses = [*_ipv4(name), *_ipv6(name)]
        if addresses:
            found[name] = addresses
    return found


def is_own(address: str) -> bool:
    """Whether it is one of this machine's: only such a one can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _ipv4(name: str) -> list[str]:
    import fcntl  # not there on Windows

    request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[_IPV4_AT])]
    return []


def _ipv6(name: str) -> list[str]:
    """Lists the IPv6 addresses of an interface that mean something on other machines."""
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [
            socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))
            for row in rows
            if row[-1] == name and not row[0].startswith(_LINK_LOCAL)
        ]
    return []


def _named_addresses() -> list[str]:
    with contextlib.suppress(OSError):
        return list(
            dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None))
        )
    return []
