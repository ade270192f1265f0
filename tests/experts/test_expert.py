"""An expert computes what its module does, learns as plain torch would, and never from what is not finite."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from shoal.core import PeerRefused, UsageError
from shoal.experts.expert import Expert, RefusedUpdate


class Mixed(nn.Module):
    """Several inputs of several types, one by keyword, one without effect, and two outputs."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)

    def forward(self, x, index, unused, *, scale):
        y = self.linear(x + self.embedding(index)) * scale
        return y, y.square().sum(dim=1)


def mixed_inputs(batch_size=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch_size, 4, generator=rng),
        torch.randint(0, 5, (batch_size,), generator=rng),
        torch.randn(batch_size, 2, generator=rng),
        torch.randn(batch_size, 1, generator=rng),
    ]


def mixed_expert(make_optimizer=None, **options):
    torch.manual_seed(0)
    module = Mixed()
    *args, scale = mixed_inputs()
    optimizer = make_optimizer(module.parameters()) if make_optimizer else None
    return Expert("mixed", module, (tuple(args), {"scale": scale}), optimizer=optimizer, **options)


def linear_expert(module=None, make_optimizer=None, **options):
    torch.manual_seed(1)
    module = nn.Linear(4, 4) if module is None else module
    optimizer = make_optimizer(module.parameters()) if make_optimizer else None
    return Expert("linear", module, ((torch.randn(3, 4),), {}), optimizer=optimizer, **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1, amsgrad=True)


def copied(expert):
    state = expert.state()
    return state.tensors, state.numbers


def assert_same(before, after):
    assert before[1] == after[1]
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])


def test_forward_is_the_modules_own_without_a_graph():
    expert = mixed_expert()
    *args, scale = inputs = mixed_inputs(7, seed=1)
    outputs = expert.forward(inputs)
    assert all(map(torch.equal, outputs, expert.module(*args, scale=scale)))
    assert not any(output.requires_grad for output in outputs)
    assert [output.shape[0] for output in outputs] == [7, 7]


def test_backward_equals_plain_torch():
    expert = mixed_expert(sgd)
    twin = copy.deepcopy(expert.module)
    twin_optimizer = sgd(twin.parameters())
    for seed in range(3):
        *args, scale = inputs = mixed_inputs(5, seed)
        grads = [torch.randn(5, 3), torch.randn(5)]
        given = expert.backward(inputs, grads)

        x, scale = args[0].clone().requires_grad_(), scale.clone().requires_grad_()
        torch.autograd.backward(twin(x, *args[1:], scale=scale), grads)
        twin_optimizer.step()
        twin_optimizer.zero_grad()

        assert torch.equal(given[0], x.grad)
        assert given[1] is None
        assert torch.equal(given[2], torch.zeros(5, 2))
        assert torch.equal(given[3], scale.grad)
    assert all(map(torch.equal, expert.module.parameters(), twin.parameters()))
    assert all(parameter.grad is None for parameter in expert.module.parameters())
    assert not any(tensor.requires_grad for tensor in inputs)
    assert expert.num_updates == 3


def test_non_contiguous_inputs_and_gradients():
    expert = linear_expert()
    x, grad = torch.randn(4, 6).t(), torch.randn(1, 4).expand(6, 4)
    leaf = x.clone().requires_grad_()
    expert.module(leaf).backward(grad)
    assert torch.allclose(expert.backward([x], [grad])[0], leaf.grad)


def test_a_merged_batch_is_one_update_with_the_sum_of_the_gradients():
    merged, apart = linear_expert(make_optimizer=sgd), linear_expert(make_optimizer=sgd)
    x, grad = torch.randn(6, 4), torch.randn(6, 4)
    before = apart.module.weight.detach().clone()
    merged.backward([x], [grad])
    weight_grad = sum(grad[part].t() @ x[part] for part in (slice(0, 2), slice(2, 6)))
    assert torch.allclose(merged.module.weight, before - 0.1 * weight_grad, atol=1e-6)
    assert merged.num_updates == 1


def test_without_an_optimizer_only_inputs_get_gradients():
    expert = mixed_expert()
    before = copied(expert)
    given = expert.backward(mixed_inputs(), [torch.randn(3, 3), torch.randn(3)])
    assert given[0].abs().sum() > 0
    assert_same(before, copied(expert))
    assert expert.num_updates == 0
    assert all(parameter.grad is None for parameter in expert.module.parameters())


