"""The checkpoints of a training run: what is in them, who writes it, and how a run goes on from them.

The first member writes what is common to all (`model`, `optimizer`, `strategy`), and each worker its own
part (`workers/rank-3`). With as many workers as it was saved by, and under the same strategy, each takes its
own part again, and the run goes on exactly where it was. Otherwise rank 0 takes the common part, which the
start of the strategy then gives to all, and loaders divide what is left of their epoch anew.

`shoal run --checkpoint FOLDER` makes every strategy resume by itself when it is attached first, and save
every so many steps and at a clean end. A second strategy of the group has `FOLDER/strategy-2`, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from safetensors.torch import load_file
from torch import nn

from shoal.core.errors import CheckpointError, ShoalError, UsageError
from shoal.core.run_options import RunOptions
from shoal.data import ShardedLoader
from shoal.data.course import merge, places_at, places_of
from shoal.data.kept import KeptLoaders, kept_loaders
from shoal.data.seeds import set_states_of_process, states_of_process
from shoal.group import Group, share
from shoal.group.functions import agree, on_first, take_state
from shoal.strategies.averaging import has_mean, own_model
from shoal.strategies.session import still_there
from shoal.strategies.start import refuse_unfit
from shoal.tensors.checkpoint import (
    NUM_KEPT,
    Checkpoint,
    CheckpointWriter,
    FileNote,
    clear_leftovers,
    newest_first,
    this_process,
)

if TYPE_CHECKING:
    from shoal.strategies.session import TrainingSession

log = logging.getLogger(__name__)

Loaders = Sequence[ShardedLoader[Any]]


@dataclass(frozen=True)
class _Contents:
    """What one worker knows of a checkpoint; `common` counts on the one alone that writes it."""

    common: Mapping[str, Any]
    own: Mapping[str, Any]
    places: list[Any]
    """What other workers have to know of this one's loaders."""


