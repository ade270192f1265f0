"""Tensors to bytes and back: equal bits, equal strides, no copies that memory does not force."""

import mmap
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import LimitExceeded, TensorError
from shoal.tensors import (
    ALIGNMENT_BYTES,
    DTYPES,
    TensorLimits,
    TensorSpec,
    aligned_memory,
    allocate_for,
    describe,
    pack,
    unpack,
)
from shoal.tensors.dtypes import carrier
from shoal.transport.memory import BufferPool

FEW = settings(derandomize=True, deadline=None, max_examples=80)


def sample(dtype, count):
    """Every bit pattern the type has, as far as they fit."""
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul_(37).remainder_(251).to(torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    return raw.view(carrier(dtype)).view(dtype) if dtype is not torch.complex32 else unpack_bytes(raw, dtype)


def unpack_bytes(raw, dtype):
    return unpack(
        [TensorSpec(str(dtype).removeprefix("torch."), (raw.numel() // dtype.itemsize,))], [raw.numpy()]
    )[0]


def bits(tensor):
    return tensor.detach().view(carrier(tensor.dtype)).reshape(-1).contiguous().view(torch.uint8).tolist()


def travel(tensor):
    specs, buffers = pack([tensor])
    memory = allocate_for(specs, [buffer.nbytes for buffer in buffers])
    for target, source in zip(memory, buffers, strict=True):
        target[:] = source
    return unpack(specs, memory)[0]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_travels(name):
    for shape in [(), (6,), (2, 3), (0, 3), (3, 0)]:
        tensor = sample(DTYPES[name], 6)[: torch.Size(shape).numel()].view(shape)
        result = travel(tensor)
        assert result.dtype == tensor.dtype
        assert result.shape == tensor.shape
        assert bits(result) == bits(tensor)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_travels_when_it_is_not_dense(name):
    tensor = sample(DTYPES[name], 24).view(4, 6)[::2, 1::2]
    result = travel(tensor)
    assert result.is_contiguous()
    assert bits(result) == bits(tensor)


def test_all_plain_dtypes_of_this_torch_are_known():
    members = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
    unknown = {str(dtype) for dtype in members if dtype not in DTYPES.values()}
    assert {name.removeprefix("torch.") for name in unknown} == {
        "qint8",
        "quint8",
        "qint32",
        "quint4x2",
        "quint2x4",
    }


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(4, 6).T,
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24.0)[4:12],
        torch.tensor(3.0),
        torch.nn.Parameter(torch.ones(3)),
    ],
)
def test_dense_tensors_are_not_copied_either_way(tensor):
    (spec,), (buffer,) = pack([tensor])
    (result,) = unpack([spec], [buffer])
    assert result.data_ptr() == tensor.data_ptr()
    assert result.stride() == tensor.stride()
    assert not result.requires_grad
    assert torch.equal(result, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 1).expand(3, 4),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(24.0).view(4, 6).diagonal(),
        torch.zeros(1).expand(0),
    ],
)
def test_other_tensors_are_copied_to_contiguous(tensor):
    result = travel(tensor)
    assert result.is_contiguous()
    assert torch.equal(result, tensor)


def test_lazy_conjugation_and_negation_are_carried_out():
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(travel(tensor.conj()), tensor.conj())
    assert torch.equal(travel(tensor.conj().imag), tensor.conj().imag)


def test_result_is_writable_and_is_the_buffer():
    buffer = bytearray(8)
    (tensor,) = unpack([TensorSpec("int32", (2,))], [buffer])
    tensor += 1
    assert buffer == b"\x01\0\0\0\x01\0\0\0"


def test_read_only_and_unaligned_buffers_are_copied():
    spec = TensorSpec("int32", (1,))
    data = b"\x05\0\0\0"
    (tensor,) = unpack([spec], [data])
    tensor += 1
    assert (tensor.item(), data) == (6, b"\x05\0\0\0")
    memory = aligned_memory(5)
    memory[1:] = data
    (tensor,) = unpack([spec], [memory[1:]])
    assert tensor.data_ptr() % 4 == 0
    assert tensor.item() == 5


