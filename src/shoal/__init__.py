"""Shoal trains one PyTorch model on many machines, and measures every way of doing so in the same terms.

The names below are loaded when they are first used: importing the package opens nothing, starts nothing and
does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shoal._version import __version__

_HOMES = {
    "Address": "shoal.core",
    "AdaptiveDeadline": "shoal.core",
    "Bucket": "shoal.tensors",
    "Codec": "shoal.tensors",
    "Deadline": "shoal.core",
    "Diff": "shoal.report",
    "Endpoint": "shoal.transport",
    "ErrorFeedback": "shoal.tensors",
    "Head": "shoal.transport",
    "Identity": "shoal.core.identity",
    "Key": "shoal.core",
    "Limits": "shoal.transport",
    "LoopThread": "shoal.core",
    "Membership": "shoal.transport",
    "Peer": "shoal.core",
    "PeerId": "shoal.core",
    "Placement": "shoal.core",
    "Profile": "shoal.transport",
    "Reply": "shoal.transport",
    "Report": "shoal.report",
    "ShoalError": "shoal.core",
    "StreamTransport": "shoal.transport",
    "SwarmSecret": "shoal.transport",
    "Transport": "shoal.transport",
}

if TYPE_CHECKING:
    from shoal.core import (
        AdaptiveDeadline,
        Address,
        Deadline,
        Key,
        LoopThread,
        Peer,
        PeerId,
        Placement,
        ShoalError,
    )
    from shoal.core.identity import Identity
    from shoal.report import Diff, Report
    from shoal.tensors import Bucket, Codec, ErrorFeedback
    from shoal.transport import (
        Endpoint,
        Head,
        Limits,
        Membership,
        Profile,
        Reply,
        StreamTransport,
        SwarmSecret,
        Transport,
    )

__all__ = [
    "AdaptiveDeadline",
    "Address",
    "Bucket",
    "Codec",
    "Deadline",
    "Diff",
    "Endpoint",
    "ErrorFeedback",
    "Head",
    "Identity",
    "Key",
    "Limits",
    "LoopThread",
    "Membership",
    "Peer",
    "PeerId",
    "Placement",
    "Profile",
    "Reply",
    "Report",
    "ShoalError",
    "StreamTransport",
    "SwarmSecret",
    "Transport",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
