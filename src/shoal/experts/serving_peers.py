"""Who serves experts, for those who would act on it that nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core import UsageError
from shoal.experts.names import ExpertAddress, ExpertUid, get_experts

if TYPE_CHECKING:
    from shoal.dht.node import DHT


async def who_serves(dht: DHT, uids: Sequence[str]) -> list[ExpertAddress | None]:
    """Where each of these experts can be called, at all who serve it; None for those that nobody serves.

    DeadlineExceeded or PeerUnreachable when that could not be found out: it is not taken for absence.
    """
    return await get_experts(dht, uids, latest=True, must_end=True)


def is_in_grid(uid: str) -> bool:
    """Whether an expert can be found in the DHT: a plain name such as `expert0` cannot."""
    try:
        ExpertUid.of(uid)
    except UsageError:
        return False
    return True
