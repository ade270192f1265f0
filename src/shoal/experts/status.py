"""How a host of experts is at a moment, as numbers and as a line. Needs no torch."""

from __future__ import annotations

import msgspec

from shoal.report.units import digits


class ExpertStatus(msgspec.Struct, frozen=True):
    """One expert, since it is served here."""

    uid: str
    num_forward_batches: int
    num_forward_samples: int
    num_backward_batches: int
    num_backward_samples: int
    num_updates: int
    busy_s: float
    num_clipped: int = 0
    """Steps whose gradient was far above what is usual for the expert."""


class HostStatus(msgspec.Struct, frozen=True):
    """A host; numbers only grow, but for those of what is there now."""

    up_s: float
    num_waiting: int
    num_failed: int
    """Requests that were accepted and ended in an error."""
    num_peers: int
    """That the DHT knows."""
    is_leaving: bool
    experts: tuple[ExpertStatus, ...]
    num_averaged: int = 0
    """Averages with other replicas that this host began."""
    num_copied: int = 0
    """Experts that have become copies of other replicas."""
    num_adopted: int = 0

    @property
    def num_samples(self) -> int:
        """Computed so far, forward and backward."""
        return sum(expert.num_forward_samples + expert.num_backward_samples for expert in self.experts)

    @property
    def num_batches(self) -> int:
        """That these were computed in."""
        return sum(expert.num_forward_batches + expert.num_backward_batches for expert in self.experts)

    def line(self, before: HostStatus) -> str:
        """In words; rates and batches are those since `before`."""
        took_s = self.up_s - before.up_s
        num_samples = self.num_samples - before.num_samples
        num_batches = self.num_batches - before.num_batches
        rate = num_samples / took_s if took_s > 0 else 0.0
        mean = f" of {digits(num_samples / num_batches)}" if num_batches else ""
        parts = [
            f"{digits(rate)} samples/s",
            f"{self.num_waiting:,} waiting",
            f"{len(self.experts):,} expert{'' if len(self.experts) == 1 else 's'}",
            f"{num_batches:,} batch{'' if num_batches == 1 else 'es'}{mean}",
        ]
        if num_clipped := sum(expert.num_clipped for expert in self.experts):
            parts.append(f"{num_clipped:,} clipped")
        if self.num_failed:
            parts.append(f"{self.num_failed:,} failed")
        if self.is_leaving:
            parts.append("leaving")
        return ", ".join(parts)
