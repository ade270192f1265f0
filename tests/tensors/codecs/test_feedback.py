"""Error feedback: sent + kept = original, for every codec, and in the long run everything is sent."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import UsageError
from shoal.tensors import ErrorFeedback, codec_from_name, decode

NAMES = ["none", "fp16", "bf16", "int8", "int8:tensor", "int8:16,stochastic", "top-k:0.1", "low-rank:2"]
NAMES += ["int4", "sparse-2bit:0.1"]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

every_codec = pytest.mark.parametrize("name", NAMES)


def wide(tensor):
    return tensor.to(torch.float64)


def assert_nothing_lost(due, sent, kept):
    """To one rounding of the subtraction, due − sent, in the precision that the rest is kept in."""
    eps = torch.finfo(kept.dtype).eps
    assert ((wide(sent) + wide(kept)) - wide(due)).abs().le(wide(due - sent.to(due)).abs() * eps).all()


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    seed = draw(st.integers(0, 1000))
    scale = draw(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 3e4, 1e30]))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    tensor = tensor.to(draw(st.sampled_from(FLOATS)))
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    kind = draw(st.sampled_from(["as is", "expanded", "strided"]))
    if kind == "expanded":
        return tensor.unsqueeze(-1).expand(*tensor.shape, 3)
    return tensor[::2] if kind == "strided" and shape else tensor


@every_codec
@settings(derandomize=True, deadline=None, max_examples=40)
@given(tensors())
def test_sent_and_kept_are_the_original(name, tensor):
    feedback = ErrorFeedback(codec_from_name(name))
    precise = torch.float64 if tensor.dtype is torch.float64 else torch.float32
    kept = torch.zeros(tensor.shape, dtype=precise)
    for _ in range(3):
        due = tensor.to(precise) + kept
        sent = decode(feedback.encode(tensor, "w"))
        assert (sent.dtype, sent.shape) == (tensor.dtype, tensor.shape)
        if not tensor.isfinite().all():
            assert feedback.residuals == {}
            assert torch.equal(sent.isfinite(), tensor.isfinite())
            return
        kept = feedback.residuals.get("w", kept)
        assert_nothing_lost(due, sent, kept)


@every_codec
def test_the_average_of_what_is_sent_approaches_the_truth(name):
    truth = torch.randn(24, 20, generator=torch.Generator().manual_seed(0))
    feedback = ErrorFeedback(codec_from_name(name))
    total = torch.zeros_like(truth, dtype=torch.float64)
    errors = {}
    for step in range(1, 257):
        total += decode(feedback.encode(truth, "w"))
        if step in (16, 256):
            errors[step] = (total / step - truth).abs().max().item()
    assert errors[256] < 0.12
    assert errors[256] < errors[16] / 4 or errors[256] < 1e-6


def test_fp16_sends_what_overflowed_later():
    feedback = ErrorFeedback(codec_from_name("fp16"))
    sent = [decode(feedback.encode(torch.tensor([200_000.0 * (step == 0)]), "w")).item() for step in range(5)]
    assert sent == [65504.0, 65504.0, 65504.0, 200_000.0 - 3 * 65504, 0.0]


def test_exact_where_the_rest_is_representable():
    tensor = torch.tensor([1.0, 0.5, 0.25, -2.0] * 10)
    feedback = ErrorFeedback(codec_from_name("top-k:0.25"))
    sent = decode(feedback.encode(tensor, "w"))
    assert torch.equal(sent + feedback.residuals["w"], tensor)
    assert sent.count_nonzero() == 10


@every_codec
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_bad_gradient_reaches_the_receiver_and_not_the_memory(name, bad):
    feedback = ErrorFeedback(codec_from_name(name))
    good = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    feedback.encode(good, "w")
    before = feedback.residuals["w"].clone()
    spoilt = good.clone()
    spoilt[3, 4] = bad
    sent = decode(feedback.encode(spoilt, "w"))
    assert torch.equal(sent.view(torch.int32), spoilt.view(torch.int32))
    assert torch.equal(feedback.residuals["w"], before)


def test_what_was_sent_stays_as_it_was():
    feedback = ErrorFeedback(codec_from_name("none"))
    tensor = torch.ones(3)
    first = feedback.encode(tensor, "w")
    feedback.encode(tensor * 2, "w")
    assert decode(first).tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_pass_through(dtype):
    feedback = ErrorFeedback(codec_from_name("int8"))
    tensor = torch.ones(300, dtype=dtype)
    assert torch.equal(feedback.decode(feedback.encode(tensor, "w")), tensor)
    assert feedback.residuals == {}


@every_codec
def test_state_goes_on_where_it_was(name):
    tensor = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    first, second = (ErrorFeedback(codec_from_name(name)) for _ in range(2))
    first.encode(tensor, "a/b")
    first.encode(tensor[:10], "c")
    second.load_state_dict({key: value.clone() for key, value in first.state_dict().items()})
    for _ in range(2):
        assert torch.equal(decode(first.encode(tensor, "a/b")), decode(second.encode(tensor, "a/b")))
    assert torch.equal(first.residuals["a/b"], second.residuals["a/b"])


def test_loaded_state_is_a_copy():
    tensor = torch.randn(30, 20)
    first, second = (ErrorFeedback(codec_from_name("low-rank:2")) for _ in range(2))
    first.encode(tensor)
    second.load_state_dict(first.state_dict())
    before = second.residuals[""].clone()
    first.residuals[""].zero_()
    assert torch.equal(second.residuals[""], before)


def test_mistakes_are_named():
    feedback = ErrorFeedback(codec_from_name("int8"))
    feedback.encode(torch.ones(30))
    with pytest.raises(UsageError, match="slot of its own"):
        feedback.encode(torch.ones(31))
    with pytest.raises(UsageError, match="error feedback"):
        feedback.load_state_dict({"warm/w": torch.ones(1)})
    with pytest.raises(UsageError, match="twice"):
        ErrorFeedback(feedback)
    feedback.forget()
    feedback.encode(torch.ones(31))


@every_codec
@pytest.mark.parametrize("decay", [0.0, 0.95])
def test_what_was_kept_decays(name, decay):
    feedback = ErrorFeedback(codec_from_name(name), decay)
    kept = torch.zeros(24, 20)
    for seed in range(4):
        tensor = torch.randn(24, 20, generator=torch.Generator().manual_seed(seed))
        due = torch.add(tensor, kept, alpha=decay)
        sent = decode(feedback.encode(tensor, "w"))
        kept = feedback.residuals["w"]
        assert_nothing_lost(due, sent, kept)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_a_decay_is_a_share(decay):
    with pytest.raises(UsageError, match="between 0 and 1"):
        ErrorFeedback(codec_from_name("int8"), decay)
