"""What workers and servers do together besides training: the start, and the state of the optimizers.

All of it is collective in `Group.everybody`, with what the first worker has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.group import Group, share
from shoal.strategies.attachment import Attachment
from shoal.strategies.start import require_equal, take_state, take_values
from shoal.tensors.checkpoint import flatten


def take_first_worker(group: Group, root: int, attachment: Attachment) -> None:
    """The parameters, buffers, and the optimizer's settings and state of rank `root` become everybody's.

    Where its optimizer has no state, others keep theirs. UsageError on all when one is of another kind.
    """
    require_equal(group, attachment.named_tensors)
    take_values(group, list(attachment.named_tensors.values()), root)
    optimizer = attachment.optimizer
    shape = [sorted(optimizer.defaults), [len(part["params"]) for part in optimizer.param_groups]]
    everybody = share(group, [any(optimizer.state.values()), shape])
    for rank, (_, theirs) in zip(group.members, everybody, strict=True):
        if theirs != everybody[0][1]:
            raise UsageError(
                f"rank {rank} of workers and servers has another optimizer than rank {group.members[0]}.",
                next_step="build the same one, with the same groups of parameters, on all.",
            )
    has_state, _ = everybody[list(group.members).index(root)]
    if has_state:
        state = take_state(group, optimizer.state_dict, root)
        if group.rank != root:
            optimizer.load_state_dict(state)
        return
    settings = take_state(group, lambda: _settings(optimizer), root)
    if group.rank != root:
        for mine, first in zip(optimizer.param_groups, settings, strict=True):
            mine.update(first)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group, what can be sent."""
    return [
        {name: value for name, value in group.items() if name != "params" and _can_travel(value)}
        for group in optimizer.param_groups
    ]


def _can_travel(value: Any) -> bool:
    try:
        flatten(value)
    except UsageError:
        return False
    return True


def give_servers_state(group: Group, num_servers: int, optimizer: Optimizer) -> dict[str, Any]:
    """One `state_dict` of all that the servers' optimizers keep, on everybody; settings are one's own."""
    return whole_state(
        optimizer,
        [take_state(group, lambda: optimizer.state_dict()["state"], server) for server in range(num_servers)],
    )


def whole_state(optimizer: Optimizer, shares: Sequence[Mapping[int, Any]]) -> dict[str, Any]:
    """The `state_dict` of an optimizer whose state lies with the servers."""
    # each has state for its own share alone, by positions among all parameters
    state = {position: kept for share in shares for position, kept in share.items()}
    return {**optimizer.state_dict(), "state": state}
