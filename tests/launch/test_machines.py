"""`shoal run` over several machines, as a user meets it: see `machines` for what they are."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.machines import two_machines
from launch.programs import PRELUDE, is_running, state_of
from shoal.core.run_options import RunOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
NAMES = (
    "SHOAL_RANK SHOAL_WORLD_SIZE SHOAL_LOCAL_RANK SHOAL_LOCAL_WORLD_SIZE SHOAL_MACHINE SHOAL_NUM_MACHINES "
    "SHOAL_MASTER_ADDR SHOAL_MASTER_PORT"
)
TELL = f"""
import json
names = "{NAMES} SHOAL_RUN SHOAL_RUN_SECRET SHOAL_RUN_ID SHOAL_RESTART_COUNT MINE".split()
print(json.dumps({{name: os.environ.get(name) for name in names}} | {{"cwd": os.getcwd()}}))
"""
TOGETHER = """
mark(f"here-{rank}", os.getpid())
for other in range(size):
    wait_for(f"here-{other}")
if rank == 0: print("ready")
mark(f"told-{rank}")
wait_for("told-0")
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with two_machines(tmp_path_factory.mktemp("machines"), count=3) as machines:
        yield machines


@pytest.fixture
def two(tmp_path):
    """Their own, for tests that break them."""
    (tmp_path / "machines").mkdir()
    with two_machines(tmp_path / "machines") as machines:
        yield machines


@pytest.fixture
def write(tmp_path):
    def write(body):
        path = tmp_path / "program.py"
        path.write_text(PRELUDE + body)
        return path

    return write


def hosts(*machines, slots=2):
    return ["-H", ",".join(f"{machine.address}:{slots}" for machine in machines)]


def told(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line.partition(" ")[2]) for line in sorted(done.stdout.splitlines())]


def start_and_wait(machine, *words):
    process = machine.start(*machine.shoal_words(*words))
    line = process.stdout.readline()
    assert line.endswith("ready\n"), line + process.stderr.read()
    return process


def pids_in(folder):
    return [int(path.read_text()) for path in Path(folder).glob("here-*")]


def wait_until_ended(pids, limit_s=10.0):
    assert pids
    end_s = time.monotonic() + limit_s
    while any(map(is_running, pids)) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not any(map(is_running, pids))


def finish(process, limit_s=60):
    began_s = time.monotonic()
    out, complaint = process.communicate(timeout=limit_s)
    return out, complaint, time.monotonic() - began_s


def test_workers_know_their_machine_and_where_they_meet(three, write, tmp_path):
    a, b, _ = three
    words = ["-np", 4, *hosts(a, b), "-x", "MINE=7", "--num-servers", 0, write(TELL)]
    workers = told(a.shoal_run(*words, cwd=tmp_path))
    assert [worker["SHOAL_RANK"] for worker in workers] == list("0123")
    assert [worker["SHOAL_MACHINE"] for worker in workers] == list("0011")
    assert [worker["SHOAL_LOCAL_RANK"] for worker in workers] == list("0101")
    for worker in workers:
        assert (worker["SHOAL_WORLD_SIZE"], worker["SHOAL_NUM_MACHINES"], worker["SHOAL_MASTER_ADDR"]) == (
            "4",
            "2",
            a.address,
        )
        assert (worker["MINE"], worker["cwd"]) == ("7", str(tmp_path))
        assert RunOptions.from_environment(worker).status_fd is not None
    (secret,) = {worker["SHOAL_RUN_SECRET"] for worker in workers}
    assert len(bytes.fromhex(secret)) == 32
    assert len({(worker["SHOAL_MASTER_PORT"], worker["SHOAL_RUN_ID"]) for worker in workers}) == 1


def test_the_head_may_be_elsewhere_and_hosts_come_from_a_file(three, write, tmp_path):
    a, b, c = three
    (tmp_path / "hosts").write_text(f"# two\n{a.address} slots=1\n\n{b.address}:3  # more\n")
    words = ["--hostfile", tmp_path / "hosts", "--num-servers", 1, "--network-interface", "eth0", "--plain"]
    workers = told(c.shoal_run(*words, write(TELL)))
    assert [worker["SHOAL_MACHINE"] for worker in workers] == list("0111")
    assert {worker["SHOAL_MASTER_ADDR"] for worker in workers} == {a.address}
    options = [RunOptions.from_environment(worker) for worker in workers]
    assert {(each.num_servers, each.encrypt) for each in options} == {(1, "never")}
    assert {worker["SHOAL_WORLD_SIZE"] for worker in workers} == {"4"}


