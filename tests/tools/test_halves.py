from __future__ import annotations

from pathlib import Path

import halves


def test_every_test_is_in_one_half():
    first, second = halves.halves()
    assert not {*first} & {*second}
    covered = [Path(place) for place in (*first, *second)]
    for path in halves.TESTS.rglob("test_*.py"):
        assert sum(path.is_relative_to(place) for place in covered) == 1
    assert {Path(place).name for place in first} == {*halves.FIRST}


def test_what_fails_is_tried_alone_and_counts_when_it_fails_again(tmp_path, monkeypatch, capfd):
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
    monkeypatch.setattr(halves, "TESTS", tmp_path)
    options = ["-q", "--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini")]
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    assert halves.main(options) == 0
    assert "Once more, alone" in capfd.readouterr().out
    (tmp_path / "test_b.py").write_text("def test_bad():\n    assert False\n")
    assert halves.main(options) == 1
