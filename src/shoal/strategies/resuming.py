"""Taking up a checkpoint, all workers together.

With as many workers as it was saved by, and under the same strategy, each takes its own part, and the run
goes on exactly where it was. Otherwise rank 0 takes the common model and optimizer, `attach` gives them to
all, and loaders divide what is left of their epoch anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.core.errors import CheckpointError, UsageError
from shoal.data.seeds import generator_states, set_generators
from shoal.group import Group, share
from shoal.strategies import checkpoints
from shoal.strategies.checkpoints import Checkpoint
from shoal.strategies.session import TrainingSession
from shoal.strategies.start import take_state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What a checkpoint has for the strategy, after the model and the optimizer were loaded."""

    path: Path
    step: int
    num_workers: int
    strategy: str
    is_exact: bool
    """Each worker has its own part; if not, only rank 0 has loaded what is common."""
    state: Mapping[str, Any]
    loaders: list[Any]
    random: Mapping[str, Any] | None

    def __str__(self) -> str:
        had = "" if self.is_exact else f", saved by {self.num_workers} workers under {self.strategy}"
        return f"resumed step {self.step} from {self.path}{had}"


def resume(group: Group, folder: Path, attachment: TrainingSession, strategy: str) -> Resumed | None:
    """Load the newest checkpoint that is whole for all workers; None when there is none. Collective."""
    chosen = _choose(group, folder, strategy)
    if chosen is None:
        return None
    path, found, own = chosen
    if own is not None:
        mine = own.state(f"workers/rank-{group.rank}")
        common, optimizer = own.state("strategy"), mine.get("optimizer") or own.state("optimizer")
        _load(attachment, own, {**common["tensors"], **mine["tensors"]}, common["model"], optimizer)
        manifest = own.manifest
        return Resumed(
            path, manifest.step, manifest.num_workers, strategy, is_exact=True,
            state=mine["strategy"], loaders=mine["loaders"], random=mine["random"],
        )  # fmt: skip
    problem = ""
    if found is not None:
        try:
            common = found.state("strategy")
            _load(attachment, found, common["tensors"], common["model"], found.state("optimizer"))
        except (CheckpointError, UsageError) as error:
            problem = error.what
    _raise(f"{path} cannot be taken up: ", share(group, problem))
    known = take_state(group, lambda: _common(found))
    return Resumed(
        path, known["step"], known["num_workers"], known["saved by"], is_exact=False,
        state=known["strategy"], loaders=known["loaders"], random=None,
    )  # fmt: skip


def random_states() -> dict[str, Any]:
    """Of Python, numpy and torch, on GPUs too where they are used."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {**generator_states(), "cuda": cuda}


def set_random_states(states: Mapping[str, Any]) -> None:
    """As they were."""
    set_generators(states)
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def _choose(
    group: Group, folder: Path, strategy: str
) -> tuple[Path, Checkpoint | None, Checkpoint | None] | None:
    """Where the checkpoint is, it on rank 0, and it on a worker that has its own part, as all of them do.

    All workers decide together: one that is damaged for some worker is left out by all. When every one is,
    the newest is taken from its common part.
    """
    if group.rank == 0:
        checkpoints.clear_leftovers(folder)
    candidates = checkpoints.candidates(folder) if group.rank == 0 else iter(())
    newest: tuple[Path, Checkpoint | None] | None = None
    while True:
        found, problem = None, ""
        try:
            found = next(candidates, None)
        except CheckpointError as error:
            problem = error.what
        answers = share(group, ["" if found is None else found.path.name, problem])
        _raise("", [trouble for _, trouble in answers])
        name = next((name for name, _ in answers if name), "")
        if not name:
            break
        path = folder / name
        own, problem = _own(group, found, path, strategy)
        answers = share(group, [own is not None, problem])
        damages = [
            f"{trouble} (rank {rank})"
            for rank, (_, trouble) in zip(group.members, answers, strict=True)
            if trouble
        ]
        if not damages:
            return path, found, own if all(has_own for has_own, _ in answers) else None
        if group.rank == 0:
            log.warning("%s All workers leave it out.", " ".join(damages))
        newest = newest or (path, found)
    if newest is None:
        return None
    if group.rank == 0:
        log.warning(
            "No checkpoint in %s is whole for all workers: all begin with the common model and optimizer of "
            "%s, whose common part is whole.",
            folder,
            newest[0].name,
        )
    return *newest, None


def _own(group: Group, found: Checkpoint | None, path: Path, strategy: str) -> tuple[Checkpoint | None, str]:
    """The checkpoint, if this worker's own part is in it; and why, if that part is damaged."""
    name = f"workers/rank-{group.rank}"
    if found is None and not path.exists():
        log.warning("rank %d does not see %s, and begins with what rank 0 gives it", group.rank, path)
        return None, ""
    try:
        checkpoint = found or checkpoints.open_checkpoint(path)
        manifest = checkpoint.manifest
        if (manifest.num_workers, manifest.strategy) != (group.size, strategy) or not checkpoint.has(name):
            return None, ""
        checkpoint.check([f"{name}.json", f"{name}.safetensors"])
    except CheckpointError as error:
        return None, error.what
    return checkpoint, ""


def _common(found: Checkpoint | None) -> dict[str, Any]:
    assert found is not None, "rank 0 has found it"
    state, manifest = found.state("strategy"), found.manifest
    about = {"step": manifest.step, "num_workers": manifest.num_workers, "saved by": manifest.strategy}
    return {**about, "strategy": state["strategy"], "loaders": state["loaders"]}


def _load(
    attachment: TrainingSession,
    checkpoint: Checkpoint,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
    optimizer: Mapping[str, Any],
) -> None:
    """Into the parameters and buffers where they lie; `tensors` come after the common model's."""
    try:
        attachment.model.load_state_dict({**checkpoint.model(), **extra})
        with torch.no_grad():
            for name, tensor in tensors.items():
                attachment.named_tensors[name].copy_(tensor)
        attachment.optimizer.load_state_dict(dict(optimizer))
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise UsageError(
            f"the checkpoint {checkpoint.path} does not fit: {error}",
            cause="the model or the optimizer is built in another way than in the run that saved it.",
            next_step="build them as there, or give another folder.",
        ) from error


def _raise(words: str, problems: list[str]) -> None:
    problem = next((problem for problem in problems if problem), "")
    if problem:
        raise CheckpointError(f"{words}{problem}")


def extra_state(model: nn.Module) -> dict[str, Any]:
    """What modules keep beside tensors (`get_extra_state`)."""
    return {name: value for name, value in model.state_dict().items() if not isinstance(value, torch.Tensor)}