class RunCheckpoints:
    """Saves and resumes the runs of a strategy, when asked, and by itself under `shoal run --checkpoint`."""

    def __init__(self) -> None:
        self._asked: tuple[Path, Loaders] | None = None
        self._kept: _KeptFolder | None = None
        self._known_group: Group | None = None
        """The group for which it is known where checkpoints are kept."""
        self._random: Mapping[str, Any] | None = None
        self._saved_step: int | None = None
        self._is_failing = False

    @property
    def folder(self) -> Path | None:
        """Where this run keeps checkpoints by itself, if it does so; known once it was attached."""
        return None if self._kept is None else self._kept.path

    def ask(self, folder: Path, loaders: Loaders | None) -> None:
        """Makes the next `resume` take up what is in this folder; `loaders` are those that come first."""
        self._asked = folder, loaders or ()

    def resume(self, session: TrainingSession) -> Literal["exact", "common"] | None:
        """Takes up the newest checkpoint that is whole for all workers, if one is to be taken up now.

        With "exact" each worker has its own part; with "common" rank 0 alone has loaded the model and the
        optimizer. Collective; CheckpointError when there is none where one was asked for.
        """
        if self._asked is not None or RunOptions.from_environment().checkpoint is not None:
            _refuse_shards(session)
        strategy, group, is_first = session.strategy, still_there(session.group), self._known_group is None
        self.find_folder(session)
        asked, self._asked = self._asked, None
        folder, loaders = asked or (self.folder if is_first else None, ())
        chosen = None if folder is None else _choose(group, folder, strategy.name)
        if chosen is None:
            if asked is not None:
                raise CheckpointError(
                    f"There is no whole checkpoint in {folder}.",
                    next_step="give the folder that `strategy.save` was given, as rank 0 sees it.",
                )
            return None
        path, is_exact = chosen
        if is_exact:
            checkpoint = Checkpoint.open(path)
            state = checkpoint.state(_part_name(group.rank))
            _load(session, checkpoint, state)
            step, num_workers, saved_by = checkpoint.manifest.step, group.size, strategy.name
        else:
            on_first(group, 0, lambda: _load(session, Checkpoint.open(path), {}))
            state = take_state(group, lambda: _common_state(path))
            step, num_workers, saved_by = state["about"]
        kept_loaders(session.group).load(state["loaders"], [loader.course for loader in loaders])
        self.ask_random(state.get("random"))
        self._saved_step = step if folder == self.folder else None
        if group.rank == 0:
            had = "" if is_exact else f", saved by {num_workers} workers under {saved_by}"
            log.warning("resumed step %d from %s%s", step, path, had)
        if saved_by != strategy.name:
            strategy.start_at(step)
        elif is_exact:
            strategy.load_state_dict(state["strategy"])
        else:
            strategy.load_common_state(state["strategy"])
        return "exact" if is_exact else "common"

    def find_folder(self, session: TrainingSession) -> None:
        """Finds out where this run keeps checkpoints by itself, if that is not known. Collective."""
        if self._known_group is not session.group:
            self._kept, self._known_group = _find_kept_folder(session.group, self.folder), session.group

    def ask_random(self, states: Mapping[str, Any] | None) -> None:
        """Makes the next `restore_random` set the generators of random numbers to these states."""
        self._random = states

    def restore_random(self) -> None:
        """Sets the generators as they were saved: what the start of a strategy has drawn does not count."""
        states, self._random = self._random, None
        if states is not None:
            set_states_of_process(states)

    def save(
        self,
        session: TrainingSession,
        folder: Path,
        *,
        loaders: Loaders | None = None,
        num_kept: int = NUM_KEPT,
    ) -> Path:
        """Writes a checkpoint, all workers together; returns its folder as this worker sees it.

        Where a worker does not see the folder, because the machines share no file system, its own part is
        left out. Collective; CheckpointError on all when one of them cannot write.
        """
        if num_kept < 1:
            raise UsageError(f"At least one checkpoint has to be kept, not {num_kept}.")
        _refuse_shards(session)
        session.settle()
        strategy = session.strategy
        strategy.status_reporter.doing("saves", is_rare=True)
        strategy.before_saving(session)
        model = strategy.common_model(session)
        contents = _own_contents(session, strategy.state_dict(), loaders)
        group, step = still_there(session.group), session.steps
        first, fail = group.members[0], functools.partial(_failed, folder)
        name = on_first(group, first, lambda: CheckpointWriter.begin(folder, step).staging.name, fail)
        staging = folder / name

        def seal() -> str:
            return _seal(session, staging, contents, model, parts, step=step, num_kept=num_kept).name

        try:
            said = agree(group, lambda: _write_part(group, staging, contents, step), fail)
            parts = msgspec.convert(said, dict[int, _Part])
            return folder / str(on_first(group, first, seal, fail))
        except BaseException:
            if group.rank == first:
                CheckpointWriter(staging).discard()
            raise

    def stepped(self, session: TrainingSession) -> None:
        """Saves after a step if it is time. A disk that fails ends nothing, and is told of once."""
        if self._kept is not None and self._kept.every and session.steps % self._kept.every == 0:
            self._keep(session, self.save)

    def save_at_end(self, session: TrainingSession, *, should_leave: bool) -> None:
        """Saves at a clean end, where the run keeps checkpoints by itself.

        Workers that leave do so one by one: then nothing in here waits for another worker. Each leaves its
        own part beside the checkpoints, and who finds itself the last makes one of all of them.
        """
        can_wait = not should_leave or session.group.size == 1
        self._keep(session, self.save if can_wait else self._save_last)

    def _keep(self, session: TrainingSession, save: Callable[[TrainingSession, Path], Path | None]) -> None:
        step = session.steps
        if self.folder is None or self._saved_step == step:
            return
        try:
            path = save(session, self.folder)
        except CheckpointError as error:
            if not self._is_failing:
                log.error("training goes on without new checkpoints: %s", error)
            self._is_failing = True
        else:
            self._is_failing, self._saved_step = False, step
            if path is not None:
                log.info("saved step %d in %s", step, path)

    def _save_last(self, session: TrainingSession, folder: Path) -> Path | None:
        """The checkpoint, if this worker is the last to end, or the first where not all see the folder."""
        kept, group, strategy = self._kept, session.group, session.strategy
        assert kept is not None
        contents = _own_contents(session, strategy.state_at_end(), None)
        try:
            parts = _leave_part(group, kept, contents, session.steps)
            if not parts:
                return None
            is_mean = kept.is_common and strategy.has_own_replica
            model = _mean_of_parts(session, kept.staging, list(parts)) if is_mean else None
            step = max(part.step for part in parts.values())
            return _seal(session, kept.staging, contents, model, parts, step=step, num_kept=NUM_KEPT)
        except (OSError, ShoalError, msgspec.MsgspecError) as error:
            raise _failed(folder, error.what if isinstance(error, ShoalError) else str(error)) from error


def _refuse_shards(session: TrainingSession) -> None:
    if session.is_sharded:
        raise UsageError(
            "Shoal writes and reads no checkpoints of a model that is sharded by FSDP2.",
            next_step="save them with torch.distributed.checkpoint, without --checkpoint. After "
            "loading them on all workers, attach(..., should_start_equal=False).",
        )


# --- writing ---


class _Part(msgspec.Struct):
    """What a worker says of the part that it has written."""

    step: int
    places: list[Any]
    """How far its loaders are."""
    files: dict[str, FileNote]


def _part_name(rank: int) -> str:
    return f"workers/rank-{rank}"


