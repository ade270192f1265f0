"""The blocks compute what their documents say."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.core import UsageError
from shoal.experts import classes as blocks


def test_the_feed_forward_block():
    block = blocks.FeedForward(8)
    x = torch.randn(3, 8)
    inner = functional.gelu(functional.linear(x, block.up.weight, block.up.bias), approximate="tanh")
    assert inner.shape == (3, 32)
    y = x + functional.linear(inner, block.down.weight, block.down.bias)
    y = (y - y.mean(1, keepdim=True)) / y.var(1, keepdim=True, unbiased=False).sqrt()
    assert torch.allclose(block(x), y, atol=1e-5)
    assert block.norm.eps == 1e-12


def test_padding_does_not_matter():
    block = blocks.Transformer(16).eval()
    x, mask = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    mask[0, 4:] = True
    changed = x.clone()
    changed[0, 4:] += 1.0
    assert torch.allclose(block(x, mask)[0, :4], block(changed, mask)[0, :4], atol=1e-6)
    assert not torch.allclose(block(x, ~mask)[0, :4], block(x, mask)[0, :4], atol=1e-3)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_sample_of_padding_alone_spoils_nothing(is_training):
    torch.manual_seed(0)
    block = blocks.Transformer(16).train(is_training)
    x, mask = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    mask[1] = True
    y = block(x, mask)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters())


@pytest.mark.parametrize(("make", "inner"), [(blocks.Transformer, 64), (blocks.LahTransformer, 2048)])
def test_transformers(make, inner):
    layer = make(16).layer
    assert isinstance(layer, nn.TransformerEncoderLayer)
    assert layer.linear1.out_features == inner
    assert layer.self_attn.num_heads == 16
    assert (layer.dropout.p, layer.norm_first) == (0.1, False)
    with pytest.raises(UsageError, match="multiple of 16"):
        make(24)


def test_the_dropout_mask_is_an_input():
    block = blocks.DeterministicDropout(8)
    x = torch.randn(3, 8, requires_grad=True)
    mask = torch.rand(3, 8) < 0.5
    y = block(x, mask)
    assert torch.equal(y, block(x, mask))
    y.sum().backward()
    assert torch.equal(x.grad == 0, ~mask)
    block.eval()
    assert torch.allclose(block(x, mask), block(x, ~mask))
    assert torch.allclose(block(0.8 * x, mask), block.train()(0.64 * x, torch.ones_like(mask)), atol=1e-6)


def test_learning_at_homes_block():
    block = blocks.LahFeedForward(8)
    shapes = [tuple(layer.weight.shape) for layer in block.layers if isinstance(layer, nn.Linear)]
    assert shapes == [(32, 8), (32, 32), (8, 32)]
    x = torch.randn(3, 8)
    assert torch.equal(block(x), x + block.layers(x))


def test_nops(monkeypatch):
    x = torch.randn(3, 8)
    late = blocks.DelayedNop(8)
    delays_s = []
    monkeypatch.setattr(time, "sleep", delays_s.append)
    assert blocks.Nop(8)(x) is late(x) is x
    assert delays_s == [0.5]
    assert late.eval()(x) is x
    assert delays_s == [0.5]
