import numpy as np
import pytest

from shoal.core import UsageError
from shoal.data.splits import check_split, divide

LABELS = np.random.default_rng(0).integers(0, 10, 1437)


def num_classes(part):
    """As many classes as equally common ones would be as mixed: 1 for a part of one class."""
    shares = np.bincount(LABELS[part], minlength=10) / len(part)
    return 1 / (shares**2).sum()


@pytest.mark.parametrize("split", ["iid", "dirichlet:0.1", "dirichlet:100"])
@pytest.mark.parametrize("num_parts", [1, 8, 100])
def test_parts_are_of_one_size_and_share_nothing(split, num_parts):
    parts = divide(LABELS, num_parts, split, seed=3)
    assert [len(part) for part in parts] == [1437 // num_parts] * num_parts
    together = np.concatenate(parts)
    assert len(np.unique(together)) == len(together)


def test_a_smaller_concentration_gives_fewer_classes():
    mixed = {
        split: np.mean([num_classes(part) for part in divide(LABELS, 8, split, seed=0)])
        for split in ("iid", "dirichlet:100", "dirichlet:1", "dirichlet:0.1")
    }
    assert mixed["iid"] > 8
    assert mixed["dirichlet:100"] > 8
    assert mixed["dirichlet:100"] > mixed["dirichlet:1"] > mixed["dirichlet:0.1"]
    assert mixed["dirichlet:0.1"] < 4


@pytest.mark.parametrize("split", ["iid", "dirichlet:0.1"])
def test_equal_seeds_divide_alike_and_others_do_not(split):
    first, again, other = (divide(LABELS, 4, split, seed) for seed in (1, 1, 2))
    assert all((one == same).all() for one, same in zip(first, again, strict=True))
    assert any(sorted(one) != sorted(than) for one, than in zip(first, other, strict=True))


def test_a_class_that_few_have_left_does_not_end_it():
    labels = np.array([0] * 90 + [1] * 10)
    parts = divide(labels, 10, "dirichlet:0.001", seed=0)
    assert sorted(np.concatenate(parts)) == list(range(100))


@pytest.mark.parametrize(
    "text", ["", "foo", "iid:1", "dirichlet", "dirichlet:0", "dirichlet:nan", "dirichlet:x"]
)
def test_other_splits_are_refused(text):
    with pytest.raises(UsageError, match="no split"):
        check_split(text)


def test_more_workers_than_examples_are_refused():
    with pytest.raises(UsageError, match="3 examples cannot be divided among 4 workers"):
        divide(np.arange(3), 4, "iid", seed=0)
