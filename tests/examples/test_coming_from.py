"""Every command of Shoal's that docs/coming-from.md shows is understood, and runs in a short form.

Those of docs/benchmarks.md are understood.
"""

import contextlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer

from shoal.cli.program import app

ROOT = Path(__file__).parents[2]


def commands_of(page):
    blocks = re.findall(r"```shoal\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


COMMANDS = commands_of("coming-from.md")
OF_THE_GUIDE = commands_of("benchmarks.md")
LIMIT_S = 170

FEW_CLIENTS = "--num-clients 2 --num-experts 2 --batch-size 8 --hidden-dim 16 --num-batches-per-client 2"
FEW_BLOCKS = "--model small-mlp --batch-size 8 --short"
FEW_ITERATIONS = (
    "--model small-mlp --batch-size 8 --num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2"
)
FEW_SWEEPS = "--model small-mlp --batch-size 8 --num-warmup 1 --num-iters 2"
FEW_PINGS = (
    "--gpus 0 --hid-dim 16 --layers-per-gpu 2 --batch-size 4 --batches-for-latency 1 "
    "--batches-for-throughput 2 --throughput-runs 2 --linspace-points 2 --max-ping 0.01 -j 2"
)
FEW_UPDATES = "--num-layers 1 --layer-dim 16 --num-trainers 2 --steps 8 --eval-every 4 --seeds 1 --device cpu"
SHORTER = (
    # what a command begins with, what is left out of it, and what is added
    ("shoal bench experts", r"--num_batches_per_client \d+", FEW_CLIENTS),
    (
        "shoal bench dht --num_peers",
        r"--num_\w+ \d+|--expert_batch_size \d+",
        "--num-peers 16 --num-experts 16",
    ),
    ("python examples/gate_over_the_dht.py", "", "--hidden-dim 16 --num-experts 4 --batch-size 4"),
    ("shoal bench dht --mode keys", r"--num_peers \d+", "--num-peers 16 --total-num-rounds 1"),
    ("shoal bench scaling --predict-published", "", ""),
    (
        "shoal bench scaling",
        r"--np \S+|-H \S+|--model \S+|--batch-size \S+",
        f"--np 2 -H localhost:2 {FEW_ITERATIONS}",
    ),
    (
        "shoal bench accuracy",
        r"--task \S+|--np \S+|--seeds \S+",
        "--task digits --np 2 --seeds 1 --steps 4 --eval-every 2",
    ),
    ("shoal bench ddp", r"--model \S+|--starts \S+", FEW_SWEEPS),
    ("shoal bench training", r"--np \S+|--model=\S+|--batch-size=\S+", f"--np 2 {FEW_BLOCKS}"),
    ("shoal bench latency", r"--gpus [\d ]+", FEW_PINGS),
    ("shoal bench convergence", "", FEW_UPDATES),
    (
        "shoal serve --port",
        r"--port \S+|--gpu \S+|--hid-dim \S+|--layers-per-gpu \S+",
        "--port 0 --device cpu --hid-dim 16 --layers-per-gpu 2",
    ),
    ("shoal run", r"-np \S+|-H \S+|--min-np \S+", "-np 2"),
)
BY_HAND = ("--ps_hosts", "--rank", "--hosts")
"""In commands that start one process of several, or ask others."""
UNTIL_TOLD = ("shoal serve", "shoal dht", "shoal top")
MADE_BEFORE = {"shoal diff base.json": 2, "shoal diff base-report.json": 2}
"""Commands that read what the ones before them on the page have written."""


def shortened(command):
    for begins, without, more in SHORTER:
        if command.startswith(begins):
            words = shlex.split(re.sub(without, "", command) if without else command)
            if begins == "shoal run":
                return [*words[:2], *more.split(), *words[2:], "--epochs", "1"]
            return [*words, *more.split()]
    return shlex.split(command)


def as_process(words):
    first, *rest = words
    return [sys.executable, "-m", "shoal", *rest] if first == "shoal" else [sys.executable, *rest]


def run(words, folder):
    rest = [str(ROOT / word) if word.startswith("examples/") else word for word in as_process(words)]
    return subprocess.run(rest, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def failed_for_horovod(command, done):
    """Where it is not installed, its row says so, and the exit code too."""
    return "horovod" in command and done.returncode == 1 and "Horovod is not there" in done.stdout


def parsed(words):
    """As the program reads the words, without doing what they say."""
    command = typer.main.get_command(app)
    context = command.make_context("shoal", list(words), resilient_parsing=True)
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, list(words))
        context = command.make_context(name, list(words), parent=context)
    return context


def test_the_page_has_commands_of_every_document():
    for verb in ("experts", "dht", "latency", "convergence", "scaling", "accuracy", "ddp", "training"):
        assert any(command.startswith(f"shoal bench {verb}") for command in COMMANDS), verb
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(
    "command", [command for command in (*COMMANDS, *OF_THE_GUIDE) if command.startswith("shoal ")]
)
def test_flags_are_those_of_the_program(command):
    assert parsed(shlex.split(command)[1:]).params


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "command",
    [
        command
        for command in COMMANDS
        if not command.startswith(UNTIL_TOLD) and not any(flag in command for flag in BY_HAND)
    ],
)
def test_it_runs(command, tmp_path):
    before = next((count for begins, count in MADE_BEFORE.items() if command.startswith(begins)), 0)
    place = COMMANDS.index(command)
    for earlier in COMMANDS[place - before : place]:
        done = run(shortened(earlier), tmp_path)
        assert done.returncode == 0, done.stderr
    done = run(shortened(command), tmp_path)
    if failed_for_horovod(command, done):
        return
    # two starts of a moment each say nothing of which is faster
    allowed = (0, 1, 3) if command.startswith("shoal diff") else (0,)
    assert done.returncode in allowed, done.stdout + done.stderr


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


