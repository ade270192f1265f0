import time

import torch

from shoal.bench.contest_worker import Pace, RealErrand, shaped
from shoal.core import Address
from shoal.group.opening import WithServers
from shoal.group.solo import SoloGroup
from shoal.simulate.job import Job
from shoal.simulate.world import Compute, StepCosts, World
from shoal.transport import Profile

JOB = Job(task="quadratic", strategy="neighbor", num_workers=1, steps=1, eval_every=1)


def test_a_step_takes_as_long_as_the_world_says():
    world = World(num_workers=1, compute=Compute(step_ms=30, forward_share=0.5))
    model = torch.nn.Linear(2, 1)
    pace = Pace(SoloGroup(), StepCosts(world, 0), world.compute.forward_share)
    with pace.charged(model):
        began_s = time.perf_counter()
        output = model(torch.ones(1, 2))
        forward_s = time.perf_counter() - began_s
        output.sum().backward()
        step_s = time.perf_counter() - began_s
    assert forward_s >= 0.015
    assert step_s >= 0.03
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_errand_goes_by_plain_values():
    errand = RealErrand(number=3, job=JOB, world=World(num_workers=4, compute=Compute(factors={1: 2.0})))
    assert RealErrand.read(errand.plain()) == errand


def test_servers_and_workers_are_where_they_are_in_virtual_time():
    profile = Profile.load("three-continents")
    world = World(num_workers=1, num_servers=1, profile=profile)
    group = shaped(WithServers(SoloGroup(), SoloGroup(), 1), world)
    places = group.everybody._conditions.profile
    assert places.place_of(Address("rank", 0)) == profile.place_of(Address("server", 0))
    assert places.place_of(Address("rank", 1)) == profile.place_of(Address("rank", 0))