def _own_contents(session: TrainingSession, state: Mapping[str, Any], loaders: Loaders | None) -> _Contents:
    """What this worker alone would write; `state` is the strategy's."""
    kept = kept_loaders(session.group) if loaders is None else KeptLoaders()
    for loader in loaders or ():
        kept.add(loader.course)
    named, has_replica = session.named_tensors, session.strategy.has_own_replica
    own: dict[str, Any] = {"strategy": state, "random": states_of_process()}
    own |= {"loaders": kept.states(), "tensors": {}}
    if session.group.size > 1:
        own["tensors"] = {
            name: tensor
            for name, tensor in named.items()
            if has_replica or not isinstance(tensor, nn.Parameter)
        }
        if has_replica:
            own["optimizer"] = session.optimizer.state_dict()
    model = session.model.state_dict()
    common = {
        "strategy": state,
        "tensors": {name: tensor for name, tensor in named.items() if name not in model},
        # what modules keep beside tensors (`get_extra_state`)
        "model": {name: value for name, value in model.items() if not isinstance(value, torch.Tensor)},
    }
    return _Contents(common, own, places_of(own["loaders"]))


def _write_part(group: Group, staging: Path, contents: _Contents, step: int) -> _Part:
    writer = CheckpointWriter(staging)
    if staging.is_dir():
        writer.write_state(_part_name(group.rank), contents.own)
    else:
        text = "rank %d does not see %s: its own part of the checkpoint is left out."
        log.warning(text, group.rank, staging.parent)
    return _Part(step, contents.places, writer.files)


def _leave_part(group: Group, kept: _KeptFolder, contents: _Contents, step: int) -> dict[int, _Part]:
    """Leaves this worker's part for the last to end; the parts of all, by rank, if that is this one."""
    ranks = [rank for rank in range(group.size) if rank not in group.lost]
    if not kept.is_common and group.rank != ranks[0]:
        return {}
    writer = CheckpointWriter.join(kept.staging, kept.writers)
    if not kept.is_common:
        # the first saves for all, whose loaders count as being where its own are
        return dict.fromkeys(range(group.size), _Part(step, contents.places, {}))
    part = _write_part(group, kept.staging, contents, step)
    notes = writer.leave(str(group.rank), msgspec.json.encode(part), [str(rank) for rank in ranks])
    parts = {int(rank): msgspec.json.decode(note, type=_Part) for rank, note in notes.items()}
    if len({part.step for part in parts.values()}) > 1:
        # who has done more steps than others cannot go on in step with them: then only what is common counts
        parts = {rank: _Part(part.step, part.places, {}) for rank, part in parts.items()}
    return parts


def _mean_of_parts(session: TrainingSession, staging: Path, ranks: Sequence[int]) -> dict[str, torch.Tensor]:
    """The mean of the models that workers have left; whole numbers are this worker's own."""
    names = {id(tensor): name for name, tensor in session.named_tensors.items()}
    kept: dict[str, Any] = session.model.state_dict(keep_vars=True)
    means = own_model(session.model)
    mixed = [name for name, tensor in means.items() if id(kept[name]) in names and has_mean(tensor)]
    means |= {name: torch.zeros_like(means[name], device="cpu") for name in mixed}
    for rank in ranks:
        theirs = load_file(staging / f"{_part_name(rank)}.safetensors")
        for name in mixed:
            means[name] += theirs[f"tensors.{names[id(kept[name])]}"] / len(ranks)
    return means


def _seal(
    session: TrainingSession,
    staging: Path,
    contents: _Contents,
    model: Mapping[str, torch.Tensor] | None,
    parts: Mapping[int, _Part],
    *,
    step: int,
    num_kept: int,
) -> Path:
    """Writes the common part, by default with this worker's model, and makes a checkpoint of all parts."""
    group, loaders = session.group, []
    optimizer = session.strategy.common_optimizer(session)  # first: servers give their parameters with it
    for number, state in enumerate(contents.own["loaders"]):
        places = places_at(number, {rank: part.places for rank, part in parts.items()})
        loaders.append(merge(state, places, group.size, list(group.lost)) if state and places else None)
    writer = CheckpointWriter(staging)
    writer.write_tensors("model", own_model(session.model) if model is None else model)
    writer.write_state("optimizer", optimizer)
    writer.write_state("strategy", {**contents.common, "loaders": loaders})
    files = {name: note for part in parts.values() for name, note in part.files.items()}
    return writer.seal(session.strategy.name, step, num_workers=group.size, files=files, num_kept=num_kept)


def _failed(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"No checkpoint could be saved in {folder}: {why}.",
        cause="the disk is full or failing, the folder is not to be written to, or a worker was lost.",
        next_step="make room, or give another folder.",
    )


# --- resuming ---


