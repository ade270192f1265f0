"""States as they are written and sent: plain values that JSON can carry, and tensors by name.

`{"a": [1, tensor]}` is `{"a": [1, {"$tensor": "a.1"}]}` beside the tensor `a.1`. Besides there are
`{"$tuple": [...]}`, `{"$items": [[key, value], ...]}` for dicts whose keys are not all texts, and
`{"$float": "nan"}`, for which JSON has no word.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from shoal.core.errors import UsageError

_SCALARS = (bool, int, float, str)


def flatten(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The plain part and the tensors, which are not copied; UsageError names the type that has no place."""
    tensors: dict[str, torch.Tensor] = {}
    return _plain(value, "", tensors), tensors


def rebuild(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What `flatten` was given; ValueError or KeyError when the two do not fit together."""
    if isinstance(plain, list):
        return [rebuild(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain
    kind: str
    content: Any
    ((kind, content),) = plain.items() if len(plain) == 1 else [("", None)]
    if kind == "$tensor":
        return tensors[content]
    if kind == "$tuple":
        return tuple(rebuild(part, tensors) for part in content)
    if kind == "$items":
        return {rebuild(key, tensors): rebuild(part, tensors) for key, part in content}
    if kind == "$float":
        return float(content)
    return {key: rebuild(part, tensors) for key, part in plain.items()}


def is_scalar(value: Any) -> bool:
    """Whether JSON has it, subclasses included."""
    return value is None or isinstance(value, _SCALARS)


def scalar(value: Any) -> Any:
    """Without subclasses (numpy's float64 is a float), which neither JSON nor MessagePack take."""
    return next((kind(value) for kind in _SCALARS if isinstance(value, kind)), None)


def _plain(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        name = path
        while name in tensors:
            name += "~"
        tensors[name] = value.detach()
        return {"$tensor": name}
    if isinstance(value, Mapping):
        parts = [(key, _plain(part, _below(path, key), tensors)) for key, part in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in parts):
            return dict(parts)
        return {"$items": [[_plain(key, "", {}), part] for key, part in parts]}
    if isinstance(value, list | tuple):
        listed = [_plain(part, _below(path, number), tensors) for number, part in enumerate(value)]
        return {"$tuple": listed} if isinstance(value, tuple) else listed
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if is_scalar(value):
        return scalar(value)
    raise UsageError(
        f"{path or 'the state'} is of type {type(value).__name__}, which is neither a number, a text, a "
        "tensor, nor a list or dict of them."
    )


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
