"""The strategies that share one group: a GAN has two models, two optimizers, two strategies.

The group is left when the last of them is detached, and goes on without lost peers when all of them do.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from shoal.group import Group
from shoal.group.solo import SoloGroup

_survivals: WeakKeyDictionary[Group, list[bool]] = WeakKeyDictionary()
"""For each group, innermost, whether those that are attached survive a loss."""


def move_in(group: Group, *, survives_loss: bool) -> None:
    """One more is attached."""
    _survivals.setdefault(innermost(group), []).append(survives_loss)


def apply_survival(group: Group) -> None:
    """Let the group outlive losses if all that are attached do."""
    group.should_survive = all(_survivals.get(innermost(group), ()))


def move_out(group: Group, *, survives_loss: bool) -> bool:
    """One less; whether it was the last."""
    others = _survivals[innermost(group)]
    others.remove(survives_loss)
    return not others


def crew(group: Group) -> Group:
    """The group; for one worker alone also after it has left, since nobody is there to miss it."""
    return SoloGroup() if group.size == 1 else group


def innermost(group: Group) -> Group:
    """Without what is wrapped around it."""
    while isinstance(inner := getattr(group, "inner", None), Group):
        group = inner
    return group
