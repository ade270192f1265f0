"""The smallest server of HTTP: a few pages that can only be read, made anew for each request.

Whoever can reach the port can read them, and nothing else: small requests, few connections at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, cast

from shoal.core import Address, UsageError
from shoal.core.ids import is_loopback

log = logging.getLogger(__name__)

_MAX_REQUEST_BYTES = 8192
_MAX_CONNECTIONS = 32
_REQUEST_S = 5.0
_ANSWER_S = 60.0
"""For whoever reads slowly."""
_LOCAL = "localhost"


@dataclass(frozen=True, slots=True)
class Page:
    """What is served at one path."""

    make: Callable[[], str]
    """Called on the loop, for each request."""
    content_type: str = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Site:
    """What one server serves: its pages, and what it is called."""

    pages: Mapping[str, Page]
    """By path."""
    what: str
    """What it is, as errors and answers call it: 'Metrics'."""
    option: str = "--listen"
    """Of the command line, which says where it listens."""
    headers: Mapping[str, str] | None = None
    """More of them, with every page."""
    is_for_browsers: bool = False
    """Then, where it listens on this machine alone, it answers to no names but this machine's: otherwise a
    web site that a browser here has open could read it under a name of its own."""


class PageServer:
    """Answers GET and HEAD, on the loop that it is opened on."""

    def __init__(self, address: Address, site: Site) -> None:
        self._wanted = address
        self._site = site
        self._server: asyncio.AbstractServer | None = None
        self._connections: dict[_Connection, None] = {}

    async def __aenter__(self) -> Self:
        is_choosy = self._site.is_for_browsers and is_loopback(self._wanted.host.lower())
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self._site, self._connections, is_choosy=is_choosy),
                self._wanted.host,
                self._wanted.port,
            )
        except OSError as error:
            raise UsageError(
                f"{self._site.what} cannot be served on {self._wanted}: {error.strerror or error}.",
                next_step=f"give another {self._site.option}, or port 0 for a free one.",
            ) from error
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.close()
            for connection in tuple(self._connections):
                connection.end()
            await self._server.wait_closed()
            self._server = None

    @property
    def address(self) -> Address:
        """The address that it listens on."""
        if self._server is None:
            raise UsageError("The server is not open.", next_step="use it inside 'async with'.")
        host, port = self._server.sockets[0].getsockname()[:2]  # type: ignore[attr-defined]
        return Address(host, port)


class _Connection(asyncio.Protocol):
    """One request, its answer, and the end."""

    def __init__(self, site: Site, others: dict[_Connection, None], *, is_choosy: bool) -> None:
        self._site = site
        self._others = others
        self._is_choosy = is_choosy
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._others) >= _MAX_CONNECTIONS and not self._makes_room():
            self.end()
            return
        self._others[self] = None
        self._limit(_REQUEST_S)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._received += data
        if b"\r\n\r\n" in self._received or b"\n\n" in self._received:
            self._send(transport, self._answer(self._received))
        elif len(self._received) > _MAX_REQUEST_BYTES:
            told = _response("431 Request Header Fields Too Large", "The request is too large.\n")
            self._send(transport, told)

    def connection_lost(self, error: Exception | None) -> None:
        self._others.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """At once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def _makes_room(self) -> bool:
        """Whether somebody had to go: of those that have not asked yet, the first who came."""
        for other in self._others:
            if not other._is_answered:
                del self._others[other]
                other.end()
                return True
        return False

    def _send(self, transport: asyncio.Transport, answer: bytes) -> None:
        self._is_answered = True
        self._limit(_ANSWER_S)
        transport.write(answer)
        transport.close()  # once it is sent

    def _limit(self, limit_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self.end)

    def _answer(self, request: bytes) -> bytes:
        site, (first, *lines) = self._site, request.decode("latin-1").splitlines()
        words = first.split()
        if len(words) != 3 or not words[2].startswith("HTTP/"):
            return _response("400 Bad Request", "This is no request of HTTP.\n")
        if self._is_choosy and not _is_local_name(_host(lines)):
            return _response("403 Forbidden", f"{site.what} can be read by this machine's own names.\n")
        method, path = words[0], words[1].partition("?")[0]
        page = site.pages.get(path)
        if page is None:
            return _response("404 Not Found", f"{site.what}: {', '.join(site.pages)}.\n")
        if method not in ("GET", "HEAD"):
            return _response(
                "405 Method Not Allowed", f"{site.what} can only be read.\n", {"Allow": "GET, HEAD"}
            )
        try:
            text = page.make()
        except Exception:
            log.exception("%s could not be gathered.", site.what)
            return _response("500 Internal Server Error", f"{site.what} could not be gathered.\n")
        headers = {"Content-Type": page.content_type, **(site.headers or {})}
        return _response("200 OK", text, headers, is_head=method == "HEAD")


def _response(
    status: str, text: str, headers: Mapping[str, str] | None = None, *, is_head: bool = False
) -> bytes:
    body = text.encode()
    all_headers = {
        "Content-Type": "text/plain; charset=utf-8",
        **(headers or {}),
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in all_headers.items())
    return f"HTTP/1.0 {status}\r\n{head}\r\n".encode() + (b"" if is_head else body)


def _host(lines: list[str]) -> str:
    """The host that a request is meant for, without its port; this machine where it does not say."""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip().lower() == "host":
            host = value.strip()
            return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return _LOCAL


def _is_local_name(host: str) -> bool:
    """An address is no name of anybody's: a site cannot have it."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == _LOCAL
    return True
