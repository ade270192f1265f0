"""Models of all workers as the rows of one tensor, and their gradients by one vectorised pass.

What a step does with them is left to `stacked_rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from shoal.core import UsageError
from shoal.simulate.task import Batch, Task
from shoal.tensors import BucketLayout

EXACT = "take `--executor exact`."
_CHUNK_BYTES = 256 * 2**20
"""Of parameters whose gradients are taken at once: activations come on top of it."""


class StackedModel:
    """Row i is worker i's trainable parameters, one after another in the model's order.

    All start with the values of one model, as they do after a strategy's `attach`.
    """

    values: torch.Tensor

    def __init__(self, task: Task, num_workers: int) -> None:
        self._task = task
        self._module = task.model()
        self.named = dict(self._module.named_parameters())
        self._require_fit()
        self._sizes = [parameter.numel() for parameter in self.named.values()]
        first = torch.cat([parameter.detach().flatten() for parameter in self.named.values()])
        self.values = first.repeat(num_workers, 1)
        chunk_size = max(1, _CHUNK_BYTES // max(1, first.nbytes))
        self._gradients: Callable[..., torch.Tensor] = vmap(grad(self._loss), chunk_size=chunk_size)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of one worker, for their shapes."""
        return list(self.named.values())

    def gradients(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Of each worker's own loss at its own parameters; all batches are of one shape."""
        inputs, labels = zip(*batches, strict=True)
        return self._gradients(self.values, torch.stack(inputs), torch.stack(labels))

    def tensors(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Views of one worker's parameters, in the model's order and shapes."""
        parts = torch.split(row, self._sizes)
        return [part.view(like.shape) for part, like in zip(parts, self.named.values(), strict=True)]

    def layouts(self, max_bytes: int, *, is_reversed: bool = False) -> list[BucketLayout]:
        """How one worker's parameters lie in buckets."""
        return BucketLayout.plan(self.parameters, max_bytes=max_bytes, is_reversed=is_reversed)

    def shares_of_backward(self, layouts: Sequence[BucketLayout]) -> list[float]:
        """Of what backward costs, what passes until each bucket can leave, after the one before it.

        A gradient costs by its size; in which order they come is seen in one backward pass.
        """
        parameters = self.parameters
        order: list[int] = []
        module = self._task.model()
        for place, parameter in enumerate(module.parameters()):
            hook = partial(_note, order, place)
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        inputs, labels = next(self._task.batches(0))
        self._task.loss(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
        past: dict[int, int] = {}
        for place in order:
            past[place] = parameters[place].numel() + (past[order[len(past) - 1]] if past else 0)
        ready, shares = 0, []
        for layout in layouts:
            until = max(ready, *(past[index] for index in layout.indices))
            shares.append((until - ready) / sum(self._sizes))
            ready = until
        return shares

    def _loss(self, values: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts = zip(self.named.items(), torch.split(values, self._sizes), strict=True)
        parameters = {name: part.view(like.shape) for (name, like), part in parts}
        return self._task.loss(functional_call(self._module, parameters, (inputs,)), labels)

    def _require_fit(self) -> None:
        if next(self._module.buffers(), None) is not None:
            raise UsageError("The stacked executor has no place for a model's buffers.", next_step=EXACT)
        kinds = {(parameter.dtype, parameter.requires_grad): None for parameter in self.named.values()}
        if len(kinds) != 1 or not next(iter(kinds))[1]:
            raise UsageError(
                "The stacked executor trains models whose parameters are all of one dtype and trainable.",
                next_step=EXACT,
            )


def _note(order: list[int], place: int, parameter: torch.Tensor) -> None:
    order.append(place)
