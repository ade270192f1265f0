"""What the system says: of other processes, by number, and of this machine, which tells it from others.

When processes began, whether they run, whose numbers these are; when the machine began, and the addresses and
networks of its network interfaces. And what a process that Shoal has started puts right at its start.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import os
import platform
import signal
import socket
import struct
import sys
import tempfile
from pathlib import Path
from typing import Literal

from shoal.core.errors import UsageError
from shoal.core.ids import Address, is_loopback

State = Literal["running", "stopped", "gone"]
_HAS_NAMES_WITHOUT_FILES = platform.system() == "Linux"
_HAS_PROC = Path("/proc/self/stat").exists()
_NAMESPACE = Path("/proc/self/ns/pid")
_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
_REQUEST_BYTES = 256
_NAME_BYTES = 15
_IPV4_AT = slice(20, 24)
_IF_INET6 = Path("/proc/net/if_inet6")
_LINK_LOCAL = "fe80"
_LOOPBACK = "127.0.0.1"
_SOMEWHERE = ("198.51.100.1", 9)  # reserved for documentation: only the route is looked up


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


def address_towards(host: str, port: int) -> str:
    """Finds the address from which this machine would speak to another; empty when there is no way."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # nothing is sent
                return str(probe.getsockname()[0])
    return ""


def own_address(interface: str | None, meeting: Address | None) -> str:
    """Finds an address of this machine: of the interface named, else of the one that reaches the meeting.

    Where that is the machine itself, and a name of it that means loopback, the one that reaches the world.
    """
    if interface:
        return _address_of(interface)
    reached = address_towards(meeting.host, meeting.port) if meeting is not None else ""
    if not reached or is_loopback(reached):
        reached = address_towards(*_SOMEWHERE)
    return reached or _LOOPBACK


def interface_of(address: str) -> str | None:
    """Finds the name of the interface that has this address; None where the system does not say."""
    return next((name for name, found in own_addresses().items() if name and address in found), None)


def _address_of(interface: str) -> str:
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(interface))
    addresses = own_addresses()
    if interface not in addresses:
        raise UsageError(
            f"This machine has no network interface {interface!r} with an address.",
            cause=f"it has {', '.join(name for _, name in socket.if_nameindex())}.",
            next_step="name one of them with --network-interface, or give an address of this machine.",
        )
    return addresses[interface][0]


def own_socket_address(purpose: str) -> str:
    """Return the address of a UNIX socket of this user's: on Linux a name that leaves no file behind."""
    digest = hashlib.blake2b(f"{os.getuid()} {purpose}".encode(), digest_size=16).hexdigest()
    if _HAS_NAMES_WITHOUT_FILES:
        return f"\0shoal-{digest}"
    return str(Path(tempfile.gettempdir()) / f"shoal-{digest}")


def is_own_user(peer: socket.socket) -> bool:
    """Whether a process of this user is at the other end: a name without a file has no permissions."""
    if not _HAS_NAMES_WITHOUT_FILES:
        return True
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


def network_of(address: str) -> str:
    """The network in which an interface of this machine has this address, as `10.1.2.0/24`; on Linux.

    Empty elsewhere, for an address that no interface has, and for what is no address.
    """
    if sys.platform != "linux":
        return ""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    prefix = _prefix_ipv4(str(parsed)) if parsed.version == 4 else _prefix_ipv6(parsed.packed.hex())
    return "" if prefix is None else str(ipaddress.ip_network(f"{parsed}/{prefix}", strict=False))


def _prefix_ipv4(address: str) -> str | None:
    """Finds the netmask that goes with an address."""
    for _, name in socket.if_nameindex():
        # an interface may have several addresses: the kernel answers for the one that is asked with
        if _ask_ipv4(_SIOCGIFADDR, name, address) == address:
            return _ask_ipv4(_SIOCGIFNETMASK, name, address)
    return None


def _prefix_ipv6(digits: str) -> int | None:
    """Finds how many leading bits of an address are those of its network."""
    return next((int(row[2], 16) for row in _ipv6_rows() if row[0] == digits), None)


def _ipv4(name: str) -> list[str]:
    found = _ask_ipv4(_SIOCGIFADDR, name)
    return [] if found is None else [found]


def _ask_ipv4(what: int, name: str, address: str = "0.0.0.0") -> str | None:
    """Asks the kernel for an address or a mask of an interface, of its first address or the one given."""
    import fcntl  # not there on Windows

    family, port = struct.pack("=H", socket.AF_INET), bytes(2)
    request = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES + 1, b"\0") + family + port
    request = (request + socket.inet_aton(address)).ljust(_REQUEST_BYTES, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), what, request)[_IPV4_AT])
    return None


def _ipv6(name: str) -> list[str]:
    """Lists the IPv6 addresses of an interface that mean something on other machines."""
    return [
        socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0]))
        for row in _ipv6_rows()
        if row[-1] == name and not row[0].startswith(_LINK_LOCAL)
    ]


def _ipv6_rows() -> list[list[str]]:
    """Reads the table of IPv6 addresses: address, index, length of the prefix, scope, flags, interface."""
    with contextlib.suppress(OSError):
        return [line.split() for line in _IF_INET6.read_text().splitlines()]
    return []


def _named_addresses() -> list[str]:
    with contextlib.suppress(OSError):
        return list(
            dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None))
        )
    return []
