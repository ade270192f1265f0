"""The consistent start: the same tensors and optimizers on all members, with the values of rank 0.

What already shares the model among the same workers is refused. Two that average the same gradients hide each
other's work: under DDP the workers of `local-sgd` never differ, and the loss looks plausible. Certain signs
are a wrapper of torch's (DistributedDataParallel, FSDP) around the model or around a module that shares its
parameters, an FSDP mesh, and Accelerate with several processes. A default process group alone is no sign:
programs open one to log, and Shoal computes by it. Models that FSDP2 shards inside each machine are another
thing (`group.replicas`): a few strategies and options train them.

Optimizers are built alike on all members, or take what rank 0 has, where that is further on: so a checkpoint
that only rank 0 has loaded is everybody's. State goes by the order of the parameters in the optimizer, which
is compared by name; schedulers are no part of it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shoal.core.errors import UsageError
from shoal.group import Group, share
from shoal.group.functions import take_state
from shoal.tensors import BucketLayout, is_sharded
from shoal.tensors.checkpoint import is_scalar, scalar

if TYPE_CHECKING:
    from shoal.strategies.session import TrainingSession
    from shoal.strategies.strategy import Strategy

log = logging.getLogger(__name__)

_OWN_MARK = "is_wrapped_by_shoal"
"""An attribute of modules around which a strategy of Shoal itself puts such a wrapper."""
_NEXT_STEP = """start without torchrun's variables, and attach the model without a wrapper:
    shoal run --env shoal -np {size} train.py
    strategy.attach(model, optimizer)
  or leave attach() and shoal.shard() out, and let the other share it."""


def named_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Names all that must be equal at the start: parameters, each once, the optimizer's own, and buffers."""
    named: dict[str, torch.Tensor] = dict(model.named_parameters())
    seen = {id(tensor) for tensor in named.values()}
    for number, group in enumerate(optimizer.param_groups):
        for position, tensor in enumerate(group["params"]):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[f"optimizer.{number}.{position}"] = tensor
    named.update(model.named_buffers())
    for name, tensor in named.items():
        if is_lazy(tensor):
            raise UsageError(
                f"{name} has no shape yet: its module is a lazy one.",
                next_step="run one forward before attach.",
            )
    return named


def device_of(parameters: Sequence[torch.Tensor]) -> torch.device:
    """The one that all trainable parameters are on."""
    devices = {parameter.device: None for parameter in parameters}
    if len(devices) > 1:
        raise UsageError(
            f"the model is on several devices: {', '.join(map(str, devices))}.",
            next_step="put it on one before attach.",
        )
    return next(iter(devices), torch.device("cpu"))


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
        and not getattr(found.module, _OWN_MARK, False)
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


_attached: WeakKeyDictionary[nn.Module, WeakSet[TrainingSession]] = WeakKeyDictionary()
"""What was attached to a model, to see which of its parameters are shared."""


def note_attached(session: TrainingSession) -> None:
    """Takes note that a session shares parameters of its model, as long as it is open."""
    _attached.setdefault(session.model, WeakSet()).add(session)


def shared_of(model: nn.Module, *, by_gradients: bool = False) -> set[int]:
    """Gives the ids of a model's parameters that strategies share, or those alone that share gradients."""
    return {
        id(tensor)
        for each in _attached.get(model, ())
        if each.is_open and (each.strategy.shares_gradients or not by_gradients)
        for tensor in each.trainable
    }


def warn_of_unshared(session: TrainingSession, named: Mapping[str, nn.Parameter]) -> None:
    """At the first step: names those that have gradients, and are shared by no strategy on this model."""
    shared = shared_of(session.model)
    names = [name for name, each in named.items() if each.grad is not None and id(each) not in shared]
    if names:
        log.warning(
            "%s: %s %s trained, and not by this optimizer: the workers' values were equal at the start, "
            "and are not shared. Where a second optimizer trains them, attach a strategy of its own to "
            "it, before the first step: `shoal.from_args(group).attach(model, second_optimizer)`.",
            session.strategy.name,
            ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            "are" if len(names) > 1 else "is",
        )


def refuse_sharded(session: TrainingSession) -> None:
    """UsageError for what a sharded model cannot be trained with."""
    strategy, options = session.strategy, session.options
    if not strategy.trains_shards:
        raise UsageError(
            f"{strategy.name} does not train models that are sharded by FSDP2; diloco and local-sgd do.",
            next_step="take --strategy diloco or local-sgd, or attach a model that is not sharded.",
        )
    whole = [name for name, tensor in session.named_parameters.items() if not is_sharded(tensor)]
    if whole:
        raise UsageError(
            f"{whole[0]} is not sharded, and other parameters are: the workers of a machine would train it "
            "apart from each other.",
            next_step="call fully_shard on the whole model, too, and make the optimizer after that.",
        )
    refused = {
        "monitor": options.monitor,
        "should_broadcast_buffers": options.should_broadcast_buffers,
        "on_nonfinite=skip": options.on_nonfinite == "skip",
    }
    for option, is_asked in refused.items():
        if is_asked:
            raise UsageError(
                f"{option} does not work with a model that is sharded by FSDP2.",
                cause="a worker sees its own shard of the gradients, or its own buffers.",
                next_step="leave the option out; on_nonfinite=stop works.",
            )


@contextlib.contextmanager
def refuse_unfit(what: str, next_step: str) -> Iterator[None]:
    """UsageError where model and optimizer in the block do not take what was kept of an earlier run."""
    try:
        yield
    except (RuntimeError, KeyError, ValueError, TypeError) as error:
        raise UsageError(
            f"{what} does not fit: {error}",
            cause="the model or the optimizer is built in another way than in the run that kept it.",
            next_step=next_step,
        ) from error


