import json
import math
import subprocess
import sys

import pytest

from cli.test_top_jobs import hide_other_jobs
from core.boards import note
from shoal.cli.program import run
from shoal.cli.top import JobSource
from shoal.cli.top_view import live_lines
from shoal.core import SYSTEM_CLOCK
from shoal.core.board import pin


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    hide_other_jobs(monkeypatch)


def put(run_name="job", **fields):
    wall_s = SYSTEM_CLOCK.wall_s()
    pin(run_name).write(note(run=run_name, noted_s=wall_s, began_s=wall_s, **fields))


def test_without_a_terminal_it_is_printed_once(capsys):
    put(step=7, size=1)
    assert run(["top"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "train.py · all-reduce"
    assert out[1] == "run job on here"
    assert json.loads(out[-1].removeprefix("RESULT: "))["step"] == 7


def test_json_is_for_programs(capsys):
    put(step=7, size=1)
    assert run(["top", "jo", "--json", "-"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["jobs"][0]["workers"][0]["step"] == document["result"]["step"] == 7
    assert captured.err.startswith("train.py")


@pytest.mark.parametrize(
    ("arguments", "what"), [([], "No job is"), (["x"], "No job whose name begins with x is")]
)
def test_nothing_to_see_is_a_failure_that_says_where_it_looked(capsys, tmp_path, arguments, what):
    assert run(["top", *arguments]) == 1
    said = capsys.readouterr().err
    assert f"{what} running here." in said
    assert str(tmp_path / "shoal") in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--listen", "127.0.0.1:0"],
        ["--web", "--once"],
        ["x", "--join", "127.0.0.1:1"],
        ["--web", "--listen", "x"],
    ],
)
def test_what_does_not_fit_together_is_refused(capsys, arguments):
    assert run(["top", *arguments]) == 2


@pytest.mark.slow
def test_the_workers_of_a_run_are_seen_until_they_leave(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("""
import sys, torch, shoal
from shoal.strategies import make_strategy
group = shoal.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
strategy = make_strategy(group, "all-reduce")
with strategy.attach(model, optimizer):
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    group.barrier().wait()
    if group.rank == 0:
        print("ready", flush=True)
    sys.stdin.readline() if group.rank == 0 else None
    group.barrier().wait()
""")
    shoal = [sys.executable, "-m", "shoal"]
    with subprocess.Popen(
        [*shoal, "run", "-np", "2", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as job:
        assert "ready" in job.stdout.readline()
        seen = subprocess.run([*shoal, "top", "--json", "-"], capture_output=True, text=True, check=True)
        job.stdin.write("\n")
        job.stdin.close()
        job.stdout.read()
    assert job.returncode == 0
    # other jobs may run on the machine meanwhile
    (found,) = [job for job in json.loads(seen.stdout)["jobs"] if job["program"] == "train.py"]
    assert [one["rank"] for one in found["workers"]] == [0, 1]
    assert found["strategy"] == "all-reduce"
    assert list((tmp_path / "shoal").iterdir()) == []


def test_it_starts_without_torch():
    code = (
        "import sys; from shoal.cli.program import run; from shoal.cli import top_view, status\n"
        "assert run(['top', 'no-such-run', '--once']) == 1; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_address_is_no_run(capsys):
    assert run(["top", "--web", "127.0.0.1:8470"]) == 2
    assert "--web --listen 127.0.0.1:8470" in " ".join(capsys.readouterr().err.split())


def unsafe(text):
    return [character for character in text if character != "\n" and not character.isprintable()]


def test_notes_cannot_steer_the_terminal(capsys):
    evil = "\x1b[2J\u202e\x9b"
    put(size=1, program=f"x{evil}", strategy=evil, host=evil, values={f"loss{evil}": 1.0})
    put("other", size=1, role=evil, program=f"a\n{evil}")
    for arguments in (["top"], ["top", "job"], ["top", "--json", "-"]):
        assert run(arguments) == 0
        captured = capsys.readouterr()
        assert not unsafe(captured.out + captured.err)
        assert "\\u001b[2J\\u202e\\u009b" in captured.out
    shot = JobSource("job").look()
    # the live view is drawn by rich on a terminal alone; these are its lines
    assert not unsafe("".join(line for line, _ in live_lines(shot)))


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan, 1e308, -1e308, 5e-324])
def test_any_number_in_a_note_is_shown(capsys, number):
    wall_s = SYSTEM_CLOCK.wall_s()
    numbers = dict.fromkeys(("steps_per_s", "examples_per_s", "wait_share"), number)
    pin("job").write(note(run="job", noted_s=wall_s, began_s=number, waits_for=-1, step=2**63, **numbers))
    pin("one").write(note(1, run="job", noted_s=number, began_s=number, waited_s={0: number}, **numbers))
    assert run(["top"]) == 0
    assert run(["top", "--json", "-"]) == 0
    assert not unsafe(capsys.readouterr().out)


@pytest.mark.parametrize(
    "content", [b"", b"\x00", b"\xff" * 9, b"\x81\xa4run_" + b"\x91" * 60_000, b"\x81\xa3run\xa2\xff\xfe"]
)
def test_what_is_no_note_is_left_out(tmp_path, content):
    put(step=7, size=1)
    folder = next(tmp_path.rglob("*.note")).parent
    (folder / "bad.note").write_bytes(content)
    assert run(["top"]) == 0
