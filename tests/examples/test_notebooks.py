"""The notebooks run from the first cell to the last, each in a fresh process, without jupyter."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def cells_of(notebook, kind):
    document = json.loads(notebook.read_text())
    assert document["nbformat"] == 4
    return ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == kind]


def run(notebook, folder):
    """Runs the code as one program."""
    path = folder / "cells.py"
    path.write_text("\n".join(cells_of(notebook, "code")))
    return subprocess.run(
        [sys.executable, path], cwd=folder, capture_output=True, text=True, check=False, timeout=500
    )


@pytest.mark.slow
@pytest.mark.timeout(520)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook, tmp_path):
    done = run(notebook, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "By seconds to 90 %: " in done.stdout
    assert not done.stderr, done.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_output_and_links_lead_somewhere(notebook):
    document = json.loads(notebook.read_text())
    assert not any(cell.get("outputs") for cell in document["cells"])
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", "\n".join(cells_of(notebook, "markdown")))
    assert targets
    assert all((notebook.parent / target).exists() for target in targets)


def test_there_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["compare_strategies", "write_a_strategy"]
