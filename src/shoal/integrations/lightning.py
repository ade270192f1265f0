"""Lightning: `Trainer(strategy=ShoalStrategy())` lets workers train one model together."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import nn
from torch.optim import LBFGS, Optimizer

from shoal.core import UsageError
from shoal.data import shard
from shoal.group import init
from shoal.strategies import Strategy, from_args
from shoal.strategies.session import TrainingSession

# `pytorch_lightning` and `lightning.pytorch` are the same code twice, and take only their own classes
_is_old_name = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_strategies: Any = importlib.import_module(
    "pytorch_lightning.strategies" if _is_old_name else "lightning.pytorch.strategies"
)


class ShoalStrategy(_strategies.SingleDeviceStrategy):  # type: ignore[misc]
    """Lightning trains on one device in each worker, and a strategy of Shoal shares what it learns.

    Each worker has its part of the training data, and rank 0 alone saves and logs. Every worker validates its
    own model on all of the validation set; `sync_dist` leaves a metric as it is.
    """

    strategy_name = "shoal"

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        stays: bool = False,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """Take the strategy that `shoal run` was asked for by default, and `stays` as `attach` does."""
        self.shared_by = from_args(init()) if strategy is None else strategy
        group = self.shared_by.group
        if device is None:
            device = f"cuda:{group.local_rank}" if torch.cuda.is_available() else "cpu"
        super().__init__(device, **settings)
        self.global_rank, self.local_rank = group.rank, group.local_rank
        rank_zero_only.rank = group.rank
        self._attachment: TrainingSession | None = None
        self._stays = stays
        self._is_stepping = False

    @property
    def root_device(self) -> torch.device:
        """The GPU of this worker's local rank, unless `Trainer(accelerator="cpu")` says otherwise."""
        is_cpu = type(self.accelerator).__name__ == "CPUAccelerator"
        return torch.device("cpu") if is_cpu else self._root_device

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker saves and logs."""
        return self.shared_by.group.rank == 0

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divide what is trained on, and nothing else."""
        trainer = self.lightning_module.trainer
        return shard(dataloader, self.shared_by.group) if trainer.training else dataloader

    def on_train_start(self) -> None:
        """Optimizers are there, and so is what a checkpoint of Lightning held."""
        super().on_train_start()
        if len(self.optimizers) != 1:
            raise UsageError(
                f"A strategy shares what one optimizer trains, and there are {len(self.optimizers)}.",
                next_step="put all parameters into groups of one optimizer.",
            )
        # Lightning calls the model through this, so that hooks of its forward see every training step
        self.model = _Passing(self.lightning_module)
        self._attachment = self.shared_by.attach(self.model, self.optimizers[0], stays=self._stays)

    def training_step(self, *args: Any, **named: Any) -> Any:
        """A forward pass; one that no step of the optimizer follows shares nothing."""
        with self._accumulating():
            return super().training_step(*args, **named)

    def backward(self, *args: Any, **named: Any) -> Any:
        """The backward pass of it."""
        with self._accumulating():
            return super().backward(*args, **named)

    def _accumulating(self) -> contextlib.AbstractContextManager[None]:
        is_last = self._is_stepping or not self.lightning_module.automatic_optimization
        return contextlib.nullcontext() if is_last else self.shared_by.accumulate()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **settings: Any
    ) -> Any:
        """Forward and backward come before the step, not inside of it: there strategies do not look."""
        step = optimizer.step

        def step_after(closure: Callable[[], Any] | None = None, **more: Any) -> Any:
            result = None if closure is None else closure()
            step(**more)
            return result

        self._is_stepping = True
        if not isinstance(optimizer, LBFGS):  # which needs the closure again and again
            optimizer.step = step_after  # type: ignore[method-assign]
        try:
            return super().optimizer_step(optimizer, closure, model, **settings)
        finally:
            optimizer.step, self._is_stepping = step, False  # type: ignore[method-assign]

    def on_train_end(self) -> None:
        """Detach; the other workers go on without this one if it stopped early."""
        super().on_train_end()
        self._close(is_failed=False)

    def teardown(self) -> None:
        """After an exception nothing is said to the group: the others learn of it when this worker ends."""
        self._close(is_failed=True)
        super().teardown()

    def _close(self, *, is_failed: bool) -> None:
        if self._attachment is not None:
            self._attachment.close(is_failed=is_failed)
            self._attachment = None
            self.model = self.lightning_module


class _Passing(nn.Module):
    """Calls another module, and is in training when that is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    @property
    def training(self) -> bool:
        return self.module.training

    @training.setter
    def training(self, value: bool) -> None:
        """As the module's, whatever is set here."""

    def forward(self, *args: Any, **named: Any) -> Any:
        return self.module(*args, **named)
