import json
import subprocess
import sys

import torch
import typer
from typer.testing import CliRunner

from shoal.cli.swarm import swarm
from shoal.dht import connect
from shoal.swarm import BlockingSwarmRun, CommittedSGD, SwarmSettings

app = typer.Typer()
app.command()(swarm)


def look(*words):
    done = CliRunner().invoke(app, ["--once", *map(str, words)])
    last = done.stdout.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return done, json.loads(last.removeprefix("RESULT: "))


def test_a_run_as_its_member_tells_it():
    settings = SwarmSettings(target_samples=10)
    with connect(listen="127.0.0.1:0") as peer:
        made = BlockingSwarmRun(peer, "digits", torch.zeros(40), CommittedSGD(0.1), settings=settings)
        with made as run:
            assert run.wait_until(lambda member: member.is_member, 30)
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


def test_it_does_not_import_torch():
    code = "import sys, shoal.cli.swarm, shoal.swarm.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
