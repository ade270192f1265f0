import json
import os
import subprocess
import sys

import pytest

from shoal.cli.program import BAD_USAGE, run
from shoal.core.run_options import RunOptions

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only")
TELL = """
import json, os, sys
names = "SHOAL_RANK SHOAL_WORLD_SIZE OMP_NUM_THREADS SHOAL_RUN SHOAL_RUN_ID".split()
told = {name: os.environ.get(name) for name in names}
print(json.dumps({"arguments": sys.argv[1:], **told}))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tell.py").write_text(TELL)
    return tmp_path


def told_by(capfd, *words):
    """What the workers tell of themselves, by the prefix of their lines."""
    assert run(["run", *words]) == 0
    out, complaint = capfd.readouterr()
    assert [line for line in complaint.splitlines() if "workers share" not in line] == []
    return {line.partition(" ")[0]: json.loads(line.partition(" ")[2]) for line in out.splitlines()}


@pytest.mark.parametrize(("words", "exit_code"), [([], 7), (["--allow-failures"], 0)])
def test_a_failure_of_one_worker_may_be_allowed(capfd, folder, words, exit_code):
    """Both say that they go on without a lost one."""
    (folder / "fail.py").write_text("""
import json, os, pathlib, sys, time
descriptor = json.loads(os.environ["SHOAL_RUN"])["status_fd"]
os.write(descriptor, b'{"survives_loss": true}\\n')
pathlib.Path("rank" + os.environ["SHOAL_RANK"]).touch()
while not pathlib.Path("rank0").exists() or not pathlib.Path("rank1").exists():
    time.sleep(0.01)
