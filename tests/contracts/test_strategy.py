"""What every strategy promises, whatever it shares."""

import pytest

from contracts import strategy_checks as checks
from contracts.strategies import ABORTED, CASES, COUNTED, EVERY, GIVEN, OUTSIDE
from shoal.strategies import BUILT_IN


@pytest.mark.skipif(bool(GIVEN), reason="strategies of another package are tested")
def test_every_strategy_has_a_case():
    assert {case.strategy for case in CASES.values()} == {*BUILT_IN, OUTSIDE}


@pytest.mark.parametrize("kind", ["solo", "host"])
def test_alone_it_is_plain_training(workers, kind):
    workers.run(checks.alone, 1, [name for name in CASES if CASES[name].is_plain_alone], kind=kind)


@pytest.mark.parametrize("size", [2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5))])
def test_each_tensor_goes_once_a_round_and_the_mean_stays(workers, size):
    workers.run(checks.rounds, size, list(EVERY if size < 4 else COUNTED))


@pytest.mark.parametrize("size", [2, 5])
def test_bytes_are_those_of_the_formula(workers, size):
    workers.run(checks.metered, size, [name for name in COUNTED if name not in OUTSIDE])


def test_an_aborted_round_changes_nothing(workers):
    workers.run(checks.aborted, 2, list(ABORTED))


def test_the_limit_of_a_quadratic(workers):
    workers.run(checks.limits, 3, list(EVERY))


def test_loops_that_people_write(workers):
    workers.run(checks.loops, 3, list(EVERY))


def test_a_copy_of_the_model_is_ones_own(workers):
    workers.run(checks.copies, 2, list(EVERY))


@pytest.mark.parametrize("name", [name for name in EVERY if name != "ddp"])
def test_a_worker_out_of_data_leaves(workers, name):
    first, *others = workers.run(checks.uneven, 3, {"name": name})
    assert first != pytest.approx(others[0], abs=1e-3)
    assert others[0] != 0
    if CASES[name].are_replicas_equal:
        assert others[0] == pytest.approx(others[1])


@pytest.mark.parametrize(
    ("what", "size"),
    [
        ("loops", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("rounds", 2), ("rounds", 4), ("limits", 2), ("limits", 4), ("loops", 4))
        ),
    ],
)
def test_on_several_machines(workers, what, size):
    """Of two workers each, or of one."""
    workers.run(getattr(checks, what), size, list(EVERY), kind="torch", timeout_s=60)
