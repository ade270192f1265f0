"""Benchmarks whose workers a launcher has started."""

import json
import subprocess
import sys

import msgspec
import pytest
import torch

from launch.machines import two_machines
from shoal.bench.ranks import LaunchedWorkers, Ranks, Told, in_lines
from shoal.bench.workers import WorkerSettings
from shoal.core import BenchmarkError, PeerLost
from shoal.group import Done, SoloGroup
from shoal.launch.output import MAX_LINE_BYTES, LineSplitter

LIMIT_S = 150
SHORT = ["--model", "small-mlp", "--short", "--strategies", "neighbor", "--no-ddp"]


def crew(size=1, **arguments):
    return LaunchedWorkers(SoloGroup(), WorkerSettings("bench.sample_workers:work", size, arguments))


def test_the_first_rank_works_too_and_answers_its_own_orders():
    workers = crew(word="ahoy")
    assert not workers.is_running
    assert workers.ask("describe") == [[0, "ahoy"]]
    assert workers.is_running
    workers.close()
    assert not workers.is_running


def test_whoever_fails_is_named_and_the_next_order_begins_anew():
    workers = crew()
    with pytest.raises(BenchmarkError, match="rank 0 of 1 failed: ZeroDivisionError: nothing is left"):
        workers.ask("fail", who=0)
    assert not workers.is_running
    assert workers.ask("describe") == [[0, None]]


def test_ranks_that_are_not_asked_answer_nothing():
    workers = crew()
    workers.ask("describe")
    message = {"kind": "ask", "among": 0, "details": {"order": "fail", "details": {"who": 0}}}
    assert workers._worker.follow(message) == {"answer": None}


def test_other_numbers_of_workers_than_the_launcher_started_are_refused():
    with pytest.raises(BenchmarkError, match="3 workers are to be measured, and the launcher has started 1"):
        crew(size=3).ask("describe")


def test_a_start_tells_what_the_scenario_says():
    told = []
    Ranks(SoloGroup()).start(
        {"benchmark": "bench.sample_scenarios:Crewed", "config": {}, "seed": 7}, None, told.append
    )
    assert told[0] == {"progress": "asking"}
    assert told[1]["row"]["starts"] == [[7.0]]


class Losing(SoloGroup):
    """A group whose other rank is lost, or has failed because of this one."""

    def __init__(self, answers=None):
        super().__init__()
        self._answers = answers

    def all_gather(self, tensor):
        if self._answers is None:
            raise PeerLost("rank 1 is lost: it was killed.", peer=1)
        is_order = "kind" in msgspec.msgpack.decode(tensor.numpy().data)
        told = bytearray(msgspec.msgpack.encode(self._answers))
        return Done([tensor] if is_order else [tensor, torch.frombuffer(told, dtype=torch.uint8)])


def test_a_rank_that_is_lost_is_a_failure_of_the_benchmark_and_of_all_later_orders():
    workers = LaunchedWorkers(Losing(), WorkerSettings("bench.sample_workers:work", 1))
    for _ in range(2):
        with pytest.raises(BenchmarkError, match="rank 1 is lost: it was killed"):
            workers.ask("describe")
    Ranks(Losing()).end()


def test_who_failed_first_is_named_and_not_who_missed_it():
    failed = {"failure": "ValueError: no", "trace": "", "is_consequence": False}
    workers = LaunchedWorkers(Losing({"answer": None}), WorkerSettings("bench.sample_workers:work", 1))
    workers.ask("describe")
    workers._control = Losing(failed)
    workers._worker.follow = lambda _: {"failure": "PeerLost: rank 1", "trace": "", "is_consequence": True}
    with pytest.raises(BenchmarkError, match="rank 1 of 1 failed: ValueError: no"):
        workers.ask("describe")


def heard(data):
    """What the head hears of what rank 0 has printed, which the launcher cuts into lines."""
    messages, lines = [], LineSplitter()
    told = Told(messages.append)
    others = [line for line in lines.shown(lines.feed(data)) if not told.take(line)]
    return messages, others, told.is_whole


def test_messages_of_any_size_come_whole_among_what_a_rank_prints():
    large = {"row": {"samples": [0.1] * MAX_LINE_BYTES, "name": "ä\x1b[2K\n"}}
    data = b"50 %" + in_lines(large) + b"noise\n" + in_lines({"progress": "on"}) + in_lines({"count": 2})
    messages, others, is_whole = heard(data)
    assert messages == [large, {"progress": "on"}]
    assert others == [b"50 %", b"noise"]
    assert is_whole


def test_what_did_not_come_is_missed():
    assert not heard(in_lines({"progress": "on"}))[2]
    assert not heard(in_lines({"count": 1}))[2]


def result_of(done):
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT: ")]
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0].removeprefix("RESULT: "))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_under_torchrun_every_process_is_a_rank_and_one_reports(tmp_path):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["--log-dir", str(tmp_path / "logs")]  # else torchrun makes a folder, and leaves it there
    done = subprocess.run(
        [*words, "-m", "shoal", "bench", "training", *SHORT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert result_of(done)["fraction_of_ceiling"]["neighbor"] > 0
    assert len(list((tmp_path / "shoal-reports").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_on_hosts_the_workers_of_several_machines_are_measured_together(tmp_path):
    with two_machines(tmp_path) as (a, b):
        hosts = f"{a.address}:1,{b.address}:1"
        done = a.run(
            *(sys.executable, "-m", "shoal", "bench", "training", *SHORT, "-H", hosts, *a.ssh_words),
            timeout=LIMIT_S,
            cwd=tmp_path,
        )
        assert result_of(done)["fraction_of_ceiling"]["neighbor"] > 0


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_collectives_are_measured_between_hosts_beside_gloo(tmp_path):
    with two_machines(tmp_path) as (a, b):
        hosts = f"{a.address}:1,{b.address}:1"
        words = ["collectives", "--sizes", "4KB", "--repeats", "3", "-H", hosts, *a.ssh_words]
        done = a.run(*(sys.executable, "-m", "shoal", "bench", *words), timeout=LIMIT_S, cwd=tmp_path)
        rows = result_of(done)["rows"]
        assert [(row["machines"], row["workers"], row["encrypted"]) for row in rows] == [
            (2, 1, False),
            (2, 1, True),
        ]
        assert all(row["ratio"] > 0 for row in rows)
