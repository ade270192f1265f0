import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
import typer
from typer.testing import CliRunner

from shoal.cli import program
from shoal.cli import serve as module
from shoal.cli.serve import serve
from shoal.core import UsageError
from shoal.core.identity import new_secret, write_private_file
from shoal.dht import connect

app = typer.Typer()
app.command()(serve)
SMALL = ["--hidden-dim", 8, "--device", "cpu", "--num-loops", 1]


@pytest.fixture(autouse=True)
def _own_process():
    """The verb owns its process, and these tests do not."""
    interval_s = sys.getswitchinterval()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    sys.setswitchinterval(interval_s)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def watched(monkeypatch):
    """Hosts that were ready; each is told to end by then."""
    hosts = []

    def watch(hosting, loop):
        hosts.append((hosting, hosting.uids, hosting.config))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_watch", watch)
    return hosts


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def last_line(text):
    last = text.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return json.loads(last.removeprefix("RESULT: "))


def test_it_says_what_is_served_and_ends_with_a_result(watched):
    done = run("--expert-class", "nop", "--num-experts", 8, "--metrics-port", 0, *SMALL)
    assert done.exit_code == 0, done.output
    ((_, uids, _),) = watched
    assert uids == [f"expert{index}" for index in range(8)]
    said = done.stdout
    listens, peer_id = re.search(
        r"Listening on (127\.0\.0\.1:\d+), TCP and UDP, as peer ([0-9a-f]{40}), without a secret", said
    ).groups()
    assert "Serving 8 experts of class nop (hidden 8, 0 parameters each) on cpu, fp32: expert0, " in said
    assert "expert5, …" in said
    assert f'From Python: shoal.ExpertClient().open().expert("expert0", "{listens}")' in said
    assert "Metrics: http://127.0.0.1:" in said
    assert re.search(r"Ready after [\d.]+ m?s\. Ctrl-C ends it\.", said)
    result = last_line(said)
    assert (result["address"], result["peer_id"]) == (listens, peer_id)
    assert (result["num_experts"], result["num_samples"], result["num_failed"]) == (8, 0, 0)
    assert result["startup_s"] > 0


def test_it_leaves_in_order_though_its_terminal_is_gone(watched, monkeypatch):
    say = module.say

    def fail_to_say(line):
        if line.startswith("Leaving"):
            raise BrokenPipeError
        say(line)

    monkeypatch.setattr(module, "say", fail_to_say)
    done = run("--expert-class", "nop", *SMALL)
    assert done.exit_code == 0, done.output
    ((hosting, _, _),) = watched
    assert hosting.moment().is_leaving


def test_flags_and_a_file_go_together(watched, tmp_path):
    path = tmp_path / "experts.toml"
    secret = tmp_path / "swarm.secret"
    write_private_file(secret, new_secret().encode())
    path.write_text(
        'expert_class = "nop"\nhidden_dim = 4\nnum_experts = 2\ndevice = "cpu"\nnum_loops = 1\n'
        f'secret_file = "{secret}"\nuid_pattern = "nop.[0:9]"\n'
    )
    with connect(listen="127.0.0.1:0", secret=secret) as swarm:
        done = run("--config", path, "--join", swarm.address, "--num-experts", 3, "--listen", "127.0.0.1:0")
        assert done.exit_code == 0, (done.output, done.exception)
    assert "Joined a swarm: 1 peer known." in done.stdout
    assert "with a swarm secret" in done.stdout
    ((_, uids, config),) = watched
    assert len(uids) == 3
    assert all(uid.startswith("nop.") for uid in uids)
    assert (config.hidden_dim, config.num_experts) == (4, 3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--uid-pattern", "ffn.[0:4]"], "without --join nobody can tell"),
        (["--hidden-dim", "0"], "--hidden-dim 0"),
        (["--expert-class", "fnn"], "The expert class 'fnn' is not known"),
        (["--optimizer", "adm"], "The optimizer 'adm' is not known"),
        (["--join", "10.0.0.7:1"], "where 10.0.0.7:1 cannot call it"),
        (["--config", "none.toml"], "Cannot read the configuration"),
    ],
)
def test_what_cannot_be_is_told(arguments, complaint):
    done = run(*SMALL, *arguments)
    assert isinstance(done.exception, UsageError)
    assert complaint in str(done.exception)


