"""What verbs that serve or look around have in common when they print: prompt lines, and JSON beside them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
import typer

from shoal.report.storage import write_atomically
from shoal.report.tables import emit

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the findings as JSON; - is stdout.")
]


def say(line: str) -> None:
    """Print it at once: somebody may be waiting for it in a pipe."""
    emit(line, sys.stdout)
    sys.stdout.flush()


def text_stream(json_file: Path | None) -> TextIO:
    """Where text for people goes: not to stdout when JSON stands there alone."""
    return sys.stderr if str(json_file) == "-" else sys.stdout


def write_json(document: dict[str, object], json_file: Path | None) -> None:
    """Write it where the command line asked for it, if it did."""
    if json_file is not None:
        write_encoded(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n", json_file)


def write_encoded(encoded: bytes, json_file: Path) -> None:
    """The same for JSON that is encoded already."""
    if str(json_file) == "-":
        emit(encoded.decode().rstrip(), sys.stdout)
    else:
        emit(f"Wrote {write_atomically(json_file, encoded)}", sys.stdout)


def counted(count: int, noun: str) -> str:
    """'1 peer', '1,234 peers'."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
