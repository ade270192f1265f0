"""Checkpoints of a run on disk: safetensors beside JSON in one folder a step; never half of one.

`step-00000120/` holds `model.safetensors`, by the names of the model's `state_dict`, for any program to load;
and `optimizer`, `strategy` and `workers/rank-3`, each of these a `.json` (see `states`) beside a
`.safetensors` with its tensors. `manifest.json` is written last and knows every file's size and hash, and its
own; then the folder gets its name. Who writes what, and what is done with it, is left to `saving` and
`resuming`.

Until then the files lie in a staging folder, whose name says which process made it: what a killed process has
left behind is removed by the next one that starts or saves there.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import CheckpointError, UsageError
from shoal.core.files import sha256_of, sync_folder, written
from shoal.core.processes import namespace, started, state_of
from shoal.strategies.states import flatten, rebuild

log = logging.getLogger(__name__)

FORMAT = 1
NUM_KEPT = 2
"""The newest ones, by default."""
_NAME = re.compile(r"step-(\d{8,})")
_STAGING = re.compile(r"\.(step|end)-.*")
_OWNER = re.compile(r"[0-9a-f]{8}\.\d+\.\d*")
_MANIFEST = "manifest.json"
_REPLACED = re.compile(r"\.(step-\d{8,})-.*-replaced")
"""Out of the way of one of the same step; counts until that one has its name."""
_UNREADABLE = -1
_MAX_JSON_BYTES = 256 << 20
_WRITERS = "writers"
_LEFTOVER_S = 24 * 3600.0
"""What processes of other machines began so long ago will not be finished; their clocks may differ."""


class FileNote(msgspec.Struct, frozen=True):
    """What a file must be."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint is of."""

    step: int
    num_workers: int
    strategy: str
    files: dict[str, FileNote]
    """By their paths inside the checkpoint."""
    number: int = 0
    """Of the checkpoint in its folder: a later one has a higher number, whatever its step."""
    format: int = FORMAT
    sha256: str = ""
    """Of all the above; empty in checkpoints that were written without."""

    def sealed(self) -> Manifest:
        """The same manifest with its checksum."""
        content = msgspec.json.encode(msgspec.structs.replace(self, sha256=""))
        return msgspec.structs.replace(self, sha256=hashlib.sha256(content).hexdigest())


