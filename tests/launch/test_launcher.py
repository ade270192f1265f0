import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from launch.programs import Recorder, is_running, kill, read_pid, state_of
from shoal.core import UsageError
from shoal.core.run_options import RunOptions
from shoal.launch import Elastic, LaunchSettings, Output, launch, launcher
from shoal.launch.worker import TIMED_OUT

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only")
STOP = f"signal {signal.SIGSTOP:d} (SIGSTOP)"
CHILD = 'child = subprocess.Popen(["sleep", "100"]); mark(f"child-{rank}", child.pid)'
TOGETHER = """
mark(f"here-{rank}", os.getpid())
for other in range(size):
    wait_for(f"here-{other}")
"""
SURVIVORS = "survive()" + TOGETHER
STUBBORN = "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)"


@pytest.fixture
def hasty(monkeypatch):
    """No long waits for workers that do not want to end."""
    monkeypatch.setattr(launcher, "GRACE_S", 0.2)


def send_to_self(number):
    return partial(os.kill, os.getpid(), number)


def wait_until(is_so):
    deadline_s = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert is_so()


def assert_ended(pids):
    """They may take a moment: whoever is killed ends when it is scheduled next."""
    wait_until(lambda: not any(map(is_running, pids)))


def assert_no_children(folder):
    children = [read_pid(folder, child.name) for child in folder.glob("child-*")]
    assert children
    assert_ended(children)


def test_workers_know_their_place_and_get_their_arguments(start):
    done = start("print(rank, size, sys.argv[1:])", 3, "--foo_bar", "a b", "")
    assert done.outcome.exit_code == 0
    assert done.outcome.deaths == ()
    assert done.out == {rank: [f"{rank} 3 ['--foo_bar', 'a b', '']"] for rank in range(3)}
    assert done.said == []


def test_lines_arrive_whole_the_last_one_too(start):
    done = start("""
        sys.stdout.write("out"); sys.stdout.flush(); time.sleep(0.02); sys.stdout.write(" of two parts")
        sys.stderr.buffer.write(b"\\xff no text")
    """)
    assert done.out == {rank: ["out of two parts"] for rank in range(2)}
    assert done.err == {rank: ["\\xff no text"] for rank in range(2)}


def test_a_progress_bar_is_shown_on_its_way_and_at_its_end(start, tmp_path):
    body = """
        sys.stderr.write("\\r 10%"); sys.stderr.flush()
        wait_for("seen")
        sys.stderr.write("\\r 90%\\r100%\\n")
    """
    done = start(body, 1, when={"10%": (tmp_path / "seen").touch})
    assert done.err == {0: [" 10%", "100%"]}


def test_the_first_traceback_is_shown_once_and_the_others_are_ended(start):
    done = start(f"{TOGETHER}\nif rank == 2: raise ValueError('boom\\n  twice')\ntime.sleep(100)", 4)
    assert done.outcome.exit_code == 1
    assert done.outcome.elapsed_s < 10
    assert done.outcome.reason == "rank 2 failed with exit code 1"
    assert [death.rank for death in done.outcome.deaths] == [2]
    assert list(done.err) == [2]
    assert done.err[2][0] == "Traceback (most recent call last):"
    assert done.err[2][-2:] == ["ValueError: boom", "  twice"]
    assert done.outcome.traceback == "\n".join(done.err[2])
    assert done.said == ["rank 2 failed with exit code 1"]


def test_errors_that_follow_are_a_line_and_not_the_cause(start):
    """Rank 0 ends first, but only because it has lost rank 1, whose process takes its time."""
    done = start(
        """
        import atexit
        class PeerLost(Exception): pass
        if rank == 1:
            atexit.register(time.sleep, 0.1)
            atexit.register(wait_for, "lost-2")
            atexit.register(wait_for, "lost-0")
            mark("failing")
            raise ValueError("boom")
        wait_for("failing")
        atexit.register(mark, f"lost-{rank}")
        raise PeerLost("rank 1 is lost")
        """,
        3,
    )
    assert list(done.err) == [1]
    assert done.err[1][-1] == "ValueError: boom"
    assert done.said == [
        "rank 1 failed with exit code 1",
        "ranks 0 and 2 failed after that: PeerLost: rank 1 is lost",
    ]


