"""Every command of the documents (tests/data/commands.md) is understood with our verb in its script's place.

The part before the script is its launcher's: `-np` and `-H` are flags of our verbs, the rest is mpirun's own.
What cannot be honoured is refused, for the reason that stands here.
"""

import contextlib
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.bench import experts, latency
from shoal.bench.processes import by_hand
from shoal.cli import bench as module
from shoal.cli.program import BAD_USAGE, run
from shoal.doctor import machine

TEXT = (Path(__file__).parents[1] / "data" / "commands.md").read_text()
COMMANDS = [line.strip() for line in TEXT.splitlines() if line.startswith("    ")]
LIMIT_S = 170
IMPORTED = (experts, latency)
"""They take functions of `machine` by name when they are imported: not while others stand in for those."""
VERBS = {
    "benchmark_throughput.py": "bench experts",
    "benchmark_dht.py": "bench dht",
    "baseline_throughput.py": "bench latency --methods fast,slow",
    "throughput_server.py": "serve",
    "throughput_client.py": "bench latency --methods ours",
    "pytorch_benchmark.py": "bench scaling",
    "benchmark.py": "bench ddp",
    "diff.py": "diff",
    "benchmark_kungfu.py": "bench training",
    "benchmark_horovod.py": "bench training --strategies horovod",
    "benchmark_ps.py": "bench training",
}
FILLED = {
    "H1:P1": "127.0.0.1:8081",
    "H2:P2": "127.0.0.1:8082",
    "FILE": "file.json",
    "PORT": "0",
    "BLOCK_TYPE": "ffn",
    "N": "0",
}
REFUSED = {
    # all its flags are understood, and here is no GPU
    "throughput_server.py": "There is no GPU for --device cuda:0",
    # files that other commands have written
    "diff.py": "BASELINE does not exist",
}
FEW_CLIENTS = "--num-clients 2 --num-experts 2 --batch-size 8 --hidden-dim 16 --num-batches-per-client 2"
FEW_PINGS = (
    "--hid-dim 16 --batch-size 1 --layers-per-gpu 2 --batches-for-latency 1 --batches-for-throughput 2 "
    "--throughput-runs 2 --linspace-points 2 --max-ping 0.01"
)
SMALL = {
    "benchmark_throughput.py": FEW_CLIENTS,
    "benchmark_dht.py": "--num-peers 16 --num-experts 16",
    "baseline_throughput.py": FEW_PINGS,
    "pytorch_benchmark.py": "-np 2 -H localhost:2 --model small-mlp --batch-size 8 --num-warmup-batches 1 "
    "--num-batches-per-iter 1 --num-iters 2",
    "benchmark.py": "--model small-mlp --batch-size 8 --num-warmup 1 --num-iters 2",
    "benchmark_kungfu.py": "-np 2 --model small-mlp --batch-size 8 --short",
    "benchmark_horovod.py": "-np 2 --model small-mlp --batch-size 8 --short",
}


def script_of(command):
    return re.search(r"\w+\.py", command)[0]


def words_of(command):
    """Our words for a command: the verb, the launcher's workers and hosts, and the script's own flags."""
    script = script_of(command)
    before, _, after = command.partition(script)
    launcher = re.findall(r"-np \S+|-H server\S+", before)
    words = shlex.split(" ".join([VERBS[script], *launcher, after]))
    return [FILLED.get(word, word) for word in words]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The configs that `run_and_tell` is asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "default_device", lambda: "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine, "ensure_open_files", lambda *_, **__: None)
    configs = []
    monkeypatch.setattr(module, "run_and_tell", lambda typed, benchmark, plan: configs.append(plan.config))
    monkeypatch.setattr(by_hand, "serve_by_hand", lambda role, config, say: configs.append(config) or {})
    interval_s = sys.getswitchinterval()
    yield configs
    sys.setswitchinterval(interval_s)  # `shoal serve` takes the process for its own


def test_every_document_has_commands():
    assert len(COMMANDS) == 17
    assert {script_of(command) for command in COMMANDS} == VERBS.keys()
    assert re.findall(r"## (.*)", TEXT) == ["hivemind", "Learning@home", "BlueFog", "PyTorch DDP", "KungFu"]


@pytest.mark.parametrize("command", COMMANDS)
def test_it_is_understood_or_refused_with_the_reason(command, asked, capsys):
    code = run(words_of(command))
    said = capsys.readouterr().err
    reason = REFUSED.get(script_of(command))
    if reason is not None:
        assert code == {"diff.py": 3}.get(script_of(command), BAD_USAGE)
        assert reason in said
        assert asked == []
        return
    assert code == 0, said
    assert len(asked) == 1


def test_kungfus_numbers_of_batches_are_taken_on_request(asked):
    (command,) = (command for command in COMMANDS if "--kungfu=sync-sgd" in command)
    sizes = ["--num-warmup-batches", "10", "--num-batches-per-iter", "10", "--num-iters", "10"]
    assert run([*words_of(command), *sizes]) == 0
    assert (asked[0].num_warmup, asked[0].iterations, asked[0].num_pairs) == (10, 10, 10)
    assert (asked[0].model, asked[0].batch_size, asked[0].num_workers) == ("resnet50", 64, 4)


def run_short(words, folder):
    return subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("command", [command for command in COMMANDS if script_of(command) in SMALL])
def test_it_runs_with_small_sizes_at_the_end(command, tmp_path):
    done = run_short([*words_of(command), *SMALL[script_of(command)].split()], tmp_path)
    if "horovod" in command and done.returncode == 1:
        assert "Horovod is not there" in done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_two_files_of_the_ddp_benchmark_are_compared(tmp_path):
    for name in ("BASELINE", "TEST"):
        done = run_short(["bench", "ddp", "--json", name, *SMALL["benchmark.py"].split()], tmp_path)
        assert done.returncode == 0, done.stderr
    done = run_short(["diff", "BASELINE", "TEST"], tmp_path)
    # two runs of a moment each say nothing of which is faster
    assert done.returncode in (0, 1, 3), done.stdout + done.stderr
    assert "baseline" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_kungfus_parameter_server_script_line_by_line(tmp_path):
    """One line for the server, which is told no model, and one for each of four workers."""
    server, worker = (words_of(command) for command in COMMANDS if "benchmark_ps" in command)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"--ps_hosts=127.0.0.1:{probe.getsockname()[1]}"
    small = ["--num-iters", "2", "--num-warmup-batches", "1"]
    lines = [[*server, *small, address]]
    for index in range(4):
        own = [f"--task_index={index}", "--model=small-mlp", "--batch-size=8"]
        lines.append([*worker, *small, address, *own])
    with contextlib.ExitStack() as stack:
        started = []
        for words in lines:
            command = [sys.executable, "-m", "shoal", *words]
            process = subprocess.Popen(
                command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.callback(process.kill)
            started.append(process)
        printed = [process.communicate(timeout=LIMIT_S - 20)[0] for process in started]
    assert [process.returncode for process in started] == [0] * 5, printed
    assert "Model: small-mlp" in printed[0]
    assert all("Img/sec per worker: " in text for text in printed[1:])
