"""Verbs that run until they are told to end: one line that is kept up to date, and a clean end.

On a terminal the line is rewritten every second, below whatever is logged; elsewhere it is a line a minute.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from shoal.core.untrusted import visible
from shoal.report.tables import emit

_EVERY_S, _EVERY_PLAIN_S = 1.0, 60.0
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


@contextlib.contextmanager
def live_line() -> Iterator[tuple[Callable[[str], None], float]]:
    """Gives a function that shows a line on stderr, and how many seconds to wait between two."""
    if not sys.stderr.isatty():
        yield lambda text: emit(text, sys.stderr), _EVERY_PLAIN_S
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    terminal = sys.stderr
    line = Live(console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=False)
    with line, contextlib.ExitStack() as stack:
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                handler.setStream(sys.stderr)  # rich's by now, which prints above the line
                stack.callback(handler.setStream, terminal)
        yield (
            lambda text: line.update(Text(visible(text), no_wrap=True, overflow="ellipsis"), refresh=True),
            _EVERY_S,
        )


@contextlib.contextmanager
def ends_by_signal() -> Iterator[None]:
    """Have every signal that asks a process to end raise KeyboardInterrupt, once: closing is not cut short.

    A signal that was ignored stays so (nohup).
    """
    before: dict[int, Any] = {}
    is_told = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal is_told
        if not is_told:
            is_told = True
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        for name in _ENDING:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
