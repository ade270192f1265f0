"""The documentation as a site: every public name and every page has its place, and its first example runs."""

import re
import shutil
from pathlib import Path

import pytest

import shoal
from documented_names import problems, public_names

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NAV = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2].partition("\nvalidation:")[0]


def test_every_public_name_has_its_place_in_the_reference():
    assert {*shoal.__all__} - {"__version__"} == public_names()
    assert problems(DOCS) == []


def test_a_public_name_without_a_place_is_named(tmp_path):
    """As `make docs` does, which then fails."""
    shutil.copytree(DOCS / "api", tmp_path / "api")
    page = tmp_path / "api" / "training.md"
    page.write_text(page.read_text().replace("::: shoal.init", "::: shoal.begin"))
    assert problems(tmp_path) == [
        "shoal.init is public and on no page of docs/api",
        "shoal.begin is in docs/api, and not public",
    ]
    assert "hooks: [tools/documented_names.py]" in (ROOT / "mkdocs.yml").read_text()


def test_every_page_is_in_the_contents_once():
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(re.findall(r": (\S+\.md)$", NAV, re.MULTILINE)) == sorted(pages)


@pytest.mark.parametrize("page", ["architecture.md", "security.md", "networks.md", "dht.md"])
def test_files_that_a_page_of_the_code_names_are_there(page):
    files = [path.as_posix() for room in ("src", "tests", "tools") for path in (ROOT / room).rglob("*.py")]
    named = re.findall(r"[\w/]+\.py\b", (DOCS / page).read_text())
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_the_five_lines_of_the_first_page_train():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    names = {}
    exec(compile(code, "index.md", "exec"), names)
    assert names["group"].size == 1
