"""Models of the user's own, named as `package.module:factory` or `file.py:factory`.

A factory is anything callable without arguments that returns an `nn.Module`. What its inputs are is said by
a second return value, or by attributes of the module, under the names of `OwnInputs`:

    def net():
        return MyNet(), {"input_shape": (3, 32, 32)}

Where neither says it, the shape is guessed from the first layer, and tried. Logits are what it returns.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from shoal.core import UsageError
from shoal.core.run_options import load_named
from shoal.models.registry import ModelEntry

_SAY_INPUTS = (
    "let the factory return (model, {'input_shape': (3, 32, 32)}) with the shape of one example, or "
    "(model, {'vocabulary_size': 256, 'num_tokens': 64}) where it reads tokens."
)
_GUESSED_TOKENS = 64
_LARGE_STEM = 7
"""A first convolution of this side, or one that strides, is made for photos."""


class OwnInputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a model of the user's own takes; all that is left out is found out."""

    input_shape: tuple[int, ...] | None = None
    """Of one example, without the batch."""
    num_classes: int | None = None
    vocabulary_size: int | None = None
    """Inputs are tokens below this number."""
    num_tokens: int | None = None
    """Of one example, where inputs are tokens."""
    batch_size: int | None = None
    """That it is measured with."""


def own_model(name: str) -> ModelEntry:
    """Describe the model of a factory; UsageError, with the next step, for whatever is wrong with it."""
    return _own_model(name, Path.cwd())


@functools.lru_cache(maxsize=16)  # commands and workers ask for the same model several times
def _own_model(name: str, _folder: Path) -> ModelEntry:
    factory = _load(name)
    model, told = _call(name, factory)
    inputs = _inputs(name, model, told)
    entries = [_entry(name, factory, inputs, shape) for shape in _shapes(model, inputs)]
    if not entries:
        raise UsageError(
            f"Nobody says what inputs {name} takes, and none can be guessed.", next_step=_SAY_INPUTS
        )
    is_guessed = inputs.input_shape is None and inputs.vocabulary_size is None
    reasons = []
    for entry in entries:
        try:
            num_classes = _num_outputs(model, entry)
        except Exception as error:  # noqa: BLE001 - the user's own forward may raise anything
            reasons.append(f"{entry.input_shape}: {type(error).__name__}: {' '.join(str(error).split())}")
            continue
        return _with_classes(name, entry, num_classes, inputs, is_guessed=is_guessed)
    said = "inputs that were guessed for it" if is_guessed else "its inputs"
    raise UsageError(
        f"{name} fails on {said}, of shape {'; '.join(reasons)}",
        next_step=_SAY_INPUTS if is_guessed else "correct input_shape, or the model's forward.",
    )


def _load(name: str) -> Callable[[], Any]:
    factory = load_named(name, "model")
    if not callable(factory):
        raise UsageError(
            f"{name} is a {type(factory).__name__}, which cannot be called.",
            next_step="name a function or class that returns the model.",
        )
    return _without_arguments(name, factory)


def _without_arguments(name: str, factory: Callable[..., Any]) -> Callable[[], Any]:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(
            f"{name} cannot be called without arguments: {error}.",
            next_step="give them defaults, or name a function that needs none.",
        ) from None
    except ValueError:
        pass  # something built in that tells no signature
    return factory


def _call(name: str, factory: Callable[[], Any]) -> tuple[nn.Module, Any]:
    """Call the factory: its module, and what it says of the inputs, if anything."""
    made = factory()
    model, told = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name} returns a {type(model).__name__}, which is no nn.Module.",
            next_step="let it return the model, or the model and what its inputs are.",
        )
    return model, told


