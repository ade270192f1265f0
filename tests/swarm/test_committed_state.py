"""Committed states: the same bits on every processor, and names that chain."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from shoal.core import ProtocolError, UsageError
from shoal.swarm import CommittedState, optimizer_named
from shoal.swarm.wire import ABORT, STEP, Commit, PartResult, RoundPlan

NAMES = ["sgd", "nesterov", "outer-nesterov", "adam", "adamw"]
STEPS = """
import hashlib, sys, numpy, torch
from shoal.swarm import optimizer_named
choice = numpy.random.RandomState(3)  # torch's own draws differ with the vector units
draw = lambda: torch.from_numpy(choice.randn(1003).astype("float32"))
for name in sys.argv[1:]:
    parameters = draw()
    optimizer = optimizer_named(name, 0.01)
    kept = optimizer.start(1003)
    for _ in range(20):
        optimizer.step(parameters, draw(), kept)
    print(name, hashlib.sha256(parameters.numpy().data).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_bits_with_and_without_vector_units():
    found = {
        subprocess.run(
            [sys.executable, "-c", STEPS, *NAMES],
            env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for capability in ("default", "avx2")
    }
    assert len(found) == 1


@pytest.mark.slow
def test_close_to_torchs_own():
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, 0.01),
        "nesterov": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
        "adam": lambda p: torch.optim.Adam(p, 0.01),
        "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    }
    for name, make in makers.items():
        ours = torch.linspace(-1, 1, 100)
        theirs = torch.nn.Parameter(ours.clone())
        optimizer, reference = optimizer_named(name, 0.01), make([theirs])
        kept = optimizer.start(100)
        for step in range(30):
            theirs.grad = torch.sin(theirs.detach() * (step + 1))
            gradient = torch.sin(ours * (step + 1))
            reference.step()
            optimizer.step(ours, gradient, kept)
        assert torch.allclose(ours, theirs.detach(), atol=1e-4), name


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(UsageError, match="adamw"):
        optimizer_named("lion")


def state():
    return CommittedState(torch.arange(4.0), optimizer_named("nesterov"), b"fork")


def step(of, kind=STEP):
    plan = RoundPlan((0,), (3,), (0, 4), (0,), (-1,), 1.0)
    return Commit(of.fork, of.round, of.name, kind, (), plan=plan, parts=(PartResult(1, b"x", b"\x01"),))


def test_names_chain():
    one, other = state(), state()
    assert one.name == other.name
    one.apply(step(one), torch.ones(4))
    assert (one.round, one.num_steps, one.num_samples) == (1, 1, 3)
    assert one.name == hashlib.sha256(other.name + step(other).digest).digest()
    other.apply(step(other, ABORT), None)
    assert (other.round, other.num_steps, other.num_samples) == (1, 0, 0)
    assert one.name != other.name


def test_a_commit_of_another_state_is_refused():
    one, other = state(), state()
    one.apply(step(one), torch.ones(4))
    with pytest.raises(ProtocolError):
        other.apply(step(one), torch.ones(4))
    assert other.fingerprint() == state().fingerprint()


def test_a_snapshot_restores_every_bit():
    one, other = state(), state()
    one.apply(step(one), torch.ones(4))
    one.branch(b"branch")
    other.restore(one.snapshot())
    assert other.fingerprint() == one.fingerprint()
    assert (other.name, other.fork, other.round) == (one.name, one.fork, one.round)
    assert other.descends_from(b"fork", 0)
    assert not other.descends_from(b"fork", 1)