def test_tracebacks_as_torch_prints_them_are_told_apart_too(start, monkeypatch):
    """Once torch.distributed is up, it puts the rank before each line."""
    monkeypatch.setattr("shoal.launch.failures.SETTLE_S", 30.0)  # the others may need a while to end
    done = start(
        """
        import io, traceback
        def print_error(*error):
            text = "".join(traceback.format_exception(*error))
            sys.stderr.write("".join(f"[rank{rank}]: {line}" for line in text.splitlines(True)))
        sys.excepthook = print_error
        if rank == 1:
            import atexit
            atexit.register(wait_for, "lost-2")
            atexit.register(wait_for, "lost-0")
            raise ValueError("boom")
        mark(f"lost-{rank}")
        raise RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]")
        """,
        3,
    )
    assert list(done.err) == [1]
    assert done.err[1][0] == "Traceback (most recent call last):"
    assert done.err[1][-1] == "ValueError: boom"
    assert done.said[0] == "rank 1 failed with exit code 1"
    assert done.said[1].startswith("ranks 0 and 2 failed after that: RuntimeError: [pair.cc:534]")


@pytest.mark.parametrize(
    ("number", "child"),
    [
        (signal.SIGKILL, "raise ConnectionResetError(104, 'Connection reset by peer')"),
        (signal.SIGSEGV, "raise ConnectionResetError(104, 'Connection reset by peer')"),
        (signal.SIGKILL, "import sys; print('Traceback (most recent call last):', file=sys.stderr)"),
    ],
)
def test_what_children_print_of_a_worker_that_was_killed_is_not_its_own(start, monkeypatch, number, child):
    monkeypatch.setattr("shoal.launch.failures.SETTLE_S", 30.0)
    body = f"""
        if rank == 0: time.sleep(100)
        subprocess.run([sys.executable, "-c", {child!r}])
        os.kill(os.getpid(), {number:d})
    """
    done = start(body, 2)
    assert done.outcome.exit_code == 128 + number
    assert done.outcome.elapsed_s < 10
    assert done.said == [done.outcome.reason]
    assert (done.err, done.outcome.traceback) == ({}, "")


def test_what_a_killed_worker_printed_before_is_shown(start):
    body = """
        import traceback
        try: 1 / 0
        except ZeroDivisionError: traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = start(body, 1)
    assert done.err[0][-1] == "ZeroDivisionError: division by zero"
    assert done.outcome.traceback == ""


def test_workers_that_all_fail_alike_show_one_traceback(start):
    done = start("import nowhere_to_be_found", 4)
    assert done.outcome.exit_code == 1
    (trace,) = done.err.values()
    assert trace[-1] == "ModuleNotFoundError: No module named 'nowhere_to_be_found'"


def test_a_traceback_of_a_worker_that_goes_on_is_shown(start, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.launch.worker.HOLD_S", 0.05)
    body = """
        import traceback
        try: 1 / 0
        except ZeroDivisionError: traceback.print_exc()
        wait_for("seen")
        sys.exit(5)
    """
    done = start(body, 1, when={"ZeroDivisionError: ": (tmp_path / "seen").touch})
    assert done.outcome.exit_code == 5
    assert done.err[0].count("ZeroDivisionError: division by zero") == 1


@pytest.mark.parametrize(
    ("ending", "exit_code", "reason", "printed"),
    [
        ("sys.exit(3)", 3, "rank 0 failed with exit code 3", []),
        ("sys.exit(200)", 1, "rank 0 failed with exit code 200", []),
        ("sys.exit('words')", 1, "rank 0 failed with exit code 1", ["words"]),
        ("os.kill(os.getpid(), 9)", 137, "rank 0 was killed by signal 9 (SIGKILL): often the kernel's", []),
    ],
)
def test_exit_codes_and_signals(start, ending, exit_code, reason, printed):
    done = start(f"{ending} if rank == 0 else time.sleep(100)")
    assert done.outcome.exit_code == exit_code
    assert done.outcome.reason.startswith(reason)
    assert done.said == [done.outcome.reason]
    assert done.err.get(0, []) == printed


def test_workers_that_do_not_want_to_end_are_killed_with_their_children(start, hasty, tmp_path):
    done = start(f"{STUBBORN}\n{CHILD}\n{TOGETHER}\nsys.exit(1) if rank == 0 else time.sleep(100)")
    assert done.outcome.exit_code == 1
    assert_no_children(tmp_path)


def test_a_worker_that_hangs_in_native_code_is_named_and_killed(start, hasty, tmp_path):
    """It holds the interpreter's lock in a C call, with all signals blocked: no handler would ever run."""
    done = start("""
        import ctypes
        if rank == 0:
            wait_for("hangs")
            sys.exit(3)
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        mark("hangs", os.getpid())
        ctypes.PyDLL(None).sleep(100)
    """)
    assert done.outcome.exit_code == 3
    assert done.outcome.elapsed_s < 20
    assert done.said == [
        "rank 0 failed with exit code 3",
        "SIGTERM has not ended rank 1, which may hang in native code; SIGKILL follows",
    ]
    assert not is_running(read_pid(tmp_path, "hangs"))


