"""What an expert is, as tensors and numbers: copied out, and put back so that training goes on to the bit.

Names are `module.<name>` and `optimizer.<index>.<key>`, where the index counts the optimizer's parameters
through all of its groups, and `applied_ids`. Files are left to the checkpoints.

An optimizer believes what it is given: without a tensor that it counts on, or with one of another shape, each
of its later steps would fail, and what is not finite would come to be in the weights. So what was saved, or
what a peer has sent, is checked against what such an optimizer knows after a step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shoal.core import UsageError

# How an optimizer computes is not part of what it has learned, and may differ from device to device.
_WAYS_TO_COMPUTE = ("foreach", "fused", "capturable", "differentiable")
APPLIED_IDS = "applied_ids"
"""The name of a tensor of bytes, a row for each request. Who knows an id may ask for its answer, so that ids
are saved, and are given to no other peer."""
_ID_BYTES = 16
_PROGRESS = ("last_epoch", "_step_count")  # of a scheduler: all but how it was set up


@dataclass(frozen=True, slots=True)
class ExpertState:
    """A snapshot; nothing in it is shared with the expert."""

    tensors: dict[str, torch.Tensor]
    """Contiguous, on the CPU."""
    numbers: dict[str, Any]
    """Whatever JSON can hold: `num_updates`, `gradient_norms`, `optimizer`, `scheduler`."""

    @property
    def num_updates(self) -> int:
        """Of the expert, when the snapshot was made."""
        number = self.numbers.get("num_updates", 0)
        return number if isinstance(number, int) and number >= 0 else 0


class _OptimizerNumbers(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    sizes: list[int]
    """How many parameters each group has."""
    groups: list[dict[str, Any]]
    values: dict[str, dict[str, Any]]
    """What the optimizer knows of a parameter beside tensors, by its index."""


class _SchedulerNumbers(msgspec.Struct, forbid_unknown_fields=True):
    kind: str
    values: dict[str, Any]


def cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy with memory of its own."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def ids_as_tensor(ids: Iterable[bytes]) -> torch.Tensor:
    """The ids of requests, to be saved in one step with what these have taught."""
    return torch.frombuffer(bytearray(b"".join(ids)), dtype=torch.uint8).view(-1, _ID_BYTES)


def applied_ids(state: ExpertState) -> list[bytes]:
    """What `ids_as_tensor` was given; none where the state has no such tensor."""
    rows = state.tensors.get(APPLIED_IDS)
    if rows is None or rows.dtype is not torch.uint8 or rows.dim() != 2 or rows.shape[1] != _ID_BYTES:
        return []
    return [bytes(row) for row in rows.tolist()]


def check_module_state(
    uid: str, module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The module's part; UsageError unless it has exactly its names, shapes and dtypes."""
    saved = {
        name.removeprefix("module."): tensor for name, tensor in tensors.items() if name.startswith("module.")
    }
    wanted = module.state_dict()
    problems = [f"{name} is missing" for name in wanted if name not in saved]
    problems += [f"{name} is unknown" for name in saved if name not in wanted]
    problems += [
        f"{name} is {saved[name].dtype}{list(saved[name].shape)}, not {value.dtype}{list(value.shape)}"
        for name, value in wanted.items()
        if name in saved and (saved[name].shape, saved[name].dtype) != (value.shape, value.dtype)
    ]
    if problems:
        more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UsageError(
            f"The state does not fit expert {uid}: {'; '.join(problems[:5])}{more}.",
            cause="it was saved by an expert of another class or hidden dimension.",
            next_step="serve the class with which it was saved, or use another checkpoint folder.",
        )
    return saved


