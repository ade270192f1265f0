import json
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from shoal.bench.findings import fail, ok, warn
from shoal.bench.health import CHECKS
from shoal.cli import doctor as module
from shoal.cli.doctor import doctor

app = typer.Typer()
app.command()(doctor)


@pytest.fixture
def run(monkeypatch):
    """Run the verb over checks of the test's own."""

    def run(checks, *arguments):
        monkeypatch.setattr(module, "CHECKS", checks)
        return CliRunner().invoke(app, list(map(str, arguments)))

    return run


def good():
    return ok("All is well.", speed=3)


def slow():
    return warn("It is slow.", "give it more.")


def broken():
    return fail("It is broken.", "mend it with: mend --all")


def raising():
    raise ZeroDivisionError("by nought")


def last_line(text):
    last = text.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return json.loads(last.removeprefix("RESULT: "))


def test_all_well_is_exit_code_0(run):
    done = run({"first": good, "second": good})
    assert done.exit_code == 0
    assert "Shoal works here." in done.stdout
    assert last_line(done.stdout) == {"num_ok": 2, "warned": [], "failed": [], "exit_code": 0}


def test_warnings_are_advice(run):
    done = run({"first": good, "second": slow})
    assert done.exit_code == 0
    assert "Next: give it more." in done.stdout
    assert "there is advice on second" in done.stdout
    assert last_line(done.stdout)["warned"] == ["second"]


def test_a_failed_check_shows_its_next_step_and_is_exit_code_1(run):
    done = run({"first": broken, "second": slow, "third": good})
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith("first"))
    assert lines[row].split() == ["first", "fail", "It", "is", "broken."]
    assert lines[row + 1].strip() == "Next: mend it with: mend --all"
    assert "cannot work here yet: see first. Advice on second." in done.stdout
    assert last_line(done.stdout) == {"num_ok": 1, "warned": ["second"], "failed": ["first"], "exit_code": 1}


def test_a_check_that_raises_is_a_row_and_no_traceback(run):
    done = run({"first": raising, "second": good})
    assert done.exit_code == 1
    assert "ZeroDivisionError: by nought" in done.stdout
    assert "Traceback" not in done.output
    assert last_line(done.stdout)["failed"] == ["first"]


def test_json_to_a_file(run, tmp_path):
    path = tmp_path / "folder" / "doctor.json"
    done = run({"first": good, "second": broken}, "--json", path)
    assert done.exit_code == 1
    assert f"Wrote {path}" in done.stdout
    document = json.loads(path.read_text())
    assert set(document) == {"shoal", "summary", "checks", "result"}
    first, second = document["checks"]
    assert first == {
        "name": "first",
        "status": "ok",
        "says": "All is well.",
        "next_step": "",
        "figures": {"speed": 3},
        "took_s": first["took_s"],
    }
    assert (second["status"], second["next_step"]) == ("fail", "mend it with: mend --all")
    assert document["result"] == last_line(done.stdout)


def test_json_to_stdout_stands_there_alone(run):
    done = run({"first": good, "second": slow}, "--json", "-")
    assert done.exit_code == 0
    assert [check["name"] for check in json.loads(done.stdout)["checks"]] == ["first", "second"]
    assert last_line(done.stderr)["num_ok"] == 1
    assert "Next: give it more." in done.stderr


def test_the_real_checks_take_a_few_seconds_at_most_and_import_no_torch():
    code = (
        "import sys, typer; from shoal.cli.doctor import doctor; app = typer.Typer(); app.command()(doctor);"
        "app(['--json', '-'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert time.monotonic() - began_s < 15  # on a machine with much else to do
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert [check["name"] for check in checks] == list(CHECKS)
    assert all(check["status"] in ("ok", "warn") for check in checks)
