import pytest

from bench.sample_contests import config_of
from shoal.bench.compare_checks import MAX_THREADS, check_contest
from shoal.core import UsageError
from shoal.simulate.world import World
from shoal.transport import FaultScript


def quadratic(*strategies, num_workers=4, **fields):
    world = fields.pop("world", World(num_workers=num_workers))
    return config_of(*strategies, task="quadratic", world=world, **fields)


def test_what_can_be_held_is_not_complained_of():
    assert check_contest(config_of("all", world=World(num_workers=8, workers_per_machine=4))) == []
    assert check_contest(quadratic("neighbor", num_workers=500)) == []
    assert check_contest(quadratic("neighbor", executor="stacked")) == []


def test_threads_for_many_workers_are_slow_and_for_more_refused():
    (note,) = check_contest(quadratic("neighbor", "pair", num_workers=65))
    assert "pair" in note
    assert "neighbor" not in note
    with pytest.raises(
        UsageError, match=f"pair would need(.|\n)*leave pair out(.|\n)*--workers {MAX_THREADS}"
    ):
        check_contest(quadratic("neighbor", "pair", num_workers=MAX_THREADS + 1))
    with pytest.raises(UsageError, match="leave --executor exact out"):
        check_contest(quadratic("neighbor", num_workers=MAX_THREADS + 1, executor="exact"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quadratic("neighbor", "pair", executor="stacked"), "has no pair"),
        (quadratic("neighbor topology=rong"), "neighbor topology=rong: there is no topology 'rong'"),
        (quadratic("extra topology=mesh:5x5"), "mesh"),
        (quadratic("hierarchical topology=x"), "no topology 'x'"),
        (quadratic("choco codec=zip"), "unknown codec"),
        (config_of("neighbor", world=World(num_workers=2000)), "1437 examples cannot be divided"),
        (
            quadratic(
                world=World(
                    num_workers=2, faults=FaultScript.parse("[[fault]]\nkind = 'kill'\npeer = 'rank:7'")
                )
            ),
            "no worker is called 'rank:7'",
        ),
    ],
)
def test_what_no_run_could_do_is_refused(config, message):
    with pytest.raises(UsageError, match=message):
        check_contest(config)