sys.exit(7 if os.environ["SHOAL_RANK"] == "1" else 0)
""")
    assert run(["run", "-np", "2", *words, "fail.py"]) == exit_code
    assert "shoal run: rank 1 failed with exit code 7" in capfd.readouterr().err


@pytest.mark.parametrize("program", [["tell.py"], ["python", "tell.py"], ["-m", "tell"]], ids=" ".join)
def test_what_follows_the_program_is_its_own(capfd, program):
    own = ["--foo_bar", "-np", "3", "--strategy", "x", "--", "a_b", "", "--help"]
    told = told_by(capfd, "-np", "2", *program, *own)
    assert sorted(told) == ["[0]", "[1]"]
    assert {text["SHOAL_RANK"] for text in told.values()} == {"0", "1"}
    assert all(text["SHOAL_WORLD_SIZE"] == "2" and text["arguments"] == own for text in told.values())


def test_options_reach_the_workers(capfd):
    words = "--np 1 --strategy neighbor_allreduce --topology ring --local_steps 4 --warmup-steps 10 --order"
    words += " adapt-while-combine --option decay-factor=0.5 --option monitor=true --patience 2 --threads 3"
    words += " --workers_per_machine 1 --peer-timeout 7 --global-average-every 5 --decay-every 6"
    words += " --on-nonfinite skip"
    words += " --allow-split --encrypt --all-reduce ring"
    (told,) = told_by(capfd, *words.split(), "tell.py").values()
    options = RunOptions.from_environment(told)
    assert options.strategy == "neighbor"
    assert options.options == {
        "topology": "ring",
        "local_steps": 4,
        "warmup_steps": 10,
        "order": "adapt-while-combine",
        "decay_factor": 0.5,
        "monitor": True,
        "global_average_every": 5,
        "decay_every": 6,
        "on_nonfinite": "skip",
    }
    assert (options.patience, options.workers_per_machine, options.timeout_s) == (2.0, 1, 7.0)
    assert (options.allow_split, options.encrypt, options.all_reduce) == (True, "always", "ring")
    assert told["OMP_NUM_THREADS"] == "3"
    assert RunOptions.from_environment({**told, "SHOAL_RUN_ID": "another"}) == RunOptions()


def test_options_of_several_machines_reach_the_workers(capfd, monkeypatch, folder):
    monkeypatch.setenv("MINE", "7")
    words = (
        "-H localhost:2,127.0.0.1:1 --num-servers 1 --network-interface lo -x MINE -x OTHER=8 --checkpoint"
    )
    words += " saved --checkpoint-every 5 --max-restarts 2 --min-np 1 --max-np 3 --plain --all-reduce direct"
    (folder / "more.py").write_text(TELL.replace("SHOAL_RANK ", "SHOAL_RANK MINE OTHER SHOAL_MACHINE ", 1))
    told = told_by(capfd, *words.split(), "more.py")
    assert sorted(told) == ["[0]", "[1]", "[2]"]
    found = {(text["SHOAL_WORLD_SIZE"], text["MINE"], text["OTHER"]) for text in told.values()}
    assert found == {("3", "7", "8")}
    options = RunOptions.from_environment(told["[0]"])
    assert (options.num_servers, options.network_interface) == (1, "lo")
    assert (options.encrypt, options.all_reduce) == ("never", "direct")
    assert (options.checkpoint, options.checkpoint_every) == (str(folder / "saved"), 5)


def test_lines_without_prefix(capfd):
    assert run(["run", "-np", "1", "--no-prefix", "tell.py"]) == 0
    assert capfd.readouterr().out.startswith("{")


def test_a_failure_is_the_exit_code_and_its_traceback(capfd, folder):
    (folder / "fail.py").write_text("import sys\ntry: 1 / 0\nfinally: print('out')")
    assert run(["run", "-np", "1", "--log-dir", "logs", "fail.py"]) == 1
    out, complaint = capfd.readouterr()
    assert out == "[0] out\n"
    assert complaint.splitlines()[0] == "[0] Traceback (most recent call last):"
    assert complaint.splitlines()[-2:] == [
        "[0] ZeroDivisionError: division by zero",
        "shoal run: rank 0 failed with exit code 1",
    ]
    assert b"ZeroDivisionError" in (folder / "logs" / "rank-0.log").read_bytes()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-np", "0", "tell.py"], "0 workers"),
        (["-np", "2", "none.py"], "no file none.py"),
        (["-np", "2", "-m", "none"], "no module none"),
        (["-np", "2"], "There is no program to run"),
        (["--swim", "tell.py"], "No such option: --swim"),
        (["--strategy", "swim", "tell.py"], "hierarchical, pair"),
        (["--strategy", "sma", "--alpha", "7", "tell.py"], "alpha"),
        (["--strategy", "neighbor", "--topology", "swim", "tell.py"], "hypercube"),
        (["--option", "swim=1", "tell.py"], "local_steps"),
        (["--timeout", "0", "tell.py"], "--timeout"),
        (["--log-dir", "tell.py", "tell.py"], "cannot be written"),
        (["-np", "5", "-H", "localhost:2,127.0.0.1:1", "tell.py"], "3 slots of localhost:3"),
        (["-H", "localhost:x", "tell.py"], "is no host"),
        (["--hostfile", "none", "tell.py"], "host file none cannot be read"),
        (["-x", "NOWHERE_TO_BE_FOUND", "tell.py"], "no such variable"),
        (["-np", "2", "--min-np", "3", "tell.py"], "--min-np 3"),
        (["-np", "2", "--max-restarts", "-1", "tell.py"], "--max-restarts"),
        (["-np", "2", "--num-servers", "-1", "tell.py"], "--num-servers"),
        (["-np", "2", "--checkpoint-every", "5", "tell.py"], "--checkpoint DIR"),
        (["--engine", "swim", "tell.py"], "ssh, ray"),
        (["--address", "auto", "tell.py"], "--engine ray"),
        (["--encrypt", "--plain", "tell.py"], "choose one of them"),
        (["--all-reduce", "swim", "tell.py"], "'auto', 'ring', 'direct'"),
        (["--engine", "ray", "-H", "a:2", "tell.py"], "leave -H"),
    ],
)
def test_bad_usage_is_told_before_anything_runs(capfd, words, told):
    assert run(["run", *words]) == BAD_USAGE
    out, complaint = capfd.readouterr()
    assert out == ""
    assert told in complaint
    assert "Traceback" not in complaint


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize("words", ["--bad", "-np 0 x.py", "--help"])
def test_bad_usage_is_told_where_somebody_listens(folder, words, closed):
    command = f'exec "{sys.executable}" -m shoal run {words} {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == (0 if words == "--help" else 2)
    assert bool(done.stdout) is (words == "--help" and closed == "2>&-")
    assert bool(done.stderr) is (words != "--help" and closed == ">&-")
    assert "Traceback" not in done.stderr


def test_programs_of_torchrun_are_told_how_to_start(capfd, folder):
    (folder / "theirs.py").write_text("import os\nprint(os.environ['LOCAL_RANK'], os.environ['WORLD_SIZE'])")
    assert run(["run", "-np", "1", "theirs.py"]) == 1
    complaint = capfd.readouterr().err
    assert "KeyError: 'LOCAL_RANK'" in complaint
    assert "--env torchrun" in complaint.splitlines()[-1]
    assert "group.local_rank" in complaint.splitlines()[-1]
    assert run(["run", "-np", "1", "--env", "torchrun", "theirs.py"]) == 0
    assert capfd.readouterr().out == "[0] 0 1\n"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_it_runs_where_nobody_listens(folder, closed):
    program = "import os, sys\nprint(1)\nopen(os.environ['SHOAL_RANK'], 'w')\nsys.exit(3)"
    (folder / "touch.py").write_text(program)
    command = f'exec "{sys.executable}" -m shoal run -np 1 touch.py {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3, done.stderr
    assert done.stdout == ("[0] 1\n" if closed == "2>&-" else "")
    assert done.stderr == ("" if "2>&-" in closed else "shoal run: rank 0 failed with exit code 3\n")
    assert (folder / "0").exists()


def test_help(capfd):
    assert run(["run", "--help"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("Usage: shoal run [OPTIONS]")
    assert "-np, --np N" in out


def test_it_starts_without_torch(folder):
    body = """
        import sys
        from shoal.cli.program import run
        words = "run -np 1 --strategy hierarchical --topology ring --workers-per-machine 1 tell.py"
        assert run(words.split()) == 0
        assert "torch" not in sys.modules
    """
    script = "\n".join(line.strip() for line in body.splitlines())
    subprocess.run([sys.executable, "-c", script], check=True, timeout=30, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("num_cores", "says"), [(1, "shoal run: 2 workers share 1 core.\n"), (2, "")])
def test_more_workers_than_cores_are_told_once(capfd, monkeypatch, num_cores, says):
    monkeypatch.setattr("shoal.launch.num_cores", lambda: num_cores)
    assert run(["run", "-np", "2", "tell.py"]) == 0
    assert capfd.readouterr().err == says
