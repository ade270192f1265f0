"""The network of the convergence experiment as plain modules and loops, with another one's parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from shoal.experts.classes import LahFeedForward
from shoal.simulate.mixture.experts import ExpertBank
from shoal.simulate.mixture.model import MixtureModel

TINY = {"num_experts": 5, "num_layers": 2, "num_active": 2, "layer_dim": 6, "num_trainers": 3, "steps": 12}


def expert_of(bank: ExpertBank, number: int) -> LahFeedForward:
    """A copy."""
    expert = LahFeedForward(bank.weights[0].shape[2])
    vectors = bank.vectors_of(number)
    linears = [expert.layers[0], expert.layers[3], expert.layers[6]]
    norms = [expert.layers[1], expert.layers[4]]
    with torch.no_grad():
        for layer, linear in enumerate(linears):
            linear.weight.copy_(bank.weights[layer][number])
            linear.bias.copy_(vectors.biases[layer])
        for layer, norm in enumerate(norms):
            norm.weight.copy_(vectors.scales[layer])
            norm.bias.copy_(vectors.shifts[layer])
    return expert


def flat_gradient(expert: LahFeedForward) -> torch.Tensor:
    """In the bank's order."""
    linears = [expert.layers[0], expert.layers[3], expert.layers[6]]
    norms = [expert.layers[1], expert.layers[4]]
    parts = [linear.weight.grad for linear in linears] + [linear.bias.grad for linear in linears]
    parts += [part.grad for norm in norms for part in (norm.weight, norm.bias)]
    return torch.cat([part.flatten() for part in parts])


class PlainMixture(nn.Module):
    """Sample by sample, expert by expert."""

    def __init__(self, model: MixtureModel) -> None:
        super().__init__()
        self.settings = model.settings
        self.trunk = nn.ParameterList([part.detach().clone() for part in model.trunk])
        self.gate = [part.detach().clone() for part in model.gate]
        count = self.settings.num_layers * self.settings.experts_a_layer
        self.experts = nn.ModuleList([expert_of(model.bank, number) for number in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first_weight, first_bias, scale, shift, last_weight, last_bias = list(self.trunk)[:6]
        gate = list(self.trunk)[6:] or self.gate
        x = functional.linear(x, first_weight, first_bias)
        for layer in range(self.settings.num_layers):
            first = layer * self.settings.experts_a_layer
            if not self.settings.has_gate:
                x = self.experts[first](x)
                continue
            scales, shifts, keys = (part[layer] for part in gate)
            outputs = []
            for sample in x:
                normed = functional.layer_norm(sample, sample.shape, scales, shifts)
                logits = normed @ (keys / keys.norm(dim=1, keepdim=True))
                chosen = logits.argsort(descending=True)[: self.settings.num_active]
                weights = logits[chosen].softmax(0)
                answers = [self.experts[first + int(number)](sample) for number in chosen]
                outputs.append(sum(w * answer for w, answer in zip(weights, answers, strict=True)))
            x = torch.stack(outputs)
        return functional.linear(functional.layer_norm(x, x.shape[1:], scale, shift), last_weight, last_bias)
