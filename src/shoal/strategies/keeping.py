"""When a strategy's checkpoints are written and taken up; what is in them is the strategy's to say.

`shoal run --checkpoint FOLDER` makes every strategy resume by itself when it is attached first, and save
every so many steps and at a clean end. A second strategy of the group has `FOLDER/strategy-2`, and so on.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from shoal.core.errors import CheckpointError
from shoal.core.run_options import RunOptions
from shoal.data import ShardedLoader
from shoal.data.kept import KeptLoaders, kept_loaders
from shoal.group import Group, share
from shoal.strategies.checkpoints import this_process
from shoal.strategies.resuming import Resumed, resume, set_random_states
from shoal.strategies.session import TrainingSession, innermost, still_there

log = logging.getLogger(__name__)

_numbers: WeakKeyDictionary[Group, int] = WeakKeyDictionary()
"""How many strategies of a group keep checkpoints by themselves."""


class Keeper:
    """One strategy's part in it; `save` is called with the folder, on all workers at the same step."""

    def __init__(self, group: Group, save: Callable[[Path], Path]) -> None:
        self._group = group
        self._save = save
        self._asked: tuple[Path, Sequence[ShardedLoader[Any]] | None] | None = None
        self._folder: Path | None = None
        self._every: int | None = None
        self._is_known = False
        self._is_common = True
        self._staging = ""
        self._writers: list[str] = []
        self._random: Mapping[str, Any] | None = None
        self._saved_step: int | None = None
        self._is_failing = False

    @property
    def folder(self) -> Path | None:
        """Where this run keeps its checkpoints, if it does so by itself; known once it is attached."""
        return self._folder

    @property
    def is_common(self) -> bool:
        """Whether all workers see the same folder there."""
        return self._is_common

    @property
    def writers(self) -> Sequence[str]:
        """The processes of all workers, as names of staging folders have them."""
        return self._writers

    def ask(self, folder: Path, loaders: Sequence[ShardedLoader[Any]] | None) -> None:
        """Take up what is there when the strategy is attached next."""
        self._asked = folder, loaders

    def resume(self, attachment: TrainingSession, strategy: str) -> Resumed | None:
        """At attaching: take up a checkpoint, if there is one to be taken up now. Collective."""
        is_first, self._is_known = not self._is_known, True
        if is_first:
            self._learn()
        asked, self._asked = self._asked, None
        folder, loaders = asked or (self._folder if is_first else None, None)
        resumed = None if folder is None else resume(still_there(self._group), folder, attachment, strategy)
        if resumed is None:
            if asked is not None:
                raise CheckpointError(
                    f"There is no whole checkpoint in {folder}.",
                    next_step="give the folder that `strategy.save` was given, as rank 0 sees it.",
                )
            return None
        given = [loader.course for loader in loaders or ()]
        kept_loaders(self._group).load(resumed.loaders, given)
        self._random = resumed.random
        self._saved_step = resumed.step if folder == self._folder else None
        if self._group.rank == 0:
            log.warning("%s", resumed)
        return resumed

    def opened(self) -> None:
        """The strategy is attached: what its start has drawn does not count."""
        random, self._random = self._random, None
        if random is not None:
            set_random_states(random)

    def stepped(self, step: int) -> None:
        """After each step: save if it is time. A disk that fails ends nothing, and is told of once."""
        if self._folder is not None and self._every and step % self._every == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Save by itself, unless that step is saved."""
        if self._folder is None or self._saved_step == step:
            return
        folder = self._folder
        self._try(step, lambda: self._save(folder))

    def end(self, step: int, save: Callable[[Path], Path | None]) -> None:
        """At the end of a run, unless that step is saved; `save` is called with a folder for the parts."""
        if self._folder is not None and self._saved_step != step:
            staging = self._folder / self._staging
            self._try(step, lambda: save(staging))

    def _try(self, step: int, save: Callable[[], Path | None]) -> None:
        try:
            path = save()
        except CheckpointError as error:
            if not self._is_failing:
                log.error("training goes on without new checkpoints: %s", error)
            self._is_failing = True
        else:
            self._is_failing = False
            self._saved_step = step
            if path is not None:
                log.info("saved step %d in %s", step, path)

    def _learn(self) -> None:
        options = RunOptions.from_environment()
        if options.checkpoint is None:
            return
        group = innermost(self._group)
        number = _numbers[group] = _numbers.get(group, 0) + 1
        folder = Path(options.checkpoint)
        self._folder = folder if number == 1 else folder / f"strategy-{number}"
        self._every = options.checkpoint_every
        self._staging, self._writers, self._is_common = _meet(still_there(self._group), self._folder)


def _meet(group: Group, folder: Path) -> tuple[str, list[str], bool]:
    """The staging folder of all workers for the end, their processes, and whether all see it. Collective."""
    first, own = group.members[0], this_process()
    name = f".end-{own}-{secrets.token_hex(4)}"
    is_made = group.rank == first and _make(folder / name)
    answers = share(group, [name, is_made, own])
    name, is_made, _ = answers[0]
    writers = [writer for *_, writer in answers]
    sign = folder / name
    if not is_made:  # the first to save says why
        return name, writers, True
    sees = share(group, _sees(sign))
    if group.rank == first:
        with contextlib.suppress(OSError):
            sign.rmdir()
        blind = [str(rank) for rank, sees_it in zip(group.members, sees, strict=True) if not sees_it]
        if blind:
            log.warning(
                "ranks that do not see %s as rank %d does: %s. Checkpoints there are without their own "
                "parts, and that of a clean end is what rank %d has then.",
                folder, first, ", ".join(blind), first,
            )  # fmt: skip
    return name, writers, all(sees)


def _sees(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:
        return False


def _make(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True)
    except OSError:
        return False
    return True


def keep(group: Group, loaders: Sequence[ShardedLoader[Any]] | None) -> KeptLoaders:
    """The loaders that are given, or all that were divided for the group."""
    if loaders is None:
        return kept_loaders(group)
    kept = KeptLoaders()
    for loader in loaders:
        kept.add(loader.course)
    return kept
