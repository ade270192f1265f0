"""The checkpoint format: one folder for each checkpoint, which is whole or not there.

    step-00000120/
        model.safetensors       tensors by name, for any program to load
        optimizer.json          a state: plain values, and {"$tensor": NAME} in place of each tensor
        optimizer.safetensors   the tensors of that state
        workers/rank-3.json     states may stand in sub-folders
        manifest.json           whose checkpoint it is, and the size and hash of every file and of itself

Files are written to a staging folder beside that place. The manifest is written last, and then the folder
gets its name, so that a process may be killed at any time. The name of a staging folder says which process
made it: what a killed process has left behind is removed by the next one that starts or saves there. Several
processes may save in one folder. What is in a checkpoint, and when one is written, is left to strategies and
experts.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import logging
import math
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shoal.core import SYSTEM_CLOCK
from shoal.core.errors import CheckpointError, ShoalError, UsageError
from shoal.core.files import sha256_of, sync_folder, written
from shoal.core.processes import namespace, started, state_of
from shoal.tensors.dtypes import DTYPES
from shoal.tensors.packing import reshape_dense
from shoal.tensors.specs import TensorSpec, describe, size_bytes

log = logging.getLogger(__name__)

FORMAT = 1
NUM_KEPT = 2
"""How many checkpoints of a folder are kept by default, the newest."""

_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{8,})")
_STAGING = re.compile(r"\.(step|end)-.*")
_REPLACED = re.compile(r"\.(step-\d{8,})-.*-replaced")
"""A checkpoint that makes way for one of the same step; it counts until that one has its name."""
_OWNER = re.compile(r"[0-9a-f]{8}\.\d+\.\d*")
_WRITERS, _NOTE, _LAST = "writers", ".ended", "last"
"""In a staging folder of several processes: who they are, the note of each, and that the last has come."""
_UNREADABLE = -1
_MAX_JSON_BYTES = 256 << 20
_LEFTOVER_S = 24 * 3600.0
"""What processes of other machines began so long ago will not be finished; their clocks may differ."""
_SCALARS = (bool, int, float, str)


class FileNote(msgspec.Struct, frozen=True):
    """The size and the hash that a file of a checkpoint must have."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """Says what a checkpoint is of, and which files belong to it."""

    step: int
    """The steps or updates that were done before it."""
    num_workers: int
    owner: str = msgspec.field(name="strategy")
    """The name of the strategy, or the uid of the expert, that it is of; format 1 calls it `strategy`."""
    files: dict[str, FileNote]
    """The files by their paths inside the checkpoint."""
    number: int = 0
    """Counts the checkpoints of a folder: a later one has a higher number, whatever its step."""
    format: int = FORMAT
    sha256: str = ""
    """The hash of all the above; empty in checkpoints that were written without."""


class Checkpoint:
    """A checkpoint that was found on disk; its files are whole as far as they were checked."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Reads the manifest alone; CheckpointError when it is missing, damaged, or of another format."""
        try:
            content = msgspec.json.decode((path / _MANIFEST).read_bytes())
            if isinstance(content, dict) and content.get("format") != FORMAT:
                raise damaged(path, f"its format is {content.get('format')!r}, and this Shoal reads {FORMAT}")
            manifest = msgspec.convert(content, Manifest)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise damaged(path, str(error)) from error
        if manifest.sha256 and manifest.sha256 != _digest(content):
            raise damaged(path, f"{_MANIFEST} is not what was written")
        return cls(path, manifest)

    @property
    def has_all_bytes(self) -> bool:
        """Whether every file is there and has its size, which is looked up without reading it."""
        try:
            return all(
                (self.path / name).stat().st_size == note.size_bytes
                for name, note in self.manifest.files.items()
            )
        except OSError:
            return False

    def check(self, names: Sequence[str]) -> None:
        """Raises CheckpointError unless these files are what was written."""
        for name in names:
            note, path = self.manifest.files.get(name), self.path / name
            try:
                if note is None or path.stat().st_size != note.size_bytes or sha256_of(path) != note.sha256:
                    raise damaged(self.path, f"{name} is not what was written")
            except OSError as error:
                raise damaged(self.path, f"{name}: {error.strerror or error}") from error

    def check_state(self, name: str) -> None:
        """Raises CheckpointError unless both files of this state are what was written."""
        self.check([f"{name}.json", f"{name}.safetensors"])

    def has_state(self, name: str) -> bool:
        """Says whether a state of this name was written."""
        return f"{name}.json" in self.manifest.files

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Reads the tensors that were written under this name; CheckpointError when that fails."""
        try:
            return load_file(self.path / f"{name}.safetensors")
        except (OSError, SafetensorError) as error:
            raise damaged(self.path, f"{name}.safetensors: {error}") from error

    def state(self, name: str) -> Any:
        """Reads a state, as it was before it was written; CheckpointError when that fails."""
        path = self.path / f"{name}.json"
        try:
            if path.stat().st_size > _MAX_JSON_BYTES:
                raise damaged(self.path, f"{path.name} is too large")
            return rebuild(msgspec.json.decode(path.read_bytes()), self.tensors(name))
        except (OSError, msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(self.path, f"{path.name}: {error}") from error


def checkpoint_paths(folder: Path) -> list[Path]:
    """Lists the checkpoints of a folder, whole or not, oldest first, those without a manifest before all."""
    return [path for _, path in _numbered(folder)]


def newest_first(folder: Path) -> Iterator[Checkpoint]:
    """Gives the checkpoints whose common files are whole, and logs a warning for the others that it meets.

    Files in sub-folders are left to those that read them.
    """
    numbered = _numbered(folder)
    # what certainly cannot be read is told of, however soon the caller stops asking
    numbered.sort(key=lambda entry: entry[0] if entry[0] != _UNREADABLE else math.inf)
    for _, path in reversed(numbered):
        try:
            checkpoint = Checkpoint.open(path)
            checkpoint.check([name for name in checkpoint.manifest.files if "/" not in name])
        except CheckpointError as error:
            log.warning("%s", error)
        else:
            yield checkpoint


class CheckpointWriter:
    """Writes one checkpoint in its staging folder; `files` are those that this process has written.

    As a context manager it discards what was not sealed. Other processes may write to the same staging
    folder: one of them seals it, with the files of all.
    """

    def __init__(self, staging: Path) -> None:
        self.staging = staging
        self.files: dict[str, FileNote] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    @classmethod
    def begin(cls, folder: Path, step: int) -> CheckpointWriter:
        """Makes a new staging folder, and `folder` where it is not there."""
        staging = folder / f".step-{step:08d}-{this_process()}-{secrets.token_hex(4)}"
        staging.mkdir(parents=True)
        return cls(staging)

    @classmethod
    def join(cls, staging: Path, writers: Sequence[str]) -> CheckpointWriter:
        """Writes to a folder that several processes share, and makes it if this is the first of them.

        While one of the `writers` (see `this_process`) runs, nobody else removes it.
        """
        staging.mkdir(parents=True, exist_ok=True)
        with written(staging / _WRITERS) as path:
            path.write_text("\n".join(writers))
        return cls(staging)

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes `name.safetensors`; UsageError when the tensors cannot be written, OSError of the disk."""
        file = self._place(f"{name}.safetensors")
        try:
            with written(file) as path:
                save_file(_apart(tensors), path)
        except (SafetensorError, ValueError, KeyError) as error:
            raise UsageError(f"the tensors of {name} cannot be written: {error}.") from error
        self._note(file)

    def write_state(self, name: str, state: Any) -> None:
        """Writes a state of numbers, texts, tensors, lists and dicts; UsageError names what else is in it."""
        plain, tensors = flatten(state)
        self.write_tensors(name, tensors)
        self._write_json(f"{name}.json", plain)

    def leave(self, name: str, note: bytes, awaited: Sequence[str]) -> dict[str, bytes]:
        """Leaves a note for processes that write here one by one, and wait for nobody.

        Returns the notes of all, by name, once those that are awaited have left theirs, to one process alone:
        it is to seal. The others get none.
        """
        with written(self.staging / f"{name}{_NOTE}") as path:
            path.write_bytes(note)
        if not all((self.staging / f"{other}{_NOTE}").exists() for other in awaited):
            return {}
        try:
            (self.staging / _LAST).mkdir()
        except FileExistsError:
            return {}
        return {path.stem: path.read_bytes() for path in sorted(self.staging.glob(f"*{_NOTE}"))}

    def seal(
        self,
        owner: str,
        step: int,
        *,
        num_workers: int = 1,
        files: Mapping[str, FileNote] | None = None,
        num_kept: int = NUM_KEPT,
    ) -> Path:
        """Makes a checkpoint of what was written, here and by others (`files`), and removes the oldest.

        Returns its path. One of the same step is replaced.
        """
        folder, notes = self.staging.parent, {**self.files, **(files or {})}
        number = 1 + max((number for number, _ in _numbered(folder)), default=0)
        content = msgspec.to_builtins(Manifest(step, num_workers, owner, notes, number))
        self._write_json(_MANIFEST, content | {"sha256": _digest(content)})
        for left in [self.staging / _WRITERS, *sorted(self.staging.glob(f"*{_NOTE}"))]:
            left.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            (self.staging / _LAST).rmdir()
        path = folder / f"step-{step:08d}"
        _rename_over(self.staging, path)
        sync_folder(folder)
        _prune(folder, num_kept)
        return path

    def discard(self) -> None:
        """Removes the staging folder and all that is in it; does nothing after `seal`."""
        _remove(self.staging)

    def _place(self, name: str) -> Path:
        file = self.staging / name
        if file.parent != self.staging:
            file.parent.mkdir(exist_ok=True)
        return file

    def _write_json(self, name: str, value: Any) -> None:
        file = self._place(name)
        with written(file) as path:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")
        self._note(file)

    def _note(self, file: Path) -> None:
        name = file.relative_to(self.staging).as_posix()
        self.files[name] = FileNote(file.stat().st_size, sha256_of(file))


