"""How a host of experts is, for Prometheus: its text format, and the smallest server of HTTP that gives it.

Whoever can reach the port can read it, and nothing else: one path, small requests, few connections at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self, cast

from shoal.core import Address, UsageError
from shoal.experts.status_line import ExpertMoment, Moment

log = logging.getLogger(__name__)

PATH = "/metrics"
_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MAX_REQUEST_BYTES = 8192
_MAX_CONNECTIONS = 32
_REQUEST_S = 5.0


def metrics_text(moment: Moment) -> str:
    """In the text format of Prometheus, version 0.0.4."""
    lines: list[str] = []

    def add(name: str, kind: str, about: str, values: Iterable[tuple[str, float]]) -> None:
        lines.append(f"# HELP shoal_{name} {about}")
        lines.append(f"# TYPE shoal_{name} {kind}")
        lines.extend(f"shoal_{name}{labels} {value:.10g}" for labels, value in values)

    def each(of: Callable[[ExpertMoment], tuple[float, float]]) -> list[tuple[str, float]]:
        found = [(_escaped(expert.uid), of(expert)) for expert in moment.experts]
        return [
            (f'{{expert="{uid}",kind="{kind}"}}', value)
            for uid, values in found
            for kind, value in zip(("forward", "backward"), values, strict=True)
        ]

    def alone(value: float) -> list[tuple[str, float]]:
        return [("", value)]

    add("up_seconds", "gauge", "Seconds since this server is ready.", alone(moment.up_s))
    add("experts", "gauge", "Experts that are served.", alone(len(moment.experts)))
    add("waiting_requests", "gauge", "Requests that wait for the device.", alone(moment.num_waiting))
    add("is_leaving", "gauge", "1 when no new work is taken.", alone(moment.is_leaving))
    add("dht_peers", "gauge", "Peers of the swarm that are known.", alone(moment.num_peers))
    add("samples_total", "counter", "Samples computed by all experts.", alone(moment.num_samples))
    add("batches_total", "counter", "Batches computed by all experts.", alone(moment.num_batches))
    add("failed_requests_total", "counter", "Accepted requests that failed.", alone(moment.num_failed))
    add("averages_total", "counter", "Averages with other replicas begun here.", alone(moment.num_averaged))
    add("copies_total", "counter", "Experts copied from other replicas.", alone(moment.num_copied))
    add("adoptions_total", "counter", "Experts that nobody served any more.", alone(moment.num_adopted))
    add(
        "expert_samples_total",
        "counter",
        "Samples computed.",
        each(lambda one: (one.num_forward_samples, one.num_backward_samples)),
    )
    add(
        "expert_batches_total",
        "counter",
        "Batches computed.",
        each(lambda one: (one.num_forward_batches, one.num_backward_batches)),
    )
    names = [f'{{expert="{_escaped(expert.uid)}"}}' for expert in moment.experts]
    updates = [expert.num_updates for expert in moment.experts]
    busy = [expert.busy_s for expert in moment.experts]
    add("expert_updates_total", "counter", "Steps of the optimizer.", zip(names, updates, strict=True))
    add("expert_busy_seconds_total", "counter", "Seconds of computing.", zip(names, busy, strict=True))
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer:
    """Answers `GET /metrics` with what `text` gives, on the loop that it is opened on."""

    def __init__(self, address: Address, text: Callable[[], str]) -> None:
        self._wanted = address
        self._text = text
        self._server: asyncio.AbstractServer | None = None
        self._connections: dict[_Connection, None] = {}

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self._text, self._connections), self._wanted.host, self._wanted.port
            )
        except OSError as error:
            raise UsageError(
                f"Metrics cannot be served on {self._wanted}: {error.strerror or error}.",
                next_step="give another --metrics-port, or 0 for a free one.",
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
            for connection in tuple(self._connections):
                connection.end()
            await self._server.wait_closed()
            self._server = None

    @property
    def url(self) -> str:
        """Where to read it."""
        if self._server is None:
            raise UsageError("The metrics server is not open.", next_step="use it inside 'async with'.")
        host, port = self._server.sockets[0].getsockname()[:2]  # type: ignore[attr-defined]
        return f"http://{Address(host, port)}{PATH}"


class _Connection(asyncio.Protocol):
    """One request, its answer, and the end."""

    def __init__(self, text: Callable[[], str], others: dict[_Connection, None]) -> None:
        self._text = text
        self._others = others
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if len(self._others) >= _MAX_CONNECTIONS:
            self.end()
            return
        self._others[self] = None
        self._timer = asyncio.get_running_loop().call_later(_REQUEST_S, self.end)

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        self._received += data
        if b"\r\n\r\n" in self._received or b"\n\n" in self._received:
            transport.write(self._answer(self._received.split(b"\n", 1)[0].split()))
            transport.close()  # once it is sent
        elif len(self._received) > _MAX_REQUEST_BYTES:
            transport.write(_response("431 Request Header Fields Too Large", "The request is too large.\n"))
            transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._others.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def end(self) -> None:
        """At once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def _answer(self, words: list[bytes]) -> bytes:
        if len(words) != 3 or not words[2].startswith(b"HTTP/"):
            return _response("400 Bad Request", "This is no request of HTTP.\n")
        method, path = words[0], words[1].partition(b"?")[0]
        if path != PATH.encode():
            return _response("404 Not Found", f"Metrics are at {PATH}.\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "Metrics can only be read.\n", "Allow: GET, HEAD\r\n")
        try:
            text = self._text()
        except Exception:
            log.exception("Metrics could not be gathered.")
            return _response("500 Internal Server Error", "Metrics could not be gathered.\n")
        return _response("200 OK", text, is_head=method == b"HEAD")


def _response(status: str, text: str, more: str = "", *, is_head: bool = False) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.0 {status}\r\nContent-Type: {_CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\n"
        f"{more}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else body)
