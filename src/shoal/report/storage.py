"""Reports on disk: read with errors that say what to do, written so that no reader ever sees half of one."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from shoal.core.errors import ReportError
from shoal.core.files import written
from shoal.core.untrusted import MAX_DEPTH, decode_json, depth_exceeds
from shoal.report import pytorch
from shoal.report.schema import SCHEMA, VERSION, Report

DEFAULT_FOLDER = Path("shoal-reports")

UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From a version to the function that turns its document into the next version's. Version 1 is the first."""


def load(path: Path | str) -> Report:
    """Read a report of this or an older version, or the JSON of PyTorch's DDP benchmark turned into a report.

    Raises ReportError for anything else, with the cause and the next step.
    """
    path = Path(path)
    document = _decode(path, _read(path))
    if pytorch.is_pytorch(document):
        return pytorch.from_document(document, str(path))
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise ReportError(
            f"{path} is JSON, but not a report",
            cause=f'it does not say "schema": "{SCHEMA}", nor is it PyTorch\'s DDP-benchmark JSON',
            next_step="give the file that a benchmark saved (it prints the path), not its --json output",
        )
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ReportError(
            f"{path}: its version is {version!r}, not a number from 1", cause="a damaged report"
        )
    if version > VERSION:
        raise ReportError(
            f"{path} is a report of version {version}; this Shoal reads up to version {VERSION}",
            cause="a newer Shoal wrote it",
            next_step="pip install --upgrade shoal",
        )
    while document["version"] < VERSION:
        document = UPGRADES[document["version"]](document)
    try:
        return msgspec.convert(document, Report)
    except msgspec.ValidationError as error:
        raise ReportError(
            f"{path} is a damaged report: {error}",
            cause="it was edited by hand, or written by a program that is not Shoal",
            next_step="run the benchmark again",
        ) from error
    except ReportError as error:
        raise ReportError(f"{path}: {error.what}", cause=error.cause, next_step=error.next_step) from error


def save(report: Report, path: Path | str) -> Path:
    """Write the report and return its path; a file of that name is replaced, and never seen half written."""
    try:
        encoded = msgspec.json.encode(report)
    except (TypeError, msgspec.MsgspecError) as error:
        raise ReportError(
            f"the report of '{report.benchmark}' cannot be written as JSON: {error}",
            cause="its config, environment or result holds something that is not plain data",
            next_step="turn that value into text, numbers, lists and dictionaries",
        ) from error
    return write_atomically(path, msgspec.json.format(encoded, indent=1) + b"\n")


def default_path(folder: Path | str, benchmark: str, created: str) -> Path:
    """A name that no file in `folder` has yet: <benchmark>-<timestamp>.json, or with -2, -3, … added."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", benchmark).strip("-.") or "report"
    timestamp = re.sub(r"\.\d+", "", created).replace("+00:00", "Z")
    timestamp = re.sub(r"[^0-9TZ+]", "", timestamp)
    for number in itertools.count(1):
        suffix = "" if number == 1 else f"-{number}"
        path = Path(folder) / f"{plain}-{timestamp}{suffix}.json"
        if not path.exists():
            return path
    raise AssertionError


def write_atomically(path: Path | str, content: bytes) -> Path:
    """Write beside `path`, flush to the disk, then rename; folders are made. Raises ReportError."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as temporary:
            temporary.write_bytes(content)
    except OSError as error:
        raise ReportError(
            f"{path} cannot be written: {error.strerror or error}",
            cause="the folder is read-only or full, or the name is a folder's",
            next_step="give another path",
        ) from error
    return path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ReportError(
            f"{path} does not exist",
            cause="a misspelt name, or the benchmark ran in another folder",
            next_step=f"ls {path.parent}",
        ) from error
    except IsADirectoryError as error:
        newest = max(path.glob("*.json"), key=lambda file: file.stat().st_mtime, default=None)
        raise ReportError(
            f"{path} is a folder, not a report",
            next_step=f"give one file, for example the newest: {newest}"
            if newest
            else "give the path of one file",
        ) from error
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from error


def _decode(path: Path, raw: bytes) -> Any:
    if not raw.strip():
        raise ReportError(
            f"{path} is empty", cause="a run that ended before it wrote", next_step="run the benchmark again"
        )
    try:
        document = decode_json(raw)
    except msgspec.DecodeError as error:
        if "truncated" in str(error):
            raise ReportError(
                f"{path} ends in the middle of its JSON",
                cause="a copy or download that was cut short",
                next_step="copy it again from where the benchmark ran",
            ) from error
        raise ReportError(
            f"{path} is not JSON that can be read: {error}",
            next_step="give the file that a benchmark saved (it prints the path)",
        ) from error
    if depth_exceeds(document):
        raise ReportError(
            f"{path} is nested more than {MAX_DEPTH} levels deep",
            cause="it is no report, or was made to confuse its reader",
            next_step="give the file that a benchmark saved (it prints the path)",
        )
    return document
