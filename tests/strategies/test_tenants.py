"""Strategies that share a group; `test_base.py` has them attached."""

import gc
import weakref

from shoal.group.observed import Metered
from shoal.group.solo import SoloGroup
from shoal.strategies.tenants import apply_survival, move_in, move_out


def test_the_last_one_is_told_also_through_wrappers():
    group = SoloGroup()
    move_in(group, survives_loss=True)
    apply_survival(group)
    assert group.should_survive
    move_in(Metered(group), survives_loss=False)
    apply_survival(group)
    assert not group.should_survive
    assert not move_out(group, survives_loss=True)
    assert move_out(Metered(group), survives_loss=False)


def test_nothing_keeps_the_group_alive():
    group = SoloGroup()
    move_in(group, survives_loss=True)
    is_there = weakref.ref(group)
    del group
    gc.collect()
    assert is_there() is None
