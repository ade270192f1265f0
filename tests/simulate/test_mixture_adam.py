"""Fused steps of Adam, on tensors that are updated at different times."""

from __future__ import annotations

import torch

from shoal.simulate.mixture.experts import AdamMoments, adam_step


def test_each_tensor_has_its_own_number_of_steps_and_gradients_may_lie_otherwise() -> None:
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(7, 5, generator=generator) for _ in range(2)]
    moments = [AdamMoments(tensor) for tensor in tensors]
    plain = [tensor.clone().requires_grad_() for tensor in tensors]
    optimizers = [torch.optim.Adam([tensor], lr=0.01, amsgrad=True) for tensor in plain]
    for touched in ([0], [0, 1], [1], [0, 1]):
        gradients = [torch.randn(5, 7, generator=generator).t() for _ in touched]
        adam_step([tensors[one] for one in touched], gradients, [moments[one] for one in touched], 0.01)
        for one, gradient in zip(touched, gradients, strict=True):
            plain[one].grad = gradient
            optimizers[one].step()
    for ours, theirs in zip(tensors, plain, strict=True):
        torch.testing.assert_close(ours, theirs.detach())
