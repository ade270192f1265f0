"""When experts update and with what; rows that wait, and their room."""

from __future__ import annotations

import pytest
import torch

from shoal.simulate.mixture.experts import ExpertBank
from shoal.simulate.mixture.settings import MixtureRunSettings
from simulate.plain_mixture import TINY, expert_of, flat_gradient

LAYER_EXPERTS = TINY["num_experts"]


def bank_of(is_one_by_one: bool = True, **changes: object) -> ExpertBank:
    settings = MixtureRunSettings(**{**TINY, "batch_size": 2, "update_every_steps": 3, **changes})
    return ExpertBank(settings, torch.Generator().manual_seed(1), is_one_by_one=is_one_by_one)


def filled_rows(bank: ExpertBank, count: int, seed: int, mark: int = 0) -> list[int]:
    first = bank.pool.take(count, mark)
    bank.pool.span(first, count).normal_(generator=torch.Generator().manual_seed(seed))
    return list(range(first, first + count))


def deliver(bank: ExpertBank, experts: list[int], mark: int = 0) -> None:
    bank.count_step()
    bank.deliver(filled_rows(bank, len(experts), len(experts), mark), experts)


def changed(bank: ExpertBank, before: torch.Tensor) -> list[int]:
    after = bank.weights[1]
    return [number for number in range(len(after)) if not torch.equal(after[number], before[number])]


def update(bank: ExpertBank) -> list[int]:
    """Who did."""
    before = bank.weights[1].clone()
    bank.decide()
    for layer in range(2):
        bank.update(layer)
    return changed(bank, before)


@pytest.mark.parametrize("is_one_by_one", [True, False])
def test_an_expert_updates_at_its_number_of_inputs_or_of_steps(is_one_by_one: bool) -> None:
    bank = bank_of(is_one_by_one)
    second = LAYER_EXPERTS
    deliver(bank, [0, 0, 1, 3, second, second + 1, -1, -1])
    assert update(bank) == [0]
    deliver(bank, [2, 2, 2, 1, -1, -1, -1, second])
    assert update(bank) == [1, 2, second]
    deliver(bank, [2, 0, 0, 0, -1, -1, -1, -1])
    assert update(bank) == [0, 3, second + 1]
    assert bank.num_touched() == 6
    assert bank.staleness == {0: 11, 1: 3}, "expert 0 had updated since it answered the last three samples"


@pytest.mark.parametrize("is_one_by_one", [True, False])
def test_an_update_is_adam_on_the_sum_of_the_gradients(is_one_by_one: bool) -> None:
    bank = bank_of(is_one_by_one)
    expert = expert_of(bank, 2)
    optimizer = torch.optim.Adam(expert.parameters(), lr=1e-3, amsgrad=True)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(4, TINY["layer_dim"], generator=generator)
        rows = filled_rows(bank, len(x), seed=0)
        _write_rows(bank, rows[0], expert, x)
        bank.deliver(rows, [2, 2, 2, 2])
        assert update(bank) == [2]
        optimizer.zero_grad()
        expert(x).square().sum().backward()
        optimizer.step()
        for layer, index in enumerate((0, 3, 6)):
            torch.testing.assert_close(bank.weights[layer][2], expert.layers[index].weight.detach())
    assert flat_gradient(expert).shape == (bank.layout.expert_size,)


def test_room_is_used_again() -> None:
    bank = bank_of()
    seen: set[int] = set()
    for _ in range(20):
        rows = filled_rows(bank, 8, seed=0)
        bank.deliver(rows, [0, 0, 1, 1, -1, -1, LAYER_EXPERTS, LAYER_EXPERTS])
        update(bank)
        seen.update(rows)
    assert len(seen) == 8
    assert 0 not in seen


def test_an_expert_that_is_due_again_before_it_was_used_makes_both_updates() -> None:
    bank, other = bank_of(), bank_of()
    for turn in range(2):
        for each in (bank, other):
            each.deliver(filled_rows(each, 4, seed=turn), [1, 1, 1, 1])
            each.decide()
        other.update(0)
    bank.update(0)
    torch.testing.assert_close(bank.weights[1][1], other.weights[1][1], rtol=0, atol=0)


def _write_rows(bank: ExpertBank, first_row: int, expert: torch.nn.Module, x: torch.Tensor) -> None:
    """What backward of the sum of squares leaves, by autograd alone."""
    given, *_ = parts = bank.layout.row_parts(bank.pool.span(first_row, len(x)))
    values, hidden = {}, x
    for layer, index in enumerate((0, 3)):
        linear, norm = expert.layers[index], expert.layers[index + 1]
        values[3 + layer] = z = linear(hidden)
        normed = torch.nn.functional.layer_norm(z, z.shape[1:])
        scale, shift = (
            part.detach().expand_as(z).clone().requires_grad_() for part in (norm.weight, norm.bias)
        )
        values[6 + 2 * layer], values[7 + 2 * layer] = scale, shift
        hidden = torch.relu(normed * scale + shift)
        parts[1 + layer].copy_(hidden.detach())
    values[5] = last = expert.layers[6](hidden)
    loss = (last + x).square().sum()
    gradients = torch.autograd.grad(loss, list(values.values()))
    given.copy_(x)
    for number, gradient in zip(values, gradients, strict=True):
        parts[number].copy_(gradient)