def test_nothing_secret_is_in_arguments(three, write, tmp_path):
    a, b, _ = three
    program = write(TOGETHER + "print(os.environ['SHOAL_RUN_SECRET'])\nwait_for('end')")
    process = start_and_wait(a, "-np", 2, *hosts(a, b, slots=1), program)
    lines = [process.stdout.readline() for _ in range(2)]
    secret = lines[0].split()[1]
    seen = [path.read_bytes() for path in map(_arguments, a.pids() + b.pids()) if path is not None]
    (tmp_path / "end").touch()
    assert finish(process)[:2] == ("", "")
    assert seen
    assert not any(secret.encode() in arguments for arguments in seen)


def _arguments(pid):
    path = Path(f"/proc/{pid}/cmdline")
    return path if path.exists() else None


def script(folder, text):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


OTHER_VERSION = (
    "import runpy, shoal._version as v; v.__version__ = '9.9'; "
    "runpy.run_module('shoal.launch.agent', run_name='__main__')"
)


@pytest.mark.parametrize(
    ("case", "what", "next_step"),
    [
        ("no key", "lets nobody in without a password", "ssh-copy-id"),
        ("unknown host key", "has never been told its host key", "ssh-keyscan"),
        ("another host key", "shows another host key", "ssh-keygen -R"),
        ("unknown name", "its name stands for no address", "getent hosts"),
        ("no sshd", "no ssh server listens there", "--ssh-port"),
        ("no Python", "There is no Python at /nowhere/python", "--remote-python"),
        ("no Shoal", "has no Shoal", "install the same version"),
        ("another version", "has Shoal 9.9, and this machine", "install the same version"),
        ("no folder", "There is no folder /nowhere", "--remote-cwd"),
        ("no interface", "has no network interface eth7", "--network-interface"),
        ("too many", "9 workers need more than the 4 slots", "give -np 4"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(three, write, tmp_path, case, what, next_step):
    a, b, _ = three
    words, host = [], b.address
    known, key = b.folder / "known_hosts", b.folder / "key"
    match case:
        case "no key":
            key = tmp_path / "key"
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        case "unknown host key":
            known = "/dev/null"
        case "another host key":
            known = tmp_path / "known_hosts"
            known.write_text(f"{b.address} {a.host_key.with_suffix('.pub').read_text()}")
        case "unknown name":
            host = "nobody.invalid"
        case "no sshd":
            words = ["-p", 23]
        case "no Python":
            words = ["--remote-python", "/nowhere/python"]
        case "no Shoal":
            words = [
                "--remote-python",
                script(tmp_path, f"exec {sys.executable} -I -S -m shoal.launch.agent"),
            ]
        case "another version":
            words = ["--remote-python", script(tmp_path, f'exec {sys.executable} -c "{OTHER_VERSION}"')]
        case "no folder":
            words = ["--remote-cwd", "/nowhere"]
        case "no interface":
            words = ["--network-interface", "eth7"]
    ssh = ["--ssh-option", f"IdentityFile={key}", "--ssh-option", f"UserKnownHostsFile={known}"]
    ssh += ["--ssh-option", "IdentitiesOnly=yes", "--ssh-option", "GlobalKnownHostsFile=/dev/null"]
    count = 9 if case == "too many" else 4
    words = ["-np", count, "-H", f"{a.address}:2,{host}:2", *words, write("print('never')")]
    done = a.run(*a.shoal_words(*words, ssh_words=ssh))
    assert done.returncode in (1, 2), done.stderr
    assert what in done.stderr
    assert next_step in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_machine_that_does_not_answer_is_named(two, write):
    a, b = two
    b.unplug()
    done = a.shoal_run("-np", 4, *hosts(a, b), "--start-timeout", 2, write("print('never')"))
    assert (done.returncode, done.stdout) == (1, "")
    assert b.address in done.stderr


@pytest.mark.parametrize("end", ["kill", "unplug"])
def test_a_whole_machine_that_goes_ends_the_run_and_is_named(two, write, tmp_path, end):
    a, b = two
    process = start_and_wait(a, "-np", 4, *hosts(a, b), write(TOGETHER + "time.sleep(100)"))
    getattr(b, end)()
    _, complaint, elapsed_s = finish(process)
    assert process.returncode == 1
    assert elapsed_s < 10
    assert f"{b.address} is lost with ranks 2 and 3: " in complaint
    assert f"rank 2 was lost with {b.address}" in complaint
    wait_until_ended([int((tmp_path / f"here-{rank}").read_text()) for rank in (0, 1)])


def test_workers_that_survive_losses_go_on_without_a_machine(two, write, tmp_path):
    a, b = two
    program = write("survive()" + TOGETHER + "wait_for('told')\nprint('finished')")
    process = start_and_wait(a, "-np", 4, *hosts(a, b), program)
    b.kill()
    seen = [process.stderr.readline()]
    while "go on" not in seen[-1] and "goes on" not in seen[-1]:
        seen.append(process.stderr.readline())
        assert seen[-1], seen
    (tmp_path / "told").touch()
    out, complaint, _ = finish(process)
    assert process.returncode == 0, complaint
    assert sorted(out.splitlines()) == ["[0] finished", "[1] finished"]
    assert complaint.endswith("shoal run: finished without ranks 2 and 3\n")


def test_a_killed_agent_takes_its_workers_along_and_its_host_counts_as_lost(two, write, tmp_path):
    a, b = two
    process = start_and_wait(a, "-np", 4, *hosts(a, b), write(TOGETHER + "time.sleep(100)"))
    worker = int((tmp_path / "here-2").read_text())
    agent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    _, complaint, elapsed_s = finish(process)
    assert process.returncode == 1
    assert elapsed_s < 10
    assert f"{b.address} is lost with ranks 2 and 3" in complaint
    wait_until_ended(pids_in(tmp_path))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_when_the_head_ends_nothing_is_left_anywhere(two, write, tmp_path, number, code):
    a, b = two
    stubborn = "for number in (15, 2): signal.signal(number, signal.SIG_IGN)\n"
    program = write(stubborn + TOGETHER + "time.sleep(100)")
    process = start_and_wait(a, "-np", 2, *hosts(a, b, slots=1), program)
    pids = pids_in(tmp_path)
    process.send_signal(number)
    assert process.wait(30) == code
    process.communicate()
    wait_until_ended(pids)


def test_ctrl_z_stops_all_machines_and_fg_lets_them_go_on(two, write, tmp_path):
    a, b = two
    words = ["-np", 2, *hosts(a, b, slots=1), "--patience", 0.1]
    process = a.start(*a.shoal_words(*words, write(TOGETHER + "wait_for('end', 60)")), process_group=0)
    assert process.stdout.readline().endswith("ready\n")
    process.send_signal(signal.SIGTSTP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
    time.sleep(4)  # longer than an agent would wait for its head
    assert [state_of(pid) for pid in pids_in(tmp_path)] == ["T", "T"]
    process.send_signal(signal.SIGCONT)
    (tmp_path / "end").touch()
    assert finish(process)[:2] == ("", "")
    assert process.returncode == 0


def test_a_head_that_vanishes_leaves_no_workers(two, write, tmp_path):
    a, b = two
    program = write(TOGETHER + "time.sleep(200)")
    process = start_and_wait(a, "-np", 2, *hosts(b), "--patience", 0.1, program)
    a.unplug()
    wait_until_ended(pids_in(tmp_path), limit_s=20)
    process.kill()
    process.communicate()


def test_a_run_starts_anew_with_the_machines_that_are_left(two, write, tmp_path):
    a, b = two
    body = TELL + "if os.environ['SHOAL_RESTART_COUNT'] == '0':\n"
    body += "".join(f"    {line}\n" for line in TOGETHER.strip().splitlines()) + "    time.sleep(100)"
    words = ["-np", 4, *hosts(a, b), "--max-restarts", 2, "--min-np", 2, "--log-dir", tmp_path / "logs"]
    process = a.start(*a.shoal_words(*words, write(body)))
    first = []
    while not (first and first[-1].endswith("ready\n")):
        first.append(process.stdout.readline())
        assert first[-1], process.stderr.read()
    b.kill()
    out, complaint, elapsed_s = finish(process)
    assert process.returncode == 0, complaint
    assert elapsed_s < 20
    second = [json.loads(line.partition(" ")[2]) for line in out.splitlines()]
    assert [(one["SHOAL_WORLD_SIZE"], one["SHOAL_RESTART_COUNT"]) for one in second] == [("2", "1")] * 2
    earlier = json.loads(next(line for line in first if "SHOAL_RANK" in line).partition(" ")[2])
    for name in ("SHOAL_RUN_ID", "SHOAL_MASTER_PORT", "SHOAL_RUN_SECRET"):
        assert second[0][name] != earlier[name]
    assert f"restart 1 of 2 with 2 workers on {a.address}" in complaint
    assert f"goes on without {b.address}: {b.address}" in complaint
    assert len((tmp_path / "logs" / "rank-0.log").read_text().splitlines()) >= 2


def test_a_run_that_may_not_shrink_does_not_start_anew(two, write):
    a, b = two
    process = start_and_wait(
        a, "-np", 2, *hosts(a, b, slots=1), "--max-restarts", 1, write(TOGETHER + "time.sleep(100)")
    )
    b.kill()
    _, complaint, _ = finish(process)
    assert process.returncode == 1
    assert "the run does not start anew" in complaint
    assert b.address in complaint.rpartition("anew")[2]
