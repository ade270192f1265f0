"""Writing a checkpoint, all workers together: the first member writes what is common, each its own.

Where a worker does not see the folder, because the machines share no file system, its own part is left out,
and a run that resumes from there begins with the common one. Either all workers have saved, or all raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.core.errors import CheckpointError, ShoalError
from shoal.data.course import merge
from shoal.group import Group, share
from shoal.strategies import checkpoints
from shoal.strategies.checkpoints import FileNote, Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Contents:
    """What one worker knows of a checkpoint."""

    strategy: str
    step: int
    model: Mapping[str, torch.Tensor]
    """Used on the first member alone, as `optimizer` and `common`."""
    optimizer: Mapping[str, Any]
    common: Mapping[str, Any]
    own: Mapping[str, Any]
    loaders: Sequence[Mapping[str, Any] | None]
    complete: Callable[[Contents], Contents] | None = None
    """At the end: adds what only the worker that writes the common part has to ask for."""


def save(group: Group, folder: Path, contents: Contents, num_kept: int) -> Path:
    """The folder of the new checkpoint, as this worker sees it. Collective; CheckpointError on all."""
    first = group.members[0]
    name, problem = "", ""
    if group.rank == first:
        name, problem = _told(lambda: checkpoints.stage(folder, contents.step).name, "")
    places = [None if state is None else places_of(state) for state in contents.loaders]
    started = _agree(group, folder, [name, places], problem)
    name = started.get(first, ["", []])[0]
    staging = folder / name
    try:
        notes: dict[str, FileNote] = {}
        problem = f"rank {first} was lost" if not name else ""
        if name and staging.is_dir():
            loaders = merged(group, contents.loaders, {rank: said[1] for rank, said in started.items()})
            notes, problem = _told(lambda: _write(group, staging, contents, loaders), notes)
        elif name:
            log.warning(
                "rank %d does not see %s: its own part of the checkpoint is left out.", group.rank, folder
            )
        written = _agree(group, folder, notes, problem)
        path, problem = "", ""
        if group.rank == first:
            files = {name: note for theirs in written.values() for name, note in theirs.items()}
            manifest = Manifest(
                contents.step, group.size, contents.strategy, msgspec.convert(files, dict[str, FileNote])
            )
            path, problem = _told(lambda: checkpoints.seal(staging, manifest, num_kept).name, "")
        sealed = _agree(group, folder, path, problem)
    except BaseException:
        if name and group.rank == first:
            checkpoints.discard(staging)
        raise
    if not sealed.get(first):
        raise _failed(folder, f"rank {first} was lost")
    return folder / str(sealed[first])


def places_of(state: Mapping[str, Any]) -> list[Any]:
    """Of a loader's state, what others have to know."""
    return [state["epoch"], state["legs"], state["num_taken"]]


def merged(
    group: Group, own: Sequence[Mapping[str, Any] | None], places: Mapping[int, Sequence[Any]]
) -> list[dict[str, Any] | None]:
    """The loaders' states for any number of workers."""
    states: list[dict[str, Any] | None] = []
    for number, state in enumerate(own):
        others = {
            rank: theirs[number]
            for rank, theirs in places.items()
            if number < len(theirs) and theirs[number] is not None
        }
        is_known = state is not None and bool(others)
        states.append(merge(state, others, group.size, list(group.lost)) if is_known and state else None)
    return states


def _write(group: Group, staging: Path, contents: Contents, loaders: Sequence[Any]) -> dict[str, FileNote]:
    notes = checkpoints.write_state(staging, f"workers/rank-{group.rank}", contents.own)
    if group.rank == group.members[0]:
        notes |= checkpoints.write_model(staging, contents.model)
        notes |= checkpoints.write_state(staging, "optimizer", contents.optimizer)
        notes |= checkpoints.write_state(staging, "strategy", {**contents.common, "loaders": loaders})
    return notes


def _told(act: Callable[[], Any], otherwise: Any) -> tuple[Any, str]:
    """The result, or what the others are told of a failure."""
    try:
        return act(), ""
    except ShoalError as error:
        return otherwise, error.what
    except OSError as error:
        return otherwise, f"{error.strerror or error}"


def _agree(group: Group, folder: Path, value: Any, problem: str) -> dict[int, Any]:
    """What each member says, by rank; CheckpointError on all when one has a problem."""
    said = {rank: (theirs, trouble) for rank, theirs, trouble in share(group, [group.rank, value, problem])}
    for rank, (_, trouble) in said.items():
        if trouble:
            raise _failed(folder, f"{trouble} (rank {rank})")
    return {rank: theirs for rank, (theirs, _) in said.items()}


def _failed(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"No checkpoint could be saved in {folder}: {why}.",
        cause="the disk is full or failing, the folder is not to be written to, or a worker was lost.",
        next_step="make room, or give another folder.",
    )
