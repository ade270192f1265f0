"""Markup of pages and pictures, made of elements; whatever is no markup yet is escaped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from shoal.report.html.figures import NUM_COLOURS


class Markup(str):
    """Text that may stand in a page as it is."""

    __slots__ = ()

    def __add__(self, other: str) -> Markup:
        return Markup(str.__add__(self, _escaped(other)))


def _escaped(content: str) -> Markup:
    return content if isinstance(content, Markup) else Markup(escape(content))


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """The parts after each other; those that are empty are left out."""
    return Markup(between.join(_escaped(part) for part in parts if part))


def element(name: str, *content: str, kind: str = "", **attributes: str | float) -> Markup:
    """An element of HTML or SVG. `kind` is its class; of an attribute's name, - is written as _.

    An attribute that is empty is left out, one that is True has no value.
    """
    given = {"class": kind, **attributes}
    written = [
        f" {key.replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for key, value in given.items()
        if value is True or (value != "" and value is not False)
    ]
    return Markup(f"<{name}{''.join(written)}>{joined(content)}</{name}>")


def table(heads: Iterable[Markup], rows: Iterable[Markup], kind: str = "") -> Markup:
    """A table that scrolls by itself where it is wider than the page."""
    head, body = element("thead", element("tr", *heads)), element("tbody", joined(rows, "\n"))
    return element("div", element("table", head, body, kind=kind), kind="scroll")


def how(words: str) -> Markup:
    """A note for a reader; nothing where there is nothing to say."""
    return element("p", words, kind="how") if words else Markup()


def listed(items: Iterable[str], kind: str = "") -> Markup:
    """A list; nothing where it is empty."""
    items = list(items)
    return element("ul", *(element("li", item) for item in items), kind=kind) if items else Markup()


def folded(name: str, content: str, *, is_open: bool = False, kind: str = "") -> Markup:
    """Content under a line that opens and closes it; nothing where there is none."""
    line = element("summary", name)
    return element("details", line, content, kind=kind, open=is_open) if content else Markup()


def titled(title: str, content: str) -> Markup:
    """Content under its title, if it has one."""
    return joined([element("h4", title) if title else "", content])


def beside_one_another(parts: Iterable[str], kind: str = "") -> Markup:
    """Parts in as many columns as fit."""
    shown = [part for part in parts if part]
    if len(shown) < 2:
        return joined(shown)
    return element("div", *(element("div", part) for part in shown), kind=f"grid {kind}".strip())


def swatch(number: int, label: str) -> Markup:
    """A report's colour and name."""
    return element("span", label, kind=f"swatch s{number % NUM_COLOURS}")


def pill(label: str, tone: str) -> Markup:
    """A small coloured word."""
    return element("span", label, kind=f"pill {tone}")


@dataclass(frozen=True)
class Section:
    """A named part of a page: `about` is a sentence that says what it shows and how to read it.

    `key` is what the report calls it.
    """

    name: str
    about: str
    content: Markup
    key: str = ""