def test_parameters_that_the_optimizer_leaves_out_stay():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expert = linear_expert(module, lambda _: sgd(module[1].parameters()))
    before = [parameter.detach().clone() for parameter in module.parameters()]
    expert.backward([torch.randn(3, 4)], [torch.randn(3, 4)])
    is_same = list(map(torch.equal, module.parameters(), before))
    assert is_same == [True, True, False, False]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_module_that_passes_its_input_on_copies_nothing():
    expert = linear_expert(nn.Identity())
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    assert expert.forward([x])[0].data_ptr() == x.data_ptr()
    assert expert.backward([x], [grad])[0].data_ptr() == grad.data_ptr()


class Integers(nn.Module):
    def forward(self, x):
        return x.argmax(dim=1)


def test_outputs_without_gradient_give_zeros():
    expert = linear_expert(Integers())
    assert torch.equal(expert.backward([torch.randn(3, 4)], [torch.zeros(3)])[0], torch.zeros(3, 4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["input", "gradient"])
def test_what_is_not_finite_changes_nothing(bad, place):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    expert = linear_expert(module, adam)
    expert.scheduler = LambdaLR(expert.optimizer, lambda step: 1 / (1 + step))
    good = ([torch.randn(3, 4)], [torch.randn(3, 4)])
    expert.backward(*good)
    before = copied(expert)

    inputs, grads = [torch.randn(3, 4)], [torch.randn(3, 4)]
    (inputs if place == "input" else grads)[0][1, 2] = bad
    with pytest.raises(RefusedUpdate, match="linear is not finite") as caught:
        expert.backward(inputs, grads)
    assert isinstance(caught.value, PeerRefused)
    assert_same(before, copied(expert))
    assert all(parameter.grad is None for parameter in module.parameters())
    assert expert.statistics.num_refused_updates == 1
    assert expert.statistics.num_backward_batches == 1
    expert.backward(*good)
    assert expert.num_updates == 2


def test_not_finite_is_refused_without_an_optimizer_too():
    expert = linear_expert(nn.Identity())
    with pytest.raises(RefusedUpdate, match="inputs"):
        expert.backward([torch.randn(3, 4)], [torch.full((3, 4), float("nan"))])


def test_large_gradients_of_a_half_precision_expert_are_finite():
    expert = Expert("half", nn.Identity(), ((torch.zeros(2, 64, dtype=torch.float16),), {}))
    grad = torch.full((64, 64), 6e4, dtype=torch.float16)
    assert torch.equal(expert.backward([torch.zeros(64, 64, dtype=torch.float16)], [grad])[0], grad)


def test_an_error_of_the_module_changes_nothing():
    expert = linear_expert(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), sgd)
    before = copied(expert)
    with pytest.raises(RuntimeError):
        expert.backward([torch.randn(3, 4)], [torch.randn(3, 5)])
    assert_same(before, copied(expert))


def test_gradients_are_clipped_by_their_total_norm():
    expert = linear_expert(make_optimizer=sgd, max_grad_norm=0.5)
    twin = copy.deepcopy(expert.module)
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    leaf = x.clone().requires_grad_()
    twin(leaf).backward(grad)
    assert nn.utils.clip_grad_norm_(twin.parameters(), 0.5) > 0.5
    sgd(twin.parameters()).step()
    assert torch.equal(expert.backward([x], [grad])[0], leaf.grad)
    assert all(map(torch.allclose, expert.module.parameters(), twin.parameters()))


