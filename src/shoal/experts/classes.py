"""Expert classes: those that Shoal knows by name, and one's own by `package.module:factory`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shoal.core import UsageError
from shoal.experts import blocks
from shoal.experts.expert import Expert
from shoal.experts.schema import Example
from shoal.experts.training import TrainingSettings, make_optimizer, make_scheduler

_EXAMPLE_BATCH_SIZE = 3


@dataclass(frozen=True, slots=True)
class ExpertClass:
    """How experts of one kind are made."""

    name: str
    make: Callable[[int], nn.Module]
    """From the hidden dimension."""
    example: Callable[[int, int], Example]
    """Inputs for a hidden dimension and a batch size."""


def make_expert(
    uid: str, class_: ExpertClass, hidden_dim: int, training: TrainingSettings, seed: int
) -> Expert:
    """A new expert; equal seeds give equal weights, and torch's own generator is left as it was."""
    if hidden_dim < 1:
        raise UsageError(f"The hidden dimension must be at least 1, not {hidden_dim}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = class_.make(hidden_dim)
        example = class_.example(hidden_dim, _EXAMPLE_BATCH_SIZE)
    optimizer = make_optimizer(module, training)
    return Expert(
        uid,
        module,
        example,
        optimizer=optimizer,
        scheduler=None if optimizer is None else make_scheduler(optimizer, training),
        max_grad_norm=training.max_grad_norm,
        clip_gradients=training.clip_gradients,
    )


def expert_class(name: str) -> ExpertClass:
    """The class of this name, hyphens and underscores being the same.

    `package.module:factory` and `path/file.py:factory` name one's own: an `ExpertClass`, or what gives a
    module for a hidden dimension, such as a subclass of `nn.Module`. Its inputs are what its attribute
    `example_inputs(hidden_dim, batch_size)`, or the module's, gives (a tensor, a tuple of them, or arguments
    and keyword arguments); without one, a tensor `[batch, hidden]`. Whoever may choose the name may run any
    code.
    """
    if ":" in name:
        return _own_class(name)
    known = {_plain(key): class_ for key, class_ in EXPERT_CLASSES.items()}
    found = known.get(_plain(name))
    if found is None:
        near = difflib.get_close_matches(_plain(name[:64]), known, n=1)
        raise UsageError(
            f"The expert class {name!r} is not known.",
            cause=f"did you mean {known[near[0]].name!r}?" if near else "",
            next_step=f"use one of {', '.join(EXPERT_CLASSES)}, or package.module:factory for your own.",
        )
    return found


def _plain(name: str) -> str:
    return name.replace("-", "_").lower()


def _row(hidden_dim: int, batch_size: int) -> Example:
    return (torch.randn(batch_size, hidden_dim),), {}


def _masked_sequence(hidden_dim: int, batch_size: int) -> Example:
    mask = torch.zeros(batch_size, 128, dtype=torch.bool)
    return (torch.randn(batch_size, 128, hidden_dim), mask), {}


def _long_sequence(hidden_dim: int, batch_size: int) -> Example:
    return (torch.randn(batch_size, 512, hidden_dim),), {}


def _masked_row(hidden_dim: int, batch_size: int) -> Example:
    mask = torch.rand(batch_size, hidden_dim) < 0.8
    return (torch.randn(batch_size, hidden_dim), mask), {}


EXPERT_CLASSES: dict[str, ExpertClass] = {
    class_.name: class_
    for class_ in (
        ExpertClass("ffn", blocks.FeedForward, _row),
        ExpertClass("transformer", blocks.Transformer, _masked_sequence),
        ExpertClass("nop", blocks.Nop, _row),
        ExpertClass("nop_delay", blocks.DelayedNop, _row),
        ExpertClass("det_dropout", blocks.DeterministicDropout, _masked_row),
        ExpertClass("lah-ffn", blocks.LahFeedForward, _row),
        ExpertClass("lah-transformer", blocks.LahTransformer, _long_sequence),
    )
}


def _own_class(name: str) -> ExpertClass:
    where, _, attribute = name.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else _import(where)
    factory = getattr(module, attribute, None)
    if isinstance(factory, ExpertClass):
        return factory
    if not callable(factory):
        public = [key for key in vars(module) if not key.startswith("_")]
        near = difflib.get_close_matches(attribute[:64], public, n=1)
        raise UsageError(
            f"{where} has no {attribute!r} that could be called.",
            cause=f"did you mean {near[0]!r}?" if near else "",
            next_step="name a function that gives a module for a hidden dimension, or a class of modules.",
        )
    made: Callable[[int], Any] = factory

    def make(hidden_dim: int) -> nn.Module:
        expert = made(hidden_dim)
        if not isinstance(expert, nn.Module):
            raise UsageError(f"{name} gave {type(expert).__name__}, not a torch.nn.Module.")
        return expert

    def example(hidden_dim: int, batch_size: int) -> Example:
        # An instance has to be made only where the factory itself does not tell.
        source: Any = made if hasattr(made, "example_inputs") else make(hidden_dim)
        if not hasattr(source, "example_inputs"):
            return _row(hidden_dim, batch_size)
        return _as_example(source.example_inputs(hidden_dim, batch_size), name)

    return ExpertClass(name, make, example)


def _as_example(given: Any, name: str) -> Example:
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, tuple | list) and given:
        if all(isinstance(part, torch.Tensor) for part in given):
            return tuple(given), {}
        if len(given) == 2 and isinstance(given[1], dict):
            args, kwargs = given
            return (args,) if isinstance(args, torch.Tensor) else tuple(args), dict(kwargs)
    raise UsageError(
        f"example_inputs of {name} gave {type(given).__name__}.",
        next_step="let it give a tensor, a tuple of tensors, or arguments and a dict of keyword arguments.",
    )


def _import(where: str) -> ModuleType:
    try:
        return importlib.import_module(where)
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"The module {where!r} of the expert class cannot be imported: {error}.",
            cause="it is not installed here, or misspelt.",
            next_step="install it, add its folder to PYTHONPATH, or name its file: path/to/file.py:factory.",
        ) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"There is no file {path} for the expert class.")
    name = f"shoal_expert_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and annotations look their module up here
    spec.loader.exec_module(module)
    return module
