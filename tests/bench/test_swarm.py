"""`shoal bench swarm`: what is measured, what its RESULT says, and hivemind beside it."""

import random
import sys

import msgspec
import pytest

from shoal.bench.frame import RunFlags, make_scenario, measured
from shoal.bench.swarm import SwarmConfig, SwarmFlags, measure_hivemind, summarize_swarm, swarm_config
from shoal.core import UsageError
from shoal.report import Report

STAND_IN_TORCH = """
class Tensor(bytearray):
    detach = numpy = lambda self: self
    tobytes = lambda self: bytes(self)
class Generator:
    def manual_seed(self, number):
        return number
def randn(size, generator):
    return Tensor([generator] * size)
def set_num_threads(number):
    pass
"""
STAND_IN_HIVEMIND = """
import contextlib, sys, time, types
class DHT:
    def __init__(self, initial_peers, host_maddrs, start):
        self.initial_peers = initial_peers
    def get_visible_maddrs(self):
        return ["/ip4/127.0.0.1/tcp/1"]
    def shutdown(self):
        pass
class DecentralizedAverager:
    def __init__(self, tensors, dht, *, prefix, target_group_size, start, **more):
        self.tensors, self.num = tensors, 0
    def step(self, timeout, allow_retries):
        time.sleep(0.01)
        self.num += 1
        self.tensors[0][:] = bytes(len(self.tensors[0]))
        return {}
    @contextlib.contextmanager
    def get_tensors(self):
        yield self.tensors
    def shutdown(self):
        pass
averaging = types.ModuleType("hivemind.averaging")
averaging.DecentralizedAverager = DecentralizedAverager
sys.modules["hivemind.averaging"] = averaging
"""


def report_of(told):
    return Report(benchmark="swarm", created="2026-01-01T00:00:00+00:00", rows=list(told))


def test_flags_become_a_config():
    flags = SwarmFlags(peers=3, size="1MB", kills=20, stops=5, plain=True)
    config = swarm_config(flags, RunFlags())
    assert config == SwarmConfig(3, 1 << 20, 10, 20, 5, True)
    short = swarm_config(flags, RunFlags(short=True))
    assert (short.num_rounds, short.num_kills, short.num_stops) == (3, 3, 1)


@pytest.mark.parametrize("wrong", [{"size": "4B"}, {"size": "many"}, {"hivemind": "/no/such/python"}])
def test_what_cannot_be_measured_is_refused(wrong):
    with pytest.raises(UsageError):
        swarm_config(SwarmFlags(**wrong), RunFlags())


def test_hivemind_is_measured_in_an_interpreter_of_its_own(tmp_path):
    (tmp_path / "torch.py").write_text(STAND_IN_TORCH)
    (tmp_path / "hivemind.py").write_text(STAND_IN_HIVEMIND)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    config = SwarmConfig(num_peers=2, size_bytes=64, num_rounds=2, num_kills=1)
    told = list(measure_hivemind(str(python), config, random.Random(1), lambda text: None))
    rows = {(one.metric, one.key["scenario"]): one.samples for one in told}
    assert len(rows["round", "clean"]) == 2
    assert min(rows["round", "clean"]) > 0.01
    assert rows["same_bits", "kill"] == [1.0]
    result = summarize_swarm(report_of(told))
    assert result["hivemind_same_bits"] is True
    assert result["hivemind_round_s"] >= 0.01  # it is rounded
    assert result["hivemind_after_kill_max_s"] > 0
    assert "hivemind_after_kill_p95_s" not in result  # of one kill


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_plain", [True, False])
def test_processes_survive_a_kill_and_a_stop(is_plain):
    config = SwarmConfig(
        num_peers=3, size_bytes=1 << 20, num_rounds=2, num_kills=3, num_stops=1, is_plain=is_plain
    )
    told = list(make_scenario("swarm", msgspec.to_builtins(config), 1).run(lambda text: None))
    result = summarize_swarm(report_of(told))
    assert result["same_bits"] is True
    assert result["hung"] == 0
    assert result["kills"] == 3
    assert result["stops"] == 1
    assert 0 < result["after_kill_max_s"] < 30
    assert 0 < result["after_stop_max_s"] < 30
    assert result["join_mb_s"] > 0
    # parts to two others and averages back, a little more than the parameters for each of three
    assert 4 * config.size_bytes <= result["round_bytes"] < 4.5 * config.size_bytes
    assert result["round_over_ceiling"] > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
def test_memory_of_processes_is_flat_over_300_kills():
    """A peer is killed in every round and another one joins; who lives through all of it must not grow."""
    config = SwarmConfig(size_bytes=512 << 10, num_rounds=1, num_kills=300, is_plain=True)
    told = list(make_scenario("swarm", msgspec.to_builtins(config), 1).run(lambda text: None))
    result = summarize_swarm(report_of(told))
    assert (result["kills"], result["hung"], result["same_bits"]) == (300, 0, True)
    assert result["rss_growth"] <= 0.02


def test_memory_grows_as_much_as_after_the_worse_kind_of_faults():
    told = [
        measured("rss_growth", {"scenario": "kill"}, [0.02, 0.3]),
        measured("rss_growth", {"scenario": "stop"}, [0.1]),
    ]
    assert summarize_swarm(report_of(told))["rss_growth"] == 0.3
