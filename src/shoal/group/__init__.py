"""The peers that train together, and the operations between them."""

from shoal.group.arena import MemoryFull
from shoal.group.base import Done, Group, Handle, Loss, Reduction, Slot, Snapshot, Window
from shoal.group.faulty import Faulty
from shoal.group.host import HostGroup, open_host_group
from shoal.group.metered import Metered, Traffic
from shoal.group.opening import init
from shoal.group.settings import GroupSettings
from shoal.group.shaped import Shaped
from shoal.group.solo import SoloGroup
from shoal.group.timeline import Timeline, merge
from shoal.group.torch_group import TorchGroup
from shoal.group.traced import Traced
from shoal.group.wrapper import GroupWrapper

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
