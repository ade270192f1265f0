"""The documentation as a site: every public name and every page has its place, and its first example runs."""

import re
from pathlib import Path

import shoal

DOCS = Path(__file__).parent.parent / "docs"
NAV = (DOCS.parent / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nvalidation:")[0]


def test_every_public_name_has_its_place_in_the_reference():
    text = "\n".join(page.read_text() for page in DOCS.glob("api/*.md"))
    described = re.findall(r"^(?:::: |## )shoal\.(\w+)$", text, re.MULTILINE)
    assert sorted(described) == sorted({*shoal.__all__} - {"__version__"})


def test_every_page_is_in_the_contents_once():
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(re.findall(r": (\S+\.md)$", NAV, re.MULTILINE)) == sorted(pages)


def test_the_five_lines_of_the_first_page_train():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(code, "index.md", "exec"), names)
    assert names["group"].size == 1
