"""Hugging Face Accelerate: an `Accelerator` of one process in each worker, whose model a strategy shares."""

from __future__ import annotations

import contextlib
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.data_loader import DataLoaderDispatcher
from torch import nn
from torch.optim import Optimizer

from shoal.core import UsageError
from shoal.group import Group
from shoal.strategies import Strategy
from shoal.strategies.session import TrainingSession


def attach(
    accelerator: Accelerator,
    strategy: Strategy,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    stays: bool = False,
) -> TrainingSession:
    """Attach a strategy to what `accelerator.prepare` has returned; as `strategy.attach` otherwise.

    Give `prepare` a loader that `shoal.shard` has divided. `accelerator.accumulate` shares nothing but in the
    last of its passes, and `is_main_process` is true on rank 0 alone.
    """
    number(accelerator, strategy.group)
    if any(isinstance(loader, DataLoaderDispatcher) for loader in accelerator._dataloaders):
        raise UsageError(
            "Accelerate would read an iterable dataset in its main process alone.",
            next_step="Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False)).",
        )
    let_accumulate(accelerator, strategy, model)
    return strategy.attach(accelerator.unwrap_model(model), bare(optimizer), stays=stays)


def number(accelerator: Accelerator, group: Group) -> None:
    """Give Accelerate this worker's rank, so that rank 0 alone saves and logs; UsageError if it shares."""
    if accelerator.num_processes > 1:
        raise UsageError(
            f"Accelerate shares the work among {accelerator.num_processes} processes itself.",
            cause="RANK and WORLD_SIZE are set, or `accelerate launch` has started this.",
            next_step="start with `shoal run` and without --env torchrun.",
        )
    for state in (PartialState(), accelerator.state):
        state.process_index, state.local_process_index = group.rank, group.local_rank


def let_accumulate(accelerator: Accelerator, strategy: Strategy, model: nn.Module) -> None:
    """Let passes that Accelerate does not want to be synchronised be the strategy's `accumulate`."""
    others = accelerator.no_sync

    own = accelerator.unwrap_model(model)

    def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        return strategy.accumulate() if accelerator.unwrap_model(model) is own else others(model)

    accelerator.no_sync = no_sync


def bare(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of Accelerate's, whose hooks are called."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner
