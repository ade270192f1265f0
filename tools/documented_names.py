"""Looks whether every public name has its place in the reference; `make docs` calls it as a hook of MkDocs.

It reads the source and imports nothing of Shoal, so that it runs where the site alone is built.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def public_names() -> set[str]:
    """What `shoal.__all__` lists."""
    tree = ast.parse((ROOT / "src" / "shoal" / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(names) - {"__version__"}


def problems(docs: Path) -> list[str]:
    """What is public and has no place in the pages of docs/api, has two, or has one and is not there."""
    text = "\n".join(page.read_text() for page in sorted(docs.glob("api/*.md")))
    described = re.findall(r"^(?:::: |## )shoal\.(\w+)$", text, re.MULTILINE)
    names = public_names()
    return [
        *(f"shoal.{name} is public and on no page of docs/api" for name in sorted(names - {*described})),
        *(f"shoal.{name} is in docs/api, and not public" for name in sorted({*described} - names)),
        *(f"shoal.{name} is in docs/api twice" for name in sorted({*described}) if described.count(name) > 1),
    ]


def on_config(config: Any) -> None:
    """Ends the building of the site where something is wrong: MkDocs calls it first of all."""
    from mkdocs.exceptions import Abort

    found = problems(Path(config["docs_dir"]))
    if found:
        raise Abort("\n".join(found))
