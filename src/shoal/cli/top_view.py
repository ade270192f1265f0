"""What `shoal top` shows at one moment, for the terminal and the web page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.report.tables import Line, Table


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
    states: tuple[str, ...] = ()
    """Of each row: 'running', 'stopped', 'gone'."""
    shares: tuple[float | None, ...] = ()
    """Of each row, what a bar behind the column named `waits` shows, 0 to 1."""
    notes: tuple[str, ...] = ()
    series: dict[str, float] = field(default_factory=dict)
    """Numbers whose course the page draws, by name."""

    def items(self) -> list[Table | Line | str]:
        """As the terminal shows it."""
        shown = [(self.title, "bold"), (self.subtitle, "dim")] if self.title else []
        figures = " · ".join(f"{label} {value}" for label, value in self.figures)
        tables = [] if self.table is None else [self.table]
        return [*shown, *([figures, ""] if figures else []), *tables, *self.notes]


@dataclass(frozen=True)
class Shot:
    """All that one look has found."""

    views: Sequence[View]
    """For the page: each by itself."""
    terminal: View
    document: dict[str, Any]
    """For machines."""
    metrics: str
    """For Prometheus."""
    result: dict[str, Any]

    @property
    def is_empty(self) -> bool:
        """Whether there was nothing to see."""
        return not self.views


class Source(Protocol):
    """Where shots come from."""

    def look(self) -> Shot:
        """See what there is now; may take a while."""
