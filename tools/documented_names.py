"""Looks whether every public name has its place in the reference, and shows links by the titles of pages.

`make docs` calls it as a hook of MkDocs.

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


def with_titles(markdown: str, folder: Path) -> str:
    """Links whose text is the name of a file have the title of that page, as a reader of the site knows it.

    `folder` is that of the page. Other readers of the same files see the names.
    """

    def titled(link: re.Match[str]) -> str:
        page = folder / link[1].partition("#")[0]
        title = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE) if page.is_file() else None
        return f"[{title[1]}]({link[1]})" if title else link[0]

    return re.sub(r"\[[\w./-]+\.md\]\(([^):]+)\)", titled, markdown)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """MkDocs shows what this returns."""
    return with_titles(markdown, Path(page.file.abs_src_path).parent)


def on_config(config: Any) -> None:
    """Ends the building of the site where something is wrong: MkDocs calls it first of all."""
    from mkdocs.exceptions import Abort

    found = problems(Path(config["docs_dir"]))
    if found:
        raise Abort("\n".join(found))
