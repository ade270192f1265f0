"""What an expert may refuse."""

from __future__ import annotations

from shoal.core import PeerRefused, ShoalError


class RefusedUpdate(PeerRefused):
    """A gradient was not finite; the expert is as it was before."""


class MergedTooLarge(ShoalError):
    """The gradient of several requests together is above the limit: each has to be computed by itself.

    One of them may be a liar's, beside which the others would be scaled down to nothing.
    """