def test_children_of_workers_that_finished_are_ended_too(start, tmp_path):
    done = start(f"{CHILD}\nprint('done')")
    assert done.outcome.exit_code == 0
    assert done.outcome.elapsed_s < 10
    assert_no_children(tmp_path)


def test_a_process_that_left_its_group_does_not_hold_the_run(start, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.launch.worker_process.LAST_WORDS_S", 0.1)
    body = """
        child = subprocess.Popen(["sleep", "30"], start_new_session=True)
        mark("child", child.pid)
        print("done")
    """
    done = start(body, 1)
    kill(read_pid(tmp_path, "child"))
    assert (done.outcome.exit_code, done.out) == (0, {0: ["done"]})
    assert done.outcome.elapsed_s < 10


@pytest.mark.parametrize(
    ("death", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 2 was killed by signal 9 (SIGKILL)"),
        (
            "raise PeerLost('it has gone on without this worker')",
            "rank 2 failed with exit code 1 (PeerLost: it",
        ),
        ("raise ValueError('boom')", "rank 2 failed with exit code 1"),
    ],
)
def test_workers_that_survive_a_loss_go_on(start, tmp_path, death, told):
    """Without one that was killed or cut off; without one that fails by itself if they are allowed to."""
    allows_failures = "ValueError" in death
    death = f"\n    class PeerLost(Exception): pass\n    {death}"
    body = f"{SURVIVORS}\nif rank == 2: {death}\nwait_for('told')\nprint('finished')"
    told_all = {"go on without it": (tmp_path / "told").touch}
    done = start(body, 4, when=told_all, allows_failures=allows_failures)
    assert done.outcome.exit_code == 0
    assert [death.rank for death in done.outcome.deaths] == [2]
    assert done.out == {rank: ["finished"] for rank in (0, 1, 3)}
    assert done.said[0].startswith(told)
    assert done.said[0].endswith("; the other 3 go on without it")
    assert done.said[1:] == ["finished without rank 2"]
    assert done.err.get(2, [""])[-1] == ("ValueError: boom" if "ValueError" in death else "")


@pytest.mark.parametrize(("death", "exit_code"), [("raise ValueError('boom')", 1), ("sys.exit(7)", 7)])
def test_an_error_of_the_program_ends_a_run_that_would_survive_a_loss(start, death, exit_code):
    done = start(f"{SURVIVORS}\nif rank == 2: {death}\ntime.sleep(100)", 4)
    assert done.outcome.exit_code == exit_code
    assert done.outcome.cause.rank == 2
    assert done.said == [f"rank 2 failed with exit code {exit_code}"]
    assert [trace[-1] for trace in done.err.values()] == ["ValueError: boom"] * (exit_code == 1)


def test_an_error_of_the_program_counts_when_the_others_have_finished(start):
    body = f"{SURVIVORS}\nif rank == 0: sys.exit(0)\nwait_until_ended(0)\nraise ValueError('boom')"
    done = start(body, 2)
    assert done.outcome.exit_code == 1
    assert done.err[1][-1] == "ValueError: boom"


def test_an_error_of_the_last_one_left_is_the_cause_and_not_an_earlier_loss(start, tmp_path):
    body = f"{SURVIVORS}\nif rank == 0: os.kill(os.getpid(), 9)\nwait_for('told')\nsys.exit(7)"
    done = start(body, 2, when={"the last one goes on": (tmp_path / "told").touch})
    assert (done.outcome.exit_code, done.outcome.cause.rank) == (7, 1)


EARLY = f"tell(phase='training', step=8){TOGETHER}"


def test_a_worker_that_ends_early_by_itself_is_told_of_and_the_others_go_on(start, tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.launch.failures.SETTLE_S", 0.1)
    body = f"""{EARLY}
if rank == 1:
    tell(early_step=12)
    tell(phase="left")
    sys.exit(0)
wait_for("told")
tell(phase="left")
"""
    done = start(body, 3, when={"rank 1 ended early": (tmp_path / "told").touch})
    assert (done.outcome.exit_code, done.outcome.deaths) == (0, ())
    where = "at step 12, inside of attach"
    assert done.said == [f"rank 1 ended early with exit code 0, {where}; the other 2 go on without it"]


@pytest.mark.parametrize("end", ["tell(early_step=12); tell(phase='left'); sys.exit(0)", "os._exit(0)"])
@pytest.mark.parametrize("survives", [True, False])
def test_workers_that_all_end_early_are_a_run_that_ended_well(start, end, survives):
    """As programs end that stop at a step, or that have something in them which hangs at exit."""
    done = start(f"survive({survives})\n{EARLY}\n{end}", 3)
    assert (done.outcome.exit_code, done.said) == (0, [])


@pytest.mark.parametrize("allows_failures", [False, True])
def test_a_worker_that_is_gone_without_a_word_is_an_error_of_the_program(
    start, tmp_path, monkeypatch, allows_failures
):
    monkeypatch.setattr("shoal.launch.failures.SETTLE_S", 0.1)
    body = f"""survive()
{EARLY}
if rank == 1: os._exit(0)
wait_for("told")
tell(phase="left")
"""
    told = {"without leaving its group": (tmp_path / "told").touch}
    done = start(body, 3, when=told, allows_failures=allows_failures)
    said = "rank 1 ended with exit code 0 without leaving its group (os._exit?), at step 8 or later"
    if allows_failures:
        assert done.outcome.exit_code == 0
        assert done.said == [f"{said}; the other 2 go on without it", "finished without rank 1"]
    else:
        assert (done.outcome.exit_code, done.outcome.cause.rank) == (1, 1)
        assert done.said == [said]


def test_a_worker_that_is_gone_without_a_word_is_the_cause_of_what_others_fail_by(start):
    body = f"""survive(False)
{EARLY}
class PeerLost(Exception): pass
if rank == 1: os._exit(0)
wait_until_ended(1)
raise PeerLost("rank 1 is lost: its process ended.")
"""
    done = start(body, 3)
    assert (done.outcome.exit_code, done.outcome.cause.rank) == (1, 1)
    assert done.said[0].startswith("rank 1 ended with exit code 0 without leaving its group (os._exit?)")
    assert all("failed after that: PeerLost: rank 1 is lost" in said for said in done.said[1:])
    assert done.err == {}


def test_a_worker_that_left_in_order_may_end_as_it_likes(start, monkeypatch):
    monkeypatch.setattr("shoal.launch.failures.SETTLE_S", 0.1)
    leave = "tell(phase='left')\nif rank == 1: os._exit(0)\nwait_until_ended(1)"
    body = f"survive()\n{EARLY}\n{leave}\ntime.sleep(0.5)"
    done = start(body, 2)
    assert (done.outcome.exit_code, done.said) == (0, [])


@pytest.mark.parametrize(("is_slow", "word"), [(False, "rank"), (True, "rank"), (True, "worker")])
def test_workers_that_fail_alike_show_one_traceback_and_are_named_together(start, monkeypatch, is_slow, word):
    """Also when their processes take so long to end that tracebacks are held no longer."""
    monkeypatch.setattr("shoal.launch.worker.HOLD_S", 0.05)
    wait = (
        "import atexit; atexit.register(wait_for, 'seen'); atexit.register(time.sleep, 0.5)"
        if is_slow
        else ""
    )
    body = f"{TOGETHER}\n{wait}\nif rank == 0: mark('seen')\nraise ValueError(f'boom of rank {{rank}}')"
    done = start(body, 3, elastic=Elastic(is_live=word == "worker"))
    assert done.outcome.exit_code == 1
    traces = [line for lines in done.err.values() for line in lines if line.startswith("Traceback")]
    assert len(traces) == 1
    if is_slow:
        said = done.said[-1]
        assert said.startswith(f"{word}s 0-2 failed with the same error: ValueError: boom of rank ")
        lines = [line for lines in done.err.values() for line in lines]
        assert sum(f"another {word} has shown this traceback" in line for line in lines) == 2


def test_a_worker_that_is_about_to_end_has_its_traceback_held(start, monkeypatch):
    """The interpreter takes long to end; what it prints first is only what follows from another's error."""
    monkeypatch.setattr("shoal.launch.worker.HOLD_S", 0.0)
    monkeypatch.setattr("shoal.launch.worker.LONG_HOLD_S", 0.0)
    body = f"""{TOGETHER}
class PeerLost(Exception): pass
import atexit
tell(phase="failing")
if rank == 0:
    atexit.register(time.sleep, 1)
    atexit.register(mark, "lost")
    raise PeerLost("rank 1 is lost: it failed.")
wait_for("lost")
raise ValueError("boom")
"""
    done = start(body, 2)
    assert done.said[0] == "rank 1 failed with exit code 1"
    assert list(done.err) == [1]


def test_a_worker_that_is_ended_while_it_prints_is_not_called_killed(start):
    body = f"""{TOGETHER}
if rank == 1:
    print("Traceback (most recent call last):", file=sys.stderr, flush=True)
    mark("printing")
    time.sleep(100)
wait_for("printing")
raise ValueError("boom")
"""
    done = start(body, 2)
    assert done.said == ["rank 0 failed with exit code 1"]


def test_survivors_that_all_fail_are_a_failure_with_one_traceback(start):
    done = start(f"{SURVIVORS}\nraise ValueError('boom')", 3, allows_failures=True)
    assert done.outcome.exit_code == 1
    assert len(done.outcome.deaths) == 3
    assert sum(trace.count("ValueError: boom") for trace in done.err.values()) == 1


def test_one_that_does_not_survive_takes_all_along(start):
    body = f"survive(rank != 1)\n{TOGETHER}\nsys.exit(7) if rank == 2 else time.sleep(100)"
    done = start(body, 3)
    assert done.outcome.exit_code == 7
    assert done.said == ["rank 2 failed with exit code 7"]


def test_a_stopped_worker_is_named_when_others_fail_for_it(start):
    done = start(
        """
        class PeerLost(Exception): pass
        if rank == 1:
            mark("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for("stopping")
        time.sleep(0.5)
        raise PeerLost("rank 1 was silent")
        """,
        3,
    )
    assert done.outcome.exit_code == 128 + signal.SIGSTOP
    assert done.outcome.elapsed_s < 10
    assert done.said[0].startswith(f"rank 1 was stopped by {STOP}")
    assert "PeerLost: rank 1 was silent" in done.said[1]
    assert done.err == {}


@pytest.mark.parametrize(
    ("others", "printed"),
    [
        ("time.sleep(100)", []),
        ("atexit.register(time.sleep, 100); raise PeerLost('silent')", ["PeerLost: silent"]),
    ],
)
def test_a_stopped_worker_ends_a_run_that_cannot_do_without_it(start, monkeypatch, others, printed):
    """Others wait on, or have raised and take long to end."""
    monkeypatch.setattr("shoal.launch.failures.SETTLE_S", 1.0)
    body = f"""
import atexit
class PeerLost(Exception): pass
survive(False){TOGETHER}
if rank == 1: os.kill(os.getpid(), signal.SIGSTOP)
{others}
"""
    done = start(body, 3, options=RunOptions(patience=0.05))
    assert done.outcome.exit_code == 128 + signal.SIGSTOP
    assert done.outcome.elapsed_s < 8
    assert done.said[0].startswith(f"rank 1 has been stopped by {STOP} for 0.25 s;")
    assert done.said[1].startswith(f"rank 1 was stopped by {STOP}, 1 s ago: `kill -STOP`")
    assert done.said[2:] == [f"ranks 0 and 2 failed after that: {error}" for error in printed]
    assert done.err == {}


def test_a_stopped_worker_does_not_keep_survivors_that_finished(start):
    done = start(
        f"{SURVIVORS}\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nprint('finished')",
        3,
        options=RunOptions(patience=0.1),
    )
    assert done.outcome.exit_code == 0
    assert done.outcome.elapsed_s < 10
    assert "rank 1 has been stopped by" in done.said[0]
    assert "SIGSTOP" in done.said[1]
    assert done.said[2:] == ["finished without rank 1"]


def test_a_worker_that_is_stopped_and_goes_on_is_no_failure(start, tmp_path):
    def let_go_on():
        kill(read_pid(tmp_path, "here-0"), signal.SIGCONT)

    stop = "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP); mark('resumed')"
    body = f"{TOGETHER}\n{stop}\nwait_for('resumed')\nprint('finished')"
    done = start(body, 2, options=RunOptions(patience=0.05), when={"kill -CONT": let_go_on})
    assert (done.outcome.exit_code, done.outcome.deaths) == (0, ())
    assert done.out == {0: ["finished"], 1: ["finished"]}


@pytest.mark.parametrize(
    ("number", "told"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by signal 15 (SIGTERM)")]
)
def test_a_signal_ends_all_without_tracebacks(start, tmp_path, number, told):
    body = f"{CHILD}\n{TOGETHER}\nprint('ready')\ntime.sleep(100)"
    done = start(body, 2, when={"ready": send_to_self(number)})
    assert done.outcome.exit_code == 128 + number
    assert done.outcome.elapsed_s < 10
    assert (done.err, done.outcome.deaths) == ({}, ())
    assert done.said == [f"{told}; the workers are being ended"]
    assert_no_children(tmp_path)


def test_workers_obey_interrupts_where_the_launcher_was_told_to_ignore_them(shoal_run, write):
    """As a shell tells what it starts in the background."""
    program = write("""
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(100)
        except KeyboardInterrupt:
            print("interrupted")
    """)
    process = shoal_run(
        "-np", 1, "--no-prefix", program, preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    )
    out, complaint = process.communicate(timeout=60)
    assert (process.returncode, out, complaint) == (0, "True\ninterrupted\n", "")


def test_after_an_interrupt_workers_may_clean_up(start):
    body = """
        try:
            mark(f"trying-{rank}")
            wait_for(f"trying-{1 - rank}")
            print("ready") if rank == 0 else None
            time.sleep(100)
        finally:
            time.sleep(0.1)
            print("saved")
    """
    done = start(body, 2, when={"ready": send_to_self(signal.SIGINT)})
    assert done.outcome.exit_code == 130
    assert done.out[1] == ["saved"]
    assert done.out[0][-1].endswith("saved")


def test_a_second_interrupt_kills_at_once(start, monkeypatch):
    monkeypatch.setattr(launcher, "SAME_SIGNAL_S", 0.0)
    monkeypatch.setattr(launcher, "GRACE_S", 30.0)
    again = {"being ended": send_to_self(signal.SIGINT), "ready": send_to_self(signal.SIGINT)}
    done = start(f"{STUBBORN}\n{TOGETHER}\nprint('ready')\ntime.sleep(100)", 2, when=again)
    assert done.outcome.exit_code == 130
    assert done.outcome.elapsed_s < 20


def test_a_run_that_takes_too_long_names_who_had_not_finished(start, hasty):
    done = start(f"{STUBBORN}\nif rank != 1: time.sleep(100)", 3, timeout_s=1.2)
    assert done.outcome.exit_code == TIMED_OUT
    assert done.said[0] == "ranks 0 and 2 had not finished after 1.2 s (--timeout)"
    assert [line[:39] for line in done.said[1:]] == ["SIGTERM has not ended ranks 0 and 2, wh"]


def test_logs_hold_all_that_a_worker_wrote(start, tmp_path):
    body = """
        sys.stdout.buffer.write(b"\\xff out\\n\\r 1%\\r 2%"); sys.stdout.flush()
        if rank == 1: raise ValueError("boom")
        time.sleep(100)
    """
    start(body, 2, log_dir=tmp_path / "a" / "logs")
    written = [(tmp_path / "a" / "logs" / f"rank-{rank}.log").read_bytes() for rank in range(2)]
    assert written[1].startswith(b"\xff out\n")
    assert b"\r 1%\r 2%" in written[1]
    assert b"ValueError: boom\n" in written[1]
    assert b"boom" not in written[0]


class Counter(Output):
    """Counts bytes, and takes none until `is_full` has been asked for a while."""

    def __init__(self):
        self.num_bytes, self.num_bytes_when_full, self.num_asked = 0, 0, 0

    @property
    def is_full(self):
        self.num_asked += 1
        return self.num_asked < 10

    def lines(self, rank, stream, lines):
        self.num_bytes += sum(map(len, lines)) + len(lines)
        self.num_bytes_when_full += self.num_asked < 10


def test_much_output_waits_for_its_reader_and_takes_no_memory(write):
    program = write("""
        line = "x" * 99
        for _ in range(1000): print("\\n".join([line] * 100), file=sys.stderr if rank else sys.stdout)
    """)
    counter = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = launch(LaunchSettings((sys.executable, str(program)), 2), counter)
    assert outcome.exit_code == 0
    assert counter.num_bytes == 2 * 10_000_000
    assert counter.num_bytes_when_full == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


def test_two_runs_at_once_do_not_clash(write):
    program = write("""
        import json, socket
        if rank == 0:
            with socket.create_server(("127.0.0.1", int(os.environ["SHOAL_MASTER_PORT"]))) as server:
                mark("port-" + os.environ["SHOAL_RUN_ID"])
                server.accept()[0].close()
        else:
            wait_for("port-" + os.environ["SHOAL_RUN_ID"])
            socket.create_connection(("127.0.0.1", int(os.environ["SHOAL_MASTER_PORT"]))).close()
        print(json.loads(os.environ["SHOAL_RUN"])["run_id"])
    """)

    def once(_):
        recorder = Recorder()
        outcome = launch(LaunchSettings((sys.executable, str(program)), 2), recorder)
        return outcome.exit_code, recorder.out[0], recorder.out[1]

    with ThreadPoolExecutor(2) as pool:  # not the main thread: signals stay as they are
        (first, second) = pool.map(once, range(2))
    assert first[0] == second[0] == 0
    assert first[1] == first[2] != second[1] == second[2]


def test_nothing_stays_open_and_signals_are_as_before(start):
    def state():
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        return handlers, len(list(Path("/dev/fd").iterdir()))

    before = state()
    start("raise ValueError if rank else SystemExit(0)", 3)
    assert state() == before


def test_a_killed_launcher_takes_its_workers_and_their_children_along(shoal_run, write, tmp_path):
    program = write(f"{STUBBORN}\n{CHILD}\n{TOGETHER}\nprint('ready')\ntime.sleep(100)")
    process = shoal_run("-np", 2, program)
    assert process.stdout.readline().endswith("ready\n")
    pids = [read_pid(tmp_path, f"{kind}-{rank}") for kind in ("here", "child") for rank in range(2)]
    process.kill()
    assert_ended(pids)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
def test_ctrl_z_stops_the_workers_too_and_fg_lets_all_go_on(shoal_run, write, tmp_path):
    program = write(f"{CHILD}\n{TOGETHER}\nprint('ready')\nwait_for('end')\nprint('done')")
    # a group of its own below this process, as a shell makes one for a job
    words = ["-np", 2, "--timeout", 30, "--patience", 0.01]
    process = shoal_run(*words, program, process_group=0)
    assert process.stdout.readline().endswith("ready\n")
    pids = [read_pid(tmp_path, f"{kind}-{rank}") for kind in ("here", "child") for rank in range(2)]
    process.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    wait_until(lambda: {state_of(pid) for pid in pids} == {"T"})
    process.send_signal(signal.SIGCONT)
    wait_until(lambda: "T" not in {state_of(pid) for pid in pids})
    (tmp_path / "end").touch()
    out, complaint = process.communicate(timeout=20)
    assert (process.returncode, complaint) == (0, "")
    assert out.count("done") == 2


def test_the_run_ends_when_nobody_reads_it(shoal_run, write):
    process = shoal_run("-np", 2, write("while True: print('x' * 100)"))
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 128 + signal.SIGPIPE


def test_rank_0_reads_what_is_piped_in(shoal_run, write):
    program = write("import json\nprint(json.dumps(sys.stdin.read()))")
    process = shoal_run("-np", 2, program, stdin=subprocess.PIPE)
    out, complaint = process.communicate("hello", timeout=20)
    assert (process.returncode, complaint) == (0, "")
    said = dict(line.split(" ", 1) for line in out.splitlines())
    assert {rank: json.loads(text) for rank, text in said.items()} == {"[0]": "hello", "[1]": ""}


def test_a_file_that_cannot_be_executed_is_named(tmp_path):
    program = tmp_path / "tool"
    program.write_text("no program")
    program.chmod(0o755)
    with pytest.raises(UsageError, match="tool cannot be run"):
        launch(LaunchSettings((str(program),), 2), Recorder())
