import math

import msgspec
import numpy as np
import pytest

from shoal.core.errors import ReportError
from shoal.report import Report, Row
from shoal.report.schema import flatten, text


def row(**fields):
    return Row(
        **{"key": {"a": 1}, "metric": "m", "unit": "s", "direction": "lower", "starts": [[1.0]]} | fields
    )


def report(*rows):
    return Report(benchmark="b", created="2026-01-01T00:00:00Z", rows=list(rows))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_samples_that_are_not_finite_are_refused_by_place(bad):
    with pytest.raises(ReportError, match="sample 2 of start 3"):
        row(starts=[[1.0], [1.0], [1.0, bad]])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"starts": []}, "neither samples nor an error"),
        ({"starts": [[1.0]], "error": "x"}, "both samples and an error"),
        ({"starts": [[1.0], []]}, "start 2 holds no samples"),
        ({"starts": [["fast"]]}, "no number"),
        ({"direction": "up"}, "direction"),
        ({"key": {"a": math.nan}}, "key"),
        ({"key": {"a": [1]}}, "key"),
    ],
)
def test_rows_that_say_nothing_or_two_things_are_refused(fields, words):
    with pytest.raises(ReportError, match=words):
        row(**fields)


def test_numpy_samples_become_plain_numbers():
    starts = row(starts=[np.array([1, 2], dtype=np.float32), np.arange(2)]).starts
    assert starts == [[1.0, 2.0], [0.0, 1.0]]
    assert all(type(sample) is float for start in starts for sample in start)


def test_a_failed_row_is_a_row():
    failed = row(starts=[], error="peer 7 was lost")
    assert report(row(key={"a": 2}), failed).failed == [failed]


def test_duplicate_rows_are_refused_whatever_the_order_of_their_keys():
    with pytest.raises(ReportError, match="occurs twice"):
        report(row(key={"a": 1, "b": 2}), row(key={"b": 2, "a": 1.0}))


@pytest.mark.parametrize("other", [{"key": {"a": True}}, {"key": {"a": "1"}}, {"key": {}}, {"metric": "n"}])
def test_rows_differ_by_type_and_metric(other):
    assert len(report(row(), row(**other)).rows) == 2


def test_json_keeps_every_field():
    original = report(
        row(key={"text": "µ", "int": 1, "float": 1.5, "bool": True}), row(starts=[], error="lost")
    )
    assert msgspec.json.decode(msgspec.json.encode(original), type=Report) == original


def test_flatten_sorts_and_joins_names():
    assert list(flatten({"b": 1, "a": {"y": {}, "x": {"z": None}}}).items()) == [
        ("a.x.z", None),
        ("a.y", {}),
        ("b", 1),
    ]


def test_text_is_what_a_person_writes():
    assert [text(value) for value in ("cpu", True, None, 1, 0.5, [1, 2])] == [
        "cpu",
        "true",
        "null",
        "1",
        "0.5",
        "[1,2]",
    ]
