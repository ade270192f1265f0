"""`shoal top --web`: the newest shot as a page that refreshes itself, as JSON, and for Prometheus."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import msgspec

from shoal.cli.top_metrics import CONTENT_TYPE, look_metrics
from shoal.cli.top_view import Shot, Source, View
from shoal.core import Address, Clock, LoopThread, ShoalError, UsageError
from shoal.transport.pages import Page, PageServer, Site

DEFAULT = Address("127.0.0.1", 8470)
_MAX_POINTS = 600
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass
class _Course:
    """What one series was, for as long as its view is there."""

    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MAX_POINTS))


class Stage:
    """The newest shot, and the course of its series; filled by one thread, read by another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._shot: Shot | None = None
        self._error = ""
        self._looked_s = clock.now_s()
        self._courses: dict[tuple[str, str], _Course] = {}

    def put(self, shot: Shot) -> None:
        """Another one."""
        now_s = self._clock.now_s()
        kept: dict[tuple[str, str], _Course] = {}
        for view in shot.views:
            for name, value in view.series.items():
                course = kept[view.id, name] = self._courses.get((view.id, name), _Course())
                course.points.append((now_s, value))
        self._courses, self._shot, self._error, self._looked_s = kept, shot, "", now_s

    def fail(self, error: str) -> None:
        """There is none now; the one before stays."""
        self._error = error

    def site(self) -> Site:
        """What is served."""
        pages = {
            "/": Page(_page, "text/html; charset=utf-8"),
            "/view.json": Page(self._view, "application/json"),
            "/status.json": Page(self._status, "application/json"),
            "/metrics": Page(self._metrics, CONTENT_TYPE),
        }
        return Site(pages, "The page", headers=_HEADERS, is_for_browsers=True)

    def _view(self) -> str:
        now_s, shot = self._clock.now_s(), self._shot
        views = [] if shot is None else [self._encode(view, now_s) for view in shot.views]
        return _json({"age_s": now_s - self._looked_s, "error": self._error, "views": views})

    def _encode(self, view: View, now_s: float) -> dict[str, Any]:
        table = view.table
        return {
            "id": view.id,
            "title": view.title,
            "subtitle": view.subtitle,
            "figures": view.figures,
            "columns": [] if table is None else [[column.name, column.align] for column in table.columns],
            "rows": [] if table is None else table.rows,
            "states": view.states,
            "shares": view.shares,
            "notes": view.notes,
            "series": {
                name: [[round(now_s - at_s, 1), value] for at_s, value in tuple(course.points)]
                for (owner, name), course in self._courses.items()
                if owner == view.id
            },
        }

    def _status(self) -> str:
        known = {} if self._shot is None else self._shot.document
        return _json({**known, "error": self._error, "looked_s_ago": round(self._age_s, 3)})

    def _metrics(self) -> str:
        """While looks fail, that alone: numbers of before would be taken for those of now."""
        of_shot = "" if self._shot is None or self._error else self._shot.metrics
        return look_metrics(self._age_s, is_failing=bool(self._error)) + of_shot

    @property
    def _age_s(self) -> float:
        return self._clock.now_s() - self._looked_s


def serve(source: Source, listen: Address | None, interval_s: float, clock: Clock, tell: Tell) -> None:
    """Look and serve until interrupted; without an address on the usual one, or a free one beside it."""
    stage = Stage(clock)
    with LoopThread("shoal-top") as loop:
        server = _opened(loop, stage.site(), listen)
        try:
            tell(server.address)
            while True:
                try:
                    stage.put(source.look())
                except ShoalError as error:
                    stage.fail(error.what)
                time.sleep(interval_s)
        finally:
            loop.run(server.__aexit__(None, None, None))


Tell = Callable[[Address], None]


def _opened(loop: LoopThread, site: Site, listen: Address | None) -> PageServer:
    wanted = [listen] if listen is not None else [DEFAULT, Address(DEFAULT.host, 0)]
    for address in wanted[:-1]:
        try:
            return loop.run(PageServer(address, site).__aenter__())
        except UsageError:
            continue
    return loop.run(PageServer(wanted[-1], site).__aenter__())


def _page() -> str:
    return resources.files("shoal.cli").joinpath("assets", "top.html").read_text(encoding="utf-8")


def _json(document: dict[str, Any]) -> str:
    return msgspec.json.encode(document).decode()