def run_together(commands, folder):
    """What each has printed; all must end well."""
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            process = subprocess.Popen(
                as_process(command), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.callback(process.kill)
            processes.append(process)
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_roles_that_are_started_by_hand_meet_and_end(tmp_path):
    server, worker = (command for command in COMMANDS if "--ps_hosts" in command)
    port = str(free_port())
    commands = [
        shlex.split(re.sub(r"--model=\S+|--batch-size=\S+", "", command).replace("20000", port))
        for command in (server, worker, worker.replace("--task_index=0", "--task_index=1"))
    ]
    few = ["--model", "small-mlp", "--batch-size", "8", "--num-iters", "3"]
    outputs = run_together([[*command, *few] for command in commands], tmp_path)
    assert all("img/sec" in output.lower() for output in outputs[1:]), outputs


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_ranks_that_are_started_by_hand_meet_and_the_first_reports(tmp_path):
    (first,) = (command for command in COMMANDS if "--rank 0" in command)
    port = str(free_port())
    commands = [
        [*shlex.split(command.replace("29500", port)), *FEW_SWEEPS.split()]
        for command in (first, first.replace("--rank 0", "--rank 1"))
    ]
    outputs = run_together(commands, tmp_path)
    assert ["1M/2G" in output for output in outputs] == [True, False], outputs
    assert (tmp_path / "base.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_the_latency_benchmark_asks_a_server_that_runs_already(tmp_path):
    (serve,) = (command for command in COMMANDS if command.startswith("shoal serve --port"))
    (ask,) = (command for command in COMMANDS if "--hosts" in command)
    port = str(free_port())
    few = ["--hid-dim", "16", "--layers-per-gpu", "2", "--linspace-points", "1", "-j", "2"]
    few += ["--batches-for-throughput", "2", "--throughput-runs", "2"]
    words = shortened(serve)
    words[words.index("--port") + 1] = port
    server = subprocess.Popen(
        as_process(words),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout.readline()
        done = run([*shlex.split(ask.replace("8080", port)), *few], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ours" in done.stdout
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith(UNTIL_TOLD)])
def test_what_runs_until_it_is_told_ends_when_it_is_told(command, tmp_path):
    process = subprocess.Popen(
        as_process(shortened(command)),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        if command == "shoal top":
            # nothing runs: it says so, and ends by itself
            assert process.communicate(timeout=60)[0]
            return
        assert process.stdout.readline()
        process.send_signal(signal.SIGINT)
        began_s = time.monotonic()
        process.communicate(timeout=60)
        assert process.returncode in (0, 130)
        assert time.monotonic() - began_s < 40
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
