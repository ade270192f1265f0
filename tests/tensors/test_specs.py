"""Claims about tensors: every one is true, or refused with an error of ours before anything is allocated."""

import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import LimitExceeded, TensorError
from shoal.tensors import DTYPES, TensorLimits, TensorSpec, check, describe, read_specs, size_bytes, unpack
from shoal.tensors.specs import contiguous_strides, is_dense, memory_shape

FEW = settings(derandomize=True, deadline=None, max_examples=150)


def test_contiguous_tensor_has_no_strides():
    assert describe(torch.zeros(2, 3)) == TensorSpec("float32", (2, 3))
    assert describe(torch.tensor(1.0)) == TensorSpec("float32", ())
    assert describe(torch.zeros(0, 7)) == TensorSpec("float32", (0, 7))


def test_dense_permutations_keep_their_strides():
    weight = torch.zeros(8, 3, 5, 5).to(memory_format=torch.channels_last)
    assert describe(weight).strides == weight.stride()
    assert describe(torch.zeros(4, 6).T).strides == (1, 6)


def test_channels_last_survives_dimensions_of_size_one():
    weight = torch.zeros(64, 3, 1, 1).to(memory_format=torch.channels_last)
    assert describe(weight).strides == weight.stride() != contiguous_strides(weight.shape)


def test_what_is_not_dense_is_described_as_contiguous():
    assert describe(torch.zeros(3, 1).expand(3, 4)).strides is None
    assert describe(torch.zeros(8, 8)[::2, 1:]).strides is None


def test_stride_of_a_lone_element_in_a_large_tensor_is_not_sent():
    assert describe(torch.zeros(10, 1000)[:1, :1]).strides is None


@FEW
@given(st.lists(st.integers(0, 4), max_size=5), st.randoms(use_true_random=False))
def test_strides_agree_with_torch(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = torch.zeros(shape).permute(order)
    spec = describe(tensor)
    assert contiguous_strides(shape) == torch.zeros(shape).stride()
    assert is_dense(tensor.shape, tensor.stride())
    assert size_bytes(spec) == tensor.numel() * 4
    if tensor.numel():
        assert (spec.strides or contiguous_strides(spec.shape)) == tensor.stride()
        assert math.prod(memory_shape(spec)) == tensor.numel()


def test_memory_shape_is_slowest_first():
    assert memory_shape(describe(torch.zeros(8, 3, 5, 1).to(memory_format=torch.channels_last))) == (8, 5, 3)
    assert memory_shape(describe(torch.zeros(4, 6).T)) == (4, 6)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros([1] * 33), "dimensions"),
        ([1.0], "list"),
    ],
)
def test_unsendable_is_refused_by_name(tensor, word):
    with pytest.raises(TensorError, match=word):
        describe(tensor)


@pytest.mark.filterwarnings("ignore:.*quantize.*:UserWarning")
def test_quantised_is_refused():
    with pytest.raises(TensorError, match="dequantize"):
        describe(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))


@pytest.mark.filterwarnings("ignore:.*nested tensors.*:UserWarning")
def test_nested_is_refused():
    with pytest.raises(TensorError, match="nested"):
        describe(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (TensorSpec("floot32", (2,)), "Did you mean 'float32'"),
        (TensorSpec("qint8", (2,)), "use one of bool"),
        (TensorSpec("x" * 10**6, (2,)), "unknown dtype"),
        (TensorSpec(7, (2,)), "a name"),
        (TensorSpec("float32", (-1,)), "not possible"),
        (TensorSpec("float32", (2**40, 2**40)), "address"),
        (TensorSpec("float32", (0, 2**40, 2**40)), "address"),
        (TensorSpec("float32", (2**100,)), "address"),
        (TensorSpec("float32", (1,) * 33), "dimensions"),
        (TensorSpec("float32", (True,)), "integer"),
        (TensorSpec("float32", "22"), "integers"),
        (TensorSpec("float32", (2, 2), (1,)), "strides"),
        (TensorSpec("float32", (2, 2), (1, 1)), "dense"),
        (TensorSpec("float32", (2, 2), (0, 1)), "dense"),
        (TensorSpec("float32", (2, 2), (3, 1)), "dense"),
        (TensorSpec("float32", (2, 2), (-2, 1)), "dense"),
        (TensorSpec("float32", (1, 2), (2**80, 1)), "dense"),
        (TensorSpec("float32", (0, 2), (2, 1)), "without elements"),
    ],
)
def test_impossible_spec_is_refused(spec, word):
    with pytest.raises(TensorError, match=word) as caught:
        check([spec], [16])
    assert len(str(caught.value)) < 1000


def test_spec_must_fit_its_bytes():
    check([TensorSpec("float32", (4,))], [16])
    with pytest.raises(TensorError, match="takes 16 bytes, but its buffer has 15"):
        check([TensorSpec("float32", (4,))], [15])
    with pytest.raises(TensorError, match="1 tensor specs came with 2 buffers"):
        check([TensorSpec("float32", (4,))], [16, 16])


def test_limits():
    specs, sizes = [TensorSpec("uint8", (8,))] * 3, [8] * 3
    check(specs, sizes, TensorLimits(max_tensors=3, max_bytes=24))
    with pytest.raises(LimitExceeded, match="max_bytes"):
        check(specs, sizes, TensorLimits(max_bytes=23))
    with pytest.raises(LimitExceeded, match="max_tensors"):
        check(specs, sizes, TensorLimits(max_tensors=2))


def test_specs_travel_as_message_pack():
    specs = [describe(torch.zeros(4, 6).T), describe(torch.tensor(1, dtype=torch.int8))]
    assert read_specs(msgspec.msgpack.decode(msgspec.msgpack.encode(specs))) == specs


dims = st.integers(-2, 6) | st.integers(-(2**70), 2**70)
hostile_specs = st.builds(
    TensorSpec,
    st.sampled_from([*DTYPES, "qint8"]) | st.text(max_size=20) | st.none(),
    st.lists(dims, max_size=4).map(tuple) | st.text(max_size=3),
    st.none() | st.lists(dims, max_size=4).map(tuple),
)


@FEW
@given(st.lists(hostile_specs, max_size=3), st.lists(st.integers(0, 300), max_size=3))
def test_hostile_specs_end_in_our_errors(specs, sizes):
    try:
        check(specs, sizes, TensorLimits(max_bytes=500))
    except (TensorError, LimitExceeded):
        return
    for tensor, spec in zip(unpack(specs, [bytearray(size) for size in sizes]), specs, strict=True):
        assert tuple(tensor.shape) == spec.shape


# Mostly believable, so that the checks behind the first one are reached as well.
near_specs = st.tuples(
    st.permutations([1, 2, 3]),
    st.permutations([1, 2, 3]) | st.permutations([1, 3, 6]) | st.permutations([1, 2, 6]) | st.none(),
).map(lambda pair: TensorSpec("int16", tuple(pair[0]), pair[1] and tuple(pair[1])))


@FEW
@given(near_specs)
def test_accepted_strides_reach_every_byte_once(spec):
    try:
        check([spec], [12])
    except TensorError:
        return
    (tensor,) = unpack([spec], [bytearray(12)])
    tensor.copy_(torch.arange(6).view(spec.shape))
    assert sorted(tensor.as_strided((6,), (1,)).tolist()) == list(range(6))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@FEW
@given(json_like)
def test_any_decoded_value_is_specs_or_refused(value):
    try:
        specs = read_specs(value)
        check(specs, [0] * len(specs))
    except (TensorError, LimitExceeded):
        pass