def test_learning_at_homes_command_is_understood_as_written(watched):
    outcome = run(
        "-a", 2, "-p", 0, "--block-type", "ffn", "--hid-dim", 8, "--layers-per-gpu", 3, "--device", "cpu"
    )
    assert outcome.exit_code == 0, outcome.output
    ((_, uids, config),) = watched
    assert uids == ["expert0", "expert1", "expert2"]
    assert (config.expert_class, config.num_loops, config.hidden_dim) == ("lah-ffn", 2, 8)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (({}, "transformer", 3), {"expert_class": "lah-transformer", "num_experts": 56, "device": "cuda:3"}),
        (({"num_experts": 2}, "ffn", None), {"expert_class": "lah-ffn", "num_experts": 2}),
        (({"device": "cpu"}, None, None), {}),
    ],
)
def test_learning_at_homes_flags_mean_ours(given, told):
    assert module._as_written(*given) == told


@pytest.mark.parametrize(
    "arguments",
    [
        ("--gpu", 0, "--device", "cpu"),
        ("--block-type", "ffn", "--expert-class", "ffn"),
        ("--port", 1, "--listen", "127.0.0.1:1"),
    ],
)
def test_what_is_said_twice_is_refused(arguments):
    caught = run(*arguments).exception
    assert isinstance(caught, UsageError)
    assert "give one of them" in caught.next_step


def test_help_names_every_flag_with_its_default(capsys):
    assert program.run(["serve", "--help"]) == 0
    said = capsys.readouterr().out
    for flag in ("--expert-class", "--hidden-dim", "--num-experts", "--uid-pattern", "--device", "--listen"):
        assert flag in said
    for flag in ("--join", "--secret-file", "--checkpoint-dir", "--max-batch-size", "--optimizer", "--lr"):
        assert flag in said
    assert "--adopt / --no-adopt" in said
    assert "--num-loops, --num-handlers" in said
    assert "[default: (1024)]" in said


class Running:
    """`shoal serve` in a process of its own."""

    def __init__(self, child):
        self.child = child
        self.said = ""
        self.until("Ctrl-C ends it.")

    def until(self, text):
        while text not in self.said:
            line = self.child.stdout.readline()
            assert line, self.said
            self.said += line

    def end(self):
        rest = self.child.stdout.read()
        return self.child.wait(timeout=20), self.said + rest


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def start(*arguments):
            child = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "shoal", "serve", *map(str, arguments)],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            stack.callback(child.kill)
            return Running(child)

        yield start


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_a_process_serves_until_it_is_told_to_end(start, tmp_path):
    import torch

    from shoal.core import Peer
    from shoal.core.ids import Address
    from shoal.experts.client.client import ExpertClient

    serving = start(*SMALL, "--checkpoint-dir", tmp_path, "--stats-s", 0.2, "--metrics-port", 0)
    address = Address.parse(re.search(r"Listening on (\S+), ", serving.said)[1])
    with ExpertClient() as client:
        x = torch.ones(3, 8, requires_grad=True)
        client.expert("expert0", Peer(address))(x).sum().backward()
    with urllib.request.urlopen(re.search(r"Metrics: (\S+)", serving.said)[1], timeout=5) as answer:
        assert b"shoal_samples_total 6\n" in answer.read()
    serving.until("samples/s, 0 waiting, 1 expert, ")
    serving.child.send_signal(signal.SIGTERM)
    code, said = serving.end()
    assert code == 0, said
    result = last_line(said)
    assert (result["num_samples"], result["num_updates"]) == (6, 1)
    again = start(*SMALL, "--checkpoint-dir", tmp_path)
    again.child.send_signal(signal.SIGINT)
    code, said = again.end()
    assert (code, last_line(said)["num_updates"]) == (0, 1)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_a_second_signal_ends_it_at_once(start):
    from shoal.core import LoopThread, Peer
    from shoal.core.ids import Address
    from shoal.experts.client.client import ExpertClient

    serving = start(*SMALL, "--expert-class", "nop_delay", "--leave-s", 60)
    address = Address.parse(re.search(r"Listening on (\S+), ", serving.said)[1])

    async def ask(client):
        import torch

        return client.expert("expert0", Peer(address))(torch.ones(1, 8))

    with ExpertClient() as client, LoopThread() as thread:
        asked = [thread.submit(ask(client)) for _ in range(8)]  # half a second each
        asked[0].result(10)
        serving.child.send_signal(signal.SIGTERM)
        serving.until("A second signal ends it at once.")
        serving.child.send_signal(signal.SIGTERM)
        code, said = serving.end()
        assert code == -signal.SIGTERM
        assert "RESULT" not in said
        for future in asked:
            future.cancel()
