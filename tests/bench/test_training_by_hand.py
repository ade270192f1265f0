import contextlib
import json
import os
import socket
import subprocess
import sys

import msgspec
import pytest

from shoal.bench.frame import RunFlags, RunSettings, measured, run_benchmark
from shoal.bench.processes import by_hand
from shoal.bench.processes.by_hand import (
    Role,
    by_hand_config,
    config_of,
    role_of,
    summarize_worker,
    worker_items,
)
from shoal.bench.ranks import HostFlags
from shoal.bench.training import TrainingConfig, TrainingFlags
from shoal.core import Address, PeerLost, Placement, UsageError
from shoal.core.run_options import RunOptions
from shoal.report import Report

HOSTS = ("ps0:2222,ps1:2222", "w0:1,w1:1,w2:1")


def flags_of(ps_hosts, worker_hosts, job, index):
    return TrainingFlags(ps_hosts=ps_hosts, worker_hosts=worker_hosts, job_name=job, task_index=index)


def test_without_its_flags_nobody_has_a_role():
    assert not TrainingFlags(task_index=0).is_by_hand
    assert all(flags_of(*given).is_by_hand for given in ((*HOSTS, "ps", 0), (None, None, "ps", 0)))


@pytest.mark.parametrize(("job", "index", "rank"), [("ps", 1, 1), ("worker", 0, 2), ("worker", 2, 4)])
def test_servers_come_first_and_all_meet_at_the_first_one(job, index, rank):
    role = role_of(flags_of(*HOSTS, job, index), HostFlags())
    placed = Placement.from_environment(role.variables)
    assert (placed.rank, placed.size) == (rank, 5)
    assert placed.rendezvous == Address("ps0", 2222)
    assert (role.num_servers, role.num_workers) == (2, 3)
    through = role_of(flags_of(*HOSTS, job, index), HostFlags(network_interface="eth1"))
    assert RunOptions.from_environment(through.variables).network_interface == "eth1"


@pytest.mark.parametrize(
    "given",
    [
        (None, HOSTS[1], "worker", 0),
        (HOSTS[0], None, "ps", 0),
        (*HOSTS, None, 0),
        (*HOSTS, "ps", 2),
        (*HOSTS, "worker", 3),
        ("ps0", HOSTS[1], "ps", 0),
        (HOSTS[0], " , ", "worker", 0),
    ],
)
def test_a_role_that_is_not_whole_is_refused(given):
    with pytest.raises(UsageError):
        role_of(flags_of(*given), HostFlags())


def test_a_worker_by_hand_does_its_own_number_of_iterations_with_plain_sgd():
    role = Role("worker", 1, 2, 3, Address("ps0", 1))
    config = config_of(role, TrainingConfig(model="lenet"), num_iterations=None, num_warmup=None)
    assert (config.iterations, config.num_warmup, config.momentum) == (3000, 10, 0.0)
    assert (config.num_workers, config.num_servers, config.model) == (3, 2, "lenet")
    config = config_of(role, config, num_iterations=7, num_warmup=2)
    assert (config.iterations, config.num_warmup) == (7, 2)


def test_the_figures_of_one_worker():
    key = {"strategy": "parameter-server", "rank": 1}
    rows = [
        measured("examples_per_s_per_worker", key, [10.0, 14.0]),
        measured("seconds_per_iteration", key, [0.1, 0.2]),
    ]
    config = msgspec.to_builtins(TrainingConfig(model="lenet", num_workers=2))
    report = Report(benchmark="training", created="", config=config, rows=rows)
    assert worker_items(report) == ["Img/sec per worker: 12.0 +-3.9"]
    result = summarize_worker(report)
    assert (result["rank"], result["num_iterations"], result["examples_per_s"]) == (1, 2, 12.0)


