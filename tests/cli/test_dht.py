import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli import dht as module
from shoal.cli.dht import DhtCounters, dht
from shoal.core import PeerUnreachable, UsageError
from shoal.core.identity import Identity, new_secret, write_private_file
from shoal.dht import DHTSettings, connect, settings
from shoal.dht.join import Joining

app = typer.Typer()
app.command()(dht)


@pytest.fixture(autouse=True)
def _switch_interval():
    """The verb owns its process, and these tests do not."""
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def last_line(text):
    last = text.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return json.loads(last.removeprefix("RESULT: "))


class Running:
    """`shoal dht` in a process of its own."""

    def __init__(self, child):
        self.child = child
        self.said = ""
        while "Ctrl-C ends it." not in self.said:
            line = child.stdout.readline()
            assert line, self.said
            self.said += line
        found = re.search(r"Listening on (\S+), TCP and UDP, as peer ([0-9a-f]{40}), ", self.said)
        self.address, self.peer_id = found.groups()

    def end(self, number=signal.SIGINT):
        self.child.send_signal(number)
        rest = self.child.stdout.read()
        return self.child.wait(timeout=20), self.said + rest


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            child = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "shoal", "dht", *map(str, arguments)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            stack.callback(child.kill)
            return Running(child)

        yield start


@pytest.fixture
def secret_file(tmp_path):
    path = tmp_path / "swarm.secret"
    write_private_file(path, new_secret().encode())
    return path


def test_two_peers_keep_a_record_though_one_is_killed(start, secret_file, tmp_path):
    first = start("--listen", "127.0.0.1:0", "--secret-file", secret_file, "--peers-file", tmp_path / "peers")
    assert first.peer_id == str(Identity.load_or_create().peer_id)
    assert "with a swarm secret" in first.said
    assert "Nobody else is here yet." in first.said
    assert f"From this machine: shoal dht --join {first.address} --secret-file FILE" in first.said
    second = start("--join", first.address, "--listen", "127.0.0.1:0", "--secret-file", secret_file)
    assert second.peer_id != first.peer_id
    assert "this id is for this run only" in second.said
    assert "Joined a swarm: 1 peer known." in second.said
    quick = DHTSettings(call_s=0.5)
    with connect(first.address, second.address, secret=secret_file, settings=quick) as client:
        assert client.store("name", 1, client.in_s(60)).num_stored == 2
        second.child.kill()
        second.child.wait()
        assert client.get("name", latest=True).value == 1
    code, said = first.end()
    assert code == 0
    result = last_line(said)
    assert (result["peer_id"], result["address"]) == (first.peer_id, first.address)
    assert result["num_records"] == 1
    assert result["up_s"] > 0
    assert secret_file.read_text() not in said


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_a_peer_comes_back_by_those_it_met(start, tmp_path):
    with connect(listen="127.0.0.1:0") as other:
        first = start("--join", other.address, "--peers-file", tmp_path / "peers")
        code, said = first.end(signal.SIGTERM)
        assert (code, last_line(said)["num_peers"]) == (0, 1)
        again = start("--peers-file", tmp_path / "peers")
        assert "Joined a swarm: 1 peer known." in again.said
        assert again.peer_id == first.peer_id
        assert again.end()[0] == 0


@pytest.fixture
def impatient(monkeypatch):
    """Nobody waits for long, and `served` tells which peers began to serve."""
    init = settings.DHTSettings.__init__
    monkeypatch.setattr(settings.DHTSettings, "__init__", functools.partialmethod(init, call_s=0.2))
    served = []
    monkeypatch.setattr(module, "_watch", lambda swarm, _: served.append(swarm.dht))
    return served


def test_nobody_there_is_an_error_unless_it_may_wait(impatient):
    done = run("--join", "127.0.0.1:9")
    assert isinstance(done.exception, PeerUnreachable)
    assert "Nobody answers at 127.0.0.1:9" in str(done.exception)
    assert "shoal doctor --join 127.0.0.1:9" in done.exception.next_step
    assert impatient == []
    done = run("--join", "127.0.0.1:9", "--wait")
    assert done.exit_code == 0, done.output
    assert "Nobody else is here yet." in done.stdout
    assert len(impatient) == 1


@pytest.mark.parametrize(
    ("listens", "arguments", "hint"),
    [
        ("127.0.0.1", [], "From this machine: shoal dht --join 127.0.0.1:PORT"),
        (
            "0.0.0.0",
            ["--secret-file"],
            "From another machine: shoal dht --join THIS-MACHINE:PORT --secret-file FILE",
        ),
        ("0.0.0.0", ["--insecure"], "From another machine: shoal dht --join THIS-MACHINE:PORT --insecure"),
    ],
)
def test_others_are_told_where_it_listens_and_how_to_join(impatient, secret_file, listens, arguments, hint):
    given = [*arguments, *([secret_file] if arguments == ["--secret-file"] else [])]
    done = run("--listen", f"{listens}:0", *given)
    assert done.exit_code == 0, done.output
    address = last_line(done.stdout)["address"]
    host, port = address.rsplit(":", 1)
    assert (host, f"Listening on {address}, TCP and UDP" in done.stdout) == (listens, True)
    assert hint.replace("PORT", port) in done.stdout.splitlines()


def test_nobody_is_told_to_join_by_a_peer_that_cannot_be_called(impatient, monkeypatch):
    async def join(joining):
        joining._protocol.is_client = True

    monkeypatch.setattr(Joining, "join", join)
    done = run()
    assert done.exit_code == 0, done.output
    assert "Others cannot call it there" in done.stdout
    assert "--join" not in done.stdout
    assert last_line(done.stdout)["address"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "0.0.0.0:0"], "Without a swarm secret this peer listens on this machine only"),
        (["--listen", "nowhere"], "is no address"),
        (["--join", "nowhere"], "is no address"),
        (["--join", "10.0.0.7:31337"], "where 10.0.0.7:31337 cannot call it"),
        (["--join", "10.0.0.7:31337", "--listen", "localhost:0"], "where 10.0.0.7:31337 cannot call it"),
        (["--deny-file", "x"], "Lists of peers need a swarm secret"),
    ],
)
def test_bad_usage_says_what_is_wrong(arguments, words):
    done = run(*arguments)
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)


def test_the_line_tells_how_the_peer_is():
    before = DhtCounters(10.0, 0, 0, 0, 0, 100)
    now = DhtCounters(12.0, 1, 2345, 3_400_000, 6, 107)
    assert now.line(before) == "1 peer known, 2,345 records here (3.40 MB), 6 cached, 3.5 requests/s"
    assert now.line(now).endswith("0.0 requests/s")
