"""What every room stands on: ids and keys, errors, time, the loop thread, task scopes and placement."""

from shoal.core.clock import SYSTEM_CLOCK, Clock, ManualClock, SystemClock, running_clock
from shoal.core.deadlines import AdaptiveDeadline, Deadline
from shoal.core.errors import (
    BenchmarkError,
    CheckpointError,
    DeadlineExceeded,
    IdentityError,
    LimitExceeded,
    NetworkSplit,
    NotComparable,
    PeerBusy,
    PeerError,
    PeerLeaving,
    PeerLost,
    PeerRefused,
    PeerUnreachable,
    ProtocolError,
    RemoteFailure,
    ReportError,
    ShoalError,
    TensorError,
    UsageError,
    VersionMismatch,
)
from shoal.core.ids import Address, Key, Peer, PeerId
from shoal.core.loop import BlockingBridge, LoopThread
from shoal.core.placement import Placement
from shoal.core.scope import Scope, StandingScope, fanout, results_of
from shoal.core.virtual import VirtualLoop, run_virtual

__all__ = [
    "SYSTEM_CLOCK",
    "AdaptiveDeadline",
    "Address",
    "BenchmarkError",
    "BlockingBridge",
    "CheckpointError",
    "Clock",
    "Deadline",
    "DeadlineExceeded",
    "IdentityError",
    "Key",
    "LimitExceeded",
    "LoopThread",
    "ManualClock",
    "NetworkSplit",
    "NotComparable",
    "Peer",
    "PeerBusy",
    "PeerError",
    "PeerId",
    "PeerLeaving",
    "PeerLost",
    "PeerRefused",
    "PeerUnreachable",
    "Placement",
    "ProtocolError",
    "RemoteFailure",
    "ReportError",
    "Scope",
    "ShoalError",
    "StandingScope",
    "SystemClock",
    "TensorError",
    "UsageError",
    "VersionMismatch",
    "VirtualLoop",
    "fanout",
    "results_of",
    "run_virtual",
    "running_clock",
]
