import sys

import pytest

from shoal.core import UsageError
from shoal.launch import command_of

ME = sys.executable


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)
    package = tmp_path / "kit"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "part.py").write_text("")
    runnable = tmp_path / "app"
    runnable.mkdir()
    (runnable / "__main__.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["x.py", "--foo_bar", "a b"], [ME, "x.py", "--foo_bar", "a b"]),
        (["python", "x.py", "-m"], [ME, "x.py", "-m"]),
        (["python3", "-u", "x.py"], [ME, "-u", "x.py"]),
        (["python", "-m", "kit.part"], [ME, "-m", "kit.part"]),
        (["python", "-c", "pass"], [ME, "-c", "pass"]),
        ([ME, "x.py"], [ME, "x.py"]),
        (["./tool", "x"], ["./tool", "x"]),
        (["sh", "-c", "true"], ["sh", "-c", "true"]),
        (["app"], [ME, "app"]),
    ],
)
def test_programs(words, command):
    assert command_of(words) == tuple(command)


@pytest.mark.parametrize("module", ["kit.part", "app", "json.tool", "shoal"])
def test_modules_are_found_without_being_imported(module):
    assert command_of([module, "--x_y"], is_module=True) == (ME, "-m", module, "--x_y")


@pytest.mark.parametrize(
    ("words", "is_module", "complaint"),
    [
        ([], False, "no program"),
        (["y.py"], False, "no file y.py"),
        (["python", "y.py"], False, "no file y.py"),
        (["python"], False, "python alone"),
        (["nothing-like-this"], False, "no program nothing-like-this"),
        (["python", "-m", "kit.none"], False, "no module kit.none"),
        (["none.part"], True, "no module none"),
        (["kit.none"], True, "no module kit.none"),
        (["kit"], True, "kit is a package without __main__.py"),
    ],
)
def test_what_cannot_run_is_told_before_anything_runs(words, is_module, complaint):
    with pytest.raises(UsageError, match=complaint) as refused:
        command_of(words, is_module=is_module)
    assert refused.value.next_step
