"""Worlds in virtual time: equal to the bit, and counted."""

import subprocess
import sys

import pytest

from shoal.bench.virtual import run_world
from shoal.core import UsageError

WORLD = """
from shoal.bench.virtual import run_world
print(run_world(num_peers=20, seconds=20, profile="home", seed=7, kind={kind!r}))
"""


def _world_in_a_process(hash_seed, kind):
    done = subprocess.run(
        [sys.executable, "-c", WORLD.format(kind=kind)],
        env={"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("kind", ["stream", "datagram"])
def test_worlds_are_equal_to_the_bit_whatever_the_hash_seed(kind):
    first, second = _world_in_a_process("1", kind), _world_in_a_process("2", kind)
    assert first == second
    assert "num_calls=1200" in first


def test_worlds_differ_by_their_seed_and_count_their_calls():
    worlds = [run_world(num_peers=10, seconds=5, profile="lan", seed=seed) for seed in (1, 2, 1)]
    assert worlds[0] == worlds[2]
    assert worlds[0].digest != worlds[1].digest
    assert worlds[0].num_calls == 150
    assert worlds[0].num_failed == 0
    assert 4 < worlds[0].simulated_s < 7


def test_a_world_without_a_profile_is_ideal():
    assert run_world(num_peers=3, seconds=2, profile=None).num_failed == 0


@pytest.mark.parametrize("wrong", [{"kind": "pigeon"}, {"num_peers": 1}])
def test_worlds_that_cannot_be_are_refused(wrong):
    with pytest.raises(UsageError, match="no world"):
        run_world(**wrong)
