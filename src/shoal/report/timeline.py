"""A record of spans of time, written as a Chrome trace that chrome://tracing and Perfetto open.

Times are of the machine's monotonic clock, so the parts that the workers of one machine write fit together;
`merge` makes one file of them, and of those of other machines when it is told how their clocks differ. It
needs no torch: a launcher uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from shoal.core import SYSTEM_CLOCK, Clock, ReportError
from shoal.core.untrusted import decode_json
from shoal.report.storage import write_atomically

MAX_EVENTS = 200_000
"""About 40 MB of memory; what comes later is left out."""
PROGRAM = "program"
"""The lane of the user's own spans."""


class _Event(NamedTuple):
    name: str
    lane: str
    began_ns: int
    ended_ns: int
    size_bytes: int | None


class Timeline:
    """One worker's spans, written to `path` when it is closed; a context manager.

    A lane is a row of the picture. Spans of a lane that overlap without one lying inside the other get rows
    of their own, as both viewers need it.
    """

    def __init__(
        self, path: Path | str, rank: int = 0, *, max_events: int = MAX_EVENTS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.path = Path(path)
        self.rank = rank
        self.num_left_out = 0
        self.clock = clock
        self._max_events = max_events
        self._events: list[_Event] = []
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add(
        self, name: str, lane: str, began_s: float, ended_s: float, size_bytes: int | None = None
    ) -> None:
        """Record a span, in seconds of `clock`; nothing once it is closed or full."""
        if self._is_closed:
            return
        if len(self._events) >= self._max_events:
            self.num_left_out += 1
            return
        self._events.append(_Event(name, lane, round(began_s * 1e9), round(ended_s * 1e9), size_bytes))

    @contextlib.contextmanager
    def span(self, name: str, lane: str = PROGRAM) -> Iterator[None]:
        """Record how long the block takes."""
        began_s = self.clock.now_s()
        try:
            yield
        finally:
            self.add(name, lane, began_s, self.clock.now_s())

    def close(self) -> None:
        """Write the file, whole or not at all. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        rows = _Rows(self.rank)
        # where two begin together the longer one comes first: the other lies inside it
        ordered = sorted(self._events, key=lambda event: (event.began_ns, -event.ended_ns))
        spans = [rows.place(event) for event in ordered]
        events = [*_names(self.rank, self.num_left_out), *rows.names(), *spans]
        _write(self.path, events, {"ranks": [self.rank], "left_out": self.num_left_out})
        self._events = []


class _Rows:
    """Gives each span a row of its lane in which it overlaps no other by a part."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lanes: dict[str, list[tuple[int, list[int]]]] = {PROGRAM: []}
        """Rows by lane: number, and the ends of the spans that are open, outermost first."""
        self._num_rows = 0

    def place(self, event: _Event) -> dict[str, Any]:
        number, open_ends_ns = self._row(event)
        open_ends_ns.append(event.ended_ns)
        span = {
            "name": event.name,
            "cat": event.lane,
            "ph": "X",
            "ts": event.began_ns / 1000,
            "dur": (event.ended_ns - event.began_ns) / 1000,
            "pid": self._rank,
            "tid": number,
        }
        return span if event.size_bytes is None else {**span, "args": {"bytes": event.size_bytes}}

    def _row(self, event: _Event) -> tuple[int, list[int]]:
        rows = self._lanes.setdefault(event.lane, [])
        for row in rows:
            open_ends_ns = row[1]
            while open_ends_ns and open_ends_ns[-1] <= event.began_ns:
                open_ends_ns.pop()
            if not open_ends_ns or event.ended_ns <= open_ends_ns[-1]:
                return row
        rows.append((self._num_rows, []))
        self._num_rows += 1
        return rows[-1]

    def names(self) -> Iterator[dict[str, Any]]:
        place = 0
        for lane, rows in self._lanes.items():
            for turn, (number, _) in enumerate(rows):
                yield _note("thread_name", self._rank, number, name=f"{lane} {turn + 1}" if turn else lane)
                yield _note("thread_sort_index", self._rank, number, sort_index=place)
                place += 1


def merge(paths: Iterable[Path | str], out: Path | str, shifts_s: Mapping[int, float] | None = None) -> Path:
    """One trace of the parts that workers have written, from their first moment on.

    `shifts_s`, by rank, is what to add to the clocks of other machines to have this one's. A part that is not
    there, its worker having been killed, is named in the trace's `otherData`. Raises ReportError for a file
    that is no trace.
    """
    events: list[dict[str, Any]] = []
    other: dict[str, Any] = {"ranks": [], "left_out": 0, "missing": []}
    for path in map(Path, paths):
        try:
            part = decode_json(path.read_bytes())
            events += part["traceEvents"]
            other["ranks"] += part["otherData"]["ranks"]
            other["left_out"] += part["otherData"]["left_out"]
        except FileNotFoundError:
            other["missing"].append(path.name)
        except (OSError, msgspec.DecodeError, KeyError, TypeError) as error:
            raise ReportError(
                f"{path} is not a worker's part of a timeline: {error}",
                next_step="give the files that the workers have written",
            ) from error
    for event in events:
        if event["ph"] == "X" and shifts_s:
            event["ts"] += shifts_s.get(event["pid"], 0.0) * 1e6
    first = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        if event["ph"] == "X":
            event["ts"] = round(event["ts"] - first, 3)
    return _write(Path(out), events, other)


def _names(rank: int, num_left_out: int) -> Iterator[dict[str, Any]]:
    yield _note("process_name", rank, 0, name=f"rank {rank}")
    yield _note("process_sort_index", rank, 0, sort_index=rank)
    if num_left_out:
        yield _note("process_labels", rank, 0, labels=f"{num_left_out} later spans are left out")


def _note(kind: str, rank: int, row: int, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": row, "args": args}


def _write(path: Path, events: list[dict[str, Any]], other: dict[str, Any]) -> Path:
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
    return write_atomically(path, msgspec.json.encode(trace) + b"\n")
