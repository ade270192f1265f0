"""Whether numbers and tensors that were saved, or that a peer has sent, can be an optimizer's at all.

An optimizer believes what it is given: without a tensor that it counts on, or with one of another shape, each
of its later steps would fail, and what is not finite would come to be in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


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
