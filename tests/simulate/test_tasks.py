import itertools

import pytest
import torch
from torch.func import functional_call, grad, vmap
from torch.optim import SGD

from shoal.core import UsageError
from shoal.simulate.job import TrainingJob
from shoal.simulate.task_facts import FACTS
from shoal.simulate.tasks import TASKS, make_task

HERE = ("quadratic", "digits", "text")


def task_of(name, **changes):
    sizes = {"num_workers": 4, "steps": 10, "eval_every": 5, "batch_size": 8, **changes}
    return make_task(TrainingJob(task=name, strategy="all-reduce", **sizes))


def taken(task, rank, count=2):
    return list(itertools.islice(task.batches(rank), count))


def test_every_task_has_its_facts():
    assert list(TASKS) == list(FACTS)
    assert all(facts.steps % facts.eval_every == 0 for facts in FACTS.values())


@pytest.mark.parametrize("name", HERE)
def test_equal_seeds_give_equal_models_and_batches_and_ranks_differ(name):
    one, same, other = task_of(name), task_of(name), task_of(name, seed=1)
    for batch, again in zip(taken(one, 1), taken(same, 1), strict=True):
        assert all(map(torch.equal, batch, again))
    assert not torch.equal(taken(one, 0)[0][1], taken(one, 1)[0][1])
    assert not torch.equal(taken(one, 0)[0][1], taken(other, 0)[0][1])
    states = [list(task.model().parameters()) for task in (one, same)]
    assert all(map(torch.equal, *states))


@pytest.mark.parametrize("name", HERE)
def test_a_model_leaves_the_generators_as_they_were(name):
    task = task_of(name)
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    task.model()
    assert torch.equal(torch.rand(1), wanted)


@pytest.mark.parametrize("name", HERE)
def test_workers_gradients_can_be_taken_together(name):
    task = task_of(name)
    model = task.model()
    x, y = (torch.stack(parts) for parts in zip(*(taken(task, rank, 1)[0] for rank in range(4)), strict=True))
    parameters = {key: value.detach() for key, value in model.named_parameters()}

    def loss(values, inputs, labels):
        return task.loss(functional_call(model, values, (inputs,)), labels)

    together = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    task.loss(model(x[2]), y[2]).backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(together[key][2], parameter.grad)


@pytest.mark.parametrize("name", HERE)
def test_training_brings_the_score_toward_the_target(name):
    task = task_of(name, batch_size=32)
    facts = task.facts
    model = task.model()
    optimizer = SGD(model.parameters(), lr=facts.learning_rates[2], momentum=facts.momentum)
    streams = [task.batches(rank) for rank in range(4)]
    before = task.evaluate(model)
    for _ in range(30):
        optimizer.zero_grad()
        for x, y in map(next, streams):
            (task.loss(model(x), y) / 4).backward()
        optimizer.step()
    after = task.evaluate(model)
    assert after.loss < before.loss
    assert facts.worst([before.value, after.value]) == before.value != after.value


def test_the_least_sum_of_all_quadratics_is_at_the_optimum_and_not_at_a_workers_own():
    task = task_of("quadratic", split="dirichlet:0.1")
    model = task.model()
    with torch.no_grad():
        model.x.copy_(task.optimum)
    gradients = []
    for rank in range(4):
        rows, values = taken(task, rank, 1)[0]
        gradients.append(torch.autograd.grad(task.loss(model(rows), values), model.x)[0])
        torch.testing.assert_close(torch.linalg.matrix_norm(rows, 2).item(), 1.0)
    assert task.evaluate(model).value < 1e-12
    assert sum(gradients).norm() < 1e-12
    assert min(gradient.norm() for gradient in gradients) > 0.01


def test_a_split_says_how_far_quadratics_differ():
    def spread(split):
        task = task_of("quadratic", split=split)
        pairs = [taken(task, rank, 1)[0] for rank in range(4)]
        optima = torch.stack([torch.linalg.lstsq(rows, values).solution for rows, values in pairs])
        return float((optima - optima.mean(0)).norm())

    assert spread("iid") < spread("dirichlet:1") < spread("dirichlet:0.1")


def test_text_is_split_by_pages():
    def num_pages(split):
        task = task_of("text", split=split)
        return len(torch.unique(task._labels[task._parts[0]]))

    assert num_pages("dirichlet:0.05") < num_pages("iid")


def test_a_task_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="no task 'cifar'"):
        task_of("cifar")


def test_mnist_is_evaluated_on_a_fifth_of_its_tests(monkeypatch):
    images = torch.arange(50.0).reshape(50, 1, 1, 1).expand(-1, 1, 28, 28)
    labels = torch.arange(50) % 10
    monkeypatch.setattr("shoal.simulate.tasks._mnist", lambda train, folder: (images, labels))
    task = task_of("mnist")
    assert task._test[0][:, 0, 0, 0].tolist() == list(range(0, 50, 5))
    assert task.model()(taken(task, 0)[0][0]).shape == (8, 10)
