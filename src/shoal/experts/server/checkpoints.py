"""Experts on disk, in the format of `shoal.tensors.checkpoint`, and when they are saved while they serve.

A checkpoint is the folder `<folder>/<uid>/step-00000120`, named by the number of updates, with the state
`expert`: `about`, `numbers` and `tensors`. Earlier versions wrote pairs of files, a JSON and a safetensors:
they are read where there is no other checkpoint, and removed when enough others exist.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file

from shoal.core import CheckpointError, LoopThread, ShoalError, UsageError
from shoal.core.files import sha256_of
from shoal.experts.state import ExpertState, is_finite
from shoal.tensors.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    FileNote,
    checkpoint_paths,
    damaged,
    newest_first,
)

if TYPE_CHECKING:
    from shoal.experts.expert import Expert
    from shoal.experts.server.server import ExpertServer

log = logging.getLogger(__name__)


_STATE = "expert"
_UID = re.compile(r"\w[\w-]*(\.[\w-]+)*")
_MAX_UID_BYTES = 200
_OLD_FILE = re.compile(r"\d{17}-[0-9a-f]{8}\.(json|safetensors)(\.[0-9a-f]{8}\.tmp)?")
_MAX_OLD_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class SavedExpert:
    """A checkpoint of an expert that was read."""

    uid: str
    state: ExpertState
    about: dict[str, Any]
    """What was told when it was saved: class, sizes, and the like."""
    num_updates: int
    path: Path
    """The checkpoint's folder, which stands in the folder of the expert."""


class Checkpoints:
    """A folder of experts, the newest `num_kept` checkpoints of each. Several processes may share it.

    All methods block: call them off the loop.
    """

    def __init__(self, folder: Path | str, num_kept: int = 3) -> None:
        if num_kept < 1:
            raise UsageError(f"At least one checkpoint has to be kept, not {num_kept}.")
        self.folder = Path(folder)
        self._num_kept = num_kept

    def uids(self) -> list[str]:
        """Lists the experts of which there is a checkpoint, whole or not, sorted."""
        try:
            folders = [one for one in self.folder.iterdir() if _is_uid(one.name) and one.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"The checkpoints in {self.folder} cannot be listed: {error.strerror or error}.",
                next_step="look at the folder's permissions.",
            ) from error
        return sorted(folder.name for folder in folders if _paths(folder))

    def save(self, uid: str, state: ExpertState, about: Mapping[str, Any] | None = None) -> Path:
        """Writes a checkpoint and removes the oldest; returns its folder. CheckpointError when it cannot."""
        folder = self._folder_of(uid)
        if not is_finite([state.numbers, about]):
            raise CheckpointError(
                f"The state of the expert {uid} cannot be written: a number in it is NaN or infinite.",
                cause="its optimizer or scheduler was set up with such a number, or has diverged.",
            )
        content = {"about": dict(about or {}), "numbers": state.numbers, "tensors": state.tensors}
        try:
            with CheckpointWriter.begin(folder, state.num_updates) as writer:
                writer.write_state(_STATE, content)
                path = writer.seal(uid, state.num_updates, num_kept=self._num_kept)
            if len(checkpoint_paths(folder)) >= self._num_kept:
                for old in [old for old in folder.iterdir() if _OLD_FILE.fullmatch(old.name)]:
                    old.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"The expert {uid} cannot be saved in {folder}: {error}.",
                cause="the disk is full or failing, or the folder is not to be written to.",
                next_step="make room, or give another folder.",
            ) from error
        except (UsageError, RuntimeError) as error:
            what = error.what if isinstance(error, UsageError) else error
            raise CheckpointError(f"The state of the expert {uid} cannot be written: {what}") from error
        return path

    def load(self, uid: str) -> SavedExpert | None:
        """Reads the newest that is whole; None when there is none. The log tells of those that are not."""
        folder = self._folder_of(uid)
        for checkpoint in newest_first(folder):
            try:
                return _read(uid, checkpoint)
            except CheckpointError as error:
                log.warning("%s", error)
        for path in reversed(_old_paths(folder)):
            try:
                return _read_old(uid, path)
            except CheckpointError as error:
                log.warning("%s", error)
        if num_found := len(_paths(folder)):
            log.error("The expert %s has %d checkpoints in %s, none of them whole.", uid, num_found, folder)
        return None

    def num_updates(self, uid: str) -> int | None:
        """Tells how far the newest checkpoint is, by its manifest alone; None when there is none to read."""
        for path in reversed(checkpoint_paths(self._folder_of(uid))):
            with contextlib.suppress(CheckpointError):
                manifest = Checkpoint.open(path).manifest
                if manifest.owner == uid:
                    return manifest.step
        return None

    def _folder_of(self, uid: str) -> Path:
        if not _is_uid(uid):
            raise UsageError(
                f"The expert {uid[:100]!r} cannot have checkpoints: its uid is no name of a folder.",
                next_step="use letters, digits, '-' and '_', and single dots between them.",
            )
        return self.folder / uid


