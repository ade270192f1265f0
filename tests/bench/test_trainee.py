import torch

from shoal.bench.trainee import CPU, Recipe, usual_backend
from shoal.models import model_named

RECIPE = Recipe(entry=model_named("small-mlp"), batch_size=4, learning_rate=0.1, seed=3)


def parameters_of(trainee):
    return torch.cat([parameter.detach().flatten() for parameter in trainee.model.parameters()])


def test_ranks_begin_alike_and_learn_from_batches_of_their_own():
    first, second = RECIPE.trainee(0, CPU), RECIPE.trainee(1, CPU)
    assert torch.equal(parameters_of(first), parameters_of(second))
    first.step()
    second.step()
    assert not torch.equal(parameters_of(first), parameters_of(second))


def test_a_step_forgets_the_gradients_of_the_last_and_learning_adds_to_them():
    plain, adding = RECIPE.trainee(0, CPU), RECIPE.trainee(0, CPU)
    for trainee, action in ((plain, plain.step), (adding, adding.learn)):
        assert trainee.seconds_of(action, 2) > 0
    assert not torch.equal(parameters_of(plain), parameters_of(adding))


def test_nccl_is_between_gpus():
    assert usual_backend(torch.device("cuda", 1), 2) == "nccl"
    assert usual_backend(torch.device("cuda"), 1) is None
    assert usual_backend(CPU, 2) is None
