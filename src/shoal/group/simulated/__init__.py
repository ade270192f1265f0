"""The group in virtual time, whose members are threads that take turns."""

from shoal.group.simulated.group import SimulatedGroup
from shoal.group.simulated.network import SimulatedNetwork

__all__ = ["SimulatedGroup", "SimulatedNetwork"]
