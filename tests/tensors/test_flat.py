"""Tensors in one flat buffer for each dtype: arithmetic, states, and parameters that move in and out."""

import io

import pytest
import torch
from torch import nn

from shoal.core import UsageError
from shoal.tensors import Flat, ParameterBuffers


def parameters_of(*tensors):
    return {f"p{number}": nn.Parameter(tensor) for number, tensor in enumerate(tensors)}


def every_kind():
    return parameters_of(
        torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(7, 3).t(),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.randn(5, dtype=torch.float64),
        torch.randn(5).bfloat16(),
        torch.randn(3, dtype=torch.complex64),
    )


def test_a_flat_is_a_vector():
    named = {"a": torch.randn(3, 4), "b": torch.randn(5), "c": torch.randn(2, dtype=torch.float64)}
    one = Flat.of(named)
    two = Flat.of({name: torch.ones_like(tensor) for name, tensor in named.items()})
    mixed = 0.5 * (one - two) + two / 0.5 - two
    mixed += one
    mixed -= two
    mixed *= 3
    mixed.add_(two, alpha=2).sub_(one, alpha=0.5).lerp_(two, 0.25)
    for name, view in mixed.items():
        value = ((0.5 * (named[name] - 1) + 1 + named[name] - 1) * 3 + 2 - 0.5 * named[name]) * 0.75 + 0.25
        torch.testing.assert_close(view, value)
    assert all(torch.equal(view, named[name]) for name, view in one.items())
    assert torch.equal((-one).views[0], -one.views[0])
    norm = sum(float(tensor.double().square().sum()) for tensor in named.values()) ** 0.5
    assert one.norm() == pytest.approx(norm)
    assert one.zero_().norm() == 0


def test_a_state_goes_by_name_and_refuses_another_shape():
    flat = Flat.of({"a": torch.ones(2), "b": torch.ones(3)})
    state = flat.state_dict()
    flat.zero_()
    assert state["a"].tolist() == [1, 1]
    flat.load_state_dict({"b": state["b"]})
    assert flat.state_dict()["a"].tolist() == [0, 0]
    assert flat.state_dict()["b"].tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match=r"\[2\] for b.*\[3\]"):
        flat.load_state_dict({"b": torch.ones(2)})


def test_one_buffer_after_another_shows_what_was_written_into_the_spare_one():
    named = parameters_of(torch.arange(5.0), torch.arange(6.0).view(2, 3))
    buffers = ParameterBuffers(named, num_buffers=2)
    ((live, spare),) = buffers.pairs
    torch.mul(live, 2, out=spare)
    assert named["p0"].tolist() == [0, 1, 2, 3, 4]
    buffers.swap()
    assert named["p0"].tolist() == [0, 2, 4, 6, 8]
    assert named["p1"].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert not buffers.is_home
    with torch.no_grad():
        named["p0"].fill_(1)
    assert buffers.live.flats[0][:5].tolist() == [1] * 5
    assert buffers.spare.flats[0][:5].tolist() == [0, 1, 2, 3, 4]
    assert buffers.live.flats[0] is spare


def test_every_kind_of_parameter_keeps_its_value_and_strides():
    named = every_kind()
    copies = {name: parameter.detach().clone() for name, parameter in named.items()}
    buffers = ParameterBuffers(named, num_buffers=2)
    buffers.spare.copy_(buffers.live)
    for step in (lambda: None, buffers.swap, buffers.close, buffers.close):
        step()
        for name, copy in copies.items():
            assert torch.equal(named[name], copy)
            assert named[name].stride() == copy.stride()
            assert named[name].data_ptr() % 64 == 0


def test_mixing_passes_through_complex_numbers():
    named = parameters_of(torch.tensor([1 + 2j, 3 - 1j]))
    buffers = ParameterBuffers(named, num_buffers=2)
    ((live, spare),) = buffers.pairs
    assert not live.is_complex()
    torch.mul(live, 0.5, out=spare)
    buffers.swap()
    assert named["p0"].tolist() == [0.5 + 1j, 1.5 - 0.5j]


def test_a_parameter_is_saved_without_its_neighbours():
    named = parameters_of(torch.randn(4), torch.randn(100_000))
    buffers = ParameterBuffers(named)
    file = io.BytesIO()
    torch.save(named["p0"].data, file)
    assert len(file.getvalue()) < 10_000
    buffers.close()


def test_training_does_not_notice_the_swaps():
    def train(should_swap):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))
        model = model.to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        named = dict(model.named_parameters())
        buffers = ParameterBuffers(named, num_buffers=2) if should_swap else None
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 6, 6)).square().mean().backward()
            optimizer.step()
            if buffers is not None:
                buffers.spare.copy_(buffers.live)
                buffers.swap()
        if buffers is not None:
            buffers.close()
        momentum = [entry["momentum_buffer"] for entry in optimizer.state.values()]
        return [*(parameter.detach() for parameter in model.parameters()), *momentum]

    assert all(map(torch.equal, train(False), train(True)))


def test_data_that_was_replaced_is_taken_back():
    named = parameters_of(torch.zeros(4), torch.zeros(4))
    buffers = ParameterBuffers(named)
    named["p0"].data = torch.full((4,), 3.0)
    buffers.adopt()
    assert buffers.live.flats[0][:4].tolist() == [3.0] * 4
    named["p0"].data.fill_(4)
    assert buffers.live.flats[0][:4].tolist() == [4.0] * 4
    named["p1"].data = named["p1"].data.double()
    with pytest.raises(UsageError, match=r"float64.*\n.*after attach"):
        buffers.adopt()


def test_what_was_written_wins_over_the_spare_buffer():
    named = parameters_of(torch.zeros(4))
    buffers = ParameterBuffers(named, num_buffers=2)
    buffers.mark()
    assert not buffers.is_written()
    with torch.no_grad():
        named["p0"].add_(1)
    assert buffers.is_written()
    buffers.keep()
    buffers.swap()
    assert named["p0"].tolist() == [1] * 4


def test_close_gives_parameters_memory_of_their_own():
    named = parameters_of(torch.ones(3))
    buffers = ParameterBuffers(named, num_buffers=2)
    live = buffers.live
    buffers.close()
    live.flats[0].fill_(9)
    assert named["p0"].tolist() == [1, 1, 1]
    assert named["p0"].requires_grad
