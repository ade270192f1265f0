"""The peers that train together, and the operations between them."""

from shoal.group.base import (
    Done,
    Group,
    GroupSettings,
    GroupStats,
    Handle,
    Loss,
    Reduction,
    Snapshot,
    Window,
    WindowSlot,
)
from shoal.group.cluster import ClusterGroup
from shoal.group.functions import (
    Mutex,
    exchange_machines,
    next_number,
    pair_gossip,
    share,
    span,
    spread_over_ranks,
)
from shoal.group.host import HostGroup, open_host_group
from shoal.group.host.memory import MemoryFull
from shoal.group.opening import init
from shoal.group.operations import GroupWrapper
from shoal.group.solo import SoloGroup
from shoal.group.wrappers import Faulty, Metered, Shaped, Traced, Traffic
from shoal.report.timeline import Timeline, merge

__all__ = [
    "ClusterGroup",
    "Done",
    "Faulty",
    "Group",
    "GroupSettings",
    "GroupStats",
    "GroupWrapper",
    "Handle",
    "HostGroup",
    "Loss",
    "MemoryFull",
    "Metered",
    "Mutex",
    "Reduction",
    "Shaped",
    "Snapshot",
    "SoloGroup",
    "Timeline",
    "Traced",
    "Traffic",
    "Window",
    "WindowSlot",
    "exchange_machines",
    "init",
    "merge",
    "next_number",
    "open_host_group",
    "pair_gossip",
    "share",
    "span",
    "spread_over_ranks",
]
