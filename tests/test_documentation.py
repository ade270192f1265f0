"""The documentation as a site: every public name and every page has its place, and its first example runs."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from documented_names import problems, public_names, with_titles
from shoal.strategies import BUILT_IN

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


def test_the_page_of_a_strategy_says_what_it_does_and_what_its_options_mean():
    """The reference shows the stub's classes, which stand before those of the source."""
    tree = ast.parse((ROOT / "src" / "shoal" / "strategies" / "__init__.pyi").read_text())
    told = {node.name: ast.get_docstring(node) or "" for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {*told} == {row.location.partition(":")[2] for row in BUILT_IN.values()}
    for row in BUILT_IN.values():
        text = told[row.location.partition(":")[2]]
        assert text.startswith(row.summary)
        assert f"`{row.name}`" in text
    assert "- `outer_lr`: learning rate of the outer step" in told["DiLoCo"]


def test_a_link_to_a_page_has_the_title_of_the_page():
    shown = with_titles("[all](strategies.md), [strategies.md](strategies.md#options), [x.md](x.md)", DOCS)
    assert shown == "[all](strategies.md), [Strategies](strategies.md#options), [x.md](x.md)"


def test_every_page_is_in_the_contents_once():
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(re.findall(r": (\S+\.md)$", NAV, re.MULTILINE)) == sorted(pages)


@pytest.mark.parametrize("page", ["architecture.md", "security.md", "networks.md", "dht.md"])
def test_files_that_a_page_of_the_code_names_are_there(page):
    files = [path.as_posix() for room in ("src", "tests", "tools") for path in (ROOT / room).rglob("*.py")]
    named = re.findall(r"[\w/]+\.py\b", (DOCS / page).read_text())
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_the_five_lines_of_the_first_page_train():
    names = {}
    exec(compile(first_program(), "index.md", "exec"), names)
    assert names["group"].size == 1


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_commands_of_the_first_page_run_its_program(tmp_path):
    (tmp_path / "train.py").write_text(first_program())
    commands = re.findall(r"^(?:python|shoal run) .*$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        program, *words = command.split()
        words = words if program == "python" else ["-m", "shoal", *words]
        done = subprocess.run(
            [sys.executable, *words], check=True, capture_output=True, text=True, cwd=tmp_path, timeout=70
        )
        rank = "" if program == "python" else r"\[0\] "
        assert len(re.findall(rf"^{rank}epoch \d: loss \d\.\d+$", done.stdout, re.MULTILINE)) == 3


def first_program():
    """The program of the page on which a reader begins."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    return code


def hidden_items(text):
    """Lines that the site shows inside the paragraph above them, though they begin a list or a table."""
    found, above, is_code, is_list = [], "", False, False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code, is_list = not is_code, False
        elif not is_code:
            is_item = bool(re.match(r"\s*(?:[-*]|\d+\.) ", line))
            if is_item and above and not above.startswith("#") and not is_list:
                found.append(line)
            if line.startswith("|") and above and not above.startswith(("|", "#")):
                found.append(line)
            is_list = bool(line) and (is_item or is_list)
        above = "" if line.lstrip().startswith("```") else line
    return found


@pytest.mark.parametrize("text", ["Two:\n- one\n- two", "A table:\n| a | b |\n|---|---|"])
def test_a_list_without_an_empty_line_above_it_is_noticed(text):
    """MkDocs shows it as one paragraph, where other readers of Markdown show a list."""
    assert hidden_items(text) == [text.splitlines()[1]]
    assert hidden_items(text.replace(":\n", ":\n\n")) == []


@pytest.mark.parametrize(
    "page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix()
)
def test_lists_and_tables_of_a_page_are_shown_as_such(page):
    assert hidden_items(page.read_text()) == []
