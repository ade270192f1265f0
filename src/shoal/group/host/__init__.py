"""The group of the workers of one machine, in shared memory."""

from shoal.group.host.group import HostGroup, open_host_group

__all__ = ["HostGroup", "open_host_group"]
