import itertools

import pytest
import torch

from shoal.simulate.tasks import accuracy_of, batches_of


def test_batches_are_whole_and_of_one_epoch_after_another():
    part = torch.arange(10.0), torch.arange(10)
    taken = [y.tolist() for _, y in itertools.islice(batches_of(part, 4, seed=1), 4)]
    assert [len(batch) for batch in taken] == [4] * 4
    assert len(dict.fromkeys(taken[0] + taken[1], True)) == 8
    again = [y.tolist() for _, y in itertools.islice(batches_of(part, 4, seed=1), 4)]
    assert taken == again
    assert taken != [y.tolist() for _, y in itertools.islice(batches_of(part, 4, seed=2), 4)]


def test_who_has_less_than_a_batch_takes_all_it_has():
    part = torch.arange(3.0), torch.arange(3)
    assert all(sorted(y.tolist()) == [0, 1, 2] for _, y in itertools.islice(batches_of(part, 4, seed=1), 3))


def test_those_of_a_part_alone_are_drawn():
    examples = torch.arange(10.0), torch.arange(10)
    own = torch.tensor([7, 2, 5, 3])
    taken = [y.tolist() for _, y in itertools.islice(batches_of(examples, 2, seed=1, own=own), 2)]
    assert sorted(taken[0] + taken[1]) == [2, 3, 5, 7]


def test_an_evaluation_counts_all_examples_and_leaves_the_model_training():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[0.0], [1.0]]))
    x = torch.tensor([1.0, -1.0] * 1500 + [1.0]).reshape(-1, 1)
    score = accuracy_of(model, (x, torch.ones(3001, dtype=torch.long)))
    assert score.value == pytest.approx(1501 / 3001)
    right, wrong = (torch.nn.functional.softplus(torch.tensor(sign)).item() for sign in (-1.0, 1.0))
    assert score.loss == pytest.approx((1501 * right + 1500 * wrong) / 3001, rel=1e-4)
    assert model.training
