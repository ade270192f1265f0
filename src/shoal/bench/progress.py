"""What a benchmark is doing, for the person who waits: one live line on a terminal, plain lines elsewhere.

A text that ends in a count, `peers created: 40 of 1024`, is a bar on a terminal; elsewhere every tenth part
of it is a line.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator

from shoal.core.untrusted import visible
from shoal.report.tables import emit

_COUNTED = re.compile(r"^(.*): (\d+) of ([1-9]\d*)$")
_WIDTH = 30


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that shows a line on stderr; stdout is for data."""
    if not sys.stderr.isatty():
        is_news = _News()
        yield lambda text: emit(f"{title}: {text}", sys.stderr) if is_news(text) else None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(title) as status:
        yield lambda text: status.update(Text(visible(f"{title}: {with_bar(text)}")))


def with_bar(text: str) -> str:
    """The text with a count at its end drawn as a bar; any other as it is."""
    counted = _COUNTED.match(text)
    if counted is None:
        return text
    what, done, total = counted[1], int(counted[2]), int(counted[3])
    filled = _WIDTH * min(done, total) // total
    return f"{what} {'━' * filled}{'╌' * (_WIDTH - filled)} {done}/{total}"


class _News:
    """Whether a text says something new: of a count, when another tenth of it is done."""

    def __init__(self) -> None:
        self._tenths: dict[str, int] = {}

    def __call__(self, text: str) -> bool:
        counted = _COUNTED.match(text)
        if counted is None:
            return True
        tenth = 10 * int(counted[2]) // int(counted[3])
        if self._tenths.get(counted[1]) == tenth:
            return False
        self._tenths[counted[1]] = tenth
        return tenth > 0
