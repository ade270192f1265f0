"""What a group is opened with."""

from __future__ import annotations

from pathlib import Path

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
    folder: Path | None = None
    """Where shared memory lies; by default /dev/shm where there is one, else the temporary folder."""

    def __post_init__(self) -> None:
        if not self.patience > 0:
            raise UsageError(f"A patience of {self.patience} waits for nobody.", next_step="give 1 or more.")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"A timeout of {self.timeout_s} s is none.", next_step="leave it out.")

    @property
    def silence_s(self) -> float:
        """How long a peer may be silent."""
        return SILENCE_S * self.patience
