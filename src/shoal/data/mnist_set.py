"""MNIST: found on this machine, or fetched once with its checksum."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from shoal.core import Deadline
from shoal.data.download import download
from shoal.data.errors import DataError
from shoal.data.idx import IdxFile

log = logging.getLogger(__name__)

TRAINING = (
    IdxFile(
        "train-images-idx3-ubyte",
        (60_000, 28, 28),
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    IdxFile(
        "train-labels-idx1-ubyte",
        (60_000,),
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    ),
)
TEST = (
    IdxFile(
        "t10k-images-idx3-ubyte",
        (10_000, 28, 28),
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    IdxFile(
        "t10k-labels-idx1-ubyte",
        (10_000,),
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
)
MIRRORS = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
DOWNLOAD_TIMEOUT_S = 300.0
"""For all files together; 11 MB at 40 KB/s."""
_LAYOUTS = ("", "mnist", "MNIST/raw")
"""Where in a folder of data sets MNIST may be; the last is torchvision's."""
_WHITE = 255


def mnist(
    train: bool = True, folder: str | os.PathLike[str] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, float32 of n×1×28×28 from 0 to 1, and their labels, int64; for training or for tests.

    Looks into `folder` alone where one is given; else into `SHOAL_DATA`, the repository's data/mnist and the
    cache, and downloads 11 MB into the cache where none has the files. DataError where that fails too.
    """
    files = TRAINING if train else TEST
    for place in _inside(Path(folder)) if folder is not None else _known_places():
        paths = [_find(place, file) for file in files]
        if None not in paths:
            images, labels = (file.read(path) for file, path in zip(files, paths, strict=True) if path)
            break
    else:
        if folder is not None:
            lacking = f"it lacks {_names(files)}."
            raise DataError(f"{folder} has no MNIST.", cause=lacking, next_step=_by_hand(folder, files))
        images, labels = _download(files, cache_folder())
    return images.unsqueeze(1) / _WHITE, labels.long()


def cache_folder() -> Path:
    """Where downloads are kept: `XDG_CACHE_HOME`, else the platform's folder for it."""
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "shoal" / "mnist"
    if sys.platform == "win32" and (local := os.environ.get("LOCALAPPDATA")):
        return Path(local) / "shoal" / "cache" / "mnist"
    try:
        return Path.home() / ".cache" / "shoal" / "mnist"
    except RuntimeError:  # this user has no home folder, as in some containers
        return Path(tempfile.gettempdir()) / "shoal" / "mnist"


def _known_places() -> Iterator[Path]:
    if given := os.environ.get("SHOAL_DATA"):
        yield from _inside(Path(given))
    yield Path("data", "mnist").absolute()
    *_, package, source, repository = Path(__file__).resolve().parents[:4]
    if source.name == "src" and package.name == "shoal":
        yield repository / "data" / "mnist"
    yield cache_folder()


def _inside(folder: Path) -> Iterator[Path]:
    return (folder / layout for layout in _LAYOUTS)


def _find(folder: Path, file: IdxFile) -> Path | None:
    return next((path for name in (f"{file.name}.gz", file.name) if (path := folder / name).is_file()), None)


def _download(files: tuple[IdxFile, ...], folder: Path) -> list[torch.Tensor]:
    log.warning("MNIST is not on this machine; downloading it to %s", folder)
    deadline = Deadline.after(DOWNLOAD_TIMEOUT_S)
    contents = []
    for file in files:
        urls = [f"{mirror}{file.name}.gz" for mirror in MIRRORS]
        try:
            packed, parsed = download(urls, file.parse, deadline, file.size_bytes)
        except DataError as error:
            raise DataError(
                f"MNIST is not on this machine and cannot be downloaded. {error.what}",
                cause="this machine has no way to the internet, or the mirrors are gone.",
                next_step=_by_hand(folder, files),
            ) from error
        _keep(packed, folder / f"{file.name}.gz")
        contents.append(parsed)
    return contents


def _keep(packed: bytes, path: Path) -> None:
    """In one step, because several workers may do so at once; not keeping it is no failure."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(packed)
        draft.replace(path)
    except OSError as error:
        log.warning("MNIST cannot be kept in %s: %s", path.parent, error)


def _names(files: tuple[IdxFile, ...]) -> str:
    return " and ".join(f"{file.name}.gz" for file in files)


def _by_hand(folder: str | os.PathLike[str], files: tuple[IdxFile, ...]) -> str:
    return (
        f"put {_names(files)} (from a machine that can fetch {MIRRORS[0]}) into {folder}, "
        "or set SHOAL_DATA to the folder that has them."
    )
