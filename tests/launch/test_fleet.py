"""Workers of several agents, which are children of this process: what the head makes of what they tell."""

import json
import os
import signal
import sys
from functools import partial

import pytest

from launch.programs import Done, Recorder, is_running, read_pid
from launch.stations import Children
from shoal.core import PeerRefused
from shoal.core.run_options import RunOptions
from shoal.launch import Elastic, LaunchSettings, launch
from shoal.launch.head import forwarded

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only")
TOGETHER = """
mark(f"here-{rank}", os.getpid())
for other in range(size):
    wait_for(f"here-{other}")
if rank == 0: print("ready")
"""


@pytest.fixture
def start(write):
    def start(body, num_workers=4, engine=None, when=None, **settings):
        recorder = Recorder(when)
        command = settings.pop("command", (sys.executable, str(write(body))))
        settings = LaunchSettings(command, num_workers, **settings)
        return Done(launch(settings, recorder, engine or Children()), recorder)

    return start


def test_lines_and_the_first_traceback_come_from_everywhere(start, tmp_path):
    body = f"{TOGETHER}\nprint(os.environ['SHOAL_MACHINE'])\nif rank == 3: raise ValueError('boom')"
    done = start(f"{body}\ntime.sleep(100)", log_dir=tmp_path / "logs")
    assert done.outcome.exit_code == 1
    assert done.outcome.elapsed_s < 10
    assert done.said == ["rank 3 failed with exit code 1"]
    assert list(done.err) == [3]
    assert done.outcome.traceback.endswith("ValueError: boom")
    assert done.out[3] == ["1"]
    assert b"ValueError: boom\n" in (tmp_path / "logs" / "rank-3.log").read_bytes()


def test_losing_a_peer_on_another_machine_is_not_the_cause(start):
    done = start("""
        import atexit
        class PeerLost(Exception): pass
        if rank == 3:
            for other in range(3): atexit.register(wait_for, f"lost-{other}")
            mark("failing")
            sys.exit(7)
        wait_for("failing")
        atexit.register(mark, f"lost-{rank}")
        raise PeerLost("rank 3 is lost")
    """)
    assert done.outcome.exit_code == 7
    assert done.said[0] == "rank 3 failed with exit code 7"
    assert done.err == {}


def test_survivors_on_all_machines_go_on(start, tmp_path):
    body = f"survive(){TOGETHER}\nif rank == 2: os.kill(os.getpid(), 9)\nwait_for('told')\nprint('finished')"
    done = start(body, when={"go on without it": (tmp_path / "told").touch})
    assert done.outcome.exit_code == 0
    assert done.said[-1] == "finished without rank 2"
    assert [done.out[rank][-1] for rank in (0, 1, 3)] == ["finished"] * 3


def test_one_that_does_not_survive_elsewhere_ends_all(start):
    done = start(f"survive(rank != 0){TOGETHER}\nsys.exit(5) if rank == 3 else time.sleep(100)")
    assert done.outcome.exit_code == 5


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_agent_that_has_gone_or_is_silent_is_lost_with_its_workers(start, tmp_path, number):
    engine = Children()
    patience = 0.4 if number == signal.SIGSTOP else 1.0
    done = start(
        f"{TOGETHER}\ntime.sleep(100)",
        engine=engine,
        when={"ready": partial(engine.signal, "b", number)},
        options=RunOptions(patience=patience),
    )
    assert done.outcome.exit_code == 1
    assert done.outcome.elapsed_s < 10
    assert done.said[0].startswith("b is lost with ranks 2 and 3: ")
    assert done.said[1:] == ["rank 2 was lost with b", "rank 3 was lost with b after that"]
    assert [death.rank for death in done.outcome.deaths] == [2, 3]
    assert not any(is_running(read_pid(tmp_path, f"here-{rank}")) for rank in (0, 1))


def test_an_interrupt_lets_workers_everywhere_clean_up(start):
    body = f"try:\n    {TOGETHER.replace(chr(10), chr(10) + '    ')}time.sleep(100)\nfinally: print('saved')"
    done = start(body, when={"ready": partial(os.kill, os.getpid(), signal.SIGINT)})
    assert done.outcome.exit_code == 130
    assert done.said == ["interrupted; the workers are being ended"]
    assert [done.out[rank][-1] for rank in range(4)] == ["saved"] * 4


def test_a_program_that_cannot_be_run_there_is_named(start, tmp_path):
    tool = tmp_path / "tool"
    tool.write_text("no program")
    tool.chmod(0o755)
    with pytest.raises(PeerRefused, match=r"On [ab]: .*tool cannot be run"):
        start("", command=(str(tool),))


def test_a_run_starts_anew_with_who_answers_and_again(start, tmp_path):
    engine = Children(missing="b")
    body = f"""
print(os.environ["SHOAL_RESTART_COUNT"], size, os.environ["SHOAL_RUN_ID"])
if size == 4:
    {TOGETHER.strip().replace(chr(10), chr(10) + "    ")}
    time.sleep(100)
if os.environ["SHOAL_RESTART_COUNT"] == "1" and rank == 0: sys.exit(3)
"""
    done = start(
        body,
        engine=engine,
        when={"ready": partial(engine.signal, "b")},
        elastic=Elastic(max_restarts=5, min_workers=1),
    )
    assert (done.outcome.exit_code, done.outcome.cause) == (0, None)
    told = [line.split() for line in done.out[0] if line != "ready"]
    assert [words[:2] for words in told] == [["0", "4"], ["1", "2"], ["2", "2"]]
    assert len({words[2] for words in told}) == 3
    assert [line for line in done.said if "restart" in line] == [
        "restart 1 of 5 with 2 workers on a",
        "restart 2 of 5 with 2 workers on a",
    ]


class Full(Recorder):
    """Takes nothing for a while."""

    num_asked = 0

    @property
    def is_full(self):
        self.num_asked += 1
        return 3 < self.num_asked < 13


def test_much_output_is_held_and_none_is_lost(write):
    program = write("for _ in range(300): print('\\n'.join(['x' * 99] * 100))")
    recorder = Full()
    settings = LaunchSettings((sys.executable, str(program)), 2)
    assert launch(settings, recorder, Children("ab", 1)).exit_code == 0
    assert recorder.num_asked > 13
    assert [len(recorder.out[rank]) for rank in range(2)] == [30_000, 30_000]


def test_only_what_is_of_use_is_forwarded():
    found = forwarded(
        {"OMP_NUM_THREADS": "2", "PYTHONPATH": "x", "HOME": "/", "SHOAL_RUN": "{}", "SHOAL_RUN_SECRET": "s"}
    )
    assert found == {"OMP_NUM_THREADS": "2", "PYTHONPATH": "x"}


def test_timelines_come_from_everywhere(start, tmp_path):
    """Here the disks are shared: what comes is not needed, and must not be in the way."""
    body = """
        import json
        path = json.loads(os.environ["SHOAL_RUN"])["timeline"]
        part = {"traceEvents": [], "otherData": {"ranks": [rank], "left_out": 0}}
        Path(f"{path}.{rank}").write_text(json.dumps(part))
    """
    path = tmp_path / "trace.json"
    engine = Children("ab", 1, has_own_disks=True)
    done = start(body, 2, engine, options=RunOptions(timeline=str(path)))
    assert done.said == [f"wrote the timeline {path}"]
    assert json.loads(path.read_text())["otherData"]["ranks"] == [0, 1]
