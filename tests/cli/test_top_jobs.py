import math

import msgspec
import pytest

from core.boards import NOW_S, gone, note
from shoal.cli.top import JobSource, _age, jobs_of, shot_of
from shoal.core import ManualClock, UsageError, board
from shoal.core.board import Sighting, pin


def hide_other_jobs(monkeypatch):
    """Read the board of this test alone: jobs that run on the machine meanwhile are on the common ones."""
    first = board.folders
    monkeypatch.setattr(board, "folders", lambda: first()[:1])


def sighting(rank=0, run="job", age_s=0.5, state="running", **fields):
    return Sighting(note(rank, run, **fields), state, age_s)


def shot(*sightings):
    return shot_of(jobs_of(sightings, NOW_S))


def text(view):
    lines = [
        line for item in view.items() if not isinstance(item, str | tuple) for line, _ in item.lines(200)
    ]
    return [" ".join(line.split()) for line in lines]


def test_one_job_is_a_row_for_each_worker():
    found = shot(
        sighting(1, step=9, steps_per_s=4.5, examples_per_s=144.0, values={"loss": 1.5}, wait_share=0.02),
        sighting(0, step=10, steps_per_s=5.0, examples_per_s=160.0, values={"loss": 0.5},
                 wait_share=0.7, waits_for=1, sent_bytes=2_000_000, received_bytes=0),
    )  # fmt: skip
    assert text(found.terminal) == [
        "worker step steps/s examples/s loss sent received waits last beat",
        "------ ---- ------- ---------- ------ ------- -------- --------- ---------",
        "0 10 5.00 160 0.5000 2.00 MB 0 B 70% for 1 0.5 s",
        "1 9 4.50 144 1.500 – – 2% 0.5 s",
    ]
    assert found.terminal.figures == (
        ("workers", "2 of 2"),
        ("step", "9 to 10"),
        ("examples/s", "304"),
        ("loss", "1.000"),
        ("up", "1 min 0 s"),
    )
    assert found.terminal.notes == ("The others wait most for worker 1: 70.0% of their time.",)
    assert found.result["examples_per_s"] == 304.0
    assert found.result["sent_bytes"] == 2_000_000
    assert found.views[0].shares == (0.7, 0.02)
    assert found.views[0].series == {"examples/s": 304.0, "loss": 1.0}
    assert [one["state"] for one in found.document["jobs"][0]["workers"]] == ["running", "running"]


def test_what_is_not_known_has_no_column():
    assert text(shot(sighting(step=3, size=1)).terminal) == [
        "worker step last beat",
        "------ ---- ---------",
        "0 3 0.5 s",
    ]


def test_who_is_gone_stopped_late_or_not_here_is_told():
    found = shot(
        Sighting(gone(0, size=5), "gone", 30.0),
        sighting(1, size=5, state="stopped", age_s=12.0),
        sighting(2, size=5, age_s=31.0),
        sighting(0, size=5, role="server", step=4),
    )
    pid = found.document["jobs"][0]["workers"][0]["pid"]
    assert found.terminal.notes[0].startswith("3 of 5 workers are here")
    assert found.terminal.notes[1:] == (
        f"Process {pid} of worker 0 on here has ended without leaving the group.",
        f"Process {pid} of worker 1 on here is stopped (SIGSTOP).",
        "No step for 31 s or longer: worker 2.",
    )
    assert found.result["num_gone"] == found.result["num_stopped"] == 1
    assert found.views[0].states == ("gone", "stopped", "running", "running")
    assert [row[0] for row in found.terminal.table.rows] == ["0", "1", "2", "server 0"]
    assert found.terminal.table.rows[0][-1] == "gone, 30 s"


def test_several_jobs_are_a_list_the_newest_first():
    found = shot(sighting(run="old", began_s=NOW_S - 4000), sighting(run="new", began_s=NOW_S - 4))
    assert [row[0] for row in found.terminal.table.rows] == ["new", "old"]
    assert [row[-1] for row in found.terminal.table.rows] == ["4.0 s", "1 h 6 min"]
    assert found.result == {"num_jobs": 2, "runs": ["new", "old"]}
    assert [view.id for view in found.views] == ["new", "old"]


def test_two_strategies_of_a_worker_are_two_rows_and_count_once():
    found = shot(
        sighting(size=1, examples_per_s=10.0, strategy="pair"),
        sighting(size=1, examples_per_s=10.0, strategy="sma", number=1),
    )
    assert [row[:2] for row in found.terminal.table.rows] == [("0", "pair"), ("0", "sma")]
    assert found.result["examples_per_s"] == 10.0
    assert found.result["num_workers"] == 1


