import json

import pytest

from shoal.core import UsageError
from shoal.core.run_options import RunOptions


def test_parts_are_merged_and_old_ones_forgotten(start, tmp_path):
    pytest.importorskip("shoal.group.timeline")
    (tmp_path / "trace.json.1").write_text("of an earlier run")
    body = """
        import json
        options = json.loads(os.environ["SHOAL_RUN"])
        part = {"traceEvents": [], "otherData": {"ranks": [rank], "left_out": 0, "started_s": 0.0}}
        if rank == 0: Path(f"{options['timeline']}.{rank}").write_text(json.dumps(part))
    """
    done = start(body, 2, options=RunOptions(timeline=str(tmp_path / "trace.json")))
    assert done.said == [f"wrote the timeline {tmp_path / 'trace.json'}"]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["ranks"] == [0]
    assert sorted(path.name for path in tmp_path.glob("trace*")) == ["trace.json"]


def test_workers_that_write_none_are_told_about(start, tmp_path):
    done = start("", 1, options=RunOptions(timeline=str(tmp_path / "trace.json")))
    assert "no worker wrote a timeline" in done.said[0]
    assert not (tmp_path / "trace.json").exists()


def test_a_timeline_needs_a_folder(start, tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        start("", 1, options=RunOptions(timeline=str(tmp_path / "none" / "trace.json")))
