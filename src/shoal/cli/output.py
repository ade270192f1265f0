"""What verbs have in common when they print: prompt lines, JSON beside them, a line kept up to date."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TextIO

import msgspec

from shoal.core.ids import Address, PeerId
from shoal.core.run_options import flag
from shoal.core.untrusted import visible
from shoal.report.storage import write_atomically
from shoal.report.tables import emit

JsonFile = Annotated[Path | None, flag("Write the findings as JSON; - is stdout.", "--json", metavar="FILE")]


def say(line: str) -> None:
    """Print it at once: somebody may be waiting for it in a pipe."""
    emit(line, sys.stdout)
    sys.stdout.flush()


def text_stream(json_file: Path | None) -> TextIO:
    """Choose where text for people goes: not to stdout when JSON stands there alone."""
    return sys.stderr if str(json_file) == "-" else sys.stdout


def write_json(document: dict[str, object], json_file: Path | None) -> None:
    """Write it where the command line asked for it, if it did."""
    write_encoded(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n", json_file)


def write_encoded(encoded: bytes, json_file: Path | None) -> None:
    """The same for JSON that is encoded already."""
    if str(json_file) == "-":
        emit(encoded.decode().rstrip(), sys.stdout)
    elif json_file is not None:
        emit(f"Wrote {write_atomically(json_file, encoded)}", sys.stdout)


# --- verbs that run until they are told to end ---

_EVERY_S, _EVERY_PLAIN_S = 1.0, 60.0
_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")


@contextlib.contextmanager
def live_line() -> Iterator[tuple[Callable[[str], None], float]]:
    """Gives a function that shows a line on stderr, and how many seconds to wait between two.

    On a terminal the line is rewritten every second, below whatever is logged; elsewhere it is a line a
    minute.
    """
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


def say_listening(address: Address, peer_id: PeerId | None, *, has_secret: bool) -> None:
    """Print where a peer listens, and who it is."""
    protected = "with a swarm secret" if has_secret else "without a secret"
    say(f"Listening on {address}, TCP and UDP, as peer {peer_id}, {protected}.")


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