def optimizer_state(optimizer: torch.optim.Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by their name in an `ExpertState`, and numbers."""
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimizer.{index}.{key}"] = cpu_copy(value)
            else:
                values.setdefault(str(index), {})[key] = value
    groups = [
        {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params" and key not in _WAYS_TO_COMPUTE
        }
        for group in optimizer.param_groups
    ]
    kind = type(optimizer).__name__
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    numbers = {"kind": kind, "sizes": sizes, "groups": groups, "values": values}
    return tensors, _as_json(numbers, f"{kind}'s state")


def restore_optimizer(
    optimizer: torch.optim.Optimizer, state: ExpertState, *, keeps_settings: bool = False
) -> list[str]:
    """Put back what `optimizer_state` gave; what cannot be this optimizer's starts anew, with a warning.

    With `keeps_settings` its rates, betas and the like stay its own; where a scheduler lowers the rate, it is
    lowered as far as the other's.
    """
    kind = type(optimizer).__name__
    optimizer.state.clear()
    try:
        numbers = msgspec.convert(state.numbers.get("optimizer"), _OptimizerNumbers)
    except msgspec.ValidationError:
        return [f"the state has nothing for {kind}, which starts anew"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if numbers.kind != kind or numbers.sizes != sizes or len(numbers.groups) != len(sizes):
        return [f"the state is that of another optimizer ({numbers.kind}), so {kind} starts anew"]
    try:
        restored = _restored(optimizer, state.tensors, numbers, keeps_settings=keeps_settings)
    except _Misfit as misfit:
        return [f"the state of {kind} cannot be used, as {misfit}, so it starts anew"]
    warnings: list[str] = []
    for group, saved in zip(optimizer.param_groups, numbers.groups, strict=True):
        if keeps_settings:
            _follow_rate(group, saved)
        else:
            warnings += _restore_group(group, saved)
    for parameter, values in restored:
        optimizer.state[parameter] = values
    move_optimizer(optimizer)
    return warnings


def replace_parameters(
    optimizer: torch.optim.Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Follow parameters that became other objects: moving a module keeps them for some devices only."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state:
                optimizer.state[replaced[parameter]] = optimizer.state.pop(parameter)
        group["params"] = [replaced[parameter] for parameter in group["params"]]


def move_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Bring the optimizer's state to where its parameters are."""
    for group in optimizer.param_groups:
        # Kernels that read the number of steps on the device want it there, all others on the CPU.
        has_steps_on_device = bool(group.get("fused") or group.get("capturable"))
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {})
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    is_on_cpu = key == "step" and not has_steps_on_device
                    values[key] = value.to("cpu" if is_on_cpu else parameter.device)


def scheduler_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Gives the numbers that a scheduler goes on from."""
    kind = type(scheduler).__name__
    return {"kind": kind, "values": _as_json(scheduler.state_dict(), f"{kind}'s state")}


def restore_scheduler(
    scheduler: LRScheduler, state: ExpertState, *, keeps_settings: bool = False
) -> list[str]:
    """Put back what `scheduler_state` gave, or warn. With `keeps_settings`, only how far it has come."""
    kind = type(scheduler).__name__
    try:
        numbers = msgspec.convert(state.numbers.get("scheduler"), _SchedulerNumbers)
    except msgspec.ValidationError:
        numbers = _SchedulerNumbers("nothing", {})
    if numbers.kind != kind:
        return [f"the state has {numbers.kind} for {kind}, which starts anew"]
    # torch takes any attribute from a state, so that only those go in which this scheduler has.
    known = scheduler.state_dict()
    given = {key: numbers.values[key] for key in known if key in numbers.values and _is_as_json(known[key])}
    if keeps_settings:
        given = {key: given[key] for key in _PROGRESS if key in given}
    if problem := misfit_of_settings(known, given):
        return [f"the state of {kind} cannot be used, as {problem}, so it starts anew"]
    if keeps_settings:
        given["_last_lr"] = [group["lr"] for group in scheduler.optimizer.param_groups]
    scheduler.load_state_dict(known | given)
    return []


class _Misfit(Exception):
    """Why a state is not this optimizer's."""


