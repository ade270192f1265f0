"""Hugging Face's Trainer: `share(trainer)` before `trainer.train()` lets workers train one model together."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shoal.core import UsageError
from shoal.data import Part, ShardSampler, shard
from shoal.group import Group, init
from shoal.integrations.accelerate import bare, let_accumulate, number
from shoal.strategies import Strategy, from_args
from shoal.strategies.session import TrainingSession


class ShoalCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches a strategy when training begins, detaches it at the end, and logs the loss for `shoal top`."""

    def __init__(self, strategy: Strategy, *, stays: bool = False) -> None:
        self.strategy = strategy
        self._stays = stays
        self._attachment: TrainingSession | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        **others: Any,
    ) -> None:
        """Model, optimizer and schedule are there, and so is what a checkpoint of the Trainer held."""
        self._attachment = self.strategy.attach(model, bare(optimizer), stays=self._stays)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **others: Any,
    ) -> None:
        """The Trainer logs on all workers, and prints on rank 0 alone."""
        if logs is not None and "loss" in logs:
            self.strategy.log(loss=float(logs["loss"]))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Detach; the other workers go on without this one if it stopped early."""
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None


def share(trainer: Trainer, strategy: Strategy | None = None, *, stays: bool = False) -> Strategy:
    """Let the strategy (by default what `shoal run` was asked for) share what this Trainer trains.

    Each worker has its part of each epoch, and its own `per_device_train_batch_size`. Rank 0 alone saves and
    logs; every worker evaluates its own model on all of the evaluation set. Call it once, before `train()`;
    for several calls of `train()` give `stays`, as to `attach`.
    """
    strategy = from_args(init()) if strategy is None else strategy
    group = strategy.group
    number(trainer.accelerator, group)
    trainer.state.is_world_process_zero = trainer.is_world_process_zero()
    trainer.state.is_local_process_zero = trainer.is_local_process_zero()
    if group.size > 1:
        if trainer.args.n_gpu > 1:
            raise UsageError(
                f"Trainer would use all of the {trainer.args.n_gpu} GPUs that this worker sees.",
                next_step='os.environ["CUDA_VISIBLE_DEVICES"] = str(group.local_rank) after group = '
                "shoal.init(), before anything uses a GPU.",
            )
        trainer.accelerator.dataloader_config.dispatch_batches = False
        _divide(trainer, group)
        let_accumulate(trainer.accelerator, strategy, trainer.model)
    trainer.add_callback(ShoalCallback(strategy, stays=stays))
    return strategy


def _divide(trainer: Trainer, group: Group) -> None:
    """Training alone: its loader is made when `train()` begins, and says how many steps an epoch has."""
    if isinstance(trainer.train_dataset, IterableDataset):
        trainer.train_dataset = shard(trainer.train_dataset, group)
        return
    make = trainer.get_train_dataloader
    seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed

    def get_train_dataloader() -> DataLoader[Any]:
        loader: DataLoader[Any] = make()
        batches = loader.batch_sampler
        if type(batches) is not BatchSampler:
            raise UsageError(
                f"The batches of {type(batches).__name__} cannot be divided among workers here.",
                next_step="give Trainer shoal.shard(dataset, group) and a ShoalCallback, without share().",
            )
        batches.sampler = ShardSampler(batches.sampler, Part(group.rank, group.size), seed=seed)
        return loader

    trainer.get_train_dataloader = get_train_dataloader
