"""`d2`: the recursion, its limit, and as little laziness as its eigenvalues need."""

import numpy as np
import pytest
import torch

from shoal.core import UsageError
from shoal.strategies.exact_diffusion import D2
from shoal.topology import make_topology
from shoal.topology.properties import SYMMETRIC, smallest_eigenvalue
from strategies.bowls import Bowls, course, diffusion
from strategies.fakes import Wide

SIZE = 4


def test_the_recursion_and_its_limit():
    """A skipped step moves nobody who has arrived."""
    bowls = Bowls(SIZE)
    rows = course("d2", SIZE, 80, skips=[72], topology="ring")
    mixing = torch.eye(SIZE) / 16 + 15 / 16 * torch.from_numpy(make_topology("ring", SIZE).matrix())
    torch.testing.assert_close(rows[:10], diffusion(bowls, mixing, 10), rtol=0, atol=1e-12)
    assert bowls.distance(rows[-1]) < 1e-9


@pytest.mark.parametrize("name", SYMMETRIC.split(", "))
@pytest.mark.parametrize("size", [2, 8])
def test_every_symmetric_topology_is_made_to_fit(name, size):
    assert smallest_eigenvalue(D2(Wide(size), topology=name).topology) > -0.26


def test_laziness():
    np.testing.assert_array_equal(D2(Wide(5)).topology.matrix(), make_topology("ring", 5).matrix())
    assert smallest_eigenvalue(D2(Wide(4), laziness=0.2).topology) == pytest.approx(0.2 - 0.8 / 3)
    with pytest.raises(UsageError, match=r"eigenvalues above −1/3; .* is -0\.333"):
        D2(Wide(4), topology="ring", laziness=0.0)
