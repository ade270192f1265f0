"""What a page draws: each plot has a place in the markup and an entry in the data that `assets/*.js` read.

A set is what several plots have in common: the series with their colours, which the reader switches on and
off, and a choice (of the axis, of the row).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from shoal.report.schema import Report, Scalar, label_of, text

NUM_COLOURS = 12
SHOWN_SERIES = 12
"""More are there to be switched on."""
CONTENDERS = ("contender", "strategy", "method")
"""Entries of a key that name who competes; the others say under which conditions."""


@dataclass(frozen=True)
class Shown:
    """A report on a page: its name there ('' for a single one), the number of its colour, and its file."""

    report: Report
    label: str = ""
    number: int = 0
    source: str = ""


@dataclass
class Figures:
    """All plots of one page."""

    plots: list[dict[str, Any]] = field(default_factory=list)
    sets: list[dict[str, Any]] = field(default_factory=list)

    def place(self, kind: str, **data: Any) -> str:
        """Keep the data, and return the element in which the plot will be."""
        self.plots.append({"kind": kind, **data})
        return f'<div class="plot" data-plot="{len(self.plots) - 1}"></div>'

    def open_set(self, series: Iterable[tuple[str, int]]) -> int:
        """A new set of series, each with a label and the number of its colour."""
        entries = [
            {"label": label, "colour": colour % NUM_COLOURS, "isHidden": index >= SHOWN_SERIES}
            for index, (label, colour) in enumerate(series)
        ]
        self.sets.append({"series": entries})
        return len(self.sets) - 1

    def legend(self, number: int) -> str:
        """The series of a set as switches; nothing where there is one series."""
        series = self.sets[number]["series"]
        if len(series) < 2:
            return ""
        buttons = "".join(
            f'<button type="button" class="line s{entry["colour"]}" data-set="{number}" '
            f'data-series="{index}" aria-pressed="{"false" if entry["isHidden"] else "true"}">'
            f"{escape(entry['label'])}</button>"
            for index, entry in enumerate(series)
        )
        return f'<div class="legend">{buttons}</div>'

    def tabs(self, number: int, name: str, choices: Sequence[str]) -> str:
        """A few choices of a set, all in sight; nothing where there is no choice."""
        if len(choices) < 2:
            return ""
        buttons = "".join(
            f'<button type="button" data-set="{number}" data-choice="{index}" '
            f'aria-pressed="{"true" if index == 0 else "false"}">{escape(choice)}</button>'
            for index, choice in enumerate(choices)
        )
        return f'<div class="tabs"><span>{escape(name)}</span>{buttons}</div>'

    def picker(self, number: int, name: str, choices: Sequence[str]) -> str:
        """Many choices of a set, in a list."""
        options = "".join(
            f'<option value="{index}">{escape(choice)}</option>' for index, choice in enumerate(choices)
        )
        return f'<label>{escape(name)} <select data-set="{number}">{options}</select></label>'


def beside_one_another(*parts: str, kind: str = "") -> str:
    """Parts in as many columns as fit."""
    shown = [part for part in parts if part]
    if len(shown) < 2:
        return "".join(shown)
    return f'<div class="{f"grid {kind}".strip()}">{"".join(f"<div>{part}</div>" for part in shown)}</div>'


def titled(title: str, plot: str) -> str:
    """A plot under its title."""
    return (f"<h4>{escape(title)}</h4>" if title else "") + plot


class Contest:
    """Who competes in which setting, told from the keys; one colour for each through a whole chapter.

    `aside` names the entries of a key that are neither: the axis of a plot.
    """

    def __init__(self, keys: Iterable[dict[str, Scalar]], aside: Sequence[str] = ()) -> None:
        self._keys = list(keys)
        self._aside = aside
        self._shared = {
            name: True
            for name, value in (self._keys[0] if self._keys else {}).items()
            if all(key.get(name) == value for key in self._keys)
        }
        names = [name for name in CONTENDERS if any(name in key for key in self._keys)]
        self._names = [name for name in names if name not in self._shared] or names

    def contender(self, key: dict[str, Scalar]) -> str:
        """As short as the others allow; '' where there is one alone."""
        if self._names:
            return " ".join(text(key[name]) for name in self._names if name in key)
        return _label(key, (*self._aside, *self._shared))

    def setting(self, key: dict[str, Scalar]) -> str:
        """What else distinguishes the key; '' where nothing does."""
        return _label(key, (*self._aside, *self._shared, *self._names)) if self._names else ""


def _label(key: dict[str, Scalar], without: Sequence[str]) -> str:
    return label_of({name: value for name, value in key.items() if name not in without})
