"""That a wrapper hides nothing of the group inside."""

import inspect

import pytest

from group.pretender import Pretender
from shoal.core import UsageError
from shoal.group import next_number, share
from shoal.group.base import Group, Window
from shoal.group.operations import GroupWrapper, WrappedWindow


def test_everything_is_forwarded():
    for interface, wrapper in ((Group, GroupWrapper), (Window, WrappedWindow)):
        public = {name for name, _ in inspect.getmembers(interface) if not name.startswith("_")}
        assert public - set(vars(wrapper)) - set(interface.__annotations__) <= ELSEWHERE


ELSEWHERE = {"put", "add", "send", "notes", "on_wait", "window"}
"""Writes, and making a window, go through one method each that is forwarded; notes and listeners are shared,
which the next test sees."""


def test_attributes_are_those_of_the_group_inside():
    inner = Pretender(4, per_machine=2)
    with GroupWrapper(inner) as group:
        for name in Group.__annotations__:
            assert getattr(group, name) == getattr(inner, name)
        assert share(group, {"a": 1}) == [{"a": 1}] * 4
        assert [next_number(one, "boat") for one in (group, inner, group)] == [0, 1, 2]
        assert next_number(group, "net") == 0
        assert group.on_wait is inner.on_wait
    with pytest.raises(UsageError, match="left"):
        inner.empty(1)
