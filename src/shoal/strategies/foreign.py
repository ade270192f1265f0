"""What already shares a model among the same workers, beside Shoal: `attach` refuses it.

Two that average the same gradients hide each other's work: under DDP the workers of `local-sgd` never
differ, and the loss looks plausible. Certain signs are a wrapper of torch's (DistributedDataParallel, FSDP)
around the model or around a module that shares its parameters, an FSDP mesh, and Accelerate with several
processes. A default process group alone is no sign: programs open one to log, and Shoal computes by it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import UsageError
from shoal.group import Group

OWN_MARK = "is_wrapped_by_shoal"
"""An attribute of modules around which a strategy of Shoal itself puts such a wrapper."""
_NEXT_STEP = """start without torchrun's variables, and attach the model without a wrapper:
    shoal run --env shoal -np {size} train.py
    strategy.attach(model, optimizer)
  or leave attach() and shoal.shard() out, and let the other share it."""


def refuse_foreign(model: nn.Module, group: Group) -> None:
    """UsageError when something else shares this model among workers of the group."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        num_processes = state.PartialState._shared_state.get("num_processes", 1)
        if num_processes > 1:
            raise _refusal(f"Accelerate shares this model among {num_processes} processes", group)
    if not dist.is_available() or not dist.is_initialized():
        return
    # a world of other ranks is a mesh inside of one worker's own processes
    if (dist.get_rank(), dist.get_world_size()) != (group.rank, group.size):
        return
    if _wrappers(model):
        gc.collect()  # one that nobody uses any more shares nothing
    for wrapper in _wrappers(model):
        _refuse_ranks(type(wrapper).__name__, dist.get_process_group_ranks(wrapper.process_group), group)
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            _refuse_ranks("fully_shard", mesh.mesh.flatten().tolist(), group)


def _wrappers(model: nn.Module) -> list[Any]:
    """Those that have parameters of the model, inside or around it: some trainers hand out what is inside."""
    kinds: list[type] = [DistributedDataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds.append(fsdp.FullyShardedDataParallel)
    for kind in kinds:  # which grows: issubclass() asks an abstract class, and takes ten times as long
        kinds += kind.__subclasses__()
    own = {id(parameter) for parameter in model.parameters()}
    return [
        found
        for found in gc.get_objects()
        if type(found) in kinds
        and not getattr(found.module, OWN_MARK, False)
        and any(id(parameter) in own for parameter in found.parameters())
    ]


def _refuse_ranks(name: str, ranks: Sequence[int], group: Group) -> None:
    """Unless they are some of the group's, inside of one machine: those are one worker to the others."""
    is_inside = len({group.machines[rank] for rank in ranks}) == 1
    if len(ranks) > 1 and not (is_inside and len(ranks) < group.size):
        raise _refusal(f"{name} shares this model among {len(ranks)} ranks of torch.distributed", group)


def _refusal(what: str, group: Group) -> UsageError:
    return UsageError(
        f"{what}, and so would Shoal.",
        cause="the two would average the same gradients, and hide from each other what they did.",
        next_step=_NEXT_STEP.format(size=group.size),
    )