def test_a_run_is_named_by_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    hide_other_jobs(monkeypatch)
    clock = ManualClock(wall_s=NOW_S)
    for run in ("abc", "abd", "ab"):
        pin(run).write(note(run=run))
    assert JobSource("abc", clock).look().result["run"] == "abc"
    assert JobSource("ab", clock).look().result["run"] == "ab"
    assert JobSource("x", clock).look().is_empty
    assert JobSource(None, clock).look().result["num_jobs"] == 3
    pin("ab").remove()
    with pytest.raises(UsageError, match="beginning of abc, abd"):
        JobSource("ab", clock).look()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3700, "1 h 1 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_ages_are_for_people(seconds, shown):
    assert _age(seconds) == shown


def test_a_job_that_hangs_has_no_speed_anywhere():
    known = {"steps_per_s": 10.0, "examples_per_s": 1000.0, "wait_share": 0.9, "size": 3}
    found = shot(
        sighting(0, waits_for=1, age_s=60.0, **known),
        sighting(1, waits_for=0, age_s=60.0, **known),
        sighting(2, waits_for=0, state="stopped", age_s=1.0, **known),
    )
    assert (found.result["examples_per_s"], found.result["steps_per_s"]) == (0, 0)
    assert found.views[0].series == {"examples/s": 0}
    assert dict(found.terminal.figures)["examples/s"] == "0"
    assert [row[2:] for row in found.terminal.table.rows] == [
        ("0", "0", "1 min 0 s"),
        ("0", "0", "1 min 0 s"),
        ("0", "0", "stopped, 1.0 s"),
    ]
    assert found.views[0].shares == (None, None, None)
    assert [one["examples_per_s"] for one in found.document["jobs"][0]["workers"]] == [0, 0, 0]
    assert 'worker_examples_per_second{run="job",role="worker",rank="0"' in found.metrics
    assert " 1000\n" not in found.metrics
    assert found.terminal.notes == (
        f"Process {found.document['jobs'][0]['workers'][2]['pid']} of worker 2 on here is stopped (SIGSTOP).",
        "No step for 1 min 0 s or longer: worker 0, worker 1.",
    )


def test_a_loss_that_is_no_number_is_shown_as_such_and_as_null_in_json():
    found = shot(
        sighting(0, values={"loss": math.nan, "norm": math.inf}),
        sighting(1, values={"loss": 1.0, "norm": 1.0}),
    )
    assert dict(found.terminal.figures)["loss"] == "nan"
    assert [row[2:4] for row in found.terminal.table.rows] == [("nan", "inf"), ("1.000", "1.000")]
    document = msgspec.json.decode(msgspec.json.encode({**found.document, "result": found.result}))
    assert document["result"]["loss"] is None
    assert [one["values"]["loss"] for one in document["jobs"][0]["workers"]] == [None, 1.0]
    assert 'name="loss"} NaN\n' in found.metrics
    assert 'name="norm"} +Inf\n' in found.metrics


def test_an_elastic_run_shows_its_generation_and_who_has_come_and_gone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    hide_other_jobs(monkeypatch)
    source, pins = JobSource("job", ManualClock(wall_s=NOW_S)), {}
    looks = [(1, [0, 1]), (2, [0, 1, 2]), (3, [2, 0])]
    shots = []
    for generation, numbers in looks:
        for one in pins.values():
            one.remove()
        for rank, number in enumerate(numbers):
            pins[number] = pin(f"job-{number}")
            pins[number].write(note(rank, "job", size=len(numbers), place=number, generation=generation))
        shots.append(source.look())
    assert [dict(shot.terminal.figures)["generation"] for shot in shots] == ["1", "2", "3"]
    assert [dict(shot.terminal.figures)["workers"] for shot in shots] == ["2 of 2", "3 of 3", "2 of 2"]
    assert [shot.result["generation"] for shot in shots] == [1, 2, 3]
    host = shots[0].document["jobs"][0]["workers"][0]["host"]
    assert shots[0].terminal.notes == ()
    assert shots[2].terminal.notes == (f"worker 2 on {host} has joined.", f"worker 1 on {host} has left.")
    assert [line.split()[:2] for line in text(shots[2].terminal)[2:]] == [["2", "0"], ["0", "1"]]


def test_a_lost_worker_is_not_shown_any_more_once_an_elastic_run_has_gone_on_without_it():
    there = [sighting(rank, generation=2, place=rank + 1) for rank in (0, 1)]
    lost = sighting(2, generation=1, place=0, state="gone")
    assert len(text(shot(*there, lost).terminal)) == 2 + 2
    still = sighting(2, generation=2, place=3, state="gone")
    assert len(text(shot(*there, still).terminal)) == 2 + 3