def _inputs(name: str, model: nn.Module, told: Any) -> OwnInputs:
    """Read what the second return value says, or else the attributes of the module."""
    if told is None:
        names = OwnInputs.__struct_fields__
        told = {each: getattr(model, each) for each in names if getattr(model, each, None) is not None}
    elif not isinstance(told, Mapping):
        told = {"input_shape": told}
    try:
        inputs = msgspec.convert(dict(told), OwnInputs)
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(
            f"What {name} says of its inputs is wrong: {error}.",
            next_step=f"say some of {', '.join(OwnInputs.__struct_fields__)}.",
        ) from None
    numbers = (*(inputs.input_shape or ()), inputs.num_classes, inputs.vocabulary_size, inputs.num_tokens)
    if any(number is not None and number < 1 for number in (*numbers, inputs.batch_size)):
        raise UsageError(f"{name} says of its inputs a number below 1.", next_step="say 1 or more of each.")
    return inputs


def _shapes(model: nn.Module, inputs: OwnInputs) -> Iterator[tuple[tuple[int, ...], int | None]]:
    """Offer shapes of one example, likeliest first, each with the vocabulary where it holds tokens."""
    if inputs.vocabulary_size is not None:
        yield (inputs.num_tokens or _GUESSED_TOKENS,), inputs.vocabulary_size
        return
    if inputs.input_shape is not None:
        yield inputs.input_shape, None
        return
    first = next(
        (layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear | nn.Embedding)), None
    )
    if isinstance(first, nn.Embedding):
        yield (inputs.num_tokens or _GUESSED_TOKENS,), first.num_embeddings
    elif isinstance(first, nn.Conv2d):
        is_large = first.in_channels > 1 and (first.stride[0] > 1 or first.kernel_size[0] >= _LARGE_STEM)
        for side in (224, 299, 32) if is_large else (32, 28, 8, 224):
            yield (first.in_channels, side, side), None
    elif isinstance(first, nn.Linear):
        yield (first.in_features,), None
        for channels in (1, 3):
            side = math.isqrt(first.in_features // channels)
            if channels * side * side == first.in_features:
                yield (channels, side, side), None


def _entry(
    name: str, factory: Callable[[], Any], inputs: OwnInputs, shape: tuple[tuple[int, ...], int | None]
) -> ModelEntry:
    input_shape, vocabulary_size = shape
    return ModelEntry(
        name,
        lambda _, __: _call(name, factory)[0],
        input_shape,
        num_classes=vocabulary_size or inputs.num_classes or 1,
        batch_size=inputs.batch_size or 32,
        max_tokens=None if vocabulary_size is None else sys.maxsize,
        has_fixed_classes=True,
    )


def _num_outputs(model: nn.Module, entry: ModelEntry) -> int:
    """Try the model on two examples: how many classes, or tokens, it gives logits of."""
    x, y = entry.random_batch(batch_size=2)
    parameter = next(itertools.chain(model.parameters(), model.buffers()), None)
    with torch.no_grad():
        outputs = model(x if parameter is None else x.to(parameter.device))
    logits = outputs[0] if isinstance(outputs, tuple | list) else outputs
    if not isinstance(logits, torch.Tensor):
        raise UsageError(f"forward returns a {type(logits).__name__} and no tensor of logits")
    if logits.ndim != y.ndim + 1 or logits.shape[:-1] != y.shape:
        wanted = "(batch, tokens, vocabulary)" if entry.num_tokens is not None else "(batch, classes)"
        raise UsageError(f"forward returns logits of shape {tuple(logits.shape)}, not of {wanted}")
    return logits.shape[-1]


def _with_classes(
    name: str, entry: ModelEntry, num_outputs: int, inputs: OwnInputs, *, is_guessed: bool
) -> ModelEntry:
    """Complete the entry by what the model returns: labels lie below the number of its logits."""
    told = entry.num_classes if entry.num_tokens is not None else (inputs.num_classes or num_outputs)
    if inputs.num_classes is not None and inputs.num_classes > num_outputs:
        raise UsageError(
            f"{name} is said to have {inputs.num_classes} classes, and gives logits of {num_outputs}.",
            next_step="correct num_classes, or leave it out.",
        )
    return dataclasses.replace(entry, num_classes=min(told, num_outputs), is_guessed=is_guessed)
