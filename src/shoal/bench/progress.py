"""What a benchmark is doing, for the person who waits: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from shoal.report.tables import emit


@contextlib.contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Gives a function that shows a line on stderr; stdout is for data."""
    if not sys.stderr.isatty():
        yield lambda text: emit(f"{title}: {text}", sys.stderr)
        return
    from rich.console import Console

    with Console(stderr=True).status(title) as status:
        yield lambda text: status.update(f"{title}: {text}")