class Positions(nn.Module):
    """Its parameter and a batch of one have the same gradient, in torch the very same memory."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x):
        return x + self.positions


def test_clipping_leaves_the_given_and_the_returned_gradients_alone():
    expert = linear_expert(Positions(), sgd, max_grad_norm=0.1)
    grad = torch.full((1, 4), 3.0)
    assert torch.equal(expert.backward([torch.randn(1, 4)], [grad])[0], torch.full((1, 4), 3.0))
    assert torch.equal(grad, torch.full((1, 4), 3.0))
    assert torch.allclose(expert.module.positions.norm(), torch.tensor(0.01), rtol=1e-3)


def test_asking_does_not_train():
    expert = linear_expert(nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), sgd)
    before = copied(expert)
    x = torch.randn(3, 4)
    first = expert.forward([x])[0]
    assert torch.equal(expert.forward([x])[0], first)
    assert_same(before, copied(expert))
    expert.backward([x], [torch.randn(3, 4)])
    assert expert.module[0].num_batches_tracked == 1
    assert not torch.equal(expert.module[0].running_mean, torch.zeros(4))


def test_the_scheduler_moves_with_every_update():
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    expert = Expert("a", module, ((torch.randn(3, 4),), {}), optimizer=optimizer, scheduler=scheduler)
    rates = []
    for _ in range(3):
        before = module.bias.detach().clone()
        expert.backward([torch.zeros(2, 4)], [torch.ones(2, 4)])
        rates.append(((before - module.bias.detach())[0] / 2).item())
    assert rates == pytest.approx([1.0, 0.5, 0.25])


def test_under_autocast_outputs_and_gradients_keep_their_types():
    expert = linear_expert(make_optimizer=sgd)
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (output,) = expert.forward([x])
        (given,) = expert.backward([x], [grad])
    assert output.dtype == given.dtype == expert.module.weight.dtype == torch.float32
    assert torch.equal(output, output.bfloat16().float())


@pytest.mark.parametrize("is_fused", [False, True])
def test_place_takes_the_optimizer_along(is_fused):
    expert = linear_expert(make_optimizer=lambda p: torch.optim.Adam(p, fused=is_fused))
    expert.backward([torch.randn(3, 4)], [torch.randn(3, 4)])
    expert.place(torch.device("meta"))
    states = [expert.optimizer.state[parameter] for parameter in expert.module.parameters()]
    assert len(states) == 2
    for state in states:
        assert state["exp_avg"].is_meta
        assert state["step"].is_meta == is_fused
    assert list(map(id, expert.module.parameters())) == list(
        map(id, expert.optimizer.param_groups[0]["params"])
    )


@pytest.mark.gpu
def test_training_goes_on_after_a_move_to_the_gpu():
    here, there = (linear_expert(make_optimizer=lambda p: torch.optim.Adam(p, fused=True)) for _ in "ab")
    x, grad = torch.randn(3, 4), torch.randn(3, 4)
    for step in range(4):
        if step == 2:
            there.place(torch.device("cuda"))
        device = there.module.weight.device
        mine, theirs = here.backward([x], [grad])[0], there.backward([x.to(device)], [grad.to(device)])[0]
        assert torch.allclose(mine, theirs.cpu(), atol=1e-5)
    assert torch.allclose(here.module.weight, there.module.weight.cpu(), atol=1e-5)


def test_replicas_see_floating_tensors_once_and_can_write_to_them():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    module[2].weight = module[0].weight
    expert = linear_expert(module)
    tensors = expert.parameters_and_buffers()
    assert list(tensors) == [
        *("0.weight", "0.bias", "1.weight", "1.bias", "2.bias"),
        *("1.running_mean", "1.running_var"),
    ]
    tensors["0.bias"].fill_(2.0)
    assert torch.equal(module[0].bias, torch.full((4,), 2.0))


def test_statistics_count_what_was_done():
    expert = linear_expert()
    expert.forward([torch.randn(5, 4)])
    expert.forward([torch.randn(2, 4)])
    expert.backward([torch.randn(2, 4)], [torch.randn(2, 4)])
    statistics = expert.statistics
    assert (statistics.num_forward_batches, statistics.num_forward_samples) == (2, 7)
    assert (statistics.num_backward_batches, statistics.num_backward_samples) == (1, 2)
    assert statistics.mean_batch_size == 3


def test_what_cannot_train_is_refused_at_once():
    module, example = nn.Linear(4, 4), ((torch.randn(3, 4),), {})
    optimizer, other = sgd(module.parameters()), sgd(nn.Linear(4, 4).parameters())
    with pytest.raises(UsageError, match="not the module's"):
        Expert("a", module, example, optimizer=other)
    with pytest.raises(UsageError, match="another optimizer"):
        Expert("a", module, example, optimizer=optimizer, scheduler=LambdaLR(other, lambda _: 1.0))
    with pytest.raises(UsageError, match="ReduceLROnPlateau"):
        Expert("a", module, example, optimizer=optimizer, scheduler=ReduceLROnPlateau(optimizer))
    with pytest.raises(UsageError, match="max_grad_norm"):
        Expert("a", module, example, optimizer=optimizer, max_grad_norm=0.0)
    with pytest.raises(UsageError, match="uid"):
        Expert("", module, example)


def test_a_schedule_that_is_over_takes_no_step_back(caplog):
    module = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=3)
    expert = Expert("a", module, ((torch.zeros(3, 4),), {}), optimizer=optimizer, scheduler=scheduler)
    for num_steps in range(1, 6):
        before = module.weight.detach().clone()
        assert expert.backward([torch.ones(3, 4)], [torch.ones(3, 4)])[0] is not None
        assert expert.num_updates == expert.num_changes == num_steps
        assert not torch.equal(module.weight, before)
    assert caplog.text.count("The scheduler of expert a fails") == 1
    assert scheduler.last_epoch == 3
