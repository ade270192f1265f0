"""Strategies that share a group; `test_base.py` has them attached."""

import gc
import weakref

from torch import nn
from torch.optim import SGD

from shoal.group.solo import SoloGroup
from shoal.group.wrappers import Metered
from shoal.strategies import make_strategy


def attach(group, name):
    model = nn.Linear(1, 1)
    return make_strategy(group, name).attach(model, SGD(model.parameters(), lr=0.1))


def test_a_group_survives_losses_while_all_that_are_attached_do_also_through_wrappers():
    group = SoloGroup()
    survivor = attach(group, "pair")
    assert group.should_survive
    other = attach(Metered(group), "all-reduce")
    assert not group.should_survive
    other.close()
    assert group.should_survive
    survivor.close()


def test_nothing_keeps_the_group_alive():
    group = SoloGroup()
    attach(group, "pair").close()
    is_there = weakref.ref(group)
    del group
    gc.collect()
    assert is_there() is None