def test_what_was_measured_before_a_server_was_lost_is_kept(monkeypatch):
    def train(role, config, say):
        yield 0.5
        yield 0.25
        raise PeerLost("server 0 is lost.", peer=0, cause="it was killed.")

    monkeypatch.setattr(by_hand, "train", train)
    role = Role("worker", 1, 1, 2, Address("ps0", 1))
    config = msgspec.to_builtins(TrainingConfig(batch_size=4))
    said = []
    starter = by_hand.WorkerByHand(role, said.append)
    [report] = run_benchmark("training", config, RunSettings(1), tell=said.append, starter=starter)
    assert report.rows[0].starts == [[8.0, 16.0]]
    assert [row.error for row in report.failed] == ["server 0 is lost. it was killed."]
    assert worker_items(report)[-1] == ("failed: server 0 is lost. it was killed.", "red")
    result = summarize_worker(report)
    assert (result["num_iterations"], result["examples_per_s"], result["failed"]) == (2, 12.0, 1)
    assert any("server 0 is lost" in line for line in said)


def test_a_worker_that_met_nobody_has_no_figures(monkeypatch):
    def train(role, config, say):
        raise PeerLost("server 0 is lost.", peer=0)
        yield

    monkeypatch.setattr(by_hand, "train", train)
    role = Role("worker", 0, 1, 1, Address("ps0", 1))
    starter = by_hand.WorkerByHand(role, lambda _: None)
    config = msgspec.to_builtins(TrainingConfig())
    [report] = run_benchmark("training", config, RunSettings(1), tell=lambda _: None, starter=starter)
    assert summarize_worker(report)["num_iterations"] == 0
    assert worker_items(report) == [("failed: server 0 is lost.", "red")]


@pytest.mark.slow
def test_servers_and_workers_that_are_started_by_hand_meet_train_and_end(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        server = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ["--ps_hosts", server, "--worker_hosts", "127.0.0.1:1,127.0.0.1:2"]
    flags += ["--num-iters", "5", "--num-warmup-batches", "2"]
    models = {"ps": [], "worker": ["--model", "small-mlp"]}  # as in KungFu's script: the server is told none
    roles = [("ps", 0), ("worker", 0), ("worker", 1)]
    with contextlib.ExitStack() as stack:
        started = []
        for job, index in roles:
            own = ["--job_name", job, "--task_index", str(index)]
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "shoal", "bench", "training", *flags, *own, *models[job]],
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=tmp_path,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                )
            )
            stack.callback(process.kill)
            started.append(process)
        printed = [process.communicate(timeout=100)[0].splitlines() for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    server_result, *results = (json.loads(lines[-1].removeprefix("RESULT: ")) for lines in printed)
    # the warm-up's gradients too: each worker counts its own iterations
    assert "Model: small-mlp" in printed[0]
    assert server_result["num_applied"] == 2 * (5 + 2)
    assert [result["num_iterations"] for result in results] == [5, 5]
    for lines in printed[1:]:
        assert len([line for line in lines if line.startswith("Iter #")]) == 5
        assert any(line.startswith("Img/sec per worker: ") for line in lines)


def test_a_server_that_is_told_no_model_waits_for_the_workers():
    role, args = Role("ps", 0, 1, 2, Address("ps0", 1)), (HostFlags(), RunFlags())
    config = by_hand_config(role, TrainingFlags(device="cpu"), *args, {})
    assert (config.model, config.image_size) == ("", None)
    told = TrainingFlags(model="lenet", device="cpu")
    assert by_hand_config(role, told, *args, {"model": "--model"}).model == "lenet"
    worker = Role("worker", 0, 1, 2, Address("ps0", 1))
    assert by_hand_config(worker, TrainingFlags(device="cpu"), *args, {}).model == "mlp"


@pytest.mark.slow
def test_servers_and_workers_that_were_told_different_models_say_so(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        server = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = ["--ps_hosts", server, "--worker_hosts", "127.0.0.1:1", "--num-iters", "1", "--device", "cpu"]
    with contextlib.ExitStack() as stack:
        started = []
        for job, model in (("ps", "lenet"), ("worker", "small-mlp")):
            command = [sys.executable, "-m", "shoal", "bench", "training", *flags]
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, "--job_name", job, "--model", model],
                    stderr=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=tmp_path,
                )
            )
            stack.callback(process.kill)
            started.append(process)
        complaints = [process.communicate(timeout=100)[1] for process in started]
    assert all(process.returncode for process in started)
    assert all("trains small-mlp, and another process was told lenet" in text for text in complaints)
