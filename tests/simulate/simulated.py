"""Checks that are written for workers of a group, run in virtual time."""

from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.transport import Profile

NEAR = Profile.parse("[ways.default]\ndelay_ms = 1\nmbit_s = 1000")


def in_simulation(function, size, *arguments, **world):
    """What each worker returns; the first error that ended one is raised."""
    world = World(**{"num_workers": size, "profile": NEAR, **world})
    outcomes = run_exact(world, lambda worker: function(worker.group, *arguments))
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]
