"""On a real cluster of two nodes, which a child process holds; nothing here imports Ray."""

import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launch.programs import Done, Recorder, is_running, read_pid
from launch.ray_cluster import Cluster
from shoal.core.errors import ShoalError, UsageError
from shoal.core.run_options import RunOptions
from shoal.launch import Elastic, LaunchSettings
from shoal.launch.ray_engine import run_on_ray


def on_ray(test):
    has_ray = importlib.util.find_spec("ray") is not None
    test = pytest.mark.skipif(not has_ray, reason="Ray is not installed")(test)
    return pytest.mark.timeout(180)(pytest.mark.slow(test))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with (tmp_path_factory.mktemp("ray") / "cluster.log").open("w") as log:
        cluster = Cluster(log)
        yield cluster
        cluster.close()


@pytest.fixture
def run(cluster, write):
    """Runs a program on the cluster, to its end."""

    def run(body, num_workers=2, *, arguments=(), when=None, **settings):
        recorder = Recorder(when)
        command = (sys.executable, str(write(body)), *arguments)
        launch_settings = LaunchSettings(command, num_workers, **settings)
        return Done(run_on_ray(launch_settings, cluster.address, recorder, 20.0), recorder)

    return run


def wait_until(is_so, limit_s=10.0):
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def words_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_without_ray_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"shoal\[ray\]"):
        run_on_ray(LaunchSettings(("true",), 1))


