"""What an expert may refuse."""

from __future__ import annotations

from shoal.core import PeerRefused


class RefusedUpdate(PeerRefused):
    """A gradient was not finite; the expert is as it was before."""
