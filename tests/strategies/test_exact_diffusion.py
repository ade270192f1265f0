"""`exact-diffusion`: the recursion with (I + W)/2, and its limit."""

import torch

from shoal.topology import make_topology
from strategies.bowls import Bowls, course, diffusion

SIZE = 4


def test_the_recursion_and_its_limit():
    """A skipped step moves nobody who has arrived."""
    bowls = Bowls(SIZE)
    rows = course("exact-diffusion", SIZE, 112, skips=[105], topology="ring")
    mixing = (torch.eye(SIZE) + torch.from_numpy(make_topology("ring", SIZE).matrix())) / 2
    torch.testing.assert_close(rows[:10], diffusion(bowls, mixing, 10), rtol=0, atol=1e-12)
    assert bowls.distance(rows[-1]) < 1e-9