@on_ray
def test_an_address_where_no_cluster_is():
    with pytest.raises(ShoalError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        run_on_ray(LaunchSettings(("true",), 1), "127.0.0.1:1", Recorder())


@on_ray
def test_each_node_is_a_machine(run, tmp_path):
    done = run(
        """
        names = "LOCAL_RANK LOCAL_WORLD_SIZE MACHINE NUM_MACHINES WORLD_SIZE".split()
        told = [os.environ[f"SHOAL_{name}"] for name in names]
        print(*told, os.getcwd(), os.environ["SHOAL_MASTER_ADDR"] != "127.0.0.1")
        print("to stderr", file=sys.stderr)
        """
    )
    assert done.outcome.exit_code == 0
    here = Path.cwd()
    assert done.out == {0: [f"0 1 0 2 2 {here} True"], 1: [f"0 1 1 2 2 {here} True"]}
    assert done.err == {0: ["to stderr"], 1: ["to stderr"]}
    assert done.said == []


@on_ray
def test_a_worker_that_fails_ends_the_others_and_is_shown(run, tmp_path):
    done = run(
        """
        mark(f"pid{rank}", os.getpid())
        wait_for("pid0"), wait_for("pid1")
        if rank == 1:
            raise ValueError("that was it")
        time.sleep(60)
        """
    )
    assert done.outcome.exit_code == 1
    assert [death.rank for death in done.outcome.deaths] == [1]
    assert done.err[1][-1] == "ValueError: that was it"
    assert any("rank 1" in text and "exit code 1" in text for text in done.said)
    assert not is_running(read_pid(tmp_path, "pid0"))


@on_ray
def test_too_few_cpus_are_an_error_with_numbers(cluster):
    with pytest.raises(ShoalError, match=r"no room for 3 workers with 1 CPU each; its 2 nodes have 2 CPUs"):
        run_on_ray(
            LaunchSettings((sys.executable, "-c", ""), 3),
            cluster.address,
            Recorder(),
            start_timeout_s=4,
        )


@on_ray
def test_an_actor_that_is_killed_is_named_soon_and_nothing_is_left(run, tmp_path):
    began_s = []

    def kill_actor():
        began_s.append(time.monotonic())
        os.kill(parent_of(parent_of(read_pid(tmp_path, "pid1"))), signal.SIGKILL)

    done = run(
        """
        mark(f"pid{rank}", os.getpid())
        wait_for("pid0"), wait_for("pid1")
        if rank == 1:
            print("ready", flush=True)
        time.sleep(60)
        """,
        when={"ready": kill_actor},
    )
    assert time.monotonic() - began_s[0] < 10
    assert done.outcome.exit_code != 0
    assert [death.rank for death in done.outcome.deaths] == [1]
    assert any("rank 1" in text and "its worker process has died" in text for text in done.said)
    wait_until(lambda: not any(is_running(read_pid(tmp_path, f"pid{rank}")) for rank in range(2)))


@on_ray
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_head(cluster, write, shoal_run, tmp_path, number):
    program = write(
        """
        mark(f"pid{rank}", os.getpid())
        time.sleep(60)
        """
    )
    head = shoal_run("--engine", "ray", "--address", cluster.address, "-np", 2, program)
    wait_until(lambda: all((tmp_path / f"pid{rank}").exists() for rank in range(2)), 20)
    head.send_signal(number)
    assert head.wait(15) == (130 if number == signal.SIGINT else -number)
    wait_until(lambda: not any(is_running(read_pid(tmp_path, f"pid{rank}")) for rank in range(2)))


TRAINING = """
import torch
import shoal

group = shoal.init()
torch.manual_seed(7)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
strategy = shoal.from_args(group)
with strategy.attach(model, optimizer):
    print("begins at", strategy.steps, flush=True)
    while strategy.steps < 20:
        is_first = os.environ["SHOAL_RESTART_COUNT"] == "0"
        if strategy.steps == 12 and is_first and sys.argv[1] != "whole":
            mark(f"pid{rank}", os.getpid())
            wait_for("pid0"), wait_for("pid1")
            if rank == 1:
                print("ready", flush=True)
            if rank == 1 and sys.argv[1] == "fail":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(100 * strategy.steps + rank))
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
print("ends with", model.weight.tolist(), flush=True)
"""


@on_ray
def test_a_restart_goes_on_from_the_checkpoint(run, tmp_path):
    def train(name):
        options = RunOptions(checkpoint=str(tmp_path / name), checkpoint_every=5)
        return run(TRAINING, arguments=[name], options=options, elastic=Elastic(max_restarts=1))

    whole, failed = train("whole"), train("fail")
    assert whole.outcome.exit_code == failed.outcome.exit_code == 0
    assert any("rank 1 was killed by signal 9 (SIGKILL)" in text for text in failed.said)
    assert any("restart 1 of 1 with 2 workers" in text for text in failed.said)
    for rank in range(2):
        assert [line for line in failed.out[rank] if "begins" in line] == ["begins at 0", "begins at 10"]
        assert failed.out[rank][-1] == whole.out[rank][-1]


@on_ray
def test_ctrl_c_while_there_is_no_room(cluster, shoal_run, tmp_path):
    (tmp_path / "program.py").write_text("")
    head = shoal_run("--engine", "ray", "--address", cluster.address, "-np", 3, "program.py")
    wait_until(lambda: any("ray_bridge" in words_of(pid) for pid in children_of(head.pid)))
    bridge = next(pid for pid in children_of(head.pid) if "ray_bridge" in words_of(pid))
    head.send_signal(signal.SIGINT)
    assert head.wait(15) == 130
    assert "interrupted before" in head.stderr.read()
    assert not is_running(bridge)


@on_ray
def test_a_node_that_dies_is_named_and_the_run_starts_anew_on_the_other(cluster, run, tmp_path):
    began_s, said_s = [], []

    def kill_node():
        began_s.append(time.monotonic())
        cluster.ask("kill")

    done = run(
        TRAINING,
        arguments=["wait"],
        options=RunOptions(checkpoint=str(tmp_path / "checkpoint"), checkpoint_every=5),
        when={"ready": kill_node, "is lost with rank": lambda: said_s.append(time.monotonic())},
        elastic=Elastic(max_restarts=1, min_workers=1),
    )
    cluster.ask("add")
    assert said_s[0] - began_s[0] < 10
    assert done.outcome.exit_code == 0
    assert [line for line in done.out[0] if "begins" in line] == ["begins at 0", "begins at 10"]
    assert done.out[0][-1].startswith("ends with")
    assert any("restart 1 of 1 with 1 worker" in text for text in done.said)
    assert not any(is_running(read_pid(tmp_path, f"pid{rank}")) for rank in range(2))
