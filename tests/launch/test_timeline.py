import json

import pytest

from shoal.core import UsageError
from shoal.core.run_options import RunOptions
from shoal.launch import LaunchSettings, timeline


def test_parts_are_merged_and_old_ones_forgotten(start, tmp_path):
    (tmp_path / "trace.json.1").write_text("of an earlier run")
    body = """
        import json
        options = json.loads(os.environ["SHOAL_RUN"])
        part = {"traceEvents": [], "otherData": {"ranks": [rank], "left_out": 0, "started_s": 0.0}}
        if rank == 0: Path(f"{options['timeline']}.{rank}").write_text(json.dumps(part))
    """
    done = start(body, 2, options=RunOptions(timeline=str(tmp_path / "trace.json")))
    assert done.said == [f"wrote the timeline {tmp_path / 'trace.json'}, without rank 1"]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["ranks"] == [0]
    assert sorted(path.name for path in tmp_path.glob("trace*")) == ["trace.json"]


def test_workers_that_write_none_are_told_about(start, tmp_path):
    done = start("", 1, options=RunOptions(timeline=str(tmp_path / "trace.json")))
    assert done.said == ["no worker wrote a timeline: none of them has called shoal.init()"]
    assert not (tmp_path / "trace.json").exists()
    done = start("sys.exit(3)", 1, options=RunOptions(timeline=str(tmp_path / "trace.json")))
    assert done.said[-1] == "no worker wrote a timeline: they were killed, or had not called shoal.init()"


def test_parts_that_cannot_be_read_are_kept_and_told_about(start, tmp_path):
    body = """
        import json
        Path(json.loads(os.environ["SHOAL_RUN"])["timeline"] + ".0").write_text("no trace")
    """
    done = start(body, 1, options=RunOptions(timeline=str(tmp_path / "trace.json")))
    assert done.outcome.exit_code == 0
    assert "trace.json.0 is not a worker's part of a timeline" in done.said[0]
    assert (tmp_path / "trace.json.0").exists()


def test_what_became_of_it_is_printed(shoal_run, write, tmp_path):
    process = shoal_run("-np", 1, "--timeline", "trace.json", write(""))
    assert "no worker wrote a timeline" in process.communicate(timeout=30)[1]


def test_a_timeline_needs_a_folder(start, tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        start("", 1, options=RunOptions(timeline=str(tmp_path / "none" / "trace.json")))


def test_a_part_travels_in_pieces_and_does_not_replace_one_that_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr(timeline, "_PIECE_BYTES", 3)
    there, here = tmp_path / "there" / "t.json", tmp_path / "t.json"
    timeline.make_room(str(there), [0, 1])
    for rank in range(2):
        there.with_name(f"t.json.{rank}").write_bytes(b"0123456789")
    here.with_name("t.json.1").write_bytes(b"shared")
    parts = timeline.Parts(LaunchSettings(("x",), 2, RunOptions(timeline=str(here))))
    for rank in range(2):
        for data in timeline.read_part(str(there), rank):
            parts.take(rank, data)
    assert here.with_name("t.json.0").read_bytes() == b"0123456789"
    assert here.with_name("t.json.1").read_bytes() == b"shared"
    assert list(timeline.read_part(str(there), 7)) == []
    timeline.make_room(str(there), [0])
    assert not there.with_name("t.json.0").exists()
