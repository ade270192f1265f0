"""The parts of a timeline that workers write, put together after the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shoal.core.errors import ReportError, UsageError
from shoal.launch.endings import Outcome, name_ranks
from shoal.launch.settings import LaunchSettings


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
    for part in _parts(settings, path):
        part.unlink(missing_ok=True)


def collect(settings: LaunchSettings, outcome: Outcome, say: Callable[[str], None]) -> None:
    """After the run: merge `F.0`, `F.1`, … into F, and say so."""
    if settings.options.timeline is None:
        return
    path = Path(settings.options.timeline)
    parts = _parts(settings, path)
    missing = [rank for rank, part in enumerate(parts) if not part.exists()]
    if len(missing) == len(parts):
        has_failed = outcome.exit_code or outcome.deaths
        reason = "they were killed, or had not called" if has_failed else "none of them has called"
        say(f"no worker wrote a timeline: {reason} shoal.init()")
        return
    from shoal.group.timeline import merge  # not before: it brings torch along

    try:
        merge(parts, path)
    except ReportError as error:
        say(f"the parts {path}.* of the timeline could not be put together: {error.what}")
        return
    for part in parts:
        part.unlink(missing_ok=True)
    say(f"wrote the timeline {path}{f', without {name_ranks(missing)}' if missing else ''}")


def _parts(settings: LaunchSettings, path: Path) -> list[Path]:
    return [path.with_name(f"{path.name}.{rank}") for rank in range(settings.num_workers)]
