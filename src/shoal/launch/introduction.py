"""What an agent says of its machine, first of all."""

from __future__ import annotations

import os
import socket

from shoal._version import __version__
from shoal.core import SYSTEM_CLOCK
from shoal.core.placement import num_cores
from shoal.core.processes import boot_id, own_addresses
from shoal.launch.messages import Hello
from shoal.launch.settings import free_port


def introduce() -> Hello:
    """For the head to know whether and how this machine can take part."""
    # 'client address, port, server address, port', as sshd sets it
    words = os.environ.get("SSH_CONNECTION", "").split()
    head_address, _, reached_at, _ = words if len(words) == 4 else [""] * 4
    return Hello(
        version=__version__,
        host=socket.gethostname(),
        addresses=own_addresses(),
        num_cores=num_cores(),
        boot_id=boot_id(),
        clock_s=SYSTEM_CLOCK.now_s(),
        free_port=free_port(),
        reached_at=reached_at,
        head_address=head_address,
    )
