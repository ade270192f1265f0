"""Reports that earlier versions wrote can be shown, and compared with those of today, row by row."""

import json
from pathlib import Path

import pytest

from shoal.cli.program import run

FOLDERS = sorted((Path(__file__).parent.parent / "report").glob("reports_of_*"))
REPORTS = [path for folder in FOLDERS for path in sorted(folder.glob("*.json"))]
AGAIN = {
    "collectives": ["--workers", "2", "--sizes", "4KB", "--repeats", "1"],
    "training": [
        *("--np", "2", "--strategies", "all-reduce,pair", "--no-ddp", "--slow-worker", "1:2"),
        *("--pairs", "1", "--iterations", "1", "--batch-size", "4"),
    ],
}
"""The least that gives all rows of the report that is kept."""
LATER = {"publish_mix"}
"""What is measured now, and was not when these reports were written."""


def name_of(path):
    return f"{path.stem} of {path.parent.name.removeprefix('reports_of_')}"


def call(capsys, *arguments):
    """What it printed, of a command that must end well."""
    code = run([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def test_there_are_some_of_both_benchmarks():
    assert {path.stem for path in REPORTS} == set(AGAIN)


@pytest.mark.parametrize("path", REPORTS, ids=name_of)
def test_a_report_is_shown(path, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert str(page) in call(capsys, "report", path, "-o", page)
    shown = page.read_text()
    for row in json.loads(path.read_text())["rows"]:
        assert row["metric"] in shown
        assert all(str(value) in shown for value in row["key"].values())


@pytest.mark.parametrize("path", REPORTS, ids=name_of)
def test_compared_with_itself_a_report_has_all_its_rows_and_no_change(path, capsys):
    told = json.loads(call(capsys, "diff", path, path, "--json", "-"))
    rows = json.loads(path.read_text())["rows"]
    assert len(told["rows"]) == len(rows)
    for row, compared in zip(rows, told["rows"], strict=True):
        assert (compared["key"], compared["metric"], compared["unit"], compared["direction"]) == (
            row["key"], row["metric"], row["unit"], row["direction"]
        )  # fmt: skip
        assert compared["starts"] == [len(row["starts"])] * 2
        assert compared["change_percent"] == 0


@pytest.mark.parametrize("path", REPORTS, ids=name_of)
def test_the_same_benchmark_has_the_same_rows_today(path, tmp_path, capsys):
    new = tmp_path / "new.json"
    call(capsys, "bench", path.stem, *AGAIN[path.stem], "--report", new)
    told = json.loads(call(capsys, "diff", path, new, "--json", "-"))
    assert told["only_baseline"] == []
    assert {row["metric"] for row in told["only_test"]} <= LATER
    assert told["result"]["failed"] == 0
    kinds = [
        {(row["metric"], row["unit"], row["direction"]) for row in json.loads(file.read_text())["rows"]}
        for file in (path, new)
    ]
    assert {kind for kind in kinds[1] if kind[0] not in LATER} == kinds[0]
