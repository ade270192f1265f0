"""What `shoal top` shows at one moment: for the terminal, as a web page, as JSON and for Prometheus."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from shoal.cli.output import say
from shoal.core import Address, Clock, LoopThread, ShoalError, UsageError
from shoal.core.board import Sighting
from shoal.core.untrusted import visible
from shoal.report.tables import Line, Table, lines_of, wrap

if TYPE_CHECKING:
    from shoal.dht.crawl import Crawl, Visited
    from shoal.report.pages import PageServer, Site


@dataclass(frozen=True)
class Matrix:
    """Numbers for each pair of workers: from the one of the row to the one of the column."""

    title: str
    about: str
    """How it is read."""
    names: tuple[str, ...]
    texts: tuple[tuple[str, ...], ...]
    """The numbers as they are shown, by row; an empty one of a worker and itself."""
    shares: tuple[tuple[float, ...], ...]
    """How strongly each is coloured, 0 to 1."""
    sums: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Of the rows, of the columns, and of all: what they are called, and each."""


@dataclass(frozen=True)
class View:
    """One job, a list of them, or a swarm."""

    id: str
    """The run, or the swarm's first address."""
    title: str
    subtitle: str = ""
    figures: tuple[tuple[str, str], ...] = ()
    """Label and value of what matters first."""
    table: Table | None = None
    more_tables: tuple[Table, ...] = ()
    """What the terminal shows below it."""
    states: tuple[str, ...] = ()
    """Of each row: 'running', 'stopped', 'gone'."""
    shares: tuple[float | None, ...] = ()
    """Of each row, what a bar behind the column named `waits` shows, 0 to 1."""
    notes: tuple[str, ...] = ()
    series: dict[str, float] = field(default_factory=dict)
    """Numbers whose course the page draws, by name."""
    legends: dict[str, str] = field(default_factory=dict)
    """What these and the figures are, by name."""
    missing: dict[str, str] = field(default_factory=dict)
    """Of numbers that are not known: what would make them so."""
    about: str = ""
    """What is seen, in one sentence without its full stop."""
    about_table: str = ""
    """How the page's table is read."""
    matrices: tuple[Matrix, ...] = ()
    """What the page alone shows."""

    def items(self) -> list[Table | Line | str]:
        """Return what the terminal shows of it."""
        shown = [(self.title, "bold"), (self.subtitle, "dim")] if self.title else []
        figures = " · ".join(f"{label} {value}" for label, value in self.figures)
        tables = [*([] if self.table is None else [self.table]), *self.more_tables]
        return [*shown, *([figures, ""] if figures else []), *tables, *self.notes]


@dataclass(frozen=True)
class Shot:
    """All that one look has found."""

    views: Sequence[View]
    """For the page: each by itself."""
    terminal: View
    document: dict[str, Any]
    """The same for programs, as JSON."""
    metrics: str
    """The same for Prometheus, as text."""
    result: dict[str, Any]

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to see."""
        return not self.views


class ShotSource(Protocol):
    """Gives a new shot whenever it is asked."""

    def look(self) -> Shot:
        """See what there is now; may take a while."""


# --- on a terminal: the newest shot, until Ctrl-C ---


def watch(source: ShotSource, last: Shot, interval_s: float, *, ends_when_empty: bool = True) -> Shot:
    """Show one shot after the other until interrupted, or until there is nothing to see; the last shot."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=Console(), screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        error = ""
        while True:
            lines = [*live_lines(last), (visible(error), "red")]
            whole = Text("\n").join(Text(line, style=style, no_wrap=True) for line, style in lines)
            live.update(whole, refresh=True)
            time.sleep(interval_s)
            try:
                now, error = source.look(), ""
            except ShoalError as failure:
                error = failure.what
                continue
            if now.is_empty and ends_when_empty:
                break
            last = now
    return last


def terminal_items(view: View) -> list[Table | Line | str]:
    """What the terminal shows of a view, as wide as it is."""
    return [
        line for item in view.items() for line in (wrap(item, _width()) if isinstance(item, str) else [item])
    ]


def live_lines(shot: Shot) -> list[Line]:
    """The same as lines, with how to end it below."""
    return [*lines_of(terminal_items(shot.terminal), _width(), "─"), ("", ""), ("Ctrl-C ends it.", "dim")]


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


# --- Prometheus: its text format, version 0.0.4 ---

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = dict[str, object]


