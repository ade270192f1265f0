"""Parameters in two buffers: what moves, what stays, and what comes back."""

import io

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.group import Done
from shoal.group.solo import SoloGroup
from shoal.strategies.twins import Twins


@pytest.fixture
def group():
    with SoloGroup() as group:
        yield group


def make(group, *tensors):
    parameters = [nn.Parameter(tensor) for tensor in tensors]
    return parameters, Twins(group, parameters, group.empty)


def test_swap_shows_what_was_written_into_the_spare_buffer(group):
    (one, two), twins = make(group, torch.arange(5.0), torch.arange(6.0).view(2, 3))
    ((live, spare),) = twins.pairs
    torch.mul(live, 2, out=spare)
    assert one.tolist() == [0, 1, 2, 3, 4]
    twins.swap()
    assert one.tolist() == [0, 2, 4, 6, 8]
    assert two.tolist() == [[0, 2, 4], [6, 8, 10]]
    assert not twins.is_home
    with torch.no_grad():
        one.fill_(1)
    assert twins.pairs[0].live[:5].tolist() == [1] * 5
    assert twins.pairs[0].spare[:5].tolist() == [0, 1, 2, 3, 4]
    assert twins.pairs[0].live is spare


def test_every_kind_of_parameter_keeps_its_value_and_strides(group):
    tensors = [
        torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(7, 3).t(),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.randn(5, dtype=torch.float64),
        torch.randn(5).bfloat16(),
        torch.randn(3, dtype=torch.complex64),
    ]
    copies = [tensor.clone() for tensor in tensors]
    parameters, twins = make(group, *tensors)
    for pair in twins.pairs:
        pair.spare.copy_(pair.live)
    for step in (lambda: None, twins.swap, twins.close):
        step()
        for parameter, copy in zip(parameters, copies, strict=True):
            assert torch.equal(parameter, copy)
            assert parameter.stride() == copy.stride()
            assert parameter.data_ptr() % 64 == 0
    assert [pair.live.dtype for pair in twins.pairs] == []


def test_mixing_passes_through_complex_numbers(group):
    (parameter,), twins = make(group, torch.tensor([1 + 2j, 3 - 1j]))
    ((live, spare),) = twins.pairs
    assert not live.is_complex()
    torch.mul(live, 0.5, out=spare)
    twins.swap()
    assert parameter.tolist() == [0.5 + 1j, 1.5 - 0.5j]


def test_a_parameter_is_saved_without_its_neighbours(group):
    (small, _), twins = make(group, torch.randn(4), torch.randn(100_000))
    file = io.BytesIO()
    torch.save(small.data, file)
    assert len(file.getvalue()) < 10_000
    twins.close()


def test_training_does_not_notice_the_swaps(group):
    def train(should_swap):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        twins = Twins(group, list(model.parameters()), group.empty) if should_swap else None
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 6, 6)).square().mean().backward()
            optimizer.step()
            if twins is not None:
                for live, spare in twins.pairs:
                    spare.copy_(live)
                twins.swap()
        if twins is not None:
            twins.close()
        momentum = [entry["momentum_buffer"] for entry in optimizer.state.values()]
        return [*(parameter.detach() for parameter in model.parameters()), *momentum]

    assert all(map(torch.equal, train(False), train(True)))


def test_data_that_was_replaced_is_taken_back(group):
    (parameter, other), twins = make(group, torch.zeros(4), torch.zeros(4))
    parameter.data = torch.full((4,), 3.0)
    twins.adopt()
    assert twins.pairs[0].live[:4].tolist() == [3.0] * 4
    parameter.data.fill_(4)
    assert twins.pairs[0].live[:4].tolist() == [4.0] * 4
    other.data = other.data.double()
    with pytest.raises(UsageError, match=r"float64.*\n.*after attach"):
        twins.adopt()


def test_close_gives_parameters_memory_of_their_own(group):
    (parameter,), twins = make(group, torch.ones(3))
    ((live, _),) = twins.pairs
    twins.close()
    twins.close()
    live.fill_(9)
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.requires_grad


def test_workers_whose_memory_differs_are_refused():
    class Two(SoloGroup):
        members = (0, 1)

        def all_gather(self, tensor):
            other = nn.Parameter(torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last))
            return Done([tensor, *_shared_of(other)])

    def _shared_of(parameter):
        class Listening(SoloGroup):
            def all_gather(self, tensor):
                seen.append(tensor)
                return super().all_gather(tensor)

        seen = []
        Twins(Listening(), [parameter], lambda count, dtype: torch.zeros(count, dtype=dtype))
        return seen

    group = Two()
    with pytest.raises(UsageError, match=r"rank 1.*\n.*channels_last"):
        Twins(group, [nn.Parameter(torch.ones(1, 2, 3, 4))], group.empty)
