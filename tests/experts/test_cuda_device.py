"""The order of work on a GPU, on a machine without one: streams and events that happen at once."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from experts.loopback import client_of, linear_expert, serving
from shoal.core import PeerRefused, UsageError
from shoal.experts import server as server_module
from shoal.experts.devices import cuda
from shoal.experts.expert import Expert
from shoal.experts.settings import ServerSettings


class FakeStream:
    """Everything put on it is done already."""

    def __init__(self, device=None):
        self.num_waits = 0

    def wait_event(self, event):
        self.num_waits += 1

    def record_event(self):
        return self

    def synchronize(self):
        """Nothing is left to wait for."""


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
        arena = cuda.PinnedArena(100, 50)
        first, second = arena.take(60), arena.take(40)
        assert pieces == [100]
        first[:] = 1
        assert second.sum() == 0
        arena.take(10)
        arena.take(60)
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
