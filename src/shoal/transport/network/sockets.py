"""What lies under the transports: a network that carries streams of bytes and datagrams between addresses.

The one on real sockets is here; links in memory are in `memory`, and `shaped` makes real sockets behave like
a worse network. A transport does not know which of them it runs on.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import ipaddress
import os
import random
import socket
import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from shoal.core import (
    SYSTEM_CLOCK,
    Address,
    Clock,
    DeadlineExceeded,
    Peer,
    PeerError,
    PeerUnreachable,
    ShoalError,
    UsageError,
)
from shoal.core.fork import close_in_children, keep_in_children
from shoal.transport.trust.tls import carry

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BACKLOG = 4096
_RECEIVE_BYTES = 4 << 20  # a burst of answers must not be lost while the loop is busy
_EXAMPLE_HOSTS = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # addresses kept for examples
_MAX_PARTS = 64  # buffers of one call to the kernel
_LAST_WORDS_S = 1.0
"""How long a side that takes no more is still read from."""


Tls = ssl.SSLContext | None
"""What secures a stream; None where it is plain."""


class Accepted(Protocol):
    """A stream that somebody has dialed and nobody serves yet. For any thread."""

    origin: Address

    def refuse(self, last_words: bytes) -> None:
        """Send what can be sent at once, and close."""

    def close(self) -> None:
        """Close it unserved; does nothing once it is served."""


class Listener(Protocol):
    """Accepts the streams that others dial to one address."""

    address: Address

    async def accept(self) -> Accepted:
        """The next stream; OSError when there is none to be had now."""

    def close(self) -> None:
        """Stop listening; nothing more is accepted."""


class Network(Protocol):
    """What carries bytes between addresses. Errors are the operating system's: transports translate them."""

    clock: Clock
    """This peer's own clock."""
    random: random.Random
    """Where this peer's random numbers come from: the system, or a seed where everything is simulated."""
    is_simulated: bool
    """Whether everything happens in this process: then there is nobody to hide from, and no TLS."""

    async def listen(self, address: Address, *, is_shared: bool = False) -> Listener:
        """Accept streams there; UsageError when that cannot be. `connect_from` may use a shared port."""

    async def dial(self, address: Address, protocol: asyncio.BufferedProtocol, *, tls: Tls = None) -> None:
        """Have `protocol` speak to whoever listens there."""

    async def connect_from(self, port: int, address: Address) -> Accepted:
        """Open a stream from a shared port of this host to whoever listens there, or does the same to it."""

    async def adopt(
        self,
        accepted: Accepted,
        protocol: asyncio.BufferedProtocol,
        *,
        tls: Tls = None,
        is_server: bool = True,
    ) -> None:
        """Have `protocol` serve a stream, on the running loop; as a client's where it is no server."""

    async def splice(
        self,
        inside: asyncio.BufferedProtocol,
        outside: asyncio.BufferedProtocol,
        *,
        tls: Tls,
        is_server: bool,
    ) -> None:
        """Join two protocols of this process by a stream: `inside` speaks, `outside` passes its bytes on.

        With `tls`, `outside` sees what TLS makes of them, and `inside` has its transport after the handshake.
        """

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """Send and receive datagrams there; UsageError when that cannot be."""

    async def resolve(self, address: Address) -> tuple[Any, ...]:
        """How `sendto` and `datagram_received` name an address."""


class SocketAccepted:
    """A TCP connection that was accepted, or opened from a shared port."""

    def __init__(self, accepted: socket.socket, origin: Address) -> None:
        self.socket = accepted
        self.origin = origin
        close_in_children(accepted.fileno())

    def refuse(self, last_words: bytes) -> None:
        """Send what can be sent at once, and close."""
        with contextlib.suppress(OSError):
            self.socket.setblocking(False)
            self.socket.send(last_words)
        self.close()

    def close(self) -> None:
        """Close it unserved; does nothing once it is served."""
        if (descriptor := self.socket.fileno()) >= 0:
            keep_in_children(descriptor)
        self.socket.close()


