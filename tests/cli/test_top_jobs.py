import math

import msgspec
import pytest

from core.boards import NOW_S, gone, note
from shoal.cli.top import JobSource, _age, jobs_of, shot_of
from shoal.core import ManualClock, UsageError, board
from shoal.core.board import Sighting, pin
from shoal.report.tables import Column


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
        "worker does step steps/s examples/s loss sent received waits last beat",
        "------ ----------- ---- ------- ---------- ------ ------- -------- --------- ---------",
        "0 waits for 1 10 5.00 160 0.5000 2.00 MB 0 B 70% for 1 0.5 s",
        "1 trains 9 4.50 144 1.500 – – 2% 0.5 s",
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


def matrix_of(found, title):
    return next(one for one in found.views[0].matrices if one.title == title)


def test_what_one_has_sent_the_other_has_received_whoever_counted_it():
    """Worker 1 fetches what worker 0 publishes, which exchanges with worker 2; each has noted at its time."""
    found = shot(
        sighting(0, size=3, sent_bytes=10_000, received_bytes=9_000, sent_to={2: 10_000},
                 received_from={2: 9_000}),
        sighting(1, size=3, sent_bytes=0, received_bytes=5_000, received_from={0: 5_000}),
        sighting(2, size=3, sent_bytes=10_000, received_bytes=11_000, sent_to={0: 10_000},
                 received_from={0: 11_000}),
    )  # fmt: skip
    moved = matrix_of(found, "Who sends to whom")
    assert moved.names == ("worker 0", "worker 1", "worker 2")
    assert moved.texts == (("", "5.00 kB", "11.0 kB"), ("0 B", "", "0 B"), ("10.0 kB", "0 B", ""))
    assert moved.sums == (
        ("sent", ("16.0 kB", "0 B", "10.0 kB")),
        ("received", ("10.0 kB", "5.00 kB", "11.0 kB")),
        ("in all", ("26.0 kB",)),
    )
    assert [row[3:5] for row in found.terminal.table.rows] == list(
        zip(*(cells for _, cells in moved.sums[:2]), strict=True)
    )
    assert found.result["sent_bytes"] == found.result["received_bytes"] == 26_000


def test_servers_have_a_row_of_bytes_and_none_of_waits():
    found = shot(
        sighting(0, size=2, place=1, sent_to={0: 10}, waited_s={1: 6.0}),
        sighting(1, size=2, place=2, received_from={0: 30}),
        sighting(0, size=2, role="server", place=0, sent_bytes=0, received_bytes=0),
    )
    assert matrix_of(found, "Who waits for whom").names == ("worker 0", "worker 1")
    assert matrix_of(found, "Who sends to whom").names == ("server 0", "worker 0", "worker 1")
    assert found.result["sent_bytes"] == 10
    assert [row[0] for row in found.terminal.table.rows] == ["0", "1", "server 0"]
    assert found.terminal.table.rows[2][3:5] == ("30.0 B", "10.0 B")


def test_who_waits_for_whom_is_a_share_of_all_the_time():
    waits = matrix_of(shot(sighting(0, waited_s={1: 15.0}), sighting(1)), "Who waits for whom")
    assert waits.texts == (("", "25%"), ("0", ""))
    assert waits.shares == ((0.0, 0.25), (0.0, 0.0))


@pytest.mark.parametrize("size", [1, 17])
def test_a_matrix_is_for_a_few(size):
    assert shot(*(sighting(rank, size=size, sent_to={0: 1}) for rank in range(size))).views[0].matrices == ()


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"phase": "starts"}, "starts"),
        ({"phase": "saves", "age_s": 20.0}, "saves a checkpoint, 20 s"),
        ({"phase": "evaluates", "wait_share": 0.9}, "evaluates"),
        ({"phase": "waits", "waits_for": 1}, "waits for 7"),
        ({"phase": "waits"}, "waits"),
        ({"phase": "dances", "age_s": 20.0}, "no step for 20 s"),
        ({"phase": "dances"}, "trains"),
        ({"wait_share": 0.6, "waits_for": 1}, "waits for 7"),
        ({"wait_share": 0.4, "waits_for": 1}, "trains"),
        ({"role": "server"}, "serves"),
        ({"state": "stopped"}, "stopped"),
    ],
)
def test_what_a_worker_does_is_told(fields, what):
    there = {"generation": 1, "steps_per_s": 5.0}
    found = shot(sighting(0, place=3, **there, **fields), sighting(1, place=7, **there))
    own = next(row for row in found.terminal.table.rows if row[0] in ("3", "server 3"))
    assert own[list(found.terminal.table.columns).index(Column("does", "left"))] == what


def test_without_a_loss_the_page_says_how_to_give_it_one():
    without, with_loss = shot(sighting()), shot(sighting(values={"loss": 1.0, "norm": 2.0}))
    assert "strategy.log(loss=loss)" in without.views[0].missing["loss"]
    assert with_loss.views[0].missing == {}
    assert with_loss.views[0].series == {"loss": 1.0, "norm": 2.0}


def test_what_is_not_known_has_no_column():
    assert text(shot(sighting(step=3, size=1)).terminal) == [
        "worker does step last beat",
        "------ ------ ---- ---------",
        "0 trains 3 0.5 s",
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
    assert [row[1:2] + row[3:] for row in found.terminal.table.rows] == [
        ("no step for 1 min 0 s", "0", "0", "1 min 0 s"),
        ("no step for 1 min 0 s", "0", "0", "1 min 0 s"),
        ("stopped", "0", "0", "stopped, 1.0 s"),
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
    assert [row[3:5] for row in found.terminal.table.rows] == [("nan", "inf"), ("1.000", "1.000")]
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
