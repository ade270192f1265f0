"""Flat buckets: aligned views with their tensors' strides, clean gaps, equal plans on all peers."""

import mmap

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import TensorError, UsageError
from shoal.tensors import ALIGNMENT_BYTES, Bucket, BucketLayout, TensorSpec, aligned_memory, describe

FEW = settings(derandomize=True, deadline=None, max_examples=80)
dtypes = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
shapes = st.lists(st.integers(0, 9), max_size=3)


def members():
    return [
        torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
        torch.randn(7),
        torch.tensor(2.0),
        torch.randn(0, 4),
        torch.randn(6, 5).T,
        torch.randn(3, 1).expand(3, 4),
        torch.nn.Parameter(torch.randn(11), requires_grad=False),
        torch.nn.Parameter(torch.randn(3, 3)),
    ]


@FEW
@given(st.lists(st.tuples(shapes, dtypes), max_size=8), st.integers(64, 2000), st.booleans())
def test_views_are_aligned_disjoint_and_complete(items, max_bytes, is_reversed):
    tensors = [torch.ones(shape, dtype=dtype) for shape, dtype in items]
    layouts = BucketLayout.plan(tensors, max_bytes=max_bytes, is_reversed=is_reversed)
    assert sorted(index for layout in layouts for index in layout.indices) == list(range(len(tensors)))
    for layout in layouts:
        assert layout.size_bytes % ALIGNMENT_BYTES == 0
        assert layout.size_bytes <= max_bytes or len(layout.slots) == 1
        bucket = Bucket(layout)
        bucket.load(layout.pick(tensors))
        for view in bucket.views:
            assert view.data_ptr() % ALIGNMENT_BYTES == 0
        # Ones do not overlap, and the gaps are zeros: the sum counts the elements.
        assert bucket.flat.double().sum().item() == sum(view.numel() for view in bucket.views)
        assert bucket.buffer.nbytes == layout.size_bytes


def test_round_trip_keeps_values_and_strides():
    tensors = members()
    (layout,) = BucketLayout.plan(tensors)
    bucket = Bucket(layout)
    bucket.load(layout.pick(tensors))
    for view, tensor in zip(bucket.views, tensors, strict=True):
        assert torch.equal(view, tensor)
        assert not view.requires_grad
    assert bucket.views[0].is_contiguous(memory_format=torch.channels_last)
    assert bucket.views[0].stride() == tensors[0].stride()
    assert bucket.views[4].stride() == (1, 5)
    assert bucket.views[5].is_contiguous()
    targets = [torch.zeros(tensor.shape) for tensor in tensors]
    bucket.store(targets)
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tensors, strict=True))


def test_store_writes_into_parameters_that_need_gradients():
    parameter = torch.nn.Parameter(torch.zeros(3))
    bucket = Bucket(BucketLayout.plan([parameter])[0])
    bucket.flat.fill_(2)
    bucket.store([parameter])
    assert parameter.tolist() == [2, 2, 2]


def test_missing_gradients_are_zeros():
    bucket = Bucket(BucketLayout.plan([torch.ones(2), torch.ones(3)])[0])
    bucket.flat.fill_(5)
    bucket.load([None, torch.ones(3)])
    assert [view.tolist() for view in bucket.views] == [[0, 0], [1, 1, 1]]
    target = torch.zeros(3)
    bucket.store([None, target])
    assert target.tolist() == [1, 1, 1]


def test_two_buckets_share_one_mmap():
    tensors = [torch.randn(5), torch.randn(4, 3).T]
    (layout,) = BucketLayout.plan(tensors)
    memory = mmap.mmap(-1, 4096)
    memory[:] = b"\xff" * 4096
    window = memoryview(memory)[128 : 128 + layout.size_bytes]
    first = Bucket(layout, window)
    first.load(tensors)
    # Attaching must not wipe what another process has written.
    second = Bucket(layout, window)
    assert all(torch.equal(view, tensor) for view, tensor in zip(second.views, tensors, strict=True))
    second.views[0].mul_(2)
    assert torch.equal(first.views[0], tensors[0] * 2)
    assert first.flat[5:16].tolist() == [0] * 11
    assert memory[:128] == b"\xff" * 128
    assert memory[128 + layout.size_bytes :] == b"\xff" * (4096 - 128 - layout.size_bytes)
    del first, second, window
    memory.close()