class SocketListener:
    """A TCP socket that listens."""

    def __init__(self, listener: socket.socket) -> None:
        self._socket = listener
        self.address = Address(*listener.getsockname()[:2])
        close_in_children(listener.fileno())

    async def accept(self) -> SocketAccepted:
        """The next connection; OSError when there is none to be had now."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, origin = await loop.sock_accept(self._socket)
            except ConnectionAbortedError:  # the caller has changed its mind
                continue
            return SocketAccepted(accepted, Address(origin[0], origin[1]))

    def close(self) -> None:
        """Stop listening; nothing more is accepted."""
        keep_in_children(self._socket.fileno())
        self._socket.close()


class SocketNetwork(Network):
    """TCP and UDP of this machine."""

    is_simulated = False

    def __init__(self) -> None:
        self.clock: Clock = SYSTEM_CLOCK
        self.random: random.Random = random.SystemRandom()

    async def listen(self, address: Address, *, is_shared: bool = False) -> SocketListener:
        """Accept TCP connections there; UsageError when that cannot be."""
        return SocketListener(await bind(address, socket.SOCK_STREAM, is_shared=is_shared))

    async def connect_from(self, port: int, address: Address) -> SocketAccepted:
        """Open a connection from a shared port; both sides may do so at the same time (RFC 9293, 3.5)."""
        return SocketAccepted(await self.connect(address, from_port=port), address)

    async def connect(self, address: Address, *, from_port: int = 0) -> socket.socket:
        """A connected TCP socket; tries every address that the name has."""
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        refusals: list[OSError] = []
        for family, kind, protocol, _, where in infos:
            candidate = socket.socket(family, kind, protocol)
            try:
                candidate.setblocking(False)
                if from_port:
                    _share_port(candidate)
                    candidate.bind(("" if family == socket.AF_INET else "::", from_port))
                await loop.sock_connect(candidate, where)
                candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                candidate.close()
                refusals.append(error)
            except BaseException:
                candidate.close()
                raise
            else:
                return candidate
        raise refusals[0] if refusals else OSError(f"no address is known for {address.host}")

    async def dial(
        self,
        address: Address,
        protocol: asyncio.BufferedProtocol,
        *,
        tls: Tls = None,
        sock: socket.socket | None = None,
    ) -> None:
        """Have `protocol` speak to whoever listens there, through `sock` where it is connected already."""
        connected = sock or await self.connect(address)
        await _carry(connected, protocol, tls, is_server=False)

    async def adopt(
        self,
        accepted: Accepted,
        protocol: asyncio.BufferedProtocol,
        *,
        tls: Tls = None,
        is_server: bool = True,
    ) -> None:
        """Have `protocol` serve a connection, on the running loop."""
        await _carry(cast("SocketAccepted", accepted).socket, protocol, tls, is_server=is_server)

    async def splice(
        self,
        inside: asyncio.BufferedProtocol,
        outside: asyncio.BufferedProtocol,
        *,
        tls: Tls,
        is_server: bool,
    ) -> None:
        """Join two protocols by a pair of sockets."""
        near, far = socket.socketpair()
        try:
            for each in (near, far):
                each.setblocking(False)
            await _carry(far, outside, None, is_server=not is_server)
        except BaseException:
            near.close()
            far.close()
            raise
        await _carry(near, inside, tls, is_server=is_server)

    async def open_datagrams(
        self, address: Address, protocol: asyncio.DatagramProtocol
    ) -> asyncio.DatagramTransport:
        """A UDP socket there; UsageError when that cannot be."""
        loop = asyncio.get_running_loop()
        bound = await bind(address, socket.SOCK_DGRAM)
        try:
            carrier, _ = await loop.create_datagram_endpoint(lambda: protocol, sock=bound)
        except BaseException:
            bound.close()
            raise
        return carrier

    async def resolve(self, address: Address) -> tuple[Any, ...]:
        """A socket address; OSError or ValueError for a name that nobody knows."""
        with contextlib.suppress(ValueError):
            version = ipaddress.ip_address(address.host).version
            return (address.host, address.port) if version == 4 else (address.host, address.port, 0, 0)
        infos = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_DGRAM
        )
        return tuple(infos[0][4])


async def _carry(
    connected: socket.socket, protocol: asyncio.BufferedProtocol, tls: Tls, *, is_server: bool
) -> None:
    """Join a protocol to a connected socket, which belongs to the loop from then on."""
    keep_in_children(connected.fileno())  # the loop may close it unseen; a protocol that has it says so again
    if tls is not None:
        await carry(protocol, connected, tls, is_server=is_server)
        return
    loop = asyncio.get_running_loop()
    try:
        if is_server:
            await loop.connect_accepted_socket(lambda: protocol, connected)
        else:
            await loop.create_connection(lambda: protocol, sock=connected)
    except BaseException:
        connected.close()
        raise


def _share_port(unbound: socket.socket) -> None:
    """Let a TCP socket have a port that other sockets of this user share in the same way."""
    unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):  # where it is missing, the first option alone does this
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


async def bind(address: Address, kind: socket.SocketKind, *, is_shared: bool = False) -> socket.socket:
    """A TCP socket that listens there, or a UDP socket; UsageError for what this machine cannot have."""
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=kind, flags=socket.AI_PASSIVE
        )
        family, kind_found, protocol, _, where = infos[0]
        bound = socket.socket(family, kind_found, protocol)
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver takes
        raise UsageError(
            f"Cannot listen on {address}: {error}.", next_step="give an address of this machine."
        ) from error
    try:
        bound.setblocking(False)
        if kind == socket.SOCK_STREAM:
            if is_shared:
                _share_port(bound)
            elif os.name == "posix":  # elsewhere the option lets two programs share a port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
            bound.listen(_BACKLOG)
        else:
            with contextlib.suppress(OSError):  # as much as the system allows
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
            bound.bind(where)
    except OSError as error:
        bound.close()
        raise UsageError(
            f"Cannot listen on {address}: {error.strerror}.",
            cause="another program uses the port, or the address is not of this machine.",
            next_step="choose another port, or 0 for any free one.",
        ) from error
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
            probe.connect((_EXAMPLE_HOSTS[family], 9))
            return str(probe.getsockname()[0])
        except OSError:  # this machine has no network
            return "::1" if family == socket.AF_INET6 else "127.0.0.1"


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


class DirectSender(asyncio.Transport):
    """Sends on a plain TCP stream by the socket's own calls, which let other threads run meanwhile.

    uvloop's transport holds the interpreter's lock while the kernel copies what it is given to send, so a
    server with many busy clients on several loop threads moves no more than one of them can: 4.8 GB/s both
    ways to 128 clients on sixteen cores, and 13.8 GB/s this way. Receiving stays uvloop's: it does not hold
    the lock there, and it sees every way in which a connection can end.

    It is full while anything is unsent, and tells the protocol when all has left. When the other side says
    that it will send no more, the connection ends and what is unsent is lost, unless it is closing already:
    then it is not read from any more, and everything is sent first.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, inner: asyncio.Transport, protocol: asyncio.BaseProtocol
    ) -> None:
        super().__init__()
        self._loop = loop
        self._inner = inner
        self._protocol = protocol
        self._socket = socket.socket(fileno=os.dup(inner.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)  # whatever the program's default timeout is
        self._descriptor = self._socket.fileno()
        close_in_children(self._descriptor)
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._is_closing = False
        self._is_deaf = False
        self._end: asyncio.TimerHandle | None = None

    def write(self, data: Buffer) -> None:
        """Send now what the kernel takes, and the rest when it takes more."""
        if not self._unsent and not self._is_closing and not self._is_deaf:
            view = memoryview(data)
            try:
                sent = self._socket.send(view)
            except OSError:  # what it means is said below
                sent = 0
            if sent == len(view):
                return
            data = view[sent:]
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        """The same for several buffers at once, each flat bytes."""
        if self._is_closing or self._is_deaf:
            return
        parts = [memoryview(data) for data in list_of_data]
        if self._unsent:
            self._unsent.extend(parts)
            return
        left = self._after_sending(parts)
        if left:
            self._unsent.extend(left)
            self._loop.add_writer(self._descriptor, self._on_writable)
            self._protocol.pause_writing()

    def _on_writable(self) -> None:
        parts = list(self._unsent)
        left = self._after_sending(parts)
        if self._is_deaf:
            return
        self._unsent = collections.deque(left)
        if left:
            return
        self._loop.remove_writer(self._descriptor)
        if self._is_closing:
            self._inner.close()
        else:
            self._protocol.resume_writing()

    def _after_sending(self, parts: list[memoryview]) -> list[memoryview]:
        """What is left to send."""
        try:
            if len(parts) == 1:
                sent = self._socket.send(parts[0])
            else:
                sent = self._socket.sendmsg(parts[:_MAX_PARTS])
        except (BlockingIOError, InterruptedError):
            return parts
        except OSError as error:
            self._go_deaf(error)
            return []
        for index, part in enumerate(parts):
            if sent < len(part):
                return [part[sent:], *parts[index + 1 :]]
            sent -= len(part)
        return []

    def _go_deaf(self, error: OSError) -> None:
        """Nothing can be sent any more; what the other side has said before it left is still to be read."""
        self._is_deaf = True
        self._stop()
        if self._is_closing or error.errno not in (errno.EPIPE, errno.ECONNRESET):
            self._inner.abort()
        else:
            self._end = self._loop.call_later(_LAST_WORDS_S, self._inner.abort)

    def _stop(self) -> None:
        if self._unsent:
            self._unsent.clear()
            with contextlib.suppress(RuntimeError):  # the loop was closed
                self._loop.remove_writer(self._descriptor)

    def release(self) -> None:
        """The connection is over: let go of the socket."""
        self._is_closing = True
        if self._end is not None:
            self._end.cancel()
        if self._socket.fileno() >= 0:
            self._stop()
            keep_in_children(self._descriptor)
            self._socket.close()

    def close(self) -> None:
        """Receive no more, send what was given, then end."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._unsent:
            self._inner.pause_reading()
        else:
            self._inner.close()

    def abort(self) -> None:
        """End at once, whatever is unsent."""
        self._is_closing = True
        self._stop()
        self._inner.abort()

    def is_closing(self) -> bool:
        """Whether nothing more may be sent."""
        return self._is_closing or self._inner.is_closing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing to set: it is full while anything is unsent."""

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet."""
        return sum(map(len, self._unsent))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """What the other transport knows."""
        return self._inner.get_extra_info(name, default)


def sending_directly(transport: asyncio.Transport, protocol: asyncio.BaseProtocol) -> asyncio.Transport:
    """The transport to use for a plain TCP stream: where it is uvloop's, one that sends by itself."""
    if type(transport).__module__.partition(".")[0] != "uvloop":
        return transport
    return DirectSender(asyncio.get_running_loop(), transport, protocol)


def release(transport: asyncio.BaseTransport | None) -> None:
    """The connection that a transport carried is over."""
    if isinstance(transport, DirectSender):
        transport.release()
