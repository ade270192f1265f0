"""Labelled examples: batches of a worker's part, without end, and how many a model gets right."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from shoal.simulate.task import Batch, Score

_EVALUATED_AT_ONCE = 2000


def batches_of(
    examples: Batch, batch_size: int, seed: int, own: torch.Tensor | None = None
) -> Iterator[Batch]:
    """Without end: epoch after epoch in an order of its own, whole batches alone.

    `own` are the indices of those to draw from; all of them without. Who has fewer examples than a batch
    takes all of them each time.
    """
    x, y = examples
    num_examples = len(x) if own is None else len(own)
    size = min(batch_size, num_examples)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(num_examples, generator=generator)
        if own is not None:
            order = own[order]
        for start in range(0, num_examples - size + 1, size):
            chosen = order[start : start + size]
            yield x[chosen], y[chosen]


def accuracy_of(model: nn.Module, examples: Batch) -> Score:
    """Share of the examples whose largest output is at the label, and mean cross-entropy."""
    num_right, loss = 0, 0.0
    model.eval()
    with torch.no_grad():
        for start in range(0, len(examples[0]), _EVALUATED_AT_ONCE):
            x, y = (tensor[start : start + _EVALUATED_AT_ONCE] for tensor in examples)
            logits = model(x)
            num_right += int((logits.argmax(1) == y).sum())
            loss += float(functional.cross_entropy(logits, y, reduction="sum"))
    model.train()
    return Score(num_right / len(examples[0]), loss / len(examples[0]))
