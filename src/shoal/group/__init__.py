"""The peers that train together, and the operations between them."""

from shoal.group.base import Done, Group, GroupSettings, Handle, Loss, Reduction, Slot, Snapshot, Window
from shoal.group.cluster import TorchGroup
from shoal.group.conditions import Faulty, Shaped
from shoal.group.host import HostGroup, open_host_group
from shoal.group.host.memory import MemoryFull
from shoal.group.observed import Metered, Traced, Traffic
from shoal.group.opening import init
from shoal.group.operations import GroupWrapper
from shoal.group.solo import SoloGroup
from shoal.report.timeline import Timeline, merge

__all__ = [
    "Done",
    "Faulty",
    "Group",
    "GroupSettings",
    "GroupWrapper",
    "Handle",
    "HostGroup",
    "Loss",
    "MemoryFull",
    "Metered",
    "Reduction",
    "Shaped",
    "Slot",
    "Snapshot",
    "SoloGroup",
    "Timeline",
    "TorchGroup",
    "Traced",
    "Traffic",
    "Window",
    "init",
    "merge",
    "open_host_group",
]
