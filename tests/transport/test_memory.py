import gc
import itertools
import random
import threading

import numpy as np
import pytest
import torch

from shoal.transport.memory import ALIGNMENT_BYTES, IDLE_S, BufferPool, byte_view

SIZES = [1, 2, 63, 64, 65, 1000, 2047, 2048, 2049, 4096, 65_535, 65_536, 65_537, 100_000, 1 << 20, 3_333_333]


def address(view):
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_is_exact_aligned_and_writable(size):
    pool = BufferPool()
    views = [pool.allocate(size) for _ in range(3)]
    for number, view in enumerate(views):
        assert len(view) == size
        assert view.format == "B"
        assert address(view) % ALIGNMENT_BYTES == 0
        view[:] = bytes([number]) * size
    assert [set(view) for view in views] == [{0}, {1}, {2}]


def test_nothing_takes_nothing():
    pool = BufferPool()
    assert len(pool.allocate(0)) == 0
    assert [len(view) for view in pool.allocate_all([3, 0, 100_000])] == [3, 0, 100_000]


def test_pieces_of_a_slab_do_not_overlap():
    pool = BufferPool()
    rng = random.Random(1)
    views = [pool.allocate(rng.randint(1, 2048)) for _ in range(2000)]
    spans = sorted((address(view), address(view) + len(view)) for view in views)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(
    "derive",
    [
        lambda view: view[10:20],
        lambda view: np.frombuffer(view, np.uint8)[5:],
        lambda view: np.asarray(view).reshape(2, -1),
        lambda view: torch.frombuffer(view, dtype=torch.uint8)[7:].view(-1, 1),
        lambda view: torch.from_numpy(np.frombuffer(view, np.uint8)),
    ],
    ids=["memoryview", "numpy", "reshaped", "torch", "torch of numpy"],
)
def test_memory_comes_back_when_its_last_view_is_gone_and_not_before(derive):
    pool = BufferPool()
    view = pool.allocate(200_001)
    view[:] = b"\0" * len(view)
    where = address(view)
    derived = derive(view[:200_000])
    del view
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.allocate(200_001)
    assert address(other) != where
    other[:] = b"\1" * len(other)
    assert not np.asarray(derived).any()
    del derived
    gc.collect()
    assert pool.idle_bytes > 0
    again = pool.allocate(200_001)
    assert address(again) == where
    assert pool.idle_bytes == 0


def test_idle_memory_is_bounded_and_can_be_cleared():
    pool = BufferPool(max_idle_bytes=1 << 20)
    views = [pool.allocate(200_000) for _ in range(20)]
    del views
    gc.collect()
    assert 0 < pool.idle_bytes <= 1 << 20
    pool.clear()
    assert pool.idle_bytes == 0
    kept = pool.allocate(200_000)
    assert pool.idle_bytes == 0
    del kept


def test_sizes_that_nobody_needs_any_more_are_given_back():
    """Else a pool would grow with every new size, as when peers come and go and shares change."""
    clock_s = 0.0
    pool = BufferPool(clock=lambda: clock_s)
    for size in range(200_000, 400_000, 1000):
        clock_s += 1.0
        held = [pool.allocate(size), pool.allocate(300_000)]
        del held
        assert pool.idle_bytes < (IDLE_S + 5) * 400_000
    clock_s += IDLE_S
    view = pool.allocate(100_000)
    del view
    assert pool.idle_bytes < 2 * 400_000


def test_dear_memory_serves_smaller_sizes_and_where_it_ends_plain_memory_does():
    made = []

    def make_storage(size_bytes):
        if len(made) == 2:
            return None
        made.append(np.empty(size_bytes, np.uint8))
        return made[-1]

    pool = BufferPool(make_storage=make_storage)
    large = pool.allocate(190_000)
    where = address(large)
    del large
    small = pool.allocate(100_000)
    assert (address(small), len(small)) == (where, 100_000)
    del small
    assert pool.idle_bytes > 190_000
    held = [pool.allocate(size) for size in (80_000, 190_000, 190_000)]
    assert [len(view) for view in held] == [80_000, 190_000, 190_000]
    assert address(held[1]) == where  # 80,000 would have wasted more than half of it
    del held
    gc.collect()
    assert pool.idle_bytes == sum(len(storage) - ALIGNMENT_BYTES for storage in made)


def test_several_threads():
    pool = BufferPool(max_idle_bytes=4 << 20)
    mistakes = []

    def work(seed):
        rng = random.Random(seed)
        held = []
        for number in range(400):
            view = pool.allocate(rng.choice([100, 3000, 70_000, 300_000]))
            mark = (seed * 400 + number) % 251
            view[0] = view[-1] = mark
            held.append((view, mark))
            if len(held) > 8:
                old, expected = held.pop(rng.randrange(8))
                if old[0] != expected or old[-1] != expected:
                    mistakes.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert mistakes == []
    gc.collect()
    assert pool.idle_bytes <= 4 << 20
    assert not pool._leases or len(pool._leases) <= 4  # the slabs of the threads


def test_byte_view_of_whatever_has_bytes():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert bytes(byte_view(array)) == array.tobytes()
    assert byte_view(array).obj is array
    assert len(byte_view(np.empty((0, 3)))) == 0
    assert byte_view(b"abc").readonly
    assert not byte_view(bytearray(3)).readonly
    for bad in (array.T, array[:, ::2]):
        with pytest.raises((BufferError, TypeError)):
            byte_view(bad)
    with pytest.raises(TypeError):
        byte_view("text")