class MetricLines:
    """The text, metric by metric."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, about: str, values: Iterable[tuple[Labels, float | None]]) -> None:
        """One metric; values that are not known are left out, and so is a metric without any."""
        known = [(labels, value) for labels, value in values if value is not None]
        if known:
            self._lines += [f"# HELP shoal_{name} {about}", f"# TYPE shoal_{name} {kind}"]
            self._lines += [f"shoal_{name}{_labels(labels)} {_number(value)}" for labels, value in known]

    def text(self) -> str:
        """Return the text of all metrics so far."""
        return "".join(f"{line}\n" for line in self._lines)


def look_metrics(age_s: float, *, is_failing: bool) -> str:
    """Tell how `shoal top` itself is."""
    lines = MetricLines()
    lines.add("top_up", "gauge", "0 while shoal top cannot look.", [({}, not is_failing)])
    lines.add("top_last_look_seconds", "gauge", "Since its last look that succeeded.", [({}, age_s)])
    return lines.text()


def job_metrics(workers: Sequence[Sighting]) -> str:
    """Tell how the workers of all jobs are."""
    lines = MetricLines()

    def noted(name: str) -> list[tuple[Labels, float | None]]:
        return [(_of(one), getattr(one.note, name)) for one in workers]

    lines.add("jobs", "gauge", "Jobs that run.", [({}, len({one.note.run for one in workers}))])
    running = [(_of(one), one.state == "running") for one in workers]
    lines.add("worker_up", "gauge", "1 while its process runs.", running)
    lines.add("worker_steps_total", "counter", "Steps of the optimizer.", noted("step"))
    lines.add("worker_steps_per_second", "gauge", "Steps a second.", noted("steps_per_s"))
    lines.add("worker_examples_total", "counter", "Examples taken.", noted("num_examples"))
    lines.add("worker_examples_per_second", "gauge", "Examples a second.", noted("examples_per_s"))
    values = [
        ({**_of(one), "name": name}, value) for one in workers for name, value in one.note.values.items()
    ]
    lines.add("worker_value", "gauge", "What the program has logged, such as the loss.", values)
    lines.add("worker_sent_bytes_total", "counter", "Bytes sent, as it counts them.", noted("sent_bytes"))
    lines.add(
        "worker_received_bytes_total",
        "counter",
        "Bytes received, as it counts them.",
        noted("received_bytes"),
    )
    lines.add("worker_wait_ratio", "gauge", "Share of time waited.", noted("wait_share"))
    waits = [({**_of(one), "for": rank}, wait) for one in workers for rank, wait in one.note.waited_s.items()]
    lines.add("worker_waited_seconds_total", "counter", "Seconds waited for a rank.", waits)
    ages = [(_of(one), one.age_s) for one in workers]
    lines.add("worker_last_beat_seconds", "gauge", "Since its last note.", ages)
    return lines.text()


def swarm_metrics(seen: Crawl) -> str:
    """Tell how the peers of a swarm are."""
    lines = MetricLines()

    def told(name: str) -> list[tuple[Labels, float | None]]:
        return [(_peer(one), getattr(one.about, name)) for one in seen.peers if one.about is not None]

    lines.add("swarm_peers", "gauge", "Peers that answered.", [({}, len(seen.peers))])
    lines.add("swarm_silent_peers", "gauge", "Peers that did not answer.", [({}, len(seen.silent))])
    lines.add("swarm_swarms", "gauge", "Swarms that do not know of each other.", [({}, seen.num_swarms)])
    lines.add("peer_records", "gauge", "Records held.", told("num_records"))
    lines.add("peer_record_bytes", "gauge", "Bytes of them.", told("record_bytes"))
    lines.add("peer_contacts", "gauge", "Peers known.", told("num_contacts"))
    lines.add("peer_up_seconds", "gauge", "Since it began.", told("uptime_s"))
    round_trips = [(_peer(one), one.round_trip_s) for one in seen.peers]
    lines.add("peer_round_trip_seconds", "gauge", "Of a call to it.", round_trips)
    return lines.text()


def _peer(one: Visited) -> Labels:
    return {"peer": one.peer.id, "address": one.peer.address}


def _of(one: Sighting) -> Labels:
    note = one.note
    labels: Labels = {"run": note.run, "role": note.role, "rank": note.rank, "host": note.host}
    return {**labels, "strategy": note.strategy, "number": note.number}


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    """Prometheus has its own words for what is none."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{value:.10g}"


# --- --web: the newest shot as a page that refreshes itself ---

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


class LivePages:
    """The newest shot, and the course of its series; filled by one thread, read by another."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._shot: Shot | None = None
        self._error = ""
        self._looked_s = clock.now_s()
        self._courses: dict[tuple[str, str], deque[tuple[float, float]]] = {}
        """Points of the series of each view, for as long as it is there."""

    def put(self, shot: Shot) -> None:
        """Keep another shot, and add it to the courses."""
        now_s = self._clock.now_s()
        kept = {}
        for view in shot.views:
            for name, value in view.series.items():
                course = kept[view.id, name] = self._courses.get((view.id, name), deque(maxlen=_MAX_POINTS))
                course.append((now_s, value))
        self._courses, self._shot, self._error, self._looked_s = kept, shot, "", now_s

    def fail(self, error: str) -> None:
        """There is none now; the one before stays."""
        self._error = error

    def site(self) -> Site:
        """The pages that are served, each made when it is asked for."""
        from shoal.report.pages import Page, Site

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
        is_ready = shot is not None
        return _json(
            {"age_s": now_s - self._looked_s, "is_ready": is_ready, "error": self._error, "views": views}
        )

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
            "legends": view.legends,
            "missing": view.missing,
            "about": view.about,
            "about_table": view.about_table,
            "matrices": view.matrices,
            "series": {
                name: [[round(now_s - at_s, 1), value] for at_s, value in tuple(course)]
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


def tell_page(at: Address) -> None:
    """Print where the page is."""
    say(f"http://{at}/ shows it, /metrics is for Prometheus, /status.json for programs.")
    say("Ctrl-C ends it.")


def serve(
    source: ShotSource,
    listen: Address | None,
    interval_s: float,
    clock: Clock,
    tell: Callable[[Address], None] = tell_page,
) -> None:
    """Look and serve until interrupted; without an address on the usual one, or a free one beside it."""
    stage = LivePages(clock)
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


def _opened(loop: LoopThread, site: Site, listen: Address | None) -> PageServer:
    from shoal.report.pages import PageServer

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
