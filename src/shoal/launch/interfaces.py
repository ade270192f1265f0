"""What tells machines apart: network interfaces with their addresses, and the start of the kernel."""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from pathlib import Path

_SIOCGIFADDR = 0x8915
_REQUEST_BYTES = 256
_NAME_BYTES = 15
_IPV4_AT = slice(20, 24)
_LINK_LOCAL = "fe80"


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


def boot_id() -> str:
    """Another one on each machine and after each start of it; empty where Linux does not say."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _ipv4(name: str) -> list[str]:
    import fcntl  # not there on Windows

    request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[_IPV4_AT])]
    return []


def _ipv6(name: str) -> list[str]:
    """Those that mean something on other machines."""
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