def _restored(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    numbers: _OptimizerNumbers,
    *,
    keeps_settings: bool,
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """What the optimizer is to know of its parameters; nothing is changed yet."""
    restored = []
    index = 0
    for group, saved in zip(optimizer.param_groups, numbers.groups, strict=True):
        settings = {key: group[key] for key in group if key not in ("params", *_WAYS_TO_COMPUTE)}
        if not keeps_settings:
            if problem := misfit_of_settings(settings, saved):
                raise _Misfit(problem)
            settings |= {key: saved[key] for key in settings if key in saved}
        examples: dict[tuple[int, torch.dtype], dict[str, Any]] = {}
        for parameter in group["params"]:
            prefix = f"optimizer.{index}."
            values: dict[str, Any] = {
                name.removeprefix(prefix): tensor.clone()
                for name, tensor in tensors.items()
                if name.startswith(prefix)
            }
            values |= numbers.values.get(str(index), {})
            index += 1
            if not values:
                continue
            kind = parameter.dim(), parameter.dtype
            if kind not in examples:
                examples[kind] = example_state(optimizer, settings, parameter)
            if problem := misfit_of_state(parameter, examples[kind], values):
                raise _Misfit(problem)
            restored.append((parameter, values))
    return restored


def _follow_rate(group: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Lower the rate as far as the other's, where both have a scheduler."""
    first, other_first, other_now = group.get("initial_lr"), other.get("initial_lr"), other.get("lr")
    numbers = (int, float)
    if first is None or not (isinstance(other_first, numbers) and isinstance(other_now, numbers)):
        return
    if 0 <= other_now <= other_first and 0 < other_first < math.inf:
        rate = float(first) * (other_now / other_first)
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _restore_group(group: dict[str, Any], saved: Mapping[str, Any]) -> list[str]:
    warnings = []
    # With a scheduler the rate differs from step to step, and the one to compare is the first.
    compared = ("weight_decay", "initial_lr" if "initial_lr" in saved else "lr")
    for key in [key for key in saved if key in group and key not in ("params", *_WAYS_TO_COMPUTE)]:
        present, value = group[key], saved[key]
        if key in compared and float(present) != value:
            warnings.append(f"{key} is {value} as saved, not {float(present)}")
        if isinstance(present, torch.Tensor):
            present.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(present, tuple) else value
    return warnings


def _is_as_json(value: Any) -> bool:
    """Whether JSON gives it back: names that are numbers, such as milestones', become text there."""
    return not isinstance(value, Mapping) or all(isinstance(key, str) for key in value)


def _as_json(numbers: Any, what: str) -> Any:
    try:
        return json.loads(json.dumps(numbers, default=torch.Tensor.item))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{what} cannot be saved: {error}.",
            next_step="use an optimizer and a scheduler whose states are tensors and plain numbers.",
        ) from error


def is_finite(value: Any) -> bool:
    """Whether no number in it, however deep, is NaN or infinite."""
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def misfit_of_settings(own: Mapping[str, Any], given: Mapping[str, Any]) -> str | None:
    """What is wrong with settings that are to replace one's own, if anything is."""
    for key, present in own.items():
        if key not in given:
            continue
        value = given[key]
        if not is_finite(value):
            return f"{key} is not finite"
        is_number = _is_number(present) or isinstance(present, torch.Tensor)
        if is_number and not _is_number(value):
            return f"{key} is no number"
        if isinstance(present, tuple) and not (isinstance(value, list) and len(value) == len(present)):
            return f"{key} is not {len(present)} numbers"
    return None


def example_state(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, Any]:
    """What such an optimizer knows of a parameter after a step, with 2 in place of each of its sizes.

    Nothing where that cannot be tried.
    """
    small = nn.Parameter(torch.zeros((2,) * parameter.dim(), dtype=parameter.dtype))
    small.grad = torch.zeros_like(small)
    kind: Any = type(optimizer)
    try:
        trial = kind([{**settings, "params": [small]}])
        trial.step()
    except Exception:  # noqa: BLE001 - of an optimizer of one's own
        return {}
    return dict(trial.state.get(small, {}))


def misfit_of_state(
    parameter: torch.Tensor, example: Mapping[str, Any], given: Mapping[str, Any]
) -> str | None:
    """What is wrong with what an optimizer should know of a parameter, if anything is.

    What the example does not have may be a single number, or have the parameter's shape.
    """
    for key in example:
        if key not in given:
            return f"{key} is missing"
    for key, value in given.items():
        wanted = example.get(key)
        if isinstance(value, torch.Tensor):
            problem = _misfit_of_tensor(parameter, wanted, value)
        elif isinstance(wanted, torch.Tensor):
            problem = "is no tensor"
        elif _is_number(wanted) and not _is_number(value):
            problem = "is no number"
        else:
            problem = None if is_finite(value) else "is not finite"
        if problem is not None:
            return f"{key} {problem}"
    return None


def _misfit_of_tensor(parameter: torch.Tensor, example: Any, given: torch.Tensor) -> str | None:
    shapes = [tuple(parameter.shape), ()]
    dtypes = [parameter.dtype, torch.float32]
    if isinstance(example, torch.Tensor):
        dtypes = [example.dtype]
        if example.dim() != parameter.dim():
            shapes = [tuple(example.shape)]
        else:
            sizes = zip(parameter.shape, example.shape, strict=True)
            shapes = [tuple(size if part == 2 else part for size, part in sizes)]
    if tuple(given.shape) not in shapes:
        return f"has the shape {list(given.shape)}"
    is_fitting = given.dtype in dtypes or (given.dim() == 0 and given.dtype.is_floating_point)
    if not is_fitting:
        return f"is of type {given.dtype}"
    return None if bool(given.isfinite().all()) else "is not finite"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
