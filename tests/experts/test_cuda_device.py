"""The order of work on a GPU, on a machine without one: streams and events that happen at once."""

from __future__ import annotations

import contextlib
import functools
import gc
import queue
import threading
import traceback
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from experts.loopback import client_of, linear_expert, serving
from shoal.core import Deadline, LoopThread, PeerLeaving, PeerRefused, RemoteFailure, TensorError, UsageError
from shoal.experts import wire
from shoal.experts.devices import cuda
from shoal.experts.expert import Expert
from shoal.experts.server import server as server_module
from shoal.experts.server.jobs import InputCache, Job, JobKind
from shoal.experts.settings import ServerSettings


class FakeStream:
    """Everything put on it is done already; an event knows after which streams' work it comes."""

    def __init__(self, device=None):
        self.after = {self}

    def wait_event(self, event):
        self.after |= event.after

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self):
        return FakeEvent(set(self.after))

    def synchronize(self):
        """Nothing is left to wait for."""


class FakeEvent:
    on_waited = staticmethod(lambda event: None)

    def __init__(self, after):
        self.after = after

    def synchronize(self):
        self.on_waited(self)


@pytest.fixture
def gpu(monkeypatch):
    """A `CudaDevice` whose GPU is the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    monkeypatch.setattr(cuda, "_keep_for", lambda tensor, stream: None)
    monkeypatch.setattr(cuda, "_pinned", lambda size_bytes: np.empty(size_bytes, np.uint8))
    made = []

    def make(settings, kept):
        made.append(cuda.CudaDevice(settings, kept))
        assert made[-1].torch_device == torch.device("cuda:0")
        made[-1].torch_device = torch.device("cpu")
        return made[-1]

    monkeypatch.setattr(server_module, "make_device", make)
    return made


def test_requests_go_through_pinned_memory_and_come_back_as_the_module_says(gpu):
    expert, local = linear_expert(), linear_expert()
    settings = ServerSettings(device="cuda", pinned_bytes=1 << 16)
    with serving(expert, settings=settings) as served, client_of() as client:
        module = client.expert("expert0", served.peer)
        x = torch.randn(4, 8, requires_grad=True)
        y = module(x)
        torch.testing.assert_close(y, local.module(x))
        assert len(served.server.kept) == 1
        y.square().sum().backward()
        twin = x.detach().clone().requires_grad_()
        local.module(twin).square().sum().backward()
        torch.testing.assert_close(x.grad, twin.grad)
        assert expert.num_updates == 1
        assert len(served.server.kept) == 0
        with pytest.raises(PeerRefused, match="not finite"):
            (module(x) * float("inf")).sum().backward()
        large = Expert("large", nn.Identity(), ((torch.zeros(3, 64),), {}))
        served.loop.run(served.server.add(large))
        x = torch.randn(1024, 64)  # more than was pinned at the start
        assert torch.equal(client.expert("large", served.peer)(x), x)
        assert gpu[0].can_start()


def test_pinned_memory_is_cut_from_large_pieces():
    pieces = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_pinned", lambda size: pieces.append(size) or np.zeros(size, np.uint8))
        arena = cuda.PinnedArena(100, 50, 250)
        first, second = arena.take(60), arena.take(40)
        assert pieces == [100]
        first[:] = 1
        assert second.sum() == 0
        arena.take(10)
        arena.take(60)
        assert pieces == [100, 50, 60]
        assert arena.take(41) is None  # a piece of 50 were too much
        assert len(arena.take(40)) == 40
        assert pieces == [100, 50, 60]


def test_a_machine_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with (
        pytest.raises(UsageError, match="no GPU"),
        serving(linear_expert(), settings=ServerSettings(device="cuda")),
    ):
        pass
    with (
        pytest.raises(UsageError, match="cannot be served on"),
        serving(linear_expert(), settings=ServerSettings(device="meta")),
    ):
        pass


class Picky(nn.Module):
    """Fails on negative numbers."""

    def forward(self, x, index):
        if (x < 0).any():
            raise ValueError("no negative numbers")
        return x * 2, index + 1


def request_of(expert, x, keep_as=b"", codec="none", is_small=False):
    job = Job(JobKind.FORWARD, expert, len(x), "client", Deadline.never())
    metas, buffers = wire.to_wire([x, torch.arange(len(x))])
    job.received = ((metas, [bytearray(buffer) for buffer in buffers]),)
    job.keep_as, job.codec, job.is_small = keep_as, codec, is_small
    return job


def picky_expert():
    return Expert("picky", Picky(), ((torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)), {}))


@contextlib.contextmanager
def opened(kept):
    """A device, and a queue of what it delivers."""
    device = server_module.make_device(ServerSettings(device="cuda", pinned_bytes=1 << 20), kept)
    delivered = queue.SimpleQueue()
    device.open(delivered.put, lambda: None)
    try:
        yield device, delivered
    finally:
        device.close()


@pytest.mark.parametrize("is_small", [False, True])
def test_a_batch_is_computed_as_one_and_only_who_spoils_it_fails(gpu, is_small):
    expert = picky_expert()
    job_of = functools.partial(request_of, is_small=is_small)
    kept = InputCache(1 << 20, 60.0)
    with opened(kept) as (device, delivered):
        good, other = torch.rand(2, 4), torch.rand(3, 4)
        device.start([job_of(expert, good), job_of(expert, other, keep_as=b"id", codec="bf16")])
        (_, first), (_, second) = delivered.get(timeout=10)
        outputs, index = wire.from_wire(*first)
        assert torch.equal(outputs, good * 2)
        assert index.tolist() == [1, 2]
        assert wire.from_wire(*second)[0].shape == (3, 4)
        assert second[0][0].codec == "bf16"
        assert torch.equal(kept.find(b"id", "picky")[0], other)
        bad, fine = job_of(expert, -good), job_of(expert, other)
        device.start([bad, fine])
        results = dict(delivered.get(timeout=10))
        assert isinstance(results[bad], RemoteFailure)
        assert torch.equal(wire.from_wire(*results[fine])[0], other * 2)
        broken = request_of(expert, good)
        broken.received = ((broken.received[0][0], [bytearray(1)]),)
        device.start([broken])
        assert isinstance(delivered.get(timeout=10)[0][1], TensorError)


@pytest.mark.parametrize("is_small", [False, True])
@pytest.mark.parametrize("are_kept", [False, True])
def test_a_huge_gradient_in_a_batch_takes_nothing_from_the_others(gpu, are_kept, is_small):
    expert = linear_expert()
    torch.manual_seed(0)
    for _ in range(8):
        expert.backward([torch.randn(3, 8)], [torch.randn(3, 8)])
    before = expert.module.bias.detach().clone()
    gradients = [torch.randn(1 + index, 8) for index in range(5)]
    gradients[2] = torch.full((3, 8), 1e15)
    jobs = []
    for index, gradient in enumerate(gradients):
        job = Job(JobKind.BACKWARD, expert, len(gradient), "client", Deadline.never())
        inputs = torch.randn(len(gradient), 8)
        job.received = (wire.to_wire([gradient]), wire.to_wire([inputs]))[: 1 if are_kept else 2]
        job.kept, job.request_id, job.codec = [inputs] if are_kept else None, bytes([index] * 16), "none"
        job.is_small = is_small
        jobs.append(job)
    with opened(InputCache(1 << 20, 60.0)) as (device, delivered):
        device.start(jobs)
        results = dict(delivered.get(timeout=10))
    for job, gradient in zip(jobs, gradients, strict=True):
        assert expert.has_applied(job.request_id)
        assert wire.from_wire(*results[job])[0].shape == gradient.shape
    assert expert.statistics.num_clipped_updates == 1
    honest = 0.1 * sum(gradient.sum(dim=0) for gradient in gradients if gradient is not gradients[2])
    lied = before - honest - expert.module.bias.detach()
    assert 0 < lied.norm() < 20


def test_what_is_kept_of_a_batch_keeps_little_more_than_itself(gpu):
    kept = InputCache(1 << 20, 60.0)
    with opened(kept) as (device, delivered):
        small, large = torch.rand(2, 4), torch.rand(8, 4)
        device.start(
            [request_of(picky_expert(), small, b"small"), request_of(picky_expert(), large, b"large")]
        )
        delivered.get(timeout=10)
        for x, key, held_bytes in ((small, b"small", 32), (large, b"large", 160)):
            tensor = kept.find(key, "picky")[0]
            assert torch.equal(tensor, x)
            assert tensor.untyped_storage().nbytes() == held_bytes


def test_a_batch_that_fails_is_told_after_all_streams_have_come_past_it(gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(FakeEvent, "on_waited", staticmethod(lambda event: seen.append(len(event.after))))
    with opened(InputCache(1 << 20, 60.0)) as (device, delivered):
        device.start([request_of(picky_expert(), torch.full((2, 4), -1.0))])
        assert isinstance(delivered.get(timeout=10)[0][1], RemoteFailure)
        assert seen == [3]


def test_a_batch_that_fails_half_way_is_told_after_the_gpu_has_let_go_of_its_memory(gpu, monkeypatch):
    error, memory, seen = MemoryError("none left"), [], []
    with opened(InputCache(1 << 20, 60.0)) as (device, delivered):
        allocate = device._pool.allocate

        def allocate_once(size_bytes):
            if memory:
                raise error
            made = allocate(size_bytes)
            memory.append(weakref.ref(made))
            return made

        def on_waited(event):
            traceback.clear_frames(error.__traceback__)
            error.__traceback__ = None
            gc.collect()
            seen.append((memory[-1]() is not None, delivered.empty()))

        monkeypatch.setattr(device._pool, "allocate", allocate_once)
        monkeypatch.setattr(FakeEvent, "on_waited", staticmethod(on_waited))
        job = request_of(picky_expert(), torch.rand(2, 4))
        device.start([job])
        ((told, failure),) = delivered.get(timeout=10)
        assert told is job
        assert isinstance(failure, RemoteFailure)
        assert seen == [(True, True)]


def test_a_device_that_closes_delivers_what_was_started_and_refuses_more(gpu):
    with opened(InputCache(1 << 20, 60.0)) as (device, delivered):
        expert, begun, goes_on = picky_expert(), threading.Event(), threading.Event()

        def hesitate(*_):
            begun.set()
            goes_on.wait(10)

        expert.module.register_forward_pre_hook(hesitate)
        job, late = request_of(expert, torch.rand(2, 4)), request_of(expert, torch.rand(2, 4))
        with LoopThread() as thread:
            thread.loop.call_soon_threadsafe(device.start, [job])
            assert begun.wait(10)
            threading.Timer(0.1, goes_on.set).start()
            device.close()
        assert delivered.get_nowait()[0][0] is job
        device.start([late])
        ((refused, error),) = delivered.get_nowait()
        assert refused is late
        assert isinstance(error, PeerLeaving)
