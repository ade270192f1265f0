"""The parts of a timeline that workers write, put together after the run."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from shoal.core.errors import ReportError, UsageError
from shoal.launch.settings import LaunchSettings
from shoal.launch.worker import Outcome, name_ranks
from shoal.report.timeline import merge

MAX_PART_BYTES = 1 << 26
"""A part that is larger than this is not sent from another machine."""
_PIECE_BYTES = 1 << 20


def clear(settings: LaunchSettings) -> None:
    """Before the run: forget parts of an earlier one; UsageError where `--timeline F` cannot be written."""
    if settings.options.timeline is None:
        return
    path = Path(settings.options.timeline)
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            f"The timeline {path} cannot be written: there is no such folder, or it is one.",
            next_step="name a file in a folder that exists.",
        )
    for number in itertools.count():
        part = _part(path, number)
        if number >= settings.num_processes and not part.exists():
            return
        part.unlink(missing_ok=True)


def collect(
    settings: LaunchSettings,
    outcome: Outcome,
    say: Callable[[str], None],
    shifts_s: Mapping[int, float],
    num_workers: int,
) -> None:
    """After the run: merge `F.0`, `F.1`, … of all workers that there were into F, and say so."""
    if settings.options.timeline is None:
        return
    path = Path(settings.options.timeline)
    parts = [_part(path, number) for number in range(num_workers)]
    missing = [rank for rank, part in enumerate(parts) if not part.exists()]
    if len(missing) == len(parts):
        has_failed = outcome.exit_code or outcome.deaths
        reason = "they were killed, or had not called" if has_failed else "none of them has called"
        say(f"no worker wrote a timeline: {reason} shoal.init()")
        return
    try:
        merge(parts, path, shifts_s)
    except ReportError as error:
        say(f"the parts {path}.* of the timeline could not be put together: {error.what}")
        return
    for part in parts:
        part.unlink(missing_ok=True)
    say(f"wrote the timeline {path}{f', without {name_ranks(missing, settings.word)}' if missing else ''}")


def make_room(timeline: str, ranks: Iterable[int]) -> None:
    """On another machine, before its workers start: make a folder without parts of an earlier run."""
    path = Path(timeline)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for rank in ranks:
            _part(path, rank).unlink(missing_ok=True)


def read_part(timeline: str, rank: int) -> Iterator[bytes]:
    """On another machine: yield what a worker has written, in pieces; nothing where that is too much."""
    part = _part(Path(timeline), rank)
    with contextlib.suppress(OSError):
        if part.stat().st_size <= MAX_PART_BYTES:
            with part.open("rb") as file:
                while data := file.read(_PIECE_BYTES):
                    yield data


class Parts:
    """Writes parts that come from other machines; where the disks are shared, they are here already."""

    def __init__(self, settings: LaunchSettings) -> None:
        self._timeline = settings.options.timeline
        self._begun: dict[int, None] = {}

    def take(self, rank: int, data: bytes) -> None:
        """Write a piece of a worker's part; with a full disk the part will not be whole, and named."""
        assert self._timeline is not None
        mode: Literal["ab", "xb"] = "ab" if rank in self._begun else "xb"
        with contextlib.suppress(OSError), _part(Path(self._timeline), rank).open(mode, buffering=0) as file:
            self._begun[rank] = None
            file.write(data)


def _part(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.{rank}")
