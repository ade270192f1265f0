"""What holds for every codec: the tensor comes back as it was described, and strangers cannot do harm."""

import contextlib

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import LimitExceeded, TensorError, UsageError
from shoal.tensors import (
    CODECS,
    Encoded,
    EncodedMeta,
    TensorSpec,
    codec_from_name,
    decode,
    describe,
    read_meta,
)
from shoal.tensors.codecs.base import plain

FEW = settings(derandomize=True, deadline=None, max_examples=100)
NAMES = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8:16",
    "int8:tensor",
    "int8:8,stochastic",
    "int4",
    "int4:16,stochastic",
    "top-k:0.1",
    "low-rank:2",
    "sparse-2bit:0.1",
]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

every_codec = pytest.mark.parametrize("name", NAMES)


def example(shape=(40, 30), dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def received(encoded):
    """What arrives: bytes, and a meta that went through MessagePack."""
    meta = read_meta(msgspec.msgpack.decode(msgspec.msgpack.encode(encoded.meta)))
    return Encoded(meta, [bytearray(buffer) for buffer in encoded.buffers])


def wire(encoded):
    return msgspec.msgpack.encode(encoded.meta) + b"".join(bytes(buffer) for buffer in encoded.buffers)


@every_codec
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
def test_dtype_and_shape_come_back(name, dtype):
    for shape in [(), (0,), (1,), (7,), (3, 0), (40, 30), (6, 5, 4, 3)]:
        tensor = example(shape).to(dtype)
        result = decode(received(codec_from_name(name).encode(tensor)))
        assert (result.dtype, result.shape) == (tensor.dtype, tensor.shape)
        if dtype not in FLOATS or name == "none":
            assert wire(plain(result)) == wire(plain(tensor))


@every_codec
@pytest.mark.parametrize(
    "tensor",
    [
        example((40, 30)).T,
        example((8, 6, 5, 5)).to(memory_format=torch.channels_last),
        example((40, 1)).expand(40, 30),
        example((40, 30))[::2, 3:],
        torch.nn.Parameter(example((40, 30))),
    ],
)
def test_memory_formats_give_the_values_of_contiguous_tensors(name, tensor):
    encoded = codec_from_name(name).encode(tensor)
    result = decode(received(encoded))
    assert result.stride() == tensor.stride() or result.is_contiguous()
    assert describe(result) == describe(tensor.detach())
    if name in ("none", "fp16", "bf16"):
        assert torch.equal(result, decode(codec_from_name(name).encode(tensor.detach().contiguous())))


@every_codec
def test_the_same_input_gives_the_same_bytes(name):
    tensors = [example(seed=seed) for seed in range(3)]
    first, second = codec_from_name(name), codec_from_name(name)
    assert [wire(first.encode(t)) for t in tensors] == [wire(second.encode(t)) for t in tensors]


@every_codec
def test_encoding_leaves_the_tensor_alone(name):
    tensor = example()
    before = tensor.clone()
    result = decode(received(codec_from_name(name).encode(tensor)))
    result.fill_(0)
    assert torch.equal(tensor, before)


@every_codec
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_non_finite_values_are_sent_plain(name, value):
    tensor = example((400, 300))
    tensor[201, 77] = value
    encoded = codec_from_name(name).encode(tensor)
    assert encoded.meta.codec == "none"
    assert torch.equal(decode(encoded).view(torch.int32), tensor.view(torch.int32))


@every_codec
def test_zeros_stay_zeros(name):
    assert decode(codec_from_name(name).encode(torch.zeros(40, 30))).count_nonzero() == 0


@every_codec
@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_extremes_stay_finite(name, dtype):
    info = torch.finfo(dtype)
    tensor = torch.tensor([info.max, info.min, info.tiny, 0.0] * 64, dtype=dtype).view(16, 16)
    assert decode(codec_from_name(name).encode(tensor)).isfinite().all()


@every_codec
@pytest.mark.parametrize("dtype", FLOATS)
def test_never_larger_than_plain(name, dtype):
    for count in range(12):
        tensor = example((count,), dtype)
        assert codec_from_name(name).encode(tensor).buffer_bytes <= count * dtype.itemsize


@pytest.mark.parametrize(
    ("name", "size_bytes"),
    [
        ("none", 4 * 6000),
        ("fp16", 2 * 6000),
        ("bf16", 2 * 6000),
        ("int8", 6000 + 4 * 2),
        ("int8:100", 6000 + 4 * 60),
        ("int8:tensor", 6000 + 4),
        ("int4", 3000 + 4 * 47),
        ("top-k:0.01", 60 * (4 + 4)),
        ("low-rank:4", 4 * 4 * (100 + 60)),
        # 41 of 4096 values and 20 of the other 1904, with 6 low bits, a gap and 2 bits for each; gaps of 63
        # and 29 in all; two bfloat16 for each chunk
        ("sparse-2bit:0.01", -(-(61 * (6 + 1 + 2) + 63 + 29) // 8) + 2 * 4),
    ],
)
def test_sizes_are_what_the_formula_says(name, size_bytes):
    encoded = codec_from_name(name).encode(example((100, 60)))
    assert encoded.buffer_bytes == size_bytes
    assert encoded.size_bytes == len(wire(encoded))
    assert encoded.size_bytes - size_bytes < 64


@pytest.mark.parametrize("name", ["fp16", "bf16", "top-k"])
def test_what_would_not_shrink_is_sent_plain(name):
    assert codec_from_name(name).encode(example((1,), torch.bfloat16)).meta.codec == "none"


@pytest.mark.parametrize(
    ("name", "dtype", "largest"), [("fp16", torch.float32, 65504.0), ("bf16", torch.float64, None)]
)
def test_casts_saturate(name, dtype, largest):
    largest = largest or torch.finfo(torch.bfloat16).max
    tensor = torch.tensor([1e300 if dtype is torch.float64 else 1e30, -largest * 1.01, 1.0], dtype=dtype)
    assert decode(codec_from_name(name).encode(tensor)).tolist() == [largest, -largest, 1.0]


def test_names():
    assert list(CODECS) == ["none", "fp16", "bf16", "int8", "int4", "top-k", "low-rank", "sparse-2bit"]
    assert all(codec.name == name for name, codec in CODECS.items())
    assert codec_from_name("Top_K:0.25").fraction == 0.25
    assert codec_from_name("low-rank:7").rank == 7
    assert codec_from_name("sparse_2bit:0.03").density == 0.03
    assert codec_from_name("int8:tensor").block_size is None
    assert codec_from_name("int8:32,stochastic").generator is not None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("topk", "Did you mean 'top-k'"),
        ("lowrank:4", "Did you mean 'low-rank'"),
        ("gzip", "none, fp16, bf16, int8, int4, top-k, low-rank, sparse-2bit"),
        ("", "unknown codec"),
        ("top-k:2", "between 0 and 1"),
        ("top-k:nan", "between 0 and 1"),
        ("top-k:many", "between 0 and 1"),
        ("low-rank:0", "positive rank"),
        ("low-rank:" + "9" * 5000, "positive rank"),
        ("int8:" + "9" * 5000, "does not know"),
        ("top-k:" + "9" * 5000, "fraction"),
        ("low-rank:x", "positive rank"),
        ("int8:-4", "int8:1024"),
        ("int8:0", "int8:1024"),
        ("fp16:3", "no parameter"),
        ("sparse-2bit:0", "between 0 and 1"),
        ("sparse-2bit:all", "between 0 and 1"),
        ("sparse:0.02", "Did you mean 'sparse-2bit'"),
    ],
)
def test_bad_names_say_what_to_write(text, word):
    with pytest.raises(UsageError, match=word):
        codec_from_name(text)


def test_codec_decodes_its_own_and_plain_only():
    tensor = example()
    assert codec_from_name("top-k").decode(codec_from_name("none").encode(tensor)).shape == tensor.shape
    with pytest.raises(TensorError, match=r"'fp16' came to 'int8'"):
        codec_from_name("int8").decode(codec_from_name("fp16").encode(tensor))


@every_codec
def test_claims_beyond_the_limit_allocate_nothing(name):
    encoded = received(codec_from_name(name).encode(example()))
    assert decode(encoded, 4800).shape == (40, 30)
    with pytest.raises(LimitExceeded, match="4799"):
        decode(encoded, 4799)
    huge = TensorSpec("float32", (2**30, 2**20))
    with pytest.raises(LimitExceeded):
        decode(Encoded(EncodedMeta(encoded.meta.codec, huge, encoded.meta.options), encoded.buffers))


@pytest.mark.parametrize("name", ["fp16", "int8", "int4", "top-k:0.1", "low-rank:2", "sparse-2bit:0.1"])
def test_cut_buffers_are_refused(name):
    encoded = received(codec_from_name(name).encode(example()))
    for buffers in ([], encoded.buffers[:-1], [*encoded.buffers, b""], [b[:-1] for b in encoded.buffers]):
        with pytest.raises(TensorError):
            decode(Encoded(encoded.meta, buffers))


def test_codecs_without_state_refuse_one():
    codec = codec_from_name("fp16")
    codec.load_state_dict(codec.state_dict())
    with pytest.raises(UsageError, match="no state"):
        codec.load_state_dict({"residual/a": torch.ones(1)})


small = st.integers(-1, 9) | st.integers(-(2**65), 2**65)
hostile_metas = st.builds(
    EncodedMeta,
    st.sampled_from([*CODECS, "gzip"]) | st.none(),
    st.builds(
        TensorSpec,
        st.sampled_from(["float32", "float16", "float64", "int8", "no"]),
        st.lists(st.integers(0, 4) | small, max_size=3).map(tuple),
        st.none() | st.lists(small, max_size=3).map(tuple),
    ),
    st.lists(small, max_size=3).map(tuple) | st.text(max_size=2),
)


@FEW
@given(hostile_metas, st.lists(st.binary(max_size=80), max_size=3))
def test_hostile_messages_end_in_our_errors(meta, buffers):
    with contextlib.suppress(TensorError, LimitExceeded):
        decode(Encoded(meta, buffers), max_bytes=4096)


@settings(FEW, max_examples=140)
@given(st.sampled_from(NAMES), st.data())
def test_corrupted_messages_end_in_our_errors(name, data):
    """Nearly right, so that the checks behind the first one are reached."""
    encoded = received(codec_from_name(name).encode(example((12, 10))))
    buffer = data.draw(st.sampled_from(encoded.buffers))
    buffer[data.draw(st.integers(0, len(buffer) - 1))] ^= data.draw(st.integers(0, 255))
    options = list(encoded.meta.options)
    for index in range(len(options)):
        options[index] += data.draw(st.sampled_from([0, 0, 1, -1, 2**64, -(2**64)]))
    shape = tuple(size + data.draw(st.sampled_from([0, 0, 0, 1])) for size in encoded.meta.spec.shape)
    meta = EncodedMeta(encoded.meta.codec, TensorSpec("float32", shape), tuple(options))
    with contextlib.suppress(TensorError, LimitExceeded):
        assert tuple(decode(Encoded(meta, encoded.buffers), 2**20).shape) == shape


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=10,
)


@FEW
@given(json_like)
def test_any_decoded_value_is_a_meta_or_refused(value):
    with contextlib.suppress(TensorError, LimitExceeded):
        decode(Encoded(read_meta(value), []), 4096)


def test_what_is_no_meta_is_refused():
    with pytest.raises(TensorError, match="unknown encoding"):
        decode(Encoded(None, []))
    with pytest.raises(TensorError, match="expected the meta"):
        codec_from_name("int8").decode(Encoded(None, []))
