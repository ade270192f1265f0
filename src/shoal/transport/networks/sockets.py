"""Sockets that listen, and what is said when no connection can be made."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from typing import Any

from shoal.core import Address, DeadlineExceeded, Peer, PeerError, PeerUnreachable, ShoalError, UsageError

_BACKLOG = 4096
_RECEIVE_BYTES = 4 << 20  # a burst of answers must not be lost while the loop is busy


async def bind(address: Address) -> socket.socket:
    """A socket that listens there; UsageError when it cannot."""
    listener, bound = await _socket_for(address, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere the option lets two programs share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(bound)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _port_is_taken(address, error) from error
    return listener


async def bind_datagrams(address: Address) -> socket.socket:
    """A UDP socket there, with a large buffer for what arrives; UsageError when it cannot be."""
    bound, where = await _socket_for(address, socket.SOCK_DGRAM)
    try:
        bound.setblocking(False)
        with contextlib.suppress(OSError):  # as much as the system allows
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise _port_is_taken(address, error) from error
    return bound


def is_wildcard(host: str) -> bool:
    """Whether it stands for all addresses of a machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def outward_host(wildcard: str) -> str:
    """The address by which this machine's packets leave it, of the wildcard's family; nothing is sent."""
    family = socket.AF_INET6 if ":" in wildcard else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_NOBODY[family], 9))
            return str(probe.getsockname()[0])
        except OSError:  # this machine has no network
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"


_NOBODY = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # addresses kept for examples


async def _socket_for(address: Address, kind: socket.SocketKind) -> tuple[socket.socket, Any]:
    """A new socket, and where to bind it; UsageError for an address that this machine cannot have."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=kind, flags=socket.AI_PASSIVE
        )
        family, kind_found, protocol, _, where = infos[0]
        return socket.socket(family, kind_found, protocol), where
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver takes
        raise UsageError(
            f"Cannot listen on {address}: {error}.", next_step="give an address of this machine."
        ) from error


def _port_is_taken(address: Address, error: OSError) -> UsageError:
    return UsageError(
        f"Cannot listen on {address}: {error.strerror}.",
        cause="another program uses the port, or the address is not of this machine.",
        next_step="choose another port, or 0 for any free one.",
    )


def unreachable(peer: Peer, error: OSError | ValueError) -> PeerError:
    """Why no connection could be made, as an error to raise."""
    if isinstance(error, ConnectionRefusedError):
        cause = "nothing listens there: the peer has not started, has ended, or uses another port."
    elif isinstance(error, (socket.gaierror, ValueError)):
        cause = f"the name {peer.address.host!r} is not known here."
    else:
        cause = f"{error.strerror or error}."
    reason = PeerUnreachable(
        f"Cannot connect to {peer}.",
        peer=peer,
        cause=cause,
        next_step="check the address, and that the peer runs.",
    )
    reason.__cause__ = error  # for those who tell refused from unreachable
    return reason


def no_answer(peer: Peer) -> ShoalError:
    """The error for a peer that nothing was heard from."""
    return DeadlineExceeded(
        f"No connection to {peer} before the deadline.",
        cause="the host is down, a firewall drops the packets, or what listens there is no Shoal peer.",
        next_step="check the address, and that its port is reachable.",
    )
