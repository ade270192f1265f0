"""The group in virtual time, whose members are threads that take turns."""

from shoal.group.simulated.group import SimulatedGroup

__all__ = ["SimulatedGroup"]
