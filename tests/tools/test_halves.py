from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import halves
from shoal.core.processes import stat_fields


def test_every_test_is_in_one_half():
    first, second = halves.halves()
    assert sorted([*first, *second]) == sorted(map(str, halves.TESTS.rglob("test_*.py")))


def test_halves_take_equally_long(tmp_path, monkeypatch):
    monkeypatch.setattr(halves, "TESTS", tmp_path)
    monkeypatch.setattr(halves, "SECONDS", tmp_path / "seconds.json")
    seconds = {f"test_{name}.py": took_s for name, took_s in zip("abcde", (50, 20, 20, 10, 200), strict=True)}
    for name in seconds:
        (tmp_path / name).write_text("def test_nothing():\n    pass\n")
    halves.SECONDS.write_text(json.dumps(seconds))
    named = [[Path(place).name for place in places] for places in halves.halves()]
    assert named == [["test_e.py"], ["test_a.py", "test_b.py", "test_c.py", "test_d.py"]]
    fast = [Path(place).name for places in halves.halves(is_fast=True) for place in places]
    assert sorted(fast) == ["test_b.py", "test_c.py", "test_d.py"]  # fifty seconds more would be too long


def test_what_files_take_is_recorded(tmp_path, monkeypatch):
    (tmp_path / "core").mkdir()
    (tmp_path / "core/test_a.py").write_text(
        "import time\nclass TestGroup:\n    def test_sleep(self):\n        time.sleep(0.3)\n"
    )
    options = options_for(tmp_path, monkeypatch)
    monkeypatch.setattr(halves, "SECONDS", tmp_path / "seconds.json")
    assert halves.main(["--record", *options]) == 0
    (name,) = seconds = json.loads(halves.SECONDS.read_text())
    assert name == "core/test_a.py"
    assert seconds[name] >= 0.3


def test_slow_tests_are_run_alone_and_dealt_by_seconds_of_their_own(tmp_path, monkeypatch):
    options = options_for(tmp_path, monkeypatch)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(
            "import pytest\ndef test_that_fails():\n    assert False\n"
            "@pytest.mark.slow\ndef test_slowly():\n    pass\n"
        )
    monkeypatch.setattr(halves, "SECONDS", tmp_path / "seconds.json")
    monkeypatch.setattr(halves, "SLOW_SECONDS", tmp_path / "slow_seconds.json")
    halves.SECONDS.write_text(json.dumps({"test_a.py": 1, "test_b.py": 1, "test_c.py": 9}))
    assert halves.main(["--slow", "--record", *options]) == 0
    assert sorted(json.loads(halves.SLOW_SECONDS.read_text())) == ["test_a.py", "test_b.py", "test_c.py"]
    halves.SLOW_SECONDS.write_text(json.dumps({"test_a.py": 9, "test_b.py": 1, "test_c.py": 1}))
    named = [[Path(place).name for place in places] for places in halves.halves(is_slow=True)]
    assert named == [["test_a.py"], ["test_b.py", "test_c.py"]]


def options_for(folder, monkeypatch):
    """Have the halves run the tests of this folder, with these options."""
    monkeypatch.setattr(halves, "TESTS", folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return ["-q", "--rootdir", str(folder), "-c", str(folder / "pytest.ini")]


def test_a_test_that_fails_once_fails_the_run(tmp_path, monkeypatch):
    (tmp_path / "core").mkdir()
    (tmp_path / "core/test_a.py").write_text(
        "import pathlib\n"
        f"MARK = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "def test_flaky():\n"
        "    was_there = MARK.exists()\n"
        "    MARK.touch()\n"
        "    assert was_there\n"
    )
    (tmp_path / "test_b.py").write_text("def test_good():\n    assert True\n")
    options = options_for(tmp_path, monkeypatch)
    assert halves.main(options) == 1
    assert halves.main(options) == 0


def test_a_process_that_stays_is_named_and_ended(tmp_path, monkeypatch, capfd):
    (tmp_path / "test_a.py").write_text(
        "import pathlib, subprocess\n"
        "def test_that_forgets_a_child():\n"
        "    child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"    pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
    )
    monkeypatch.setattr(halves, "PATIENCE_S", 0.2)
    assert halves.main(["-W", "ignore", *options_for(tmp_path, monkeypatch)]) == 1
    pid = int((tmp_path / "pid").read_text())
    assert f"Left behind by the tests: process {pid}: sleep 600" in capfd.readouterr().out
    while process_is_there(pid):
        time.sleep(0.01)


def process_is_there(pid):
    """Whether it runs; one that has ended may wait for whoever inherited it to notice."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def test_a_temporary_file_that_stays_is_named_and_removed(tmp_path, monkeypatch, capfd):
    (tmp_path / "test_a.py").write_text(
        "import pathlib, tempfile\n"
        "def test_that_forgets_a_folder(tmp_path):\n"
        "    (tmp_path / 'fine').write_text('')\n"
        f"    pathlib.Path({str(tmp_path / 'made')!r}).write_text(tempfile.mkdtemp(prefix='forgotten'))\n"
    )
    assert halves.main(options_for(tmp_path, monkeypatch)) == 1
    made = (tmp_path / "made").read_text()
    assert f"Left behind by the tests: {made}" in capfd.readouterr().out
    assert not Path(made).parent.exists()


def test_shared_memory_that_nobody_uses_any_more_is_named_and_removed(tmp_path, monkeypatch):
    # a folder stands in for /dev/shm, in which other programs have theirs
    monkeypatch.setattr(halves, "SHARED_MEMORY", tmp_path)
    (tmp_path / "old").touch()
    before = halves.shared_memory()
    (tmp_path / halves.BOARD).touch()
    (tmp_path / "new").touch()
    with (tmp_path / "used").open("wb"):
        assert halves.remove_shared_memory(before) == [str(tmp_path / "new")]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["old", "used", halves.BOARD])


def test_tests_that_are_started_in_the_background_can_interrupt_their_children():
    program = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "import conftest\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "child.send_signal(signal.SIGINT)\n"
        "sys.exit(0 if child.wait() == -signal.SIGINT else 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=Path(__file__).parent.parent, timeout=50
    )
    assert done.returncode == 0
