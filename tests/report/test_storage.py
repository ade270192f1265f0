import os

import msgspec
import pytest

from shoal.core.errors import ReportError
from shoal.report import default_path, load, save, storage


def test_what_is_saved_is_loaded(tmp_path, make_report):
    report = make_report(num_rows=3)
    path = save(report, tmp_path / "new" / "folder" / "r.json")
    assert load(path) == report
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]


def test_a_failed_write_leaves_the_old_report_and_nothing_else(tmp_path, make_report, monkeypatch):
    path = save(make_report(), tmp_path / "r.json")
    before = path.read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ReportError, match="No space left"):
        save(make_report(num_rows=2), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_something_that_is_not_plain_data_is_refused(tmp_path, make_report):
    report = make_report()
    report.config["model"] = object()
    with pytest.raises(ReportError, match="cannot be written as JSON"):
        save(report, tmp_path / "r.json")
    assert not list(tmp_path.iterdir())


def test_default_path_never_names_an_existing_file(tmp_path):
    paths = []
    for _ in range(3):
        path = default_path(tmp_path, "ddp/cpu", "2026-03-02T10:20:30.123456+00:00")
        path.touch()
        paths.append(path.name)
    assert paths == [f"ddp-cpu-20260302T102030Z{suffix}.json" for suffix in ("", "-2", "-3")]


def refused(path):
    with pytest.raises(ReportError) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"loss 0.1", "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"schema": "shoal-rep', "ends in the middle"),
        (b"[1, 2]", "not a report"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"schema": "shoal-report", "config": ' + b"[" * 300 + b"]" * 300 + b"}", "100 levels deep"),
        (b'{"throughput": 3}', "not a report"),
        (b'{"schema": "shoal-report", "version": "1"}', "version is '1'"),
        (b'{"schema": "shoal-report", "version": 1}', "missing required field `benchmark`"),
        (b'{"schema": "shoal-report", "version": 2, "rows": "another shape"}', "pip install --upgrade shoal"),
        (b'{"benchmark_results": [{"model": 3}]}', "PyTorch"),
    ],
)
def test_files_that_are_no_report_say_why(tmp_path, content, words):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert words in refused(path)


def test_missing_files_and_folders_say_what_to_do(tmp_path, make_report):
    assert f"ls {tmp_path}" in refused(tmp_path / "r.json")
    newest = save(make_report(), tmp_path / "r.json")
    assert str(newest) in refused(tmp_path)


def test_duplicate_rows_in_a_file_name_the_file(tmp_path, make_report):
    path = save(make_report(), tmp_path / "r.json")
    document = msgspec.json.decode(path.read_bytes())
    document["rows"] *= 2
    path.write_bytes(msgspec.json.encode(document))
    assert "occurs twice" in refused(path)


def test_fields_of_a_later_minor_change_are_ignored(tmp_path, make_report):
    path = save(make_report(), tmp_path / "r.json")
    document = msgspec.json.decode(path.read_bytes()) | {"mood": "good"}
    path.write_bytes(msgspec.json.encode(document))
    assert load(path) == make_report()


def test_old_versions_are_upgraded_one_by_one(tmp_path, make_report, monkeypatch):
    path = save(make_report(), tmp_path / "r.json")
    monkeypatch.setattr(storage, "VERSION", 3)
    monkeypatch.setitem(
        storage.UPGRADES, 1, lambda old: old | {"version": 2, "benchmark": old["benchmark"] + "!"}
    )
    monkeypatch.setitem(
        storage.UPGRADES, 2, lambda old: old | {"version": 3, "benchmark": old["benchmark"] + "?"}
    )
    assert load(path).benchmark == "transport!?"
