"""The trace files, and the spans that a traced group writes into them."""

import json

import pytest
import torch

from group.pretender import Pending, Pretender, ones
from shoal.core import ManualClock, ReportError
from shoal.group import span as group_span
from shoal.group.wrappers import Traced
from shoal.report.timeline import Timeline, merge


def read(path):
    """A trace, checked for what both viewers need of it."""
    trace = json.loads(path.read_bytes())
    assert trace["displayTimeUnit"] in ("ms", "ns")
    rows = {}
    for event in trace["traceEvents"]:
        assert event["ph"] in "XM"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in rows.values():
        check_nesting(events)
    return trace


def check_nesting(events):
    """Spans of one row lie one after the other, or one inside the other."""
    for index, first in enumerate(events):
        for second in events[index + 1 :]:
            begin, end = first["ts"], first["ts"] + first["dur"]
            begin_2, end_2 = second["ts"], second["ts"] + second["dur"]
            assert end <= begin_2 or end_2 <= begin or (begin <= begin_2 and end_2 <= end)


def spans(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def notes(trace, kind):
    return [event["args"] for event in trace["traceEvents"] if event["name"] == kind]


@pytest.fixture
def clock():
    return ManualClock(5.0)


def test_spans_in_microseconds_with_names_for_their_rows(tmp_path, clock):
    with Timeline(tmp_path / "trace.0", 3, clock=clock) as timeline:
        timeline.add("all_reduce", "all_reduce", 5.001, 5.003, size_bytes=4000)
        with timeline.span("epoch"):
            clock.advance(1)
    trace = read(tmp_path / "trace.0")
    reduction = {
        "name": "all_reduce",
        "cat": "all_reduce",
        "ph": "X",
        "ts": 5_001_000.0,
        "dur": 2000.0,
        "pid": 3,
        "tid": 1,
        "args": {"bytes": 4000},
    }
    assert reduction in spans(trace)
    assert [(span["name"], span["dur"]) for span in spans(trace)] == [("epoch", 1e6), ("all_reduce", 2000)]
    assert notes(trace, "process_name") == [{"name": "rank 3"}]
    assert notes(trace, "thread_name") == [{"name": "program"}, {"name": "all_reduce"}]
    assert notes(trace, "process_labels") == []


def test_spans_that_overlap_get_rows_of_their_own(tmp_path):
    choice = torch.Generator().manual_seed(1)
    with Timeline(tmp_path / "trace") as timeline:
        for begin, length in torch.rand(300, 2, generator=choice).tolist():
            timeline.add("x", "lane", begin, begin + length / 20)
        timeline.add("outer", "nested", 1.0, 2.0)
        timeline.add("inner", "nested", 1.0, 1.5)
    trace = read(tmp_path / "trace")
    names = [note["name"] for note in notes(trace, "thread_name")]
    assert names[:2] == ["lane", "lane 2"]
    assert names[-1] == "nested"
    assert len(spans(trace)) == 302


def test_memory_is_bounded_and_what_is_left_out_is_counted(tmp_path):
    timeline = Timeline(tmp_path / "trace", max_events=10)
    for turn in range(25):
        timeline.add("x", "lane", turn, turn + 0.5)
    timeline.close()
    timeline.add("late", "lane", 0, 1)
    timeline.close()
    trace = read(tmp_path / "trace")
    assert len(spans(trace)) == 10
    assert trace["otherData"] == {"ranks": [0], "left_out": 15}
    assert notes(trace, "process_labels") == [{"labels": "15 later spans are left out"}]


def test_parts_merge_from_their_first_moment_on(tmp_path, clock):
    for rank in (0, 2):
        with Timeline(tmp_path / f"trace.{rank}", rank, max_events=1, clock=clock) as timeline:
            timeline.add("x", "lane", 7.5 + rank, 8.5 + rank)
            timeline.add("y", "lane", 7.5 + rank, 8.5 + rank)
    whole = merge([tmp_path / f"trace.{rank}" for rank in range(3)], tmp_path / "trace.json")
    trace = read(whole)
    assert [(span["pid"], span["ts"], span["dur"]) for span in spans(trace)] == [(0, 0, 1e6), (2, 2e6, 1e6)]
    assert [note["name"] for note in notes(trace, "process_name")] == ["rank 0", "rank 2"]
    assert trace["otherData"] == {"ranks": [0, 2], "left_out": 2, "missing": ["trace.1"]}


def test_clocks_of_other_machines_are_set_right(tmp_path, clock):
    for rank, began_s in enumerate((5.0, 1005.0)):
        with Timeline(tmp_path / f"trace.{rank}", rank, clock=clock) as timeline:
            timeline.add("x", "lane", began_s, began_s + 1)
    paths = [tmp_path / f"trace.{rank}" for rank in range(2)]
    trace = read(merge(paths, tmp_path / "trace.json", {1: -999.5}))
    assert [(span["pid"], span["ts"]) for span in spans(trace)] == [(0, 0), (1, 5e5)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"traceEvents": []}', '"x"'])
def test_what_is_no_part_is_refused(tmp_path, text):
    (tmp_path / "trace.0").write_text(text)
    with pytest.raises(ReportError, match=r"trace\.0 is not a worker's part"):
        merge([tmp_path / "trace.0"], tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()


def test_a_traced_group_records_operations_waits_and_the_users_spans(tmp_path, clock):
    with Traced(Pretender(), Timeline(tmp_path / "trace", clock=clock)) as group:
        pending = group.inner.pending = Pending()
        with group_span(group, "step"):
            handle = group.all_reduce(ones())
            clock.advance(2)
            pending.is_over = True
            assert handle.wait() is pending.result
            clock.advance(1)
        group.window("model", 10, sources=()).publish(ones(10), 1)
    seen = {
        span["name"]: (span["cat"], span["dur"], span.get("args")) for span in spans(read(tmp_path / "trace"))
    }
    assert seen == {
        "step": ("program", 3e6, None),
        "all_reduce": ("all_reduce", 2e6, {"bytes": 4000}),
        "wait for all_reduce": ("waiting", 0, None),
        "window": ("window", 0, {"bytes": 40}),
        "publish": ("publish", 0, {"bytes": 40}),
    }


def test_the_timeline_is_written_even_if_closing_the_group_fails(tmp_path, monkeypatch):
    group = Traced(Pretender(), Timeline(tmp_path / "trace"))
    monkeypatch.setattr(group.inner, "close", lambda error: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        group.close()
    assert (tmp_path / "trace").exists()
