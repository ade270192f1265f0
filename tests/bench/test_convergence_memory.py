import pytest

from shoal.bench import convergence_memory as module
from shoal.bench.convergence_memory import check_memory, free_bytes, memory_text, num_at_once
from shoal.bench.machine import Memory
from shoal.core import UsageError
from shoal.simulate.mixture_settings import MixtureSettings

SMALL = MixtureSettings(num_experts=4, layer_dim=32)
LARGE = MixtureSettings(num_experts=256)


@pytest.fixture
def machine(monkeypatch):
    """A machine of so many cores, with memory for so many seeds of SMALL."""

    def machine(cores, num_seeds):
        free = None if num_seeds is None else int(num_seeds * SMALL.memory_bytes())
        monkeypatch.setattr(module, "memory", lambda: Memory(free, free))
        monkeypatch.setattr(module, "num_cores", lambda: cores)

    return machine


@pytest.mark.parametrize(
    ("cores", "fitting", "expected"),
    [(2, 9, 3), (1, 9, 1), (8, 9, 3), (8, 2.5, 2), (8, 0.5, 1), (2, None, 3)],
)
def test_seeds_run_side_by_side_as_cores_and_memory_allow(machine, cores, fitting, expected):
    machine(cores, fitting)
    assert num_at_once(SMALL, 3) == expected


def test_a_gpu_takes_one_seed_after_another():
    assert num_at_once(MixtureSettings(device="cuda"), 5) == 1


def test_the_line_says_what_it_takes_and_whether_that_fits(machine):
    machine(2, 4)
    text = memory_text(SMALL, 3, free_bytes("cpu"))
    assert "for a seed" in text
    assert "3 seeds at once" in text
    assert text.endswith("that fits.")
    assert memory_text(LARGE, 1, 1 << 30).endswith("1.07 GB are free: that does NOT fit.")
    assert memory_text(LARGE, 1, None).endswith("how much is free is not known.")


def test_what_does_not_fit_is_refused_with_a_way_out():
    check_memory(SMALL, SMALL.memory_bytes())
    check_memory(LARGE, None)
    with pytest.raises(
        UsageError, match="--num-experts or --layer-dim, another --device, or --force"
    ) as caught:
        check_memory(LARGE, 1 << 30)
    assert "of memory, and 1.07 GB are free" in caught.value.what
