"""The stacked executor tells of a job what the exact one tells: models, times, bytes and waits."""

import msgspec
import numpy as np
import pytest
import torch

from shoal.simulate.contest import run_workers
from shoal.simulate.job import TrainingJob
from shoal.simulate.stacked.executor import RULES, run_stacked
from shoal.simulate.tasks import make_task
from shoal.simulate.world import Compute, World
from shoal.transport import Profile
from shoal.transport.network.distributions import Exponential

NUM_WORKERS = 16
CONSTANT = Profile.parse("[ways.default]\ndelay_ms = 3")
RANDOM = Profile.parse('[ways.default]\ndelay_ms = { kind = "exponential", mean = 5 }\nmbit_s = 10')
QUEUES = Profile.load("three-continents")
WORLD = World(
    num_workers=NUM_WORKERS, compute=Compute(step_ms=Exponential(10), factors={3: 4.0}), patience=1.0, seed=5
)
"""One worker is four times as slow as the others."""
JOB = TrainingJob(
    task="quadratic",
    strategy="neighbor",
    num_workers=NUM_WORKERS,
    steps=5,
    eval_every=2,
    learning_rate=0.05,
    split="dirichlet:0.5",
)
SLOW = ("all-reduce of parameters", "directed", "local-sgd", "gradient-tracking with averages", "extra")
CASES = {
    "all-reduce": ("all-reduce", {}),
    "all-reduce of parameters": ("all-reduce", {"local_steps": 2}),
    "static": ("neighbor", {"topology": "ring"}),
    "directed": ("neighbor", {"topology": "exponential-2"}),
    "irregular, overlapped": ("neighbor", {"topology": "star", "order": "adapt-while-combine"}),
    "dynamic": ("neighbor", {"topology": "one-peer-exponential"}),
    "now and then": (
        "neighbor",
        {"topology": "random-matching", "local_steps": 2, "global_average_every": 1, "warmup_steps": 3},
    ),
    "local-sgd": ("local-sgd", {"local_steps": 2}),
    "local-sgd with momentum": ("local-sgd", {"local_steps": 3, "average_momentum": True}),
    "sma": ("sma", {}),
    "gradient-tracking": ("gradient-tracking", {"topology": "one-peer-exponential"}),
    "gradient-tracking with averages": ("gradient-tracking", {"local_steps": 2, "global_average_every": 1}),
    "exact-diffusion": ("exact-diffusion", {"local_steps": 2}),
    "extra": ("extra", {}),
    "extra with averages": ("extra", {"local_steps": 2, "global_average_every": 1}),
    "d2": ("d2", {"global_average_every": 3}),
    "momentum": ("momentum", {"global_average_every": 3}),
}


def assert_agree(job, world):
    exact = run_workers(make_task(job), world).logs
    stacked = run_stacked(job, world)
    tolerance = 1e-10 if job.task == "quadratic" else 1e-5
    for one, other in zip(exact, stacked, strict=True):
        assert (one.rank, one.ended, other.ended) == (other.rank, "", "")
        np.testing.assert_allclose(other.waited_s, one.waited_s, rtol=1e-9, atol=1e-9)
        for mine, theirs in zip(one.snapshots, other.snapshots, strict=True):
            assert (theirs.step, theirs.sent_bytes) == (mine.step, mine.sent_bytes)
            assert theirs.received_bytes == mine.received_bytes
            assert theirs.at_s == pytest.approx(mine.at_s, rel=1e-9, abs=1e-12)
            for ours, others in ((mine.tensors, theirs.tensors), (mine.at_round, theirs.at_round)):
                for tensor, expected in zip(others, ours, strict=True):
                    torch.testing.assert_close(tensor, expected, rtol=tolerance, atol=tolerance)


def job_of(strategy, options, **settings):
    return msgspec.structs.replace(JOB, strategy=strategy, options=options, **settings)


def world_of(profile, **settings):
    return msgspec.structs.replace(WORLD, profile=profile, **settings)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES]
)
def test_on_links_that_draw_their_delays(case):
    assert_agree(job_of(*CASES[case]), world_of(RANDOM))


@pytest.mark.parametrize("case", ["all-reduce", "irregular, overlapped"])
def test_on_links_of_one_delay(case):
    assert_agree(job_of(*CASES[case]), world_of(CONSTANT))


@pytest.mark.parametrize(
    "case",
    ["directed", *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case != "directed")],
)
def test_on_lines_that_queue(case):
    assert_agree(job_of(*CASES[case]), world_of(QUEUES))


@pytest.mark.parametrize(
    ("between", "order"), [("workers", "adapt-while-combine"), ("machines", "adapt-then-combine")]
)
def test_machines(between, order):
    options = {"topology": "ring", "order": order}
    assert_agree(job_of("hierarchical", options), world_of(QUEUES, workers_per_machine=4, between=between))


@pytest.mark.parametrize("profile", [CONSTANT, RANDOM, QUEUES], ids=["constant", "random", "queues"])
def test_several_buckets_under_way_at_once(profile):
    assert_agree(job_of("all-reduce", {"bucket_mib": 0.004}, task="digits"), world_of(profile))


@pytest.mark.slow
def test_characters():
    job = job_of("exact-diffusion", {"decay_every": 2}, task="text", steps=20)
    assert_agree(job, world_of(QUEUES))


def test_every_strategy_that_can_be_stacked_is_compared():
    assert {strategy for strategy, _ in CASES.values()} | {"hierarchical"} == set(RULES)
