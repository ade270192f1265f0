"""What the package promises as a whole."""

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "shoal"
ROOMS = sorted(path.parent for path in SOURCE.glob("*/__init__.py"))


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


def test_importing_opens_nothing():
    """No descriptor, thread, child or heavy module after `import shoal`."""
    told = python(
        "import os, sys, threading\n"
        "before = set(os.listdir('/proc/self/fd'))\n"
        "import shoal\n"
        "print(set(os.listdir('/proc/self/fd')) - before, threading.active_count(),\n"
        "      [name for name in ('torch', 'numpy', 'asyncio', 'uvloop', 'plotly') if name in sys.modules])\n"
    )
    assert told.strip() == "set() 1 []"


def test_all_is_exact():
    public = {name for name in shoal.__all__ if name != "__version__"}
    assert public == set(shoal._HOMES)
    assert len(shoal.__all__) == len(public) + 1
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    assert set(dir(shoal)) == {*public, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'Whale'"):
        shoal.Whale  # noqa: B018


def test_names_for_type_checkers_are_the_same():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == shoal._HOMES


@pytest.mark.parametrize("name", shoal._MOVED)
def test_a_name_that_has_moved_works_and_says_where_it_is(name):
    with pytest.warns(DeprecationWarning, match=rf"shoal\.{name} is now shoal\.\w+\.{name};"):
        value = getattr(shoal, name)
    home = importlib.import_module(shoal._MOVED[name])
    assert value is getattr(home, name)
    assert name in home.__all__
    assert name not in shoal.__all__


@pytest.mark.parametrize("name", ["ALIASES", "CommonOptions", "OPTIONS", "STRATEGIES"])
def test_former_names_of_strategies_work_and_say_what_is_there_now(name):
    with pytest.warns(DeprecationWarning, match="is now "):
        assert getattr(shoal.strategies, name)
    assert name not in dir(shoal.strategies)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_room_says_in_one_sentence_what_it_is(room):
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text()))
    assert docstring
    what_it_is, _, _ = docstring.partition("\n\n")  # in which order to read it may follow
    assert "\n" not in what_it_is
    assert what_it_is.endswith(".")
    assert what_it_is.count(". ") == 0


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_file_says_what_it_is_for_and_all_names_exist(room):
    for path in room.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path
    module = importlib.import_module(f"shoal.{room.name}")
    assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))


def test_rooms_are_those_of_the_contract():
    layers = re.search(r"layers = \[(.*)\]", (ROOT / "pyproject.toml").read_text())
    # `testing` is one file
    assert sorted(re.findall(r'"(\w+)"', layers[1])) == sorted([*(room.name for room in ROOMS), "testing"])


def test_ci_runs_the_readmes_commands():
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    told = {
        line.split("#")[0].strip()
        for block in blocks
        for line in block.splitlines()
        if line.startswith("make ")
    }
    run = {line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")}
    assert run <= told
    assert {"make check", "make test"} == run
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {command.split()[1] for command in told} <= targets
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_example_of_calls_runs(tmp_path):
    page = (ROOT / "docs" / "networks.md").read_text().partition("## Calls between peers")[2]
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    script = tmp_path / "example.py"
    script.write_text(example)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "{'got': 8388608}\n"
    assert done.stderr == ""


def test_pinned_versions_meet_the_declared_ranges():
    constraints = (ROOT / "constraints.txt").read_text()
    assert "torch==2.13.0" in constraints
    project = (ROOT / "pyproject.toml").read_text()
    for name in (
        "numpy",
        "msgspec",
        "cryptography",
        "safetensors",
        "typer",
        "rich",
        "uvloop",
        "aiofastnet",
        "plotly",
    ):
        assert f'"{name}>=' in project
        assert re.search(rf"^{name}==", constraints, re.MULTILINE)


def test_what_is_cited_is_this_version():
    said = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {shoal.__version__}\n" in said
    assert "\nlicense: Apache-2.0\n" in said
