"""Real machines behind routers: network namespaces, joined by a program that routes and translates.

Each host is a namespace whose only way out is a tun device; this process holds the other end of all of
them, and does with packets what the Internet and the routers of its edges do. The rules are those of
`shoal.transport.network.nat`, as in memory. It needs root.
"""

import contextlib
import fcntl
import functools
import os
import random
import re
import selectors
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from shoal.core import Address
from shoal.transport.network.nat import NATS, AddressTranslation, NatRules

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CARRIERS = {6: ("tcp", 16), 17: ("udp", 6)}  # by IP's number: the name, and where the checksum stands
_TCP_IDLE_S = 3600.0


@functools.cache
def is_possible():
    """Whether this process may make namespaces and tun devices."""
    if os.name != "posix" or os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        return False
    name = f"shoal-{os.getpid()}-try"
    try:
        subprocess.run(["ip", "netns", "add", name], check=True, capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], check=True, capture_output=True)
        with Path("/dev/net/tun").open("r+b", buffering=0):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Internet:
    """Hosts and routers; leave it (`with`) to have all of them gone."""

    def __init__(self, seed=0):
        self.num_dropped = 0
        self._seed = seed
        self._hosts = {}  # by address: its tun device's descriptor, its namespace, its router's address
        self._routers = {}
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._route_all, daemon=True)
        self._closing = contextlib.ExitStack()

    def __enter__(self):
        _delete_leftovers()
        self._wake, self._waker = os.pipe()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._is_over = True
        os.write(self._waker, b"x")
        self._thread.join(10)
        self._closing.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)

    def router(self, address, kind):
        """A router with this outside address."""
        rules = NATS[kind]
        rules = NatRules(rules.mapping, rules.filtering, rules.udp_idle_s, _TCP_IDLE_S)
        self._routers[address] = AddressTranslation(rules, random.Random(f"{self._seed} {address}"))

    def host(self, address, behind=None):
        """A machine of its own with one address, which is private where it is behind a router."""
        name = f"shoal-tun-{os.getpid()}-{len(self._hosts)}"
        device = f"sh{os.getpid() % 1_000_000}x{len(self._hosts)}"
        _ip("netns", "add", name)
        self._closing.callback(_ip, "netns", "delete", name)
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._closing.callback(os.close, descriptor)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("link", "set", device, "netns", name)
        for command in (
            ["addr", "add", f"{address}/32", "dev", device],
            ["link", "set", device, "up"],
            ["link", "set", "lo", "up"],
            ["route", "add", "default", "dev", device],
        ):
            _ip("-n", name, *command)
        with self._lock:
            self._hosts[address] = (descriptor, name, behind)
        self._selector.register(descriptor, selectors.EVENT_READ, address)
        os.write(self._waker, b"x")

    def start(self, address, arguments, **options):
        """A Python program that runs on a host."""
        command = ["ip", "netns", "exec", self._hosts[address][1], sys.executable, *map(str, arguments)]
        return subprocess.Popen(command, **options)

    # --- packets ---

    def _route_all(self):
        while not self._is_over:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake, 100)
                    continue
                with contextlib.suppress(BlockingIOError):
                    for _ in range(64):
                        self._route(bytearray(os.read(key.fd, 65_536)), key.data)

    def _route(self, packet, sender):
        if packet[0] >> 4 != 4 or packet[9] not in _CARRIERS:
            return
        carrier, _ = _CARRIERS[packet[9]]
        at = 4 * (packet[0] & 15)
        ports = struct.unpack_from("!HH", packet, at)
        source, target = Address(_dotted(packet[12:16]), ports[0]), Address(_dotted(packet[16:20]), ports[1])
        own_router, now_s = self._hosts[sender][2], time.monotonic()
        there = self._hosts.get(target.host)
        is_inside = there is not None and there[2] == own_router
        if own_router is not None and not is_inside:
            mapping = self._routers[own_router].leave(carrier, source, target, now_s)
            source = Address(own_router, mapping.port)
        if (router := self._routers.get(target.host)) is not None:
            mapping = None
            if target.host != own_router:
                mapping = router.enter(carrier, target.port, source, now_s)
            if mapping is None:
                self.num_dropped += 1
                return
            target = mapping.inside
        elif there is not None and there[2] is not None and not is_inside:
            self.num_dropped += 1  # a private address of somebody else
            return
        if (there := self._hosts.get(target.host)) is None:
            return
        _readdress(packet, at, source, target)
        with contextlib.suppress(BlockingIOError):  # a full queue drops
            os.write(there[0], packet)


def _readdress(packet, at, source, target):
    """Put other addresses into a packet, and correct its checksums for the difference (RFC 1624)."""
    before = packet[12:20] + packet[at : at + 4]
    packet[12:16], packet[16:20] = _bytes(source.host), _bytes(target.host)
    struct.pack_into("!HH", packet, at, source.port, target.port)
    after = packet[12:20] + packet[at : at + 4]
    old, new = struct.unpack("!6H", before), struct.unpack("!6H", after)
    _correct(packet, 10, old[:4], new[:4])
    where = at + _CARRIERS[packet[9]][1]
    if packet[9] != 17 or packet[where : where + 2] != b"\0\0":
        _correct(packet, where, old, new)


def _correct(packet, where, old, new):
    (checksum,) = struct.unpack_from("!H", packet, where)
    total = (~checksum & 0xFFFF) + sum(~word & 0xFFFF for word in old) + sum(new)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    struct.pack_into("!H", packet, where, ~total & 0xFFFF)


def _dotted(four):
    return ".".join(map(str, four))


def _bytes(host):
    return bytes(map(int, host.split(".")))


def _delete_leftovers():
    """Delete the namespaces of tests that were killed."""
    for line in _ip("netns").splitlines():
        if (found := re.match(r"(shoal-tun-(\d+)-\d+)\b", line)) and not Path(f"/proc/{found[2]}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another test does so, too
                _ip("netns", "delete", found[1])


def _ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
