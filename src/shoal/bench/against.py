"""Another version of the code to compare with: a git revision, checked out beside, or a folder."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import shoal
from shoal.core import UsageError


@contextlib.contextmanager
def source_of(reference: str) -> Iterator[Path]:
    """The folder that holds the package of `reference`, which is a checkout's folder or a git revision."""
    folder = Path(reference)
    if folder.is_dir():
        for source in (folder / "src", folder):
            if (source / "shoal" / "__init__.py").is_file():
                yield source.resolve()
                return
        raise UsageError(
            f"{folder} holds no Shoal.", next_step="give the folder of a checkout, or a git revision."
        )
    repository = Path(shoal.__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix="shoal-against-") as temporary:
        checkout = Path(temporary) / "checkout"
        _git(
            repository,
            "worktree",
            "add",
            "--detach",
            "--quiet",
            str(checkout),
            reference,
            reference=reference,
        )
        try:
            yield checkout / "src"
        finally:
            _git(repository, "worktree", "remove", "--force", str(checkout), reference=reference)


def _git(repository: Path, *arguments: str, reference: str) -> None:
    try:
        done = subprocess.run(
            ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise UsageError(
            "git is not installed.", next_step="install it, or give --against the folder of another checkout."
        ) from None
    if done.returncode:
        raise UsageError(
            f"The revision {reference!r} cannot be checked out: {done.stderr.strip()}.",
            cause="Shoal does not run from a git checkout, or the revision is not in it.",
            next_step="give a commit, tag or branch of this repository, or the folder of another checkout.",
        )