def test_buffer_is_the_bucket():
    bucket = Bucket(BucketLayout.plan([torch.ones(2)])[0])
    bucket.buffer[:4] = torch.tensor([7.0]).numpy().tobytes()
    assert bucket.views[0].tolist() == [7, 0]


def test_bad_memory_is_refused():
    (layout,) = BucketLayout.plan([torch.ones(40)])
    memory = aligned_memory(1024)
    with pytest.raises(UsageError, match="boundary"):
        Bucket(layout, memory[4:])
    with pytest.raises(UsageError, match="does not fit"):
        Bucket(layout, memory[:128])
    with pytest.raises(UsageError, match="write"):
        Bucket(layout, bytes(1024))


def test_bucket_without_bytes():
    (layout,) = BucketLayout.plan([torch.ones(0, 3), torch.ones(0)])
    bucket = Bucket(layout, bytearray())
    assert [tuple(view.shape) for view in bucket.views] == [(0, 3), (0,)]
    assert (bucket.buffer.nbytes, bucket.flat.numel()) == (0, 0)
    bucket.load([torch.ones(0, 3), None])


@pytest.mark.parametrize(
    "wrong", [[torch.ones(3)], [torch.ones(2), torch.ones(1)], [torch.ones(2).double()] * 2]
)
def test_wrong_tensors_are_refused_before_anything_moves(wrong):
    bucket = Bucket(BucketLayout.plan([torch.ones(2), torch.ones(3)])[0])
    with pytest.raises(TensorError):
        bucket.load(wrong)
    with pytest.raises(TensorError):
        bucket.store(wrong)
    assert bucket.flat.count_nonzero() == 0


def test_plan_divides_by_dtype_in_the_order_of_filling():
    half, full = torch.ones(16, dtype=torch.float16), torch.ones(16)
    layouts = BucketLayout.plan([half, full, full, full, half], max_bytes=128)
    assert [(layout.dtype, layout.indices) for layout in layouts] == [
        ("float32", (1, 2)),
        ("float32", (3,)),
        ("float16", (0, 4)),
    ]


def test_plan_backward_with_a_small_first_bucket():
    tensors = [torch.ones(16) for _ in range(6)]
    layouts = BucketLayout.plan(tensors, max_bytes=128, first_max_bytes=64, is_reversed=True)
    assert [layout.indices for layout in layouts] == [(5,), (4, 3), (2, 1), (0,)]


def test_a_large_tensor_has_a_bucket_to_itself():
    layouts = BucketLayout.plan([torch.ones(1), torch.ones(1000), torch.ones(1)], max_bytes=256)
    assert [layout.indices for layout in layouts] == [(0,), (1,), (2,)]


def test_plans_from_specs_tensors_and_the_wire_are_equal():
    tensors = members()
    layouts = BucketLayout.plan(tensors)
    assert layouts == BucketLayout.plan(describe(tensor) for tensor in tensors)
    assert layouts == msgspec.msgpack.decode(msgspec.msgpack.encode(layouts), type=list[BucketLayout])
    assert BucketLayout.plan([]) == []


def test_plan_refuses_nonsense():
    with pytest.raises(UsageError, match="64"):
        BucketLayout.plan([torch.ones(1)], max_bytes=63)
    with pytest.raises(TensorError, match="dtype"):
        BucketLayout.plan([TensorSpec("float33", (1,))])


def test_other_devices_hold_buckets_without_a_buffer():
    (layout,) = BucketLayout.plan([torch.ones(3)])
    bucket = Bucket(layout, device="meta")
    assert bucket.views[0].shape == (3,)
    with pytest.raises(UsageError, match="no buffer"):
        _ = bucket.buffer
    with pytest.raises(UsageError, match="cannot hold"):
        Bucket(layout, aligned_memory(64), device="meta")


@pytest.mark.parametrize("is_channels_last", [False, True])
def test_layers_compute_equal_bits_on_views(is_channels_last):
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(5 * 36, 7))
    if is_channels_last:
        layers = layers.to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 8, 8)
    before = layers(x)
    parameters = list(layers.parameters())
    (layout,) = BucketLayout.plan(parameters)
    bucket = Bucket(layout)
    bucket.load(parameters)
    for parameter, view in zip(parameters, bucket.views, strict=True):
        parameter.data = view
    assert torch.equal(layers(x), before)
