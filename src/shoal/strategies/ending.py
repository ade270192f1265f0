"""The checkpoint at the end of a run, whose workers end one by one and wait for nobody.

Each leaves its own part beside the checkpoints, and who finds itself the last makes one of all of them. Where
not all see the same folder, the first worker makes one of what it has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from shoal.core.errors import CheckpointError, ShoalError
from shoal.core.files import written
from shoal.group import Group
from shoal.strategies import checkpoints
from shoal.strategies.checkpoints import FileNote, Manifest
from shoal.strategies.saving import Contents, merged, places_of
from shoal.strategies.session import TrainingSession


class _Part(msgspec.Struct):
    """What a worker that has ended says of itself."""

    step: int
    places: list[Any]
    notes: dict[str, FileNote]


def save_at_end(
    group: Group,
    staging: Path,
    writers: Sequence[str],
    contents: Contents,
    attachment: TrainingSession | None,
) -> Path | None:
    """The checkpoint, if this worker is the last to end; `staging` is the same folder on all workers.

    `writers` are their processes: while one of them runs, nobody else removes the folder. With an attachment,
    models differ, and their mean is written. A part that a lost worker would have left is not waited for.
    CheckpointError when it cannot be written.
    """
    with _told(staging.parent):
        (staging / "workers").mkdir(parents=True, exist_ok=True)
        checkpoints.note_writers(staging, writers)
        return _save(group, staging, contents, attachment)


def save_first_at_end(group: Group, staging: Path, contents: Contents) -> Path | None:
    """The checkpoint, on the first worker that is not lost: what is common, and no worker's own part.

    The others' loaders count as being where its own are. CheckpointError when it cannot be written.
    """
    if group.rank != next(rank for rank in range(group.size) if rank not in group.lost):
        return None
    with _told(staging.parent):
        staging.mkdir(parents=True, exist_ok=True)
        files = _write_common(staging, group, contents, dict.fromkeys(range(group.size), _places(contents)))
        return checkpoints.seal(staging, Manifest(contents.step, group.size, contents.strategy, files))


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ShoalError, msgspec.MsgspecError) as error:
        what = error.what if isinstance(error, ShoalError) else str(error)
        raise CheckpointError(
            f"No checkpoint of the end could be saved in {folder}: {what}.",
            next_step="make room, or give another folder.",
        ) from error


def _save(group: Group, staging: Path, contents: Contents, attachment: TrainingSession | None) -> Path | None:
    notes = checkpoints.write_state(staging, f"workers/rank-{group.rank}", contents.own)
    with written(_said(staging, group.rank)) as path:
        path.write_bytes(msgspec.json.encode(_Part(contents.step, _places(contents), notes)))
    ranks = [rank for rank in range(group.size) if rank not in group.lost]
    if not all(_said(staging, rank).exists() for rank in ranks):
        return None
    try:
        (staging / "last").mkdir()
    except FileExistsError:
        return None
    parts = {
        rank: msgspec.json.decode(_said(staging, rank).read_bytes(), type=_Part)
        for rank in range(group.size)
        if _said(staging, rank).exists()
    }
    steps = [part.step for part in parts.values()]
    # who has done more steps than others cannot go on in step with them: then only what is common counts
    are_even = min(steps) == max(steps)
    files = {name: note for part in parts.values() for name, note in part.notes.items() if are_even}
    if attachment is not None:
        contents = replace(contents, model=_mean(staging, list(parts), attachment))
    files |= _write_common(staging, group, contents, {rank: part.places for rank, part in parts.items()})
    for rank in parts:
        _said(staging, rank).unlink()
    (staging / "last").rmdir()
    return checkpoints.seal(staging, Manifest(max(steps), group.size, contents.strategy, files))


def _write_common(
    staging: Path, group: Group, contents: Contents, places: Mapping[int, Sequence[Any]]
) -> dict[str, FileNote]:
    if contents.complete is not None:
        contents = contents.complete(contents)
    loaders = merged(group, contents.loaders, places)
    return {
        **checkpoints.write_model(staging, contents.model),
        **checkpoints.write_state(staging, "optimizer", contents.optimizer),
        **checkpoints.write_state(staging, "strategy", {**contents.common, "loaders": loaders}),
    }


def _places(contents: Contents) -> list[Any]:
    return [None if state is None else places_of(state) for state in contents.loaders]


def _said(staging: Path, rank: int) -> Path:
    return staging / f"rank-{rank}.ended"


def _mean(staging: Path, ranks: list[int], attachment: TrainingSession) -> dict[str, torch.Tensor]:
    """Over the parts, tensor by tensor of the model's `state_dict`; whole numbers are this worker's own."""
    names = {id(tensor): name for name, tensor in attachment.named_tensors.items()}
    kept: dict[str, Any] = attachment.model.state_dict(keep_vars=True)
    means = {
        name: tensor.detach().clone() for name, tensor in kept.items() if isinstance(tensor, torch.Tensor)
    }
    mixed = {
        name: f"tensors.{names[id(kept[name])]}"
        for name, tensor in means.items()
        if id(kept[name]) in names and (tensor.is_floating_point() or tensor.is_complex())
    }
    for name in mixed:
        means[name].zero_()
    for rank in ranks:
        theirs = load_file(staging / f"workers/rank-{rank}.safetensors")
        for name, saved in mixed.items():
            means[name] += theirs[saved] / len(ranks)
    return means
