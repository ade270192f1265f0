"""What an expert takes and gives: dtypes and shapes without the batch, which comes first in every tensor.

`discover_schema` finds it by running an example batch through the module, without a trace.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from shoal.core import TensorError, UsageError
from shoal.tensors.dtypes import dtype_name, dtype_named

Example = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]
"""Positional and keyword inputs of a batch."""


class TensorSchema(msgspec.Struct, frozen=True, array_like=True):
    """One input or output."""

    dtype: str
    shape: tuple[int, ...]
    """Of one sample."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSchema:
        """The schema that a batch fits."""
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape[1:]))

    def __str__(self) -> str:
        return f"{self.dtype}[batch{''.join(f', {size}' for size in self.shape)}]"


class ExpertSchema(msgspec.Struct, frozen=True):
    """All inputs, positional ones first, and all outputs."""

    inputs: tuple[TensorSchema, ...]
    keyword_names: tuple[str, ...]
    """Of the last inputs, in the order in which they travel."""
    outputs: tuple[TensorSchema, ...]
    is_single: bool
    """The module gives one tensor, not a tuple of them."""

    @property
    def num_args(self) -> int:
        """Inputs that are given by position."""
        return len(self.inputs) - len(self.keyword_names)

    def check_itself(self) -> None:
        """TensorError when it describes what no tensors can be; for a schema that a peer has sent."""
        for schema in (*self.inputs, *self.outputs):
            dtype_named(schema.dtype)
            if any(size < 0 for size in schema.shape):
                raise TensorError(f"{schema} is not possible")
        if not self.inputs or not self.outputs or len(self.keyword_names) > len(self.inputs):
            raise TensorError("an expert has inputs and outputs")

    def flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Inputs in the order in which they travel; UsageError when they are not those of this expert."""
        if not kwargs and not self.keyword_names and len(args) == len(self.inputs):
            return list(args)
        missing = [name for name in self.keyword_names if name not in kwargs]
        unknown = [name for name in kwargs if name not in self.keyword_names]
        if len(args) != self.num_args or missing or unknown:
            raise UsageError(
                f"The expert takes {self.describe_inputs()}; given were {len(args)} by position"
                + (f" and {', '.join(kwargs)} by name." if kwargs else "."),
                next_step="call it as its module is called.",
            )
        return [*args, *(kwargs[name] for name in self.keyword_names)]

    def unflatten(
        self, tensors: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], dict[str, torch.Tensor]]:
        """The inverse of `flatten`."""
        return tensors[: self.num_args], dict(zip(self.keyword_names, tensors[self.num_args :], strict=True))

    def describe_inputs(self) -> str:
        """Describes all inputs in words, for messages."""
        names = [""] * self.num_args + [f"{name}=" for name in self.keyword_names]
        return ", ".join(f"{name}{schema}" for name, schema in zip(names, self.inputs, strict=True))

    def check_inputs(self, tensors: Sequence[Any]) -> int:
        """TensorError when the tensors (or their specs) are not inputs of this expert; the batch size."""
        return check_tensors("input", self.inputs, tensors)

    def check_outputs(self, tensors: Sequence[Any], batch_size: int | None = None) -> int:
        """TensorError when the tensors (or their specs) are not outputs of this expert for such a batch."""
        got = check_tensors("output", self.outputs, tensors)
        if batch_size is not None and got != batch_size:
            raise TensorError(f"outputs for {got} samples, not for {batch_size}")
        return got


def check_tensors(what: str, schemas: Sequence[TensorSchema], tensors: Sequence[Any]) -> int:
    """TensorError when tensors (or their specs) are not what the schemas say; the batch size."""
    if len(tensors) != len(schemas):
        raise TensorError(f"{len(tensors)} {what}s, not {len(schemas)}")
    batch_size = -1
    for index, (schema, tensor) in enumerate(zip(schemas, tensors, strict=True)):
        shape, dtype = tensor.shape, tensor.dtype
        if type(dtype) is not str:
            dtype = dtype_name(dtype)
        if len(shape) == 0 or tuple(shape[1:]) != schema.shape or dtype != schema.dtype:
            raise TensorError(f"{what} {index} is {dtype}{list(shape)}, not {schema}")
        if batch_size not in (-1, shape[0]):
            raise TensorError(f"{what} {index} has {shape[0]} samples, the one before {batch_size}")
        batch_size = shape[0]
    return batch_size


_NEXT_STEP = "let every input and output be a tensor whose first dimension is the batch."


def as_example(given: Any, what: str) -> Example:
    """Inputs of a batch from a tensor, a tuple of tensors, or arguments and a dict of keyword arguments."""
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[1], dict):
        args, kwargs = given
        args = (args,) if isinstance(args, torch.Tensor) else args
        if isinstance(args, tuple | list) and all(_is_tensor(part) for part in (*args, *kwargs.values())):
            return tuple(args), dict(kwargs)
    elif isinstance(given, tuple | list) and given and all(map(_is_tensor, given)):
        return tuple(given), {}
    raise UsageError(
        f"{what} {_described(given)}.",
        next_step="let it give a tensor, a tuple of tensors, or arguments and a dict of keyword arguments, "
        "as ((x, mask), {}); the first dimension of each is the batch.",
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _described(given: Any) -> str:
    if isinstance(given, tuple | list):
        return (
            f"a {type(given).__name__} of {', '.join(type(part).__name__ for part in given[:4]) or 'nothing'}"
        )
    return type(given).__name__


def discover_schema(module: nn.Module, example: Example) -> ExpertSchema:
    """The schema; UsageError when the module cannot be an expert. Its mode stays as it is."""
    args, kwargs = as_example(example, "The example of an expert is")
    names = tuple(kwargs)
    inputs = [*args, *kwargs.values()]
    batch_size = _batch_size("input", inputs)
    device = next((parameter.device for parameter in module.parameters()), None)
    given = [tensor.detach().to(device, copy=True) for tensor in inputs]
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            raw = _run(module, names, given)
    except Exception as error:
        raise UsageError(
            f"The module fails when it is given the example: {_described_inputs(names, inputs)}.",
            cause=f"{type(error).__name__}: {' '.join(str(error).split())}",
            next_step=f"give a batch that {type(module).__name__}.forward{_parameters_of(module)} takes; "
            "the first dimension of each tensor is the batch.",
        ) from error
    finally:
        for part, is_training in modes:
            part.training = is_training
    is_single = isinstance(raw, torch.Tensor)
    outputs = [raw] if is_single else list(raw) if isinstance(raw, tuple | list) else []
    if _batch_size("output", outputs) != batch_size:
        raise UsageError(
            f"For {batch_size} samples the module gives {outputs[0].shape[0]}.",
            cause="the batch is not the first dimension, or samples are mixed into one.",
            next_step=_NEXT_STEP,
        )
    for index, (after, before) in enumerate(zip(given, inputs, strict=True)):
        is_same = (after == before.to(after.device)) | after.isnan()
        if not bool(is_same.all()):
            raise UsageError(
                f"The module changes its input {index}, which is still needed for backward.",
                next_step="use operations that are not in place, such as nn.ReLU(inplace=False).",
            )
    return ExpertSchema(
        inputs=tuple(TensorSchema.of(tensor) for tensor in inputs),
        keyword_names=names,
        outputs=tuple(TensorSchema.of(tensor) for tensor in outputs),
        is_single=is_single,
    )


def _described_inputs(names: Sequence[str], inputs: Sequence[torch.Tensor]) -> str:
    """Type and shape of each input, with its name where it has one."""
    starts = [""] * (len(inputs) - len(names)) + [f"{name}=" for name in names]
    return ", ".join(
        f"{start}{dtype_name(tensor.dtype)}{list(tensor.shape)}"
        for start, tensor in zip(starts, inputs, strict=True)
    )


def _parameters_of(module: nn.Module) -> str:
    try:
        return str(inspect.signature(module.forward))
    except (TypeError, ValueError):
        return "(…)"


def run_on(
    module: nn.Module, keyword_names: Sequence[str], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Call the module with flat inputs; a single output becomes a tuple of one."""
    outputs = _run(module, keyword_names, inputs) if keyword_names else module(*inputs)
    return (outputs,) if isinstance(outputs, torch.Tensor) else outputs


def _run(module: nn.Module, keyword_names: Sequence[str], inputs: Sequence[torch.Tensor]) -> Any:
    if not keyword_names:
        return module(*inputs)
    num_args = len(inputs) - len(keyword_names)
    return module(*inputs[:num_args], **dict(zip(keyword_names, inputs[num_args:], strict=True)))


def _batch_size(what: str, tensors: Sequence[Any]) -> int:
    if not tensors or not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        raise UsageError(
            f"Not every {what} of the module is a tensor with a batch, or there is none.",
            next_step=_NEXT_STEP,
        )
    sizes = [tensor.shape[0] for tensor in tensors]
    if len(set(sizes)) > 1 or sizes[0] == 0:
        raise UsageError(
            f"The {what}s of the module have {', '.join(map(str, sizes))} samples.", next_step=_NEXT_STEP
        )
    return int(sizes[0])
