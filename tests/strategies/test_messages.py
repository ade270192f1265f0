"""Messages of a fixed size: what each codec makes of a model, and that all who read one come to the same."""

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal import models
from shoal.tensors import BucketLayout, Flat
from shoal.tensors.codecs import codec_from_name
from shoal.tensors.codecs.formats import Format

DOCS = Path(__file__).parents[2] / "docs" / "strategies.md"


def model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.Linear(40, 30).double())


def flats(module):
    """With values of the parameters, as they lie."""
    return Flat.of(dict(module.named_parameters())).flats


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


class Small(nn.Module):
    """200 tensors of 3 values."""

    def __init__(self):
        super().__init__()
        self.values = nn.ParameterList(torch.zeros(3) for _ in range(200))


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("`resnet18`", models.resnet18),
        ("`mobilenet_v2`", models.mobilenet_v2),
        ("`mlp`", models.mlp),
        ("200 tensors of 3 values", Small),
    ],
)
def test_padding_costs_what_the_page_says(name, make):
    parameters = list(make().parameters())
    plain_bytes = sum(parameter.nbytes for parameter in parameters)
    layouts = BucketLayout.plan(parameters, is_reversed=True)
    padded_bytes = sum(layout.size_bytes for layout in layouts)
    flags_bytes = sum(layout.with_flags().size_bytes for layout in layouts) - padded_bytes
    message_bytes = Format(codec_from_name("int8"), parameters).size_bytes
    num_values, num_padded = plain_bytes // 4, padded_bytes // 4
    unpadded_bytes = num_values + 4 * -(-num_values // 4096)
    assert message_bytes == num_padded + 4 * -(-num_padded // 4096)
    row = (
        f"| {name} | {len(parameters)} | {plain_bytes:,} | {padded_bytes - plain_bytes:,} | {flags_bytes} "
        f"| {message_bytes:,}, with {message_bytes - unpadded_bytes:,} |"
    )
    assert row in DOCS.read_text()
