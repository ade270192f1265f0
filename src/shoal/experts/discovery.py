"""Finds what a module takes and gives by running an example batch through it, without a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.core import UsageError
from shoal.experts.schema import Example, ExpertSchema, TensorSchema

_NEXT_STEP = "let every input and output be a tensor whose first dimension is the batch."


def discover_schema(module: nn.Module, example: Example) -> ExpertSchema:
    """The schema; UsageError when the module cannot be an expert. Its mode stays as it is."""
    args, kwargs = example
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


def run_on(
    module: nn.Module, keyword_names: Sequence[str], inputs: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Call the module with flat inputs; a single output becomes a tuple of one."""
    outputs = _run(module, keyword_names, inputs)
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
