"""The consistent start."""

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.group.functions import take_state
from shoal.strategies.all_reduce import GradientAllReduce
from shoal.strategies.start import require_equal
from strategies.fakes import Mirror


def model_of(rank, *, width=4, dtype=torch.float32, is_frozen=False):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Conv1d(1, 2, 3))
    model[0].weight.requires_grad_(not is_frozen)
    with torch.no_grad():
        model[1].running_mean.add_(rank)
        model[1].num_batches_tracked.add_(rank)
    model[2].to(dtype)
    model.register_buffer("mask", torch.tensor([rank == 0, rank > 0]))
    model.register_buffer("nothing", torch.empty(0))
    return model


def start(group, arguments):
    model, expected = model_of(group.rank), model_of(0)
    frozen = model_of(group.rank, is_frozen=True)
    with GradientAllReduce(group).attach(model, torch.optim.SGD(model.parameters()), stays=True):
        assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))
    with GradientAllReduce(group).attach(frozen, torch.optim.SGD(frozen.parameters()), stays=True):
        assert torch.equal(frozen[0].weight, expected[0].weight)
    errors = []
    for odd in ({"width": 5}, {"dtype": torch.float64}, {"is_frozen": True}):
        other = model_of(group.rank, **(odd if group.rank == 2 else {}))
        with pytest.raises(UsageError) as caught:
            require_equal(group, {**dict(other.named_parameters()), **dict(other.named_buffers())})
        errors.append(caught.value.what)
    return errors


def test_values_of_rank_0_and_differences_by_name(workers):
    answers = workers.run(start, 3)
    assert answers[0] == answers[1] == answers[2]
    shape, dtype, frozen = answers[0]
    assert shape.startswith(
        "rank 2 has 0.weight (float32, shape [5, 3], trainable) where rank 0 has 0.weight"
    )
    assert dtype.startswith("rank 2 has 2.weight (float64, ")
    assert frozen.startswith("rank 2 has 0.weight (float32, shape [4, 3], not trainable)")


def gets_state(group, arguments):
    root = arguments["root"]
    state = {"betas": (0.9, 0.99), 3: torch.full((2, 2), float(group.rank)).t(), "none": torch.ones(0)}
    got = take_state(group, lambda: state if group.rank == root else object(), root)
    return [list(got["betas"]), got[3].tolist(), list(got["none"].shape)]


def test_a_state_of_one_member_is_given_to_all(workers):
    for root in range(2):
        expected = [[0.9, 0.99], [[float(root)] * 2] * 2, [0]]
        assert workers.run(gets_state, 2, {"root": root}) == [expected] * 2


def test_a_state_that_cannot_be_sent_is_an_error_on_all():
    with pytest.raises(UsageError, match="of type object"):
        take_state(Mirror(), lambda: {"x": object()})
