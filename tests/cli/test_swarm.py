import contextlib
import json
import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

import shoal
from shoal.cli.swarm import RunSource, lend_to, swarm
from shoal.core import PeerUnreachable, UsageError
from shoal.dht import connect
from shoal.swarm import BlockingSwarmRun, CommittedSGD, SwarmSettings
from shoal.swarm.facts import ModelFacts

MODEL = ModelFacts((("weight", (100, 1000)),), "rounds of this test")
app = typer.Typer()
app.command()(swarm)


@contextlib.contextmanager
def member(peer, num_elements=100_000):
    """Begins the run `digits` of 10 samples a round."""
    settings = SwarmSettings(target_samples=10)
    made = BlockingSwarmRun(
        peer, "digits", torch.zeros(num_elements), CommittedSGD(0.1), settings=settings, model=MODEL
    )
    with made as run:
        assert run.wait_until(lambda member: member.is_member, 30)
        yield run


def look(*words):
    done = CliRunner().invoke(app, ["--once", *map(str, words)])
    last = done.stdout.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return done, json.loads(last.removeprefix("RESULT: "))


def test_a_run_as_its_member_tells_it():
    with connect(listen="127.0.0.1:0") as peer:
        with member(peer, 40) as run:
            run.loss = 0.25
            run.add(torch.ones(40), 10)
            assert run.wait_until(lambda member: member.state.num_steps == 1, 30)
            run.note("a line\x1b[2J of trouble")
            done, result = look("--join", peer.address, "--run", "digits")
            assert done.exit_code == 0, done.output
            (row,) = (line for line in done.stdout.splitlines() if "100%" in line)
            assert str(peer.address) in row
            assert row.split()[-1] == "0.25"
            assert "a line\\u001b[2J of trouble" in done.stdout
            assert (result["members"], result["steps"], result["samples"]) == (1, 1, 10)
            done, result = look("--join", peer.address, "--run", "other")
            assert (done.exit_code, result["members"]) == (1, 0)
            assert "Nobody of the run 'other' answers." in done.stdout


def test_who_lends_is_a_member_that_only_averages():
    with connect(listen="127.0.0.1:0") as peer, member(peer) as run:
        with connect(peer.address, listen="127.0.0.1:0") as other:
            with lend_to(other, "digits", bandwidth=1000.0) as lent:
                assert lent.wait_until(lambda member: member.is_member, 30)
                assert run.wait_until(lambda member: len(member.members) == 2, 30)
                run.add(torch.ones(100_000), 10)
                assert run.wait_until(lambda member: member.state.num_steps == 1, 30)
                assert lent.run.num_sent_bytes > 0
                assert lent.facts().kind == "auxiliary"
                with connect(peer.address) as visitor:
                    source = RunSource(visitor, "digits")
                    shot = source.look()
                assert shot.result["members"] == 2
                assert [row[1].endswith("(lends)") for row in shot.views[0].table.rows].count(True) == 1
                assert 'shoal_run_members{run="digits"} 2' in shot.metrics
                assert len(shot.document["peers"]) == 2
            assert run.wait_until(lambda member: len(member.members) == 1, 30)
    with (
        connect(listen="127.0.0.1:0") as peer,
        connect(peer.address, listen="127.0.0.1:0") as other,
        pytest.raises(PeerUnreachable, match="digits"),
    ):
        lend_to(other, "digits", bandwidth=1.0)


@pytest.mark.slow
def test_the_command_lends_until_it_is_ended():
    with connect(listen="127.0.0.1:0") as peer, member(peer) as run:
        words = ["swarm", "--join", str(peer.address), "--run", "digits", "--lend"]
        program = [sys.executable, "-m", "shoal", *words]
        child = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        try:
            assert run.wait_until(lambda member: len(member.members) == 2, 60)
            child.terminate()
            told, _ = child.communicate(timeout=60)
        finally:
            child.kill()
        assert child.returncode == 0
        assert "averages for the run 'digits'" in told
        assert run.wait_until(lambda member: len(member.members) == 1, 30)


@pytest.mark.parametrize(("words", "match"), [(["--listen", "127.0.0.1:0"], "--web"), (["--lend"], "--once")])
def test_flags_that_do_not_go_together(words, match):
    done = CliRunner().invoke(app, ["--once", "--join", "127.0.0.1:1", *words])
    assert isinstance(done.exception, UsageError)
    assert match in str(done.exception)


def test_it_does_not_import_torch():
    code = "import sys, shoal.cli.swarm, shoal.swarm.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_state_is_saved_by_who_only_watches_and_a_run_starts_from_it(tmp_path):
    def network():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))

    def begin(model, swarm):
        strategy = shoal.SwarmTraining(swarm, run="digits", target_samples=16)
        return strategy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(model, optimizer, seed):
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    model = network()
    swarm = shoal.connect(listen="127.0.0.1:0")
    strategy, optimizer = begin(model, swarm)
    with strategy.attach(model, optimizer):
        step(model, optimizer, 1)
        step(model, optimizer, 2)
        words = ("--join", swarm.address, "--run", "digits", "--checkpoint", tmp_path, "--every", 10)
        done, result = look(*words)
        assert done.exit_code == 0, done.output
        assert result["saved_step"] == 2
        step(model, optimizer, 3)
    again = network()
    strategy, optimizer = begin(again, shoal.connect(listen="127.0.0.1:0"))
    strategy.load(tmp_path)
    with strategy.attach(again, optimizer):
        assert strategy.steps == 2
        step(again, optimizer, 3)  # with the momentum of the run
    for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
