"""Topologies that fit, and those that are refused with a word about which would."""

import numpy as np
import pytest

from shoal.core import UsageError
from shoal.strategies.exact_diffusion import D2, ExactDiffusion
from shoal.strategies.extra import Extra
from shoal.strategies.gradient_tracking import GradientTracking
from shoal.topology import make_topology
from shoal.topology.properties import SYMMETRIC, require_symmetric
from strategies.fakes import Wide


@pytest.mark.parametrize("name", SYMMETRIC.split(", "))
def test_those_that_are_named_fit(name):
    require_symmetric(make_topology(name, 8), "d2")


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("one-peer-exponential", "the same weights in every round"),
        ("exponential-2", "needs a symmetric matrix"),
        ("ring:left", "needs a symmetric matrix"),
        (np.eye(4), "a way from every worker to every other"),
    ],
)
@pytest.mark.parametrize("kind", [ExactDiffusion, Extra, D2])
def test_static_and_symmetric(kind, topology, words):
    with pytest.raises(UsageError, match=words):
        kind(Wide(4), topology=topology)


def test_trackers_need_doubly_stochastic_weights():
    GradientTracking(Wide(3), topology=[[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]])
    with pytest.raises(UsageError, match="over sources and over destinations"):
        GradientTracking(Wide(3), topology=[[0.5, 0.5, 0], [0.5, 0.5, 0], [0.5, 0, 0.5]])
    with pytest.raises(UsageError, match="in turn 0"):
        GradientTracking(Wide(4), topology="one-peer:star")
