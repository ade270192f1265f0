"""Code of the user's own, named as `package.module:name` or `file.py:name`: models, strategies, experts."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from shoal.core.errors import UsageError


def load_module(where: str, purpose: str) -> ModuleType:
    """Imports the module, or runs the file, that `where` names; `purpose` says what should come from it.

    UsageError when there is none. What the module itself raises passes through.
    """
    if where.endswith(".py"):
        return _run_file(where, purpose)
    if str(Path.cwd()) not in sys.path:
        # the `shoal` program lacks the current folder, which `python -m` has; at the end it hides nothing
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"There is no module {error.name!r}, from which {purpose} should come.",
            cause=f"it is misspelt, or neither installed nor on PYTHONPATH nor in {Path.cwd()}.",
            next_step="start in the folder that holds it, set PYTHONPATH to that folder, or install it.",
        ) from None


def _run_file(where: str, purpose: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise UsageError(
            f"There is no file {where!r}, from which {purpose} should come.",
            next_step=f"give its path from {Path.cwd()}, on every machine that needs it.",
        )
    name = f"shoal_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what the file imports from beside it
    sys.modules[name] = module  # dataclasses and annotations look their module up here
    spec.loader.exec_module(module)
    return module
