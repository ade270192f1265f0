import contextlib
import functools
import json
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli import doctor as module
from shoal.cli.doctor import doctor
from shoal.core import UsageError
from shoal.core.identity import new_secret, write_private_file
from shoal.doctor import joining, recording
from shoal.doctor.advice import ROWS
from shoal.doctor.checks import CHECKS, fail, ok, warn
from shoal.transport.network.profiles import Profile

app = typer.Typer()
app.command()(doctor)


@pytest.fixture
def run(monkeypatch):
    """Run the verb over checks of the test's own."""

    def run(checks, *arguments):
        monkeypatch.setattr(module, "CHECKS", checks)
        return CliRunner().invoke(app, list(map(str, arguments)))

    return run


def good():
    return ok("All is well.", speed=3)


def slow():
    return warn("It is slow.", "give it more.")


def broken():
    return fail("It is broken.", "mend it with: mend --all")


def raising():
    raise ZeroDivisionError("by nought")


def last_line(text):
    last = text.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return json.loads(last.removeprefix("RESULT: "))


def test_all_well_is_exit_code_0(run):
    done = run({"first": good, "second": good})
    assert done.exit_code == 0
    assert "Shoal works here." in done.stdout
    assert last_line(done.stdout) == {"num_ok": 2, "warned": [], "failed": [], "exit_code": 0}


def test_warnings_are_advice(run):
    done = run({"first": good, "second": slow})
    assert done.exit_code == 0
    assert "Next: give it more." in done.stdout
    assert "there is advice on second" in done.stdout
    assert last_line(done.stdout)["warned"] == ["second"]


def test_a_failed_check_shows_its_next_step_and_is_exit_code_1(run):
    done = run({"first": broken, "second": slow, "third": good})
    assert done.exit_code == 1
    lines = done.stdout.splitlines()
    row = next(number for number, line in enumerate(lines) if line.startswith("first"))
    assert lines[row].split() == ["first", "fail", "It", "is", "broken."]
    assert lines[row + 1].strip() == "Next: mend it with: mend --all"
    assert "cannot work here yet: see first. Advice on second." in done.stdout
    assert last_line(done.stdout) == {"num_ok": 1, "warned": ["second"], "failed": ["first"], "exit_code": 1}


def test_a_check_that_raises_is_a_row_and_no_traceback(run):
    done = run({"first": raising, "second": good})
    assert done.exit_code == 1
    assert "ZeroDivisionError: by nought" in done.stdout
    assert "Traceback" not in done.output
    assert last_line(done.stdout)["failed"] == ["first"]


def test_json_to_a_file(run, tmp_path):
    path = tmp_path / "folder" / "doctor.json"
    done = run({"first": good, "second": broken}, "--json", path)
    assert done.exit_code == 1
    assert f"Wrote {path}" in done.stdout
    document = json.loads(path.read_text())
    assert set(document) == {"shoal", "summary", "checks", "result"}
    first, second = document["checks"]
    assert first == {
        "name": "first",
        "status": "ok",
        "says": "All is well.",
        "next_step": "",
        "figures": {"speed": 3},
        "took_s": first["took_s"],
    }
    assert (second["status"], second["next_step"]) == ("fail", "mend it with: mend --all")
    assert document["result"] == last_line(done.stdout)


def test_json_to_stdout_stands_there_alone(run):
    done = run({"first": good, "second": slow}, "--json", "-")
    assert done.exit_code == 0
    assert [check["name"] for check in json.loads(done.stdout)["checks"]] == ["first", "second"]
    assert last_line(done.stderr)["num_ok"] == 1
    assert "Next: give it more." in done.stderr


