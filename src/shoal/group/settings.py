"""What a group is opened with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from shoal.core import UsageError
from shoal.core.run_options import SILENCE_S


class GroupSettings(msgspec.Struct, frozen=True):
    """Of one group, alike on all its members."""

    key: str
    """Tells this group from others on the machine; its members share it."""
    patience: float = 1.0
    timeout_s: float | None = None
    """The longest wait for a peer that is alive; None waits on, with a line every ten seconds."""
    workers_per_machine: int | None = None
    """Splits one machine into several, to try out what is meant for several."""
    names: tuple[int, ...] = ()
    """For a machine's group inside a larger one: its members' ranks there, for what is said to people."""
    backend: Literal["gloo", "nccl"] | None = None
    """Of torch.distributed, which then carries collectives of all tensors (gloo) or those of devices."""
    network_interface: str | None = None
    """Through which machines talk: its name, or an address of it; None finds the one that reaches rank 0."""
    on_split: Literal["stop", "continue", "ignore"] = "stop"
    """What the side of a cut network does that should stop: see `partition`. `ignore` also says nothing."""
    folder: Path | None = None
    """Where shared memory lies; by default /dev/shm where there is one, else the temporary folder."""

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise UsageError(f"A patience of {self.patience} waits for nobody.", next_step="give 1 or more.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"A timeout of {self.timeout_s} s is none.", next_step="leave it out.")

    def name_of(self, rank: int) -> int:
        """The rank that people know a member by."""
        return self.names[rank] if self.names else rank

    @property
    def silence_s(self) -> float:
        """How long a peer may be silent."""
        return SILENCE_S * self.patience