def test_bool_bytes_of_a_stranger_become_true():
    (tensor,) = unpack([TensorSpec("bool", (3,))], [bytearray([0, 1, 255])])
    assert tensor.view(torch.uint8).tolist() == [0, 1, 1]


def test_an_mmap_stays_open_under_its_tensor():
    memory = mmap.mmap(-1, 4096)
    (tensor,) = unpack([TensorSpec("float32", (1024,))], [memory])
    with pytest.raises(BufferError):
        memory.close()
    tensor.fill_(1)
    del tensor
    memory.close()


@pytest.mark.parametrize(
    ("buffer", "word"),
    [(bytearray(7), "takes 8 bytes"), (memoryview(bytearray(16))[::2], "gaps"), ("no", "not a buffer")],
)
def test_wrong_buffers_are_refused(buffer, word):
    with pytest.raises(TensorError, match=word):
        unpack([TensorSpec("uint8", (8,))], [buffer])


def test_number_of_buffers_must_agree():
    with pytest.raises(TensorError, match="1 tensor specs came with 0"):
        unpack([TensorSpec("uint8", (8,))], [])


def test_meta_tensors_have_no_bytes():
    with pytest.raises(TensorError, match="meta"):
        pack([torch.empty(3, device="meta")])
    assert describe(torch.empty(3, device="meta")).shape == (3,)


def test_allocation_is_aligned_writable_and_checked_first():
    calls = []

    def allocate(size):
        calls.append(size)
        return aligned_memory(size)

    good, bad = TensorSpec("uint8", (8,)), TensorSpec("uint8", (2**62,))
    with pytest.raises(TensorError):
        allocate_for([good, bad], [8, 8], allocate=allocate)
    with pytest.raises(LimitExceeded):
        allocate_for([good, bad], [8, 2**62], TensorLimits(), allocate)
    assert calls == []
    buffers = allocate_for([good, TensorSpec("uint8", (0,))], [8, 0], TensorLimits(), allocate)
    assert [(buffer.nbytes, buffer.readonly) for buffer in buffers] == [(8, False), (0, False)]


@FEW
@given(st.integers(0, 10_000))
def test_aligned_memory(size):
    memory = aligned_memory(size)
    assert (memory.nbytes, memory.readonly, memory.format) == (size, False, "B")
    if size:
        (tensor,) = unpack([TensorSpec("uint8", (size,))], [memory])
        assert tensor.data_ptr() % ALIGNMENT_BYTES == 0


@FEW
@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_any_view_travels(shape, data):
    base = torch.arange(float(torch.Size(shape).numel())).view(shape)
    tensor = base.permute(data.draw(st.permutations(range(len(shape)))))
    if shape and data.draw(st.booleans()):
        tensor = tensor[data.draw(st.integers(0, 2)) :: data.draw(st.integers(1, 2))]
    if data.draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(2, *tensor.shape)
    assert torch.equal(travel(tensor), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 64, 4096])
def test_memory_of_a_pool_is_not_used_again_before_the_tensor_is_gone(dtype, num_rows):
    pool = BufferPool()
    sent = torch.arange(num_rows * 64, dtype=torch.float32).view(num_rows, 64).to(dtype)
    specs, packed = pack([sent])
    received = []
    for _ in range(600 if num_rows == 1 else 3):  # small ones share a block, which is used again as a whole
        memory = pool.allocate(len(packed[0]))
        memory[:] = packed[0]
        received += unpack(specs, [memory])
        del memory
    assert pool.idle_bytes == 0
    others = [pool.allocate(len(packed[0])) for _ in range(600 if num_rows == 1 else 3)]
    for other in others:
        other[:] = bytes(len(other))
    assert all(torch.equal(tensor, sent) for tensor in received)
    received.clear()


def test_big_endian_machines_say_so(monkeypatch):
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(TensorError, match="big-endian"):
        pack([torch.ones(1)])
    with pytest.raises(TensorError, match="big-endian"):
        unpack([TensorSpec("uint8", (1,))], [bytearray(1)])


def test_bytes_on_the_wire_are_little_endian():
    _, (buffer,) = pack([torch.tensor([1, 258], dtype=torch.int16)])
    assert bytes(buffer) == b"\x01\x00\x02\x01"
