"""Adam with AMSGrad (Reddi et al. 2018) on just the tensors that a step touches, in one fused call."""

from __future__ import annotations

import torch
from torch.optim.adam import adam


class AdamMoments:
    """What the optimizer remembers of one tensor; made when the tensor is first updated."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.mean, self.square, self.greatest = torch.zeros(3, *tensor.shape, device=tensor.device).unbind(0)
        self.num_steps = torch.zeros((), device=tensor.device)


def adam_step(
    tensors: list[torch.Tensor], gradients: list[torch.Tensor], moments: list[AdamMoments], rate: float
) -> None:
    """One step of each; the numbers of steps may differ. The tensors are contiguous."""
    adam(
        tensors,
        [gradient.contiguous() for gradient in gradients],  # the fused kernel takes for granted that they are
        [one.mean for one in moments],
        [one.square for one in moments],
        [one.greatest for one in moments],
        [one.num_steps for one in moments],
        fused=True,
        amsgrad=True,
        beta1=0.9,
        beta2=0.999,
        lr=rate,
        weight_decay=0.0,
        eps=1e-8,
        maximize=False,
    )
