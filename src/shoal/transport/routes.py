"""Which handler answers which method."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.core import PeerRefused, UsageError
from shoal.transport.messages import Allocate, Serve, ServeChannel


@dataclass(frozen=True, slots=True)
class Route:
    """One method's handler."""

    serve: Serve | None
    serve_channel: ServeChannel | None
    allocate: Allocate | None
    decoder: msgspec.msgpack.Decoder[Any] | None
    is_plain_function: bool


class Routes:
    """The methods of one peer."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}

    def add(self, method: str, serve: Serve, allocate: Allocate | None, payload_type: Any) -> None:
        """Register a handler of calls."""
        self._add(method, Route(serve, None, allocate, _decoder(payload_type), not _is_async(serve)))

    def add_channel(self, method: str, serve: ServeChannel, payload_type: Any) -> None:
        """Register a handler of channels."""
        self._add(method, Route(None, serve, None, _decoder(payload_type), is_plain_function=False))

    def remove(self, method: str) -> None:
        """Answer it no more."""
        self._routes.pop(method, None)

    def find(self, method: str) -> Route:
        """The handler of a method; PeerRefused, for the caller to read, when there is none."""
        route = self._routes.get(method)
        if route is None:
            near = difflib.get_close_matches(method[:100], self._routes, n=1)
            raise PeerRefused(
                f"this peer has no method {method[:100]!r}.",
                next_step=f"did you mean {near[0]!r}?"
                if near
                else "check that both sides run the same version.",
            )
        return route

    def _add(self, method: str, route: Route) -> None:
        if method in self._routes:
            raise UsageError(
                f"The method {method!r} has a handler already.", next_step="choose another name."
            )
        self._routes[method] = route


def _decoder(payload_type: Any) -> msgspec.msgpack.Decoder[Any] | None:
    return None if payload_type is Any else msgspec.msgpack.Decoder(payload_type)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