class Saver:
    """Saves a server's experts when they have changed, on the loop thread `writer`.

    An expert is copied between two batches, one at a time. A disk that fails stops nobody: it is told of
    once, and tried again.
    """

    def __init__(
        self,
        server: ExpertServer,
        checkpoints: Checkpoints,
        writer: LoopThread,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._server = server
        self._checkpoints = checkpoints
        self._writer = writer
        self._about = dict(about or {})
        self._saved: dict[str, tuple[Expert, int]] = {}  # and how many changes it had
        self._is_failing = False
        self._turn = asyncio.Lock()

    async def save(self) -> int:
        """Saves every expert that differs from its newest checkpoint; returns how many could be saved."""
        num_saved = 0
        async with self._turn:
            for expert in tuple(self._server.experts.values()):
                try:
                    num_saved += await self._save(expert)
                except ShoalError as error:
                    if not self._is_failing:
                        log.error("Experts are not saved, which is tried again from now on: %s", error)
                    self._is_failing = True
            self._saved = {uid: saved for uid, saved in self._saved.items() if uid in self._server.experts}
        return num_saved

    async def run(self, every_s: float) -> None:
        """Saves now and every so many seconds, until cancelled."""
        if not every_s > 0:
            raise UsageError(f"Experts cannot be saved every {every_s} s.", next_step="give a time above 0.")
        while True:
            await self.save()
            await asyncio.sleep(every_s)

    async def _save(self, expert: Expert) -> bool:
        uid = expert.uid
        known, num_changes = self._saved.get(uid, (None, 0))
        if known is not expert:
            num_updates = await self._writer.run_blocking(lambda: self._checkpoints.num_updates(uid))
            num_changes = 0 if num_updates == expert.num_updates else -1
        if num_changes == expert.num_changes:
            self._saved[uid] = expert, num_changes
            return False
        state, num_changes = await self._server.on_device(lambda: (expert.state(), expert.num_changes))
        await self._writer.run_blocking(lambda: self._checkpoints.save(uid, state, self._about))
        self._saved[uid] = expert, num_changes
        if self._is_failing:
            log.info("Experts are saved again.")
        self._is_failing = False
        return True


def _is_uid(text: str) -> bool:
    return len(text.encode(errors="replace")) <= _MAX_UID_BYTES and _UID.fullmatch(text) is not None


def _paths(folder: Path) -> list[Path]:
    return [*checkpoint_paths(folder), *_old_paths(folder)]


def _read(uid: str, checkpoint: Checkpoint) -> SavedExpert:
    path, manifest = checkpoint.path, checkpoint.manifest
    if manifest.owner != uid:
        raise damaged(path, f"it is one of {manifest.owner[:100]!r}")
    try:
        content = checkpoint.state(_STATE)
        state = ExpertState(tensors=dict(content["tensors"]), numbers=dict(content["numbers"]))
        return SavedExpert(uid, state, dict(content["about"]), manifest.step, path)
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"it is not one of an expert: {error!r}") from error


# --- the files of earlier versions ---


class _OldDocument(msgspec.Struct, frozen=True):
    format: int
    uid: str
    about: dict[str, Any]
    num_updates: int
    numbers: dict[str, Any]
    tensors: FileNote


def _old_paths(folder: Path) -> list[Path]:
    """The JSON files of the checkpoints, oldest first."""
    try:
        return sorted(
            path for path in folder.iterdir() if _OLD_FILE.fullmatch(path.name) and path.suffix == ".json"
        )
    except OSError:
        return []


def _read_old(uid: str, path: Path) -> SavedExpert:
    file = path.with_suffix(".safetensors")
    try:
        if path.stat().st_size > _MAX_OLD_JSON_BYTES:
            raise damaged(path, "its JSON is too large")
        document = msgspec.json.decode(path.read_bytes(), type=_OldDocument)
        if document.format != 1:
            raise damaged(path, f"its format is {document.format}, and this Shoal reads 1")
        if document.uid != uid:
            raise damaged(path, f"it is one of the expert {document.uid[:100]!r}")
        note = document.tensors
        if file.stat().st_size != note.size_bytes or sha256_of(file) != note.sha256:
            raise damaged(path, "its tensors are not those that were written")
        tensors = load_file(file)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError, SafetensorError) as error:
        raise damaged(path, str(error)) from error
    state = ExpertState(tensors=tensors, numbers=document.numbers)
    return SavedExpert(uid, state, document.about, document.num_updates, path)