class Checkpoint:
    """One that is there; it is whole as far as was looked (`check`)."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    def check(self, names: list[str]) -> None:
        """CheckpointError unless these files are what was written."""
        for name in names:
            note, path = self.manifest.files.get(name), self.path / name
            try:
                if note is None or path.stat().st_size != note.size_bytes or sha256_of(path) != note.sha256:
                    raise _damaged(self.path, f"{name} is not what was written")
            except OSError as error:
                raise _damaged(self.path, f"{name}: {error.strerror or error}") from error

    def has(self, name: str) -> bool:
        """Whether a state of this name was written."""
        return f"{name}.json" in self.manifest.files

    def model(self) -> dict[str, torch.Tensor]:
        """The common one's tensors."""
        return self._tensors("model")

    def state(self, name: str) -> Any:
        """A state as it was before it was written."""
        path = self.path / f"{name}.json"
        try:
            if path.stat().st_size > _MAX_JSON_BYTES:
                raise _damaged(self.path, f"{path.name} is too large")
            return rebuild(msgspec.json.decode(path.read_bytes()), self._tensors(name))
        except (OSError, msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(self.path, f"{path.name}: {error}") from error

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        try:
            return load_file(self.path / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            raise _damaged(self.path, f"{name}.safetensors: {error}") from error


def candidates(folder: Path) -> Iterator[Checkpoint]:
    """Those whose common files are whole, the newest first; tells of those that are not.

    The workers' own files are left to the workers to check.
    """
    found = _found(folder)
    unreadable = [path for number, path in found if number == _UNREADABLE]
    for path in (*unreadable, *(path for _, path in reversed(found) if path not in unreadable)):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.check([name for name in checkpoint.manifest.files if "/" not in name])
        except CheckpointError as error:
            log.warning("%s", error)
        else:
            yield checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """By its manifest alone; CheckpointError when there is none, a damaged one, or one of another format."""
    try:
        content = msgspec.json.decode((path / _MANIFEST).read_bytes())
        if isinstance(content, dict) and content.get("format") != FORMAT:
            raise _damaged(path, f"its format is {content.get('format')!r}, and this Shoal reads {FORMAT}")
        manifest = msgspec.convert(content, Manifest)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if manifest.sha256 and manifest != manifest.sealed():
        raise _damaged(path, f"{_MANIFEST} is not what was written")
    return Checkpoint(path, manifest)


def stage(folder: Path, step: int) -> Path:
    """A new folder to write a checkpoint's files to, beside its place."""
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".step-{step:08d}-{this_process()}-{secrets.token_hex(4)}"
    (staging / "workers").mkdir(parents=True)
    return staging


def this_process() -> str:
    """A word for this process in the names of staging folders: machine, number, and when it began."""
    return f"{_machine()}.{os.getpid()}.{started(os.getpid())}"


def note_writers(staging: Path, writers: Sequence[str]) -> None:
    """Say which processes write to a staging folder, where these are others than the one in its name."""
    with written(staging / _WRITERS) as path:
        path.write_text("\n".join(writers))


def clear_leftovers(folder: Path) -> None:
    """Remove the staging folders of processes that are gone.

    Only this machine's processes can be looked for. What others have begun stays for a day.
    """
    try:
        found = sorted(path for path in folder.iterdir() if _is_staging(path))
    except OSError:
        return
    for path in found:
        if not _is_in_use(path):
            discard(path)


def write_model(staging: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, FileNote]:
    """The common model; what was written, for the manifest."""
    return _write_tensors(staging, "model", tensors)


def write_state(staging: Path, name: str, state: Any) -> dict[str, FileNote]:
    """A state of numbers, texts, tensors, lists and dicts; what was written, for the manifest."""
    plain, tensors = flatten(state)
    return {**_write_tensors(staging, name, tensors), **_write_json(staging, f"{name}.json", plain)}


def seal(staging: Path, manifest: Manifest, num_kept: int = NUM_KEPT) -> Path:
    """Make a checkpoint of what was written, and forget the oldest; where it is."""
    folder, name = staging.parent, f"step-{manifest.step:08d}"
    number = 1 + max((number for number, _ in _found(folder)), default=0)
    _write_json(staging, _MANIFEST, msgspec.structs.replace(manifest, number=number).sealed())
    (staging / _WRITERS).unlink(missing_ok=True)
    path = folder / name
    if path.exists():
        path.rename(folder / f".{name}-{secrets.token_hex(4)}-replaced")
    staging.rename(path)
    sync_folder(folder)
    _prune(folder, num_kept)
    return path


def discard(staging: Path) -> None:
    """Nothing comes of it."""
    shutil.rmtree(staging, ignore_errors=True)


def _prune(folder: Path, num_kept: int) -> None:
    found = [path for _, path in _found(folder)]
    for path in sorted(folder.iterdir()):
        if _REPLACED.fullmatch(path.name) is not None and path not in found:
            discard(path)
    clear_leftovers(folder)
    for path in found[:-num_kept]:
        discard(path)


def _is_staging(path: Path) -> bool:
    is_named_so = _STAGING.fullmatch(path.name) is not None and _REPLACED.fullmatch(path.name) is None
    return is_named_so and path.is_dir()


def _is_in_use(staging: Path) -> bool:
    """Whether somebody may still write there."""
    try:
        writers = (staging / _WRITERS).read_text().split()
    except OSError:
        writers = []
    named = [*_OWNER.findall(staging.name), *writers]
    here, is_any_running = _machine(), False
    for machine, pid, began in (name.split(".") for name in named if _OWNER.fullmatch(name)):
        if machine != here:
            break
        is_any_running = is_any_running or state_of(int(pid), began) != "gone"
    else:
        if named:
            return is_any_running
    try:
        return SYSTEM_CLOCK.wall_s() - staging.stat().st_mtime <= _LEFTOVER_S
    except OSError:
        return False


@functools.cache
def _machine() -> str:
    """A word for this machine since it was started; a container counts for itself."""
    return hashlib.sha256(f"{socket.gethostname()} {namespace()}".encode()).hexdigest()[:8]


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints with their numbers, whole or not, those that are certainly not before all others."""
    try:
        paths = sorted(path for path in folder.iterdir() if _is_name(path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"The checkpoints in {folder} cannot be listed: {error.strerror or error}.",
            next_step="look at the folder's permissions.",
        ) from error
    numbers = []
    for path in paths:
        number = _UNREADABLE
        with contextlib.suppress(CheckpointError):
            number = open_checkpoint(path).manifest.number
        numbers.append(number)
    return sorted(zip(numbers, paths, strict=True))


def _is_name(path: Path) -> bool:
    replaced = _REPLACED.fullmatch(path.name)
    if replaced is None:
        return _NAME.fullmatch(path.name) is not None
    return not path.with_name(replaced[1]).exists()


def _write_tensors(staging: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, FileNote]:
    try:
        with written(staging / f"{name}.safetensors") as path:
            save_file(_apart(tensors), path)
    except (SafetensorError, ValueError, KeyError) as error:
        raise UsageError(f"the tensors of {name} cannot be written: {error}.") from error
    return _note(staging, f"{name}.safetensors")


def _write_json(staging: Path, name: str, value: Any) -> dict[str, FileNote]:
    with written(staging / name) as path:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
    return _note(staging, name)


def _note(staging: Path, name: str) -> dict[str, FileNote]:
    path = staging / name
    return {name: FileNote(path.stat().st_size, sha256_of(path))}


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each in memory of its own, laid out row by row, as safetensors wants them."""
    apart: dict[str, torch.Tensor] = {}
    seen: list[int] = []
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.nbytes() != plain.nbytes or storage.data_ptr() in seen:
            plain = plain.clone()
        seen.append(plain.untyped_storage().data_ptr())
        apart[name] = plain
    return apart


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} is left out: {why}.",
        cause="its writer was stopped in the middle, or the disk has failed.",
    )
