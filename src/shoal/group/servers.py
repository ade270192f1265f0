"""The group of a run with parameter servers: workers see each other alone, `everybody` holds them all.

The first ranks of `everybody` are the servers; a worker's rank there is its own plus their number. On a
server the group is one of its own. What servers do is the business of the strategy.
"""

from __future__ import annotations

from typing import Literal

from shoal.core import UsageError
from shoal.group.base import Group
from shoal.group.wrapper import GroupWrapper


class WithServers(GroupWrapper):
    """`inner` for everything, and `everybody` beside it; both end together."""

    def __init__(self, inner: Group, everybody: Group, num_servers: int) -> None:
        super().__init__(inner)
        self.everybody = everybody
        self.num_servers = num_servers
        self.role: Literal["worker", "server"] = "server" if everybody.rank < num_servers else "worker"

    @property
    def traffic_bytes(self) -> tuple[int, int]:
        """In both."""
        sent, received = self.inner.traffic_bytes
        sent_to_all, received_from_all = self._all.traffic_bytes
        return sent + sent_to_all, received + received_from_all

    def progress(self) -> None:
        """Of both."""
        self.inner.progress()
        self._all.progress()

    def leave(self) -> None:
        """Leave both."""
        self.inner.leave()
        self._all.leave()

    def close(self) -> None:
        """Close both."""
        try:
            self.inner.close()
        finally:
            self._all.close()

    def abandon(self) -> None:
        """Abandon both."""
        try:
            self.inner.abandon()
        finally:
            self._all.abandon()

    @property
    def _all(self) -> Group:
        assert self.everybody is not None
        return self.everybody


def check_servers(num_servers: int, size: int) -> None:
    """UsageError when nobody would be left to work."""
    if num_servers < 0:
        raise UsageError(f"{num_servers} servers are impossible.", next_step="give 0 or more.")
    if num_servers and num_servers >= size:
        raise UsageError(
            f"{num_servers} servers of {size} processes leave no worker.",
            cause="the world size counts servers and workers together.",
            next_step=f"start {num_servers + 1} processes or more; shoal run -np counts workers alone.",
        )
