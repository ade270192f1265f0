"""The command of a run, checked before any worker starts, and without importing it."""

from __future__ import annotations

import importlib.machinery
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from shoal.core.errors import UsageError


def command_of(words: Sequence[str], *, is_module: bool = False) -> tuple[str, ...]:
    """Return the command of `x.py args`, `python x.py args` or another program; `is_module`: `python -m`.

    A plain `python` is the interpreter that runs Shoal: in another one workers would not find it.
    """
    if not words:
        raise UsageError("There is no program to run.", next_step="shoal run -np 2 train.py")
    first, *arguments = words
    if is_module:
        _require_module(first)
        return (sys.executable, "-m", *words)
    if first in ("python", "python3"):
        _require_what_python_runs(arguments)
        return (sys.executable, *arguments)
    path = Path(first)
    if path.suffix == ".py" or (path / "__main__.py").is_file():
        _require_file(first)
        return (sys.executable, *words)
    found = shutil.which(first)
    if found is None:
        raise UsageError(
            f"There is no program {first} in {Path.cwd()} or on the path.",
            cause="a typing error, another working folder, or a file that may not be executed.",
            next_step="name a Python file (x.py), `python x.py`, `-m module`, or an executable.",
        )
    if re.fullmatch(r"python[\d.]*", Path(found).name):
        _require_what_python_runs(arguments)
    return tuple(words)


def _require_what_python_runs(arguments: Sequence[str]) -> None:
    """Check what comes first; where that is an option of Python, it is Python's to understand."""
    if not arguments:
        raise UsageError("python alone is no program to run.", next_step="shoal run -np 2 python train.py")
    if arguments[0] == "-m" and len(arguments) > 1:
        _require_module(arguments[1])
    elif not arguments[0].startswith("-"):
        _require_file(arguments[0])


def _require_file(name: str) -> None:
    if not Path(name).exists():
        raise UsageError(
            f"There is no file {name} in {Path.cwd()}.",
            cause="a typing error, or another working folder.",
            next_step="give the path of the program.",
        )


def _require_module(name: str) -> None:
    """Look without importing: the packages on the way may take seconds, or expect to be workers."""
    places: Sequence[str] | None = None
    known = ""
    for part in name.split("."):
        full_name = f"{known}.{part}" if known else part
        spec = _find(full_name, places)
        if spec is None:
            raise UsageError(
                f"There is no module {full_name}.",
                cause=f"a typing error, another working folder than {Path.cwd()}, or it is not installed.",
                next_step="give the name that `python -m` takes, or the path of a file without -m.",
            )
        known, places = full_name, spec.submodule_search_locations
    if places is not None and _find(f"{name}.__main__", places) is None:
        raise UsageError(
            f"{name} is a package without __main__.py, which cannot be run.",
            next_step="name one of its modules.",
        )


def _find(name: str, places: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    if places is None:
        here = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
        if here is not None:
            return here
    for finder in sys.meta_path:  # not PathFinder alone: packages installed as editable have their own
        spec = finder.find_spec(name, places)
        if spec is not None:
            return spec
    return None
