"""What members of a simulated group publish, and how others get it: a request there, a copy back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from shoal.core import UsageError
from shoal.group.base import Done, Handle, Snapshot
from shoal.group.kernels import CopiedSnapshot, copy_out
from shoal.group.simulated_hub import Hub, Pending

Received = Callable[[int], None]
"""Is told how many bytes have come."""


class Publication:
    """What one member has under one name."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._tensor: torch.Tensor | None = None
        self._version = -1
        self._is_changing = False
        self._waiting: list[Callable[[], bool]] = []

    def publish(self, tensor: torch.Tensor, version: int) -> None:
        """A newer one takes the place of the one before."""
        self._tensor, self._version = tensor.detach(), version
        self.look()

    def reclaim(self, name: str, version: int) -> None:
        """UsageError for the newest."""
        if self._tensor is not None and self._version <= version:
            raise UsageError(
                f"Version {version} of {name!r} is the newest that is published, and cannot be reclaimed.",
                next_step="publish a newer version first.",
            )

    @contextlib.contextmanager
    def changing(self, name: str, version: int) -> Iterator[None]:
        """What is published is of that version when the block has ended well."""
        if self._tensor is None:
            raise UsageError(
                f"Nothing is published as {name!r}, so it cannot be changed.", next_step="publish it first."
            )
        if version < self._version:
            raise UsageError(
                f"{name!r} is of version {self._version} and cannot become {version}.",
                next_step="count upwards.",
            )
        self._is_changing = True
        yield
        self._is_changing = False
        self._version = version
        self.look()

    def snapshot(self, least_version: int = 0) -> CopiedSnapshot | None:
        """A copy; None where there is none of that version, or it is being changed."""
        if self._tensor is None or self._is_changing or self._version < least_version:
            return None
        return CopiedSnapshot(self._rank, self._version, self._tensor.clone())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever published."""
        return self._tensor is None

    def when(self, attempt: Callable[[], bool]) -> None:
        """Try now, and whenever it has changed, until it is true."""
        if not attempt():
            self._waiting.append(attempt)

    def look(self) -> None:
        """It has changed, or its member is gone."""
        self._waiting = [attempt for attempt in self._waiting if not attempt()]


def publication(hub: Hub, rank: int, name: str) -> Publication:
    """The one of this member and name."""
    key = rank, name
    if key not in hub.published:
        made = hub.published[key] = Publication(rank)
        hub.on_change(made.look)
    found: Publication = hub.published[key]
    return found


def fetch(hub: Hub, rank: int, peer: int, name: str, received: Received) -> Handle[Snapshot | None]:
    """What is there when the request comes, back over the link."""
    hub.turns.current.look_up()
    found = publication(hub, peer, name)
    if peer == rank:
        return Done(found.snapshot())
    handle: Pending[Snapshot | None] = Pending(hub, rank, f"fetch {name!r} of rank {peer}")

    def arrived(now_s: float) -> None:
        snapshot = found.snapshot() if peer in hub.present else None
        size_bytes = 0 if snapshot is None else snapshot.tensor.nbytes
        back_s = hub.links.carry(peer, rank, now_s, size_bytes).arrives_at_s

        def take() -> Snapshot | None:
            received(size_bytes)
            return snapshot

        handle.resolve(back_s, take)

    hub.send(rank, peer, 0, arrived)
    return handle


def read(
    hub: Hub, rank: int, peer: int, wanted: tuple[str, int, torch.Tensor], received: Received
) -> Handle[int | None]:
    """As `fetch`, once the version is there, into a tensor."""
    name, version, into = wanted
    hub.turns.current.look_up()
    found = publication(hub, peer, name)
    handle: Pending[int | None] = Pending(hub, rank, f"read {name!r} of rank {peer}")

    def attempt() -> bool:
        now_s = hub.turns.now_s
        is_none = peer not in hub.present or (found.is_empty and version == 0)
        snapshot = None if is_none else found.snapshot(version)
        if is_none:
            handle.resolve(now_s, lambda: None)
        elif snapshot is not None:
            size_bytes = 0 if peer == rank else snapshot.tensor.nbytes
            back_s = now_s if peer == rank else hub.links.carry(peer, rank, now_s, size_bytes).arrives_at_s

            def take() -> int:
                received(size_bytes)
                return copy_out(snapshot, into, name)

            handle.resolve(back_s, take)
        return handle.is_resolved

    if peer == rank:
        found.when(attempt)
    else:
        hub.send(rank, peer, 0, lambda _: found.when(attempt))
    return handle
