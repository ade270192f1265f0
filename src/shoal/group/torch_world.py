"""The end of torch.distributed in a process that has brought it up."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist

_ended: deque[Any] = deque(maxlen=4)


def destroy_world() -> None:
    """As torch's `destroy_process_group`, without the deadlock that this can be.

    When the last reference to a process group goes, torch waits for gloo's threads, and holds the
    interpreter's lock meanwhile, for which a thread may wait that has just done its last operation. So a
    group is let go of only when others have come after it.
    """
    _ended.append(dist.group.WORLD)
    dist.destroy_process_group()