def test_the_real_checks_take_a_few_seconds_at_most_and_import_no_torch():
    code = (
        "import sys, typer; from shoal.cli.doctor import doctor; app = typer.Typer(); app.command()(doctor);"
        "app(['--json', '-'], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert time.monotonic() - began_s < 15  # on a machine with much else to do
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    checks = json.loads(done.stdout)["checks"]
    assert [check["name"] for check in checks] == list(CHECKS)
    assert all(check["status"] in ("ok", "warn") for check in checks)


# --- peers ---


def shoal(*arguments, timeout_s=30):
    return subprocess.run(
        [sys.executable, "-m", "shoal", "doctor", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


@pytest.fixture
def serve(tmp_path):
    """Starts `shoal doctor --serve` on loopback; gives its address, and what it said once it has ended."""
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            command = [
                sys.executable,
                "-m",
                "shoal",
                "doctor",
                "--serve",
                "127.0.0.1:0",
                *map(str, arguments),
            ]
            child = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
            stack.callback(child.kill)
            first = child.stdout.readline()
            address = re.match(r"Listening on (\S+), TCP and UDP, as peer [0-9a-f]{40}, ", first)
            assert address, first + child.stdout.read()

            def end():
                child.send_signal(signal.SIGINT)
                rest = child.stdout.read()
                assert child.wait(timeout=20) == 0
                return first + rest

            return address[1], end

        yield start


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "swarm.secret"
    write_private_file(path, new_secret().encode())
    return path


def test_serve_and_join_with_a_secret(serve, secret_file, tmp_path, monkeypatch):
    address, end = serve("--secret-file", secret_file)
    done = shoal("--join", address, "--secret-file", secret_file, "--json", tmp_path / "join.json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = last_line(done.stdout)
    assert (result["num_ok"], result["warned"], result["failed"]) == (9, [], [])
    assert (result["seen_as"], result["way"]) == ("127.0.0.1", "dialed")
    assert f"This machine can be a peer of {address}" in done.stdout
    document = json.loads((tmp_path / "join.json").read_text())
    assert [check["name"] for check in document["checks"]] == list(ROWS)
    monkeypatch.setenv("SHOAL_SECRET", secret_file.read_text())
    assert CliRunner().invoke(app, ["--join", address]).exit_code == 0
    said = end()
    assert result["peer_id"] in said
    assert f"shoal doctor --join {address} --secret-file FILE" in said
    assert "asks who is here over TCP" in said
    assert "TCP ok, UDP ok" in said
    assert last_line(said)["num_lines"] == 6
    assert secret_file.read_text() not in said + done.stdout + done.stderr


def test_join_fails_where_nobody_listens(monkeypatch, tmp_path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setattr(joining, "PATIENCE_S", 0.3)
        monkeypatch.setattr(joining.join, "__kwdefaults__", {"network": None, "patience_s": 0.3})
        done = CliRunner().invoke(app, ["--join", "{}:{}".format(*nobody.getsockname())])
    assert done.exit_code == 1
    assert "nothing listens at that port" in " ".join(done.stdout.split())
    assert "Next: see what listens there" in done.stdout
    assert last_line(done.stdout)["failed"] == ["TCP to peer", "UDP to peer"]


def test_record_writes_a_profile_and_names_what_it_could_not_measure(serve, monkeypatch, tmp_path):
    monkeypatch.setattr(recording, "Effort", functools.partial(recording.Effort, 20, 1.0, 0.2, 1 << 20, 0.5))
    address, end = serve()
    path = tmp_path / "here" / "link.toml"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        gone = "{}:{}".format(*nobody.getsockname())
        done = CliRunner().invoke(app, ["--record", address, gone, "-o", str(path), "--json", "-"])
    assert done.exit_code == 1, done.output
    assert last_line(done.stderr) == {
        "profile": str(path),
        "num_links": 1,
        "failed": [gone],
        "exit_code": 1,
    }
    rows = {line.split()[0]: line.split() for line in done.stderr.splitlines() if line.startswith("127.")}
    assert rows[address][-1] == "UDP"
    assert rows[gone][-1] == "failed"
    assert f"shoal doctor --join {gone}" in " ".join(done.stderr.split())
    links = json.loads(done.stdout)["links"]
    profile = Profile.load(path)
    assert profile.ways.default.delay_ms.samples == links[0]["delays_ms"]
    assert len(profile.ways.between) == 2
    end()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--join", "a:1", "--serve", "b:2"], "cannot be had at once"),
        (["a:1"], "what is to be done with it"),
        (["--record"], "needs peers"),
        (["--record", "a:1", "--listen", "b:2"], "--listen goes with --join"),
        (["--join", "a:1", "-o", "x"], "--output goes with --record"),
        (["--serve", "127.0.0.1:0", "--json", "x"], "--json goes with something other than --serve"),
        (["--secret-file", "x"], "--secret-file goes with --join, --serve or --record"),
        (["--insecure"], "--insecure goes with --join, --serve or --record"),
        (["--join", "127.0.0.1:1", "--deny-file", "x"], "--deny-file goes with --serve"),
        (["--serve", "127.0.0.1:0", "--allow-file", "x"], "Lists of peers need a swarm secret"),
        (["--join", "nowhere"], "is no address"),
        (["--serve", "0.0.0.0:0"], "Without a swarm secret this peer listens on this machine only"),
    ],
)
def test_bad_usage_says_what_is_wrong(arguments, words):
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)


def test_joining_imports_no_torch():
    code = (
        "import sys, typer; from shoal.cli.doctor import doctor; app = typer.Typer(); app.command()(doctor)\n"
        "try: app(['--join', 'no-such-host.invalid:1'], standalone_mode=False)\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "is not known here" in done.stdout, done.stderr
    assert "AssertionError" not in done.stderr