def this_process() -> str:
    """Names this process in the names of staging folders: machine, process number, and when it began."""
    return f"{_machine()}.{os.getpid()}.{started(os.getpid())}"


def clear_leftovers(folder: Path) -> None:
    """Removes the staging folders of processes that are gone.

    Only this machine's processes can be looked for. What others have begun stays for a day.
    """
    try:
        found = sorted(path for path in folder.iterdir() if _is_staging(path))
    except OSError:
        return
    for path in found:
        if not _is_in_use(path):
            _remove(path)


def damaged(path: Path, why: str) -> CheckpointError:
    """Returns the error for a checkpoint that is passed over."""
    return CheckpointError(
        f"The checkpoint {path} is left out: {why}.",
        cause="its writer was stopped in the middle, or the disk has failed.",
    )


# --- states as plain values and tensors ---
#
# {"a": [1, tensor]} is {"a": [1, {"$tensor": "a.1"}]} beside the tensor "a.1". Besides there are
# {"$tuple": [...]}, {"$items": [[key, value], ...]} for dicts whose keys are not all texts, and
# {"$float": "nan"}, for which JSON has no word.


def flatten(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Splits a state into what JSON can hold and tensors by name, which are not copied.

    UsageError names the place of a type that cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _plain(value, "", tensors), tensors


def rebuild(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns what `flatten` was given; ValueError or KeyError when the two do not fit together."""
    if isinstance(plain, list):
        return [rebuild(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    kind: str
    content: Any
    ((kind, content),) = plain.items() if len(plain) == 1 else [("", None)]
    if kind == "$tensor":
        return tensors[content]
    if kind == "$tuple":
        return tuple(rebuild(part, tensors) for part in content)
    if kind == "$items":
        return {rebuild(key, tensors): rebuild(part, tensors) for key, part in content}
    if kind == "$float":
        return float(content)
    return {key: rebuild(part, tensors) for key, part in plain.items()}


def is_scalar(value: Any) -> bool:
    """Says whether JSON can hold it as one value, subclasses included."""
    return value is None or isinstance(value, _SCALARS)


def scalar(value: Any) -> Any:
    """Turns a subclass (numpy's float64 is a float) into what both JSON and MessagePack take."""
    return next((kind(value) for kind in _SCALARS if isinstance(value, kind)), None)


def _plain(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        name = path
        while name in tensors:
            name += "~"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, Mapping):
        parts = [(key, _plain(part, _below(path, key), tensors)) for key, part in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in parts):
            return dict(parts)
        return {"$items": [[_plain(key, "", {}), part] for key, part in parts]}
    if isinstance(value, list | tuple):
        listed = [_plain(part, _below(path, number), tensors) for number, part in enumerate(value)]
        return {"$tuple": listed} if isinstance(value, tuple) else listed
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if is_scalar(value):
        return scalar(value)
    raise UsageError(
        f"{path or 'the state'} is of type {type(value).__name__}, which is neither a number, a text, a "
        "tensor, nor a list or dict of them."
    )


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives each tensor memory of its own, laid out row by row, as safetensors wants them."""
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


class SentState(msgspec.Struct, array_like=True):
    """Describes a state to who receives it, before its tensors come."""

    plain: Any = None
    names: list[str] = []
    specs: list[TensorSpec] = []
    problem: str = ""
    """Why it cannot travel."""

    @classmethod
    def of(cls, make: Callable[[], Any]) -> tuple[SentState, dict[str, torch.Tensor]]:
        """Describes what `make` gives, or its failure; the tensors are not copied."""
        try:
            plain, tensors = flatten(make())
            return cls(plain, list(tensors), [describe(tensor) for tensor in tensors.values()]), tensors
        except ShoalError as error:
            return cls(problem=error.what), {}

    def room(self) -> dict[str, torch.Tensor]:
        """Makes memory for the tensors, by name."""
        return dict(zip(self.names, map(_empty, self.specs), strict=True))


def _empty(spec: TensorSpec) -> torch.Tensor:
    dtype = DTYPES[spec.dtype]
    return reshape_dense(torch.empty(size_bytes(spec) // dtype.itemsize, dtype=dtype), spec)


# --- objects whose attributes are kept ---


def can_be_kept(value: Any) -> bool:
    """Says whether the state of an attribute can be kept: a number, a text, a generator, what has a state."""
    if isinstance(value, list):
        return bool(value) and all(map(can_be_kept, value))
    return is_scalar(value) or isinstance(value, torch.Generator) or hasattr(value, "load_state_dict")


def kept_state(value: Any) -> Any:
    """Returns the state of an attribute that can be kept."""
    if isinstance(value, list):
        return [kept_state(part) for part in value]
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if hasattr(value, "state_dict") else value


def restored(value: Any, state: Any, name: str) -> Any:
    """Returns the attribute with what was kept of it: written in place where it can be."""
    if isinstance(value, list):
        if len(value) != len(state):
            raise UsageError(
                f"the state has {len(state)} {name}, not {len(value)}.",
                next_step=f"take the number of {name} that it was saved with.",
            )
        return [restored(*pair, name) for pair in zip(value, state, strict=True)]
    if isinstance(value, torch.Generator):
        value.set_state(state)
    elif hasattr(value, "load_state_dict"):
        if state is not None:
            value.load_state_dict(state)
    elif is_scalar(state):
        return state
    return value


# --- folders ---


def _digest(content: Mapping[str, Any]) -> str:
    """The hash of a manifest as it was read, so that fields of a later version are part of it."""
    return hashlib.sha256(msgspec.json.encode({**content, "sha256": ""})).hexdigest()


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints with their numbers, oldest first, those whose manifest cannot be read before all others."""
    try:
        paths = sorted(path for path in folder.iterdir() if _is_checkpoint(path))
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
            number = Checkpoint.open(path).manifest.number
        numbers.append(number)
    return sorted(zip(numbers, paths, strict=True))


def _is_checkpoint(path: Path) -> bool:
    replaced = _REPLACED.fullmatch(path.name)
    if replaced is None:
        return _NAME.fullmatch(path.name) is not None
    return not path.with_name(replaced[1]).exists()


def _rename_over(staging: Path, path: Path) -> None:
    while True:
        with contextlib.suppress(FileNotFoundError):
            path.rename(path.with_name(f".{path.name}-{secrets.token_hex(4)}-replaced"))
        try:
            staging.rename(path)
        except OSError as error:
            # another process has taken the name in the meantime: its checkpoint is replaced as well
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return


def _prune(folder: Path, num_kept: int) -> None:
    """Keeps the newest that have all their bytes; what is damaged pushes out nothing."""
    # before the checkpoints are listed: what another process replaces just now is then among these
    replaced = sorted(path for path in folder.iterdir() if _REPLACED.fullmatch(path.name))
    found, num_whole = checkpoint_paths(folder), 0
    for path in replaced:
        if path not in found:
            _remove(path)
    clear_leftovers(folder)
    for path in reversed(found):
        if num_whole >= num_kept:
            _remove(path)
        else:
            with contextlib.suppress(CheckpointError):
                num_whole += Checkpoint.open(path).has_all_bytes


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


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
