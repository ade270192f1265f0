"""Experts on disk: tensors as safetensors beside a JSON that says what they are; never half of one.

A checkpoint is `<folder>/<uid>/<name>.safetensors` and `<name>.json`. The JSON is written last and knows the
other file's size and hash: what has none, or one that does not fit, is no checkpoint. Names sort by age.
Several processes may use one folder. When to save is `saving`'s to say.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shoal.core import SYSTEM_CLOCK, CheckpointError, Clock, UsageError
from shoal.core.files import TEMPORARY, sha256_of, written
from shoal.experts.fitting import is_finite
from shoal.experts.state import ExpertState

log = logging.getLogger(__name__)

FORMAT = 1
_TENSORS, _DOCUMENT = ".safetensors", ".json"
_NAME = re.compile(r"(\d{17})-[0-9a-f]{8}")
_UID = re.compile(r"\w[\w-]*(\.[\w-]+)*")
_MAX_UID_BYTES = 200
_MAX_DOCUMENT_BYTES = 64 << 20
_LEFTOVER_S = 3600.0  # what somebody began to write so long ago will not be finished


@dataclass(frozen=True, slots=True)
class SavedExpert:
    """A checkpoint that was read."""

    uid: str
    state: ExpertState
    about: dict[str, Any]
    """What was told when it was saved: class, sizes, and the like."""
    num_updates: int
    path: Path
    """Of its JSON."""


class _TensorFile(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str


class _Document(msgspec.Struct, frozen=True):
    format: int
    uid: str
    about: dict[str, Any]
    num_updates: int
    numbers: dict[str, Any]
    tensors: _TensorFile


class Checkpoints:
    """A folder of experts, the newest `num_kept` of each. All methods block: call them off the loop."""

    def __init__(self, folder: Path | str, num_kept: int = 3, clock: Clock = SYSTEM_CLOCK) -> None:
        if num_kept < 1:
            raise UsageError(f"At least one checkpoint has to be kept, not {num_kept}.")
        self.folder = Path(folder)
        self._num_kept = num_kept
        self._clock = clock

    def uids(self) -> list[str]:
        """Those of which there is a checkpoint, whole or not, sorted."""
        try:
            folders = [one for one in self.folder.iterdir() if _is_uid(one.name) and one.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"The checkpoints in {self.folder} cannot be listed: {error.strerror or error}.",
                next_step="look at the folder's permissions.",
            ) from error
        return sorted(folder.name for folder in folders if _names(folder))

    def save(self, uid: str, state: ExpertState, about: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint and forget the oldest; the path of its JSON. CheckpointError when it cannot."""
        folder = self._folder_of(uid)
        if not is_finite([state.numbers, about]):  # JSON has no word for it
            raise CheckpointError(
                f"The state of the expert {uid} cannot be written: a number in it is NaN or infinite.",
                cause="its optimizer or scheduler was set up with such a number, or has diverged.",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = self._next_name(folder)
            with written(folder / (name + _TENSORS)) as temporary:
                save_file(dict(state.tensors), temporary)
                tensors = _TensorFile(temporary.stat().st_size, sha256_of(temporary))
            num_updates = int(state.numbers["num_updates"])
            document = _Document(FORMAT, uid, dict(about or {}), num_updates, dict(state.numbers), tensors)
            path = folder / (name + _DOCUMENT)
            with written(path) as temporary:
                temporary.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
            self._prune(uid, folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"The expert {uid} cannot be saved in {folder}: {error}.",
                cause="the disk is full or failing, or the folder is not to be written to.",
                next_step="make room, or give another folder.",
            ) from error
        except (TypeError, ValueError, RuntimeError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"The state of the expert {uid} cannot be written: {error}.") from error
        return path

    def load(self, uid: str) -> SavedExpert | None:
        """The newest that is whole; None when there is none. Those that are not are told of in the log."""
        folder = self._folder_of(uid)
        names = _names(folder)
        for name in reversed(names):
            path = folder / (name + _DOCUMENT)
            try:
                return _read(uid, path)
            except CheckpointError as error:
                log.warning("%s", error)
        if names:
            log.error("The expert %s has %d checkpoints in %s, none of them whole.", uid, len(names), folder)
        return None

    def num_updates(self, uid: str) -> int | None:
        """Of the newest checkpoint, by its JSON alone; None when there is none to be read."""
        folder = self._folder_of(uid)
        for name in reversed(_names(folder)):
            with contextlib.suppress(CheckpointError):
                return _document(uid, folder / (name + _DOCUMENT)).num_updates
        return None

    def _folder_of(self, uid: str) -> Path:
        if not _is_uid(uid):
            raise UsageError(
                f"The expert {uid[:100]!r} cannot have checkpoints: its uid is no name of a folder.",
                next_step="use letters, digits, '-' and '_', and single dots between them.",
            )
        return self.folder / uid

    def _next_name(self, folder: Path) -> str:
        """Later than all that are there, whatever the machine's clock says."""
        now_us = int(self._clock.wall_s() * 1e6)
        latest_us = max((int(name[:17]) for name in _names(folder)), default=0)
        return f"{max(now_us, latest_us + 1):017d}-{secrets.token_hex(4)}"

    def _prune(self, uid: str, folder: Path) -> None:
        num_whole = 0
        for name in reversed(_names(folder)):
            document, tensors = folder / (name + _DOCUMENT), folder / (name + _TENSORS)
            if num_whole >= self._num_kept:
                document.unlink(missing_ok=True)  # first: from now on it is no checkpoint
                tensors.unlink(missing_ok=True)
                continue
            with contextlib.suppress(CheckpointError, OSError):
                num_whole += _document(uid, document).tensors.size_bytes == tensors.stat().st_size
        kept = _names(folder)
        for path in sorted(folder.iterdir()):
            is_leftover = path.suffix == TEMPORARY or (path.suffix == _TENSORS and path.stem not in kept)
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if is_leftover and self._clock.wall_s() - path.stat().st_mtime > _LEFTOVER_S:
                    path.unlink()


def _is_uid(text: str) -> bool:
    return len(text.encode(errors="replace")) <= _MAX_UID_BYTES and _UID.fullmatch(text) is not None


def _names(folder: Path) -> list[str]:
    """Of checkpoints whose JSON is there, oldest first."""
    try:
        files = list(folder.iterdir())
    except OSError:
        return []
    return sorted(
        path.stem for path in files if path.suffix == _DOCUMENT and _NAME.fullmatch(path.stem) is not None
    )


def _read(uid: str, path: Path) -> SavedExpert:
    document = _document(uid, path)
    file = path.with_suffix(_TENSORS)
    try:
        if file.stat().st_size != document.tensors.size_bytes or sha256_of(file) != document.tensors.sha256:
            raise _damaged(path, "its tensors are not those that were written")
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    state = ExpertState(tensors=tensors, numbers=document.numbers)
    return SavedExpert(uid, state, document.about, document.num_updates, path)


def _document(uid: str, path: Path) -> _Document:
    try:
        if path.stat().st_size > _MAX_DOCUMENT_BYTES:
            raise _damaged(path, "its JSON is too large")
        content = msgspec.json.decode(path.read_bytes())
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise _damaged(path, f"its format is {content.get('format')!r}, and this Shoal reads {FORMAT}")
        document = msgspec.convert(content, _Document)
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if document.uid != uid:
        raise _damaged(path, f"it is one of the expert {document.uid[:100]!r}")
    return document


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} is left out: {why}.",
        cause="its writer was stopped in the middle, or the disk has failed.",
    )