def _choose(group: Group, folder: Path, strategy: str) -> tuple[Path, bool] | None:
    """The newest checkpoint that is whole for all workers, and whether each of them has its own part in it.

    All workers decide together: one that is damaged for some worker is left out by all. When every one is,
    the newest is taken from its common part.
    """
    if group.rank == 0:
        clear_leftovers(folder)
    names = (found.path.name for found in newest_first(folder))
    newest = None
    while name := on_first(group, 0, lambda: next(names, "")):
        path = folder / name
        newest = newest or path
        try:
            has_own = agree(group, functools.partial(_has_own_part, group, path, strategy))
        except CheckpointError as error:
            if group.rank == 0:
                log.warning("%s All workers leave it out.", error.what)
        else:
            return path, all(has_own.values())
    if newest is None:
        return None
    if group.rank == 0:
        log.warning(
            "No checkpoint in %s is whole for all workers: all begin with the common model and optimizer of "
            "%s, whose common part is whole.", folder, newest.name,
        )  # fmt: skip
    return newest, False


def _has_own_part(group: Group, path: Path, strategy: str) -> bool:
    """Whether this worker's own part is in the checkpoint; CheckpointError if that part is damaged."""
    if not path.exists():
        log.warning("rank %d does not see %s, and begins with what rank 0 gives it", group.rank, path)
        return False
    checkpoint, name = Checkpoint.open(path), _part_name(group.rank)
    is_of_this = (checkpoint.manifest.num_workers, checkpoint.manifest.owner) == (group.size, strategy)
    if not is_of_this or not checkpoint.has_state(name):
        return False
    checkpoint.check_state(name)
    return True


def _common_state(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint.open(path)
    state, manifest = checkpoint.state("strategy"), checkpoint.manifest
    about = [manifest.step, manifest.num_workers, manifest.owner]
    return {"about": about, "strategy": state["strategy"], "loaders": state["loaders"]}


def _load(session: TrainingSession, checkpoint: Checkpoint, own: Mapping[str, Any]) -> None:
    """Loads into parameters and buffers where they lie; a worker's own part counts before the common one."""
    common, optimizer = checkpoint.state("strategy"), own.get("optimizer") or checkpoint.state("optimizer")
    with refuse_unfit(f"the checkpoint {checkpoint.path}", "build them as there, or give another folder."):
        values, is_whole = {**checkpoint.tensors("model"), **common["model"]}, common.get("is_whole", True)
        found = session.model.load_state_dict(values, strict=is_whole)
        lacking = [name for name in found.missing_keys if name in session.named_parameters]
        if lacking or found.unexpected_keys:  # what is not trained may stay as the program has made it
            raise KeyError(*lacking, *found.unexpected_keys)
        with torch.no_grad():
            for name, tensor in {**common["tensors"], **own.get("tensors", {})}.items():
                session.named_tensors[name].copy_(tensor)
        if optimizer:
            session.optimizer.load_state_dict(dict(optimizer))


# --- the folder of `shoal run --checkpoint` ---


@dataclass(frozen=True)
class _KeptFolder:
    """Where a run keeps checkpoints by itself."""

    path: Path
    every: int | None
    """Steps from one checkpoint to the next."""
    staging: Path
    """The same folder on all workers, for the parts that they leave at the end."""
    writers: list[str]
    """The processes of all workers, as names of staging folders have them."""
    is_common: bool
    """Whether all workers see the same folder there."""


def _find_kept_folder(group: Group, folder: Path | None) -> _KeptFolder | None:
    """Reads the options of the run, and finds out which workers see the folder. Collective."""
    options = RunOptions.from_environment()
    if options.checkpoint is None:
        return None
    if folder is None:  # else the strategy has had it in another group
        folder = Path(options.checkpoint)
        number = group.notes["num_kept_runs"] = group.notes.get("num_kept_runs", 0) + 1
        folder = folder if number == 1 else folder / f"strategy-{number}"
    group = still_there(group)
    first, own = group.members[0], this_process()
    name = f".end-{own}-{secrets.token_hex(4)}"
    if group.rank == first:
        with contextlib.suppress(OSError):
            (folder / name).mkdir(parents=True)
    answers = share(group, [name, own])
    staging, is_seen = folder / answers[0][0], False
    with contextlib.suppress(OSError):
        is_seen = staging.exists()
    sees = share(group, [group.rank, is_seen])
    if group.rank == first:
        with contextlib.suppress(OSError):
            staging.rmdir()
    # where the first itself could not make it, the first to save says why
    blind = [str(rank) for rank, sees_it in sees if sees[0][1] and not sees_it]
    if blind and group.rank == first:
        log.warning(
            "ranks that do not see %s as rank %d does: %s. Checkpoints there are without their own parts, "
            "and that of a clean end is what rank %d has then.", folder, first, ", ".join(blind), first,
        )  # fmt: skip
    writers = [writer for _, writer in answers]
    return _KeptFolder(folder, options.checkpoint_every, staging, writers, is_common=not blind)
