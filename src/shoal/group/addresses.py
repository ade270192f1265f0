"""Which machine this is, and the address at which workers of other machines reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import platform
import socket
import struct
from pathlib import Path

from shoal.core import Address, UsageError
from shoal.transport.trust.membership import is_loopback

LOOPBACK = "127.0.0.1"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_GLOBAL_SCOPE = "00"
_SOMEWHERE = ("198.51.100.1", 9)  # reserved for documentation: nothing is sent, only the route is looked up


def host_id() -> str:
    """Tells machines apart, and containers and namespaces that have a network of their own."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    network = ""
    with contextlib.suppress(OSError):
        network = str(_NETWORK.stat().st_ino)
    return f"{boot} {network} {platform.node()} {os.getuid() if hasattr(os, 'getuid') else ''}"


def own_address(interface: str | None, meeting: Address | None) -> str:
    """An address of this machine: of the interface that is named, else of the one that reaches the meeting.

    Where that is the machine itself, and a name of it that means loopback, the one that reaches the world.
    """
    if interface:
        return _address_of(interface)
    reached = _from_here_to((meeting.host, meeting.port)) if meeting is not None else LOOPBACK
    if is_loopback(reached):
        reached = _from_here_to(_SOMEWHERE)
    return reached


def interface_of(address: str) -> str | None:
    """The name of the interface that has this address; None where the system does not say."""
    for _, name in socket.if_nameindex():
        if address in (_ipv4_of(name), _ipv6_of(name)):
            return name
    return None


def _from_here_to(where: tuple[str, int]) -> str:
    """The address from which this machine would speak to another; loopback when there is no way."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(*where, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return LOOPBACK


def _address_of(interface: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    found = _ipv4_of(interface) or _ipv6_of(interface)
    if found is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise UsageError(
            f"This machine has no network interface {interface!r} with an address.",
            cause=f"it has {names}.",
            next_step="name one of them with --network-interface, or give an address of this machine.",
        )
    return found


def _ipv4_of(interface: str) -> str | None:
    if platform.system() != "Linux" or len(interface.encode()) > 15:
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode())
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)[20:24])
    return None


def _ipv6_of(interface: str) -> str | None:
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == _GLOBAL_SCOPE:
                return str(ipaddress.IPv6Address(int(digits, 16)))
    return None
