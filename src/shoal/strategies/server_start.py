"""What workers and servers do together besides training: the start, and the state of the optimizers.

All of it is collective in `Group.everybody`, with what the first worker has.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from shoal.group import Group
from shoal.strategies.attachment import Attachment
from shoal.strategies.start import require_equal, take_values
from shoal.strategies.states import take_state


def take_first_worker(group: Group, root: int, attachment: Attachment) -> None:
    """The parameters, buffers and optimizer state of rank `root` become everybody's."""
    require_equal(group, attachment.named_tensors)
    take_values(group, list(attachment.named_tensors.values()), root)
    has_state = group.share(any(attachment.optimizer.state.values()))
    if has_state[list(group.members).index(root)]:
        state = take_state(group, attachment.optimizer.state_dict, root)
        if group.rank != root:
            attachment.optimizer.load_state_dict(state)


def give_servers_state(group: Group, num_servers: int, optimizer: Optimizer) -> dict[str, Any]:
    """One `state_dict` of all that the servers' optimizers keep, on everybody; settings are one's own."""
    whole = optimizer.state_dict()
    whole["state"] = {}
    for server in range(num_servers):
        # each has state for its own share alone, by positions among all parameters
        whole["state"].update(take_state(group, lambda: optimizer.state_dict()["state"], server))
    return whole
