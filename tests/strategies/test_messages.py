"""Messages of a fixed size: what each codec makes of a model, and that all who read one come to the same."""

import pytest
import torch
from torch import nn

from shoal.strategies.companions import Companion
from shoal.strategies.messages import Format
from shoal.tensors.codecs import codec_from_name


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Linear(40, 30).double())


def flats(module):
    """With values of the parameters, as they lie."""
    companion = Companion(
        dict(module.named_parameters()), lambda count, dtype: torch.zeros(count, dtype=dtype)
    )
    for parameter, view in companion:
        view.copy_(parameter.detach())
    return companion.flats


def sent(name, values, module):
    form = Format(codec_from_name(name), list(module.parameters()))
    message = form.encode(values)
    assert message.dtype is torch.uint8
    assert len(message) == form.size_bytes
    came = [torch.zeros_like(value) for value in values]
    form.add(message, came)
    return form, came


@pytest.mark.parametrize(
    ("name", "size_bytes", "share"),
    [
        ("none", None, 0.0),
        ("fp16", None, 0.01),
        ("int8", (240 + 4) + (1232 + 4), 0.03),
        ("top-k:0.1", 24 * (4 + 4) + 123 * (4 + 8), 0.9),
        # the weights as matrices of 24 × 9 and 30 × 40, the biases as they are
        ("low-rank:2", 4 * (2 * (24 + 9) + 8) + 8 * (2 * (30 + 40) + 30), 0.98),
    ],
)
def test_what_comes_is_near_what_was_given_in_so_many_bytes(name, size_bytes, share):
    module = model()
    values = flats(module)
    assert [value.numel() for value in values] == [240, 1232]
    form, came = sent(name, values, module)
    raw_bytes = sum(value.nbytes for value in values)
    assert form.share == form.size_bytes / raw_bytes
    if size_bytes is not None:
        assert form.size_bytes == size_bytes
    for value, got in zip(values, came, strict=True):
        assert (value - got).norm() <= share * value.norm()


@pytest.mark.parametrize("name", ["int8", "top-k:0.1", "low-rank:2"])
def test_what_is_not_finite_counts_as_zeros(name):
    module = model()
    values = flats(module)
    values[1][7] = torch.nan
    _, came = sent(name, values, module)
    assert came[0].any()
    assert all(value.isfinite().all() for value in came)


def test_it_is_added_to_what_is_there():
    module = model()
    values = flats(module)
    form = Format(codec_from_name("none"), list(module.parameters()))
    there = [value.clone() for value in values]
    form.add(form.encode(values), there)
    for value, got in zip(values, there, strict=True):
        assert torch.equal(got, 2 * value)
