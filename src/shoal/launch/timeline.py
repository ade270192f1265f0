"""The parts of a timeline that workers write, put together after the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal.core.errors import UsageError
from shoal.launch.settings import LaunchSettings


@contextlib.contextmanager
def collected(settings: LaunchSettings, say: Callable[[str], None]) -> Iterator[None]:
    """Clears the place before the run; afterwards merges `F.0`, `F.1`, … of `--timeline F` into F."""
    if settings.options.timeline is None:
        yield
        return
    path = Path(settings.options.timeline)
    parts = [path.with_name(f"{path.name}.{rank}") for rank in range(settings.num_workers)]
    if not path.parent.is_dir() or path.is_dir():
        raise UsageError(
            f"The timeline {path} cannot be written: there is no such folder, or it is one.",
            next_step="name a file in a folder that exists.",
        )
    for part in parts:
        part.unlink(missing_ok=True)  # of an earlier run
    yield
    if not any(part.exists() for part in parts):
        say("no worker wrote a timeline: none of them has called shoal.init()")
        return
    from shoal.group.timeline import merge  # not before: it brings torch along

    merge(parts, path)  # names those that are missing
    for part in parts:
        part.unlink(missing_ok=True)
    say(f"wrote the timeline {path}")
