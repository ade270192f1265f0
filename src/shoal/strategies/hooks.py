"""Hooks on a user's model that do not follow it into a copy.

`copy.deepcopy(model)`, `AveragedModel(model)` and `torch.save(model)` take a module's forward hooks along. A
copy shares nothing with the group: its hooks do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """Calls `act`; copied or loaded, it does nothing."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[..., None] | None = None) -> None:
        self._act = act

    def __call__(self, *args: Any) -> None:
        """As the module calls its hooks."""
        if self._act is not None:
            self._act(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()
