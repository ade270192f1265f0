"""All workers in one tensor: what it can do, what it refuses, and how fast workers come to agree in it."""

import math
import time

import msgspec
import pytest
import torch

from shoal.core import UsageError
from shoal.simulate.exact import beginner
from shoal.simulate.job import TrainingJob
from shoal.simulate.stacked.executor import StackedRun, run_stacked
from shoal.simulate.tasks import make_task
from shoal.simulate.world import World
from shoal.topology import make_topology, spectral_gap
from shoal.transport import FaultScript, Profile

JOB = TrainingJob(task="quadratic", strategy="neighbor", num_workers=8, steps=4, eval_every=2, momentum=0.9)
WORLD = World(num_workers=8)


def job_of(**settings):
    return msgspec.structs.replace(JOB, **settings)


def world_of(**settings):
    return msgspec.structs.replace(WORLD, **settings)


def rates_of_agreement(topology, size, num_turns):
    """What a turn leaves of a disagreement in the long run: of workers that only mix, and by the gap."""
    options = {"topology": topology}
    job = job_of(options=options, num_workers=size, steps=2 * num_turns, eval_every=num_turns)
    run = StackedRun(msgspec.structs.replace(job, learning_rate=0.0), world_of(num_workers=size))
    values = torch.randn(run.model.values.shape, generator=torch.Generator().manual_seed(0)).double()
    if topology == "ring":  # chance would take thousands of turns to leave the slowest wave alone
        wave = torch.cos(2 * math.pi * torch.arange(size, dtype=torch.float64) / size)
        values = wave[:, None].expand_as(values).clone()
    run.model.values = values
    logs = run.run()
    models = [torch.stack([log.snapshots[number].tensors[0] for log in logs]) for number in (1, 2)]
    before, after = (float((model - model.mean(0)).norm()) for model in models)
    return (after / before) ** (1 / num_turns), 1 - spectral_gap(make_topology(topology, size))


@pytest.mark.parametrize(
    ("topology", "num_turns"), [("ring", 30), ("exponential-2", 30), ("one-peer-exponential", 24)]
)
def test_consensus_distance_falls_at_the_rate_of_the_spectral_gap(topology, num_turns):
    measured, predicted = rates_of_agreement(topology, 60, num_turns)
    assert 1 - measured == pytest.approx(1 - predicted, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("topology", "num_turns"), [("ring", 100), ("exponential-2", 50), ("one-peer-exponential", 40)]
)
def test_so_it_does_for_a_thousand(topology, num_turns):
    measured, predicted = rates_of_agreement(topology, 1000, num_turns)
    assert 1 - measured == pytest.approx(1 - predicted, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("topology", ["ring", "exponential-2", "one-peer-exponential"])
def test_a_thousand_workers_train_within_a_minute(topology):
    options = {"topology": topology}
    job = job_of(task="digits", options=options, num_workers=1000, steps=200, eval_every=50)
    network = Profile.parse("[ways.default]\ndelay_ms = 20")
    began_s = time.process_time()
    logs = run_stacked(job, world_of(num_workers=1000, profile=network))
    assert time.process_time() - began_s < 60
    step_s = WORLD.compute.step_ms * 1e-3
    assert all(log.snapshots[-1].at_s == pytest.approx(200 * (step_s + 0.02)) for log in logs)


def test_one_worker_trains_as_it_would_alone():
    job = job_of(task="digits", num_workers=1)
    task = make_task(job)
    model, optimizer = beginner(task)
    batches = task.batches(0)
    for _ in range(job.steps):
        inputs, labels = next(batches)
        optimizer.zero_grad()
        task.loss(model(inputs), labels).backward()
        optimizer.step()
    (log,) = run_stacked(job, world_of(num_workers=1))
    for tensor, expected in zip(log.snapshots[-1].tensors, model.parameters(), strict=True):
        torch.testing.assert_close(tensor, expected.detach())
    assert log.snapshots[-1].at_s == pytest.approx(job.steps * WORLD.compute.step_ms * 1e-3)
    assert log.snapshots[-1].sent_bytes == 0


def test_the_same_job_and_world_give_the_same_bits():
    world = world_of(profile=Profile.load("home"), seed=3)
    first, second = (run_stacked(job_of(strategy="d2"), world) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one.waited_s == other.waited_s
        assert [each.at_s for each in one.snapshots] == [each.at_s for each in other.snapshots]
        for mine, theirs in zip(one.snapshots, other.snapshots, strict=True):
            assert all(map(torch.equal, mine.tensors, theirs.tensors))


@pytest.mark.parametrize(
    ("job", "world", "what"),
    [
        ({"strategy": "async-sgd"}, {}, "no pair"),
        ({"strategy": "parameter-server"}, {"num_servers": 1}, "no parameter-server"),
        ({}, {"num_servers": 1}, "no servers"),
        (
            {},
            {"faults": FaultScript.parse("[[fault]]\nkind = 'kill'\nat_s = 1\npeers = ['rank:1']")},
            "no faults",
        ),
        ({"strategy": "local-sgd", "options": {"codec": "int8"}}, {}, "no codec"),
        ({"options": {"monitor": "true"}}, {}, "no monitor"),
    ],
)
def test_what_only_the_exact_executor_can_do_is_refused(job, world, what):
    with pytest.raises(UsageError, match=what) as caught:
        run_stacked(job_of(**job), world_of(**world))
    assert "--executor exact" in str(caught.value)


def test_a_strategy_refuses_what_it_would_refuse_of_any_group():
    with pytest.raises(UsageError, match="same weights in every round"):
        run_stacked(job_of(strategy="extra", options={"topology": "one-peer-exponential"}), WORLD)
    with pytest.raises(UsageError, match="momentum buffers"):
        run_stacked(job_of(strategy="momentum", momentum=0.0), WORLD)