def require_equal(group: Group, tensors: Mapping[str, torch.Tensor]) -> None:
    """UsageError, on all members, when what they hold differs in more than values; names the first tensor."""
    mine = [
        [name, str(tensor.dtype), list(tensor.shape), tensor.requires_grad, *_sharding(tensor)]
        for name, tensor in tensors.items()
    ]
    digests = share(group, hashlib.sha256(msgspec.msgpack.encode(mine)).digest())
    if len({*digests}) == 1:
        return
    ranks = group.members
    everybody = share(group, mine)
    for rank, theirs in zip(ranks, everybody, strict=True):
        for first, other in zip_longest(everybody[0], theirs):
            if first != other:
                raise UsageError(
                    f"rank {rank} has {_words(other)} where rank {ranks[0]} has {_words(first)}.",
                    cause="the model is built in another way there (another number of classes, other "
                    "layers frozen, another version of the code).",
                    next_step="build the same model on all workers; values may differ, rank 0's are taken.",
                )


def require_same_count(group: Group, strategy: Strategy) -> None:
    """UsageError, on all members, when they have not done equally many: they would share at other times."""
    ranks = group.members
    everybody = share(group, [strategy.steps, strategy.rounds])
    for rank, theirs in zip(ranks, everybody, strict=True):
        if theirs != everybody[0]:
            (steps, rounds), (first_steps, first_rounds) = theirs, everybody[0]
            raise UsageError(
                f"{strategy.name} on rank {rank} has done {steps} steps and {rounds} rounds, on rank "
                f"{ranks[0]} {first_steps} and {first_rounds}.",
                cause="a state of the strategy was loaded on some workers only, or is of another time.",
                next_step="load the state of one checkpoint on all workers.",
            )


def require_equal_layouts(group: Group, layouts: list[BucketLayout]) -> None:
    """UsageError when parameters of equal shapes lie in another order (channels_last on one worker only)."""
    mine = msgspec.msgpack.encode(layouts)
    for rank, theirs in zip(group.members, share(group, mine), strict=True):
        if theirs != mine:
            raise UsageError(
                f"the parameters of rank {rank} lie otherwise in memory than those of rank {group.rank}.",
                cause="another memory format (channels_last), another order, or other frozen parameters.",
                next_step="build the model in the same way on all workers, its memory format included.",
            )


def _sharding(tensor: Any) -> list[str]:
    return [str((tensor.device_mesh.shape, tensor.placements))] if is_sharded(tensor) else []


def _words(entry: list[object] | None) -> str:
    if entry is None:
        return "no tensor"
    name, dtype, shape, is_trainable, *sharding = entry
    kind = str(dtype).removeprefix("torch.")
    parts = ", in parts" if sharding else ""
    return f"{name} ({kind}, shape {shape}, {'trainable' if is_trainable else 'not trainable'}{parts})"


class _Account(msgspec.Struct, array_like=True):
    """What one member says of its optimizer."""

    rank: int
    names: bytes
    """A digest of the parameters' names, group by group."""
    settings: list[dict[str, Any]]
    """Of each group: lr, momentum and so on."""
    has_state: bool


def start_optimizers(session: TrainingSession, *, should_take_state: bool, has_loaded: bool) -> None:
    """Compare settings, or take settings and state of rank 0 where that has state or `has_loaded` some.

    Collective. What is loaded may be settings alone, such as a rate that a scheduler has changed. Settings
    that differ are an error, on all members, where gradients are shared, and a warning elsewhere.
    """
    group, optimizer = session.group, session.optimizer
    own = _account(group.rank, optimizer, session.named_tensors)
    accounts = [msgspec.convert(account, _Account) for account in share(group, own)]
    first = accounts[0]
    for account in accounts:
        if account.names != first.names:
            raise UsageError(
                f"the optimizer of rank {account.rank} has other parameters, or others first, than that of "
                f"rank {first.rank}.",
                next_step="give it the same parameters, in the same groups and order, on all workers.",
            )
    if should_take_state and (has_loaded or first.has_state):
        state = take_state(group, optimizer.state_dict, first.rank)
        if group.rank != first.rank:
            optimizer.load_state_dict(state)
        return
    difference = _difference(accounts)
    if difference and session.strategy.shares_gradients:
        raise UsageError(
            f"{difference}: the replicas would drift apart.",
            cause="the optimizer is built in another way there, or a checkpoint was loaded there alone.",
            next_step="build it alike on all workers; a checkpoint is loaded on all, or on rank 0.",
        )
    if difference and group.rank == first.rank:
        log.warning("%s", difference)


def _account(rank: int, optimizer: Optimizer, named: Mapping[str, torch.Tensor]) -> _Account:
    names = {id(tensor): name for name, tensor in named.items()}
    groups = [[names[id(tensor)] for tensor in group["params"]] for group in optimizer.param_groups]
    settings = [
        {name: _plain(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    digest = hashlib.sha256(msgspec.msgpack.encode(groups)).digest()
    return _Account(rank, digest, settings, any(optimizer.state.values()))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return scalar(value) if is_scalar(value) else type(value).__name__


def _difference(accounts: Sequence[_Account]) -> str | None:
    first = accounts[0]
    for account in accounts:
        if account.has_state and not first.has_state:
            return f"the optimizer of rank {account.rank} has state, that of rank {first.rank} has none"
        for number, (mine, theirs) in enumerate(zip(first.settings, account.settings, strict=True)):
            for name in (*mine, *theirs):
                if mine.get(name) != theirs.get(name):
                    where = f" in group {number}" if len(first.settings) > 1 else ""
                    return (
                        f"the optimizer of rank {account.rank} has {name} {theirs.get(name)}{where}, "
                        f"that of rank {first.rank} {mine.get(name)}"
                    )
    return None
