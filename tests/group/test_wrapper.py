"""That a wrapper hides nothing of the group inside."""

import inspect

import pytest

from group.pretender import Pretender
from shoal.core import UsageError
from shoal.group.base import Group
from shoal.group.operations import GroupWrapper

MADE_OF_OTHERS = {"next_number", "share"}
"""What goes through operations that are forwarded."""


def test_everything_is_forwarded():
    public = {name for name, _ in inspect.getmembers(Group) if not name.startswith("_")}
    assert public - set(vars(GroupWrapper)) - set(Group.__annotations__) == MADE_OF_OTHERS


def test_attributes_are_those_of_the_group_inside():
    inner = Pretender(4, per_machine=2)
    with GroupWrapper(inner) as group:
        for name in Group.__annotations__:
            assert getattr(group, name) == getattr(inner, name)
        assert [group.machine_of(rank) for rank in group.members] == [0, 0, 1, 1]
        assert group.share({"a": 1}) == [{"a": 1}] * 4
        assert [one.next_number("boat") for one in (group, inner, group)] == [0, 1, 2]
        assert group.next_number("net") == 0
    with pytest.raises(UsageError, match="left"):
        inner.empty(1)
