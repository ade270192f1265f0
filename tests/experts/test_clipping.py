"""One huge gradient does not spoil an expert, and usual ones pass untouched."""

import copy
import math

import pytest
import torch

from shoal.experts.classes import ExpertClass, TrainingSettings, expert_class, make_expert
from shoal.experts.clipping import GradientClip
from shoal.experts.expert import MergedTooLarge

HIDDEN_DIM, BATCH_SIZE = 16, 8


@pytest.fixture(autouse=True)
def _one_thread():
    """Many tiny steps: on a loaded machine threads that wait for each other take a hundred times as long."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def new_expert(**settings):
    return make_expert("expert0", expert_class("ffn"), HIDDEN_DIM, TrainingSettings(**settings), seed=3)


def honest_steps(expert, num_steps, scale=1.0, seed=0):
    """Teach the expert to answer 10, which is far off."""
    rng = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        x = torch.randn(BATCH_SIZE, HIDDEN_DIM, generator=rng)
        (output,) = expert.forward([x])
        noise = 1 + 3 * torch.rand(1, generator=rng)  # norms of different batches differ
        expert.backward([x], [scale * noise * (output - 10.0) / output.numel()])


def huge_step(expert, value=1e17):
    x = torch.randn(BATCH_SIZE, HIDDEN_DIM, generator=torch.Generator().manual_seed(1))
    expert.backward([x], [torch.full((BATCH_SIZE, HIDDEN_DIM), value)])


def weights(expert):
    return torch.cat([tensor.detach().reshape(-1).clone() for tensor in expert.module.parameters()])


def progress(expert, **options):
    """By how much a hundred honest steps lower the loss."""
    before = loss(expert)
    honest_steps(expert, 100, seed=2, **options)
    return before - loss(expert)


def loss(expert):
    x = torch.randn(64, HIDDEN_DIM, generator=torch.Generator().manual_seed(9))
    return (expert.forward([x])[0] - 10.0).square().mean().item()


@pytest.mark.parametrize("num_before", [0, 1, 50])
@pytest.mark.parametrize(
    ("optimizer", "scale"), [("adam", 1.0), ("adam", 1e-4), ("adamw", 1.0), ("sgd", 1.0)]
)
def test_one_huge_gradient_does_not_stop_training(optimizer, scale, num_before):
    honest, lied_to = new_expert(optimizer=optimizer), new_expert(optimizer=optimizer)
    for expert in (honest, lied_to):
        honest_steps(expert, num_before, scale)
    before = weights(lied_to)
    huge_step(lied_to)
    # what it does by itself is bounded: by the learning rate, or by a hundredth of the weights' norm
    assert (weights(lied_to) - before).norm() < 0.05 * before.norm()
    assert 0.55 < progress(lied_to, scale=scale) / progress(honest, scale=scale) < 1.1


def test_a_huge_input_does_not_stop_training_either():
    class Bare(torch.nn.Linear):  # nothing normalizes its inputs
        def __init__(self, hidden_dim):
            super().__init__(hidden_dim, hidden_dim)

    bare = ExpertClass("bare", Bare, lambda dim, size: ((torch.randn(size, dim),), {}))
    experts = [make_expert("expert0", bare, HIDDEN_DIM, TrainingSettings(), seed=0) for _ in range(2)]
    honest, lied_to = experts
    for expert in experts:
        honest_steps(expert, 50)
    lied_to.backward([torch.full((1, HIDDEN_DIM), 1e17)], [torch.ones(1, HIDDEN_DIM)])
    assert progress(lied_to) > 0.6 * progress(honest)


def test_a_tiny_first_gradient_does_not_hold_the_others_down():
    expert, untouched = new_expert(optimizer="sgd"), new_expert(optimizer="sgd")
    huge_step(expert, 1e-25)
    assert progress(expert) > 0.8 * progress(untouched)


def test_without_clipping_a_huge_gradient_freezes_the_expert():
    """So that the tests above show something."""
    honest, lied_to = new_expert(clip_gradients=0.0), new_expert(clip_gradients=0.0)
    huge_step(lied_to)
    assert progress(lied_to) < 0.1 * progress(honest)
    assert lied_to.statistics.num_clipped_updates == 0


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_usual_training_is_the_same_to_the_bit(optimizer):
    experts = [new_expert(optimizer=optimizer, clip_gradients=factor) for factor in (10.0, 0.0)]
    for expert in experts:
        honest_steps(expert, 200)
    assert torch.equal(*map(weights, experts))
    assert experts[0].statistics.num_clipped_updates == 0


def test_norms_that_grow_are_followed():
    expert, unclipped = new_expert(optimizer="sgd"), new_expert(optimizer="sgd", clip_gradients=0.0)
    for each in (expert, unclipped):
        honest_steps(each, 50, scale=1e-3)
    honest_steps(expert, 60)  # a thousand times as large as those before
    num_clipped = expert.statistics.num_clipped_updates
    assert 0 < num_clipped < 60
    honest_steps(expert, 50, seed=4)
    assert expert.statistics.num_clipped_updates == num_clipped


def test_a_minority_of_huge_gradients_shifts_nothing():
    honest, lied_to = new_expert(optimizer="sgd"), new_expert(optimizer="sgd")
    for step in range(60):
        honest_steps(honest, 1, seed=step)
        honest_steps(lied_to, 1, seed=step)
        if step % 6 == 5:
            huge_step(lied_to)
    assert lied_to.statistics.num_clipped_updates == 10
    usual = GradientClip(10.0)
    usual.restore(honest.state().numbers["gradient_norms"])
    shifted = GradientClip(10.0)
    shifted.restore(lied_to.state().numbers["gradient_norms"])
    assert shifted.limit(lambda: 1.0) < 5 * usual.limit(lambda: 1.0)


def test_what_is_usual_survives_a_checkpoint():
    expert = new_expert()
    honest_steps(expert, 50)
    restored = new_expert()
    assert restored.load(expert.state()) == []
    assert restored.state().numbers == expert.state().numbers
    for each in (expert, restored):
        huge_step(each)
        assert each.statistics.num_clipped_updates == 1
    assert torch.equal(weights(expert), weights(restored))


@pytest.mark.parametrize("norms", [None, "many", [1.0, "two"], [math.inf], [-1.0], [0.0], [1.0] * 1000])
def test_a_state_without_norms_or_with_impossible_ones_starts_anew(norms):
    state = new_expert().state()
    state.numbers["gradient_norms"] = norms
    if norms is None:
        del state.numbers["gradient_norms"]
    expert = new_expert()
    expert.load(state)
    assert expert.state().numbers["gradient_norms"] == []
    honest_steps(expert, 3)
    assert expert.num_updates == 3


def test_a_restart_of_the_optimizer_is_told_and_happens_once(caplog):
    expert = new_expert()
    huge_step(expert)
    honest_steps(expert, 40, scale=1e-3)
    assert caplog.text.count("The optimizer of expert expert0 starts anew") == 1
    steps = {state["step"].item() for state in expert.optimizer.state.values()}
    assert steps <= {36, 37, 38, 39}


def test_merged_requests_above_the_limit_are_refused_together_and_taken_apart():
    expert = new_expert()
    honest_steps(expert, 20)
    before = copy.deepcopy(expert.state())
    x = torch.randn(2, HIDDEN_DIM)
    grad = torch.stack([torch.full((HIDDEN_DIM,), 1e17), torch.ones(HIDDEN_DIM)])
    with pytest.raises(MergedTooLarge):
        expert.backward([x], [grad], [bytes(16), bytes([1] * 16)])
    after = expert.state()
    assert before.numbers == after.numbers
    assert all(torch.equal(before.tensors[name], after.tensors[name]) for name in before.tensors)
    expert.backward([x[:1]], [grad[:1]], [bytes(16)])
    assert expert.statistics.num_clipped_updates == 1
