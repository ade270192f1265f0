"""Calls of a few samples: computed together, and never to each other's harm."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from experts.loopback import client_of, linear_expert, serving
from shoal.core import Deadline, LoopThread, RemoteFailure, TensorError
from shoal.experts import wire
from shoal.experts.devices.device import CpuDevice
from shoal.experts.expert import Expert
from shoal.experts.schema import TensorSchema
from shoal.experts.server.jobs import _ENTRY_BYTES, InputCache, Job, JobKind
from shoal.experts.settings import ServerSettings
from shoal.tensors import EncodedMeta, TensorSpec

FLOATS = (TensorSchema("float32", (4,)),)


class Picky(nn.Module):
    """Fails on negative numbers; counts how often it is called."""

    num_calls = 0

    def forward(self, x, index):
        self.num_calls += 1
        if (x < 0).any():
            raise ValueError("no negative numbers")
        return x * 2, index + 1


def picky_expert():
    return Expert("picky", Picky(), ((torch.ones(3, 4), torch.zeros(3, dtype=torch.int64)), {}))


def small_job(expert, x, keep_as=b"", codec="none"):
    metas, buffers = wire.to_wire([x, torch.arange(len(x))])
    received = ((metas, [bytearray(buffer) for buffer in buffers]),)
    return Job(
        JobKind.FORWARD,
        expert,
        len(x),
        "client",
        Deadline.never(),
        received=received,
        keep_as=keep_as,
        codec=codec,
        is_small=True,
    )


def started(jobs, kept=None):
    """What a device of the CPU delivers for these."""
    results = {}
    device = CpuDevice(ServerSettings(), InputCache(1 << 20, 60.0) if kept is None else kept)
    device.open(lambda some: results.update(some), lambda: None)
    device.start(jobs)
    return results


def test_small_requests_are_computed_at_once_and_each_gets_its_own_rows():
    expert, kept = picky_expert(), InputCache(1 << 20, 60.0)
    before = expert.module.num_calls
    batches = [torch.rand(size, 4) for size in (1, 3, 1, 2)]
    jobs = [small_job(expert, x, keep_as=bytes([n + 1])) for n, x in enumerate(batches)]
    jobs[2].codec = "bf16"
    results = started(jobs, kept)
    assert expert.module.num_calls == before + 1
    for number, (job, x) in enumerate(zip(jobs, batches, strict=True)):
        outputs, index = wire.from_wire(*results[job])
        torch.testing.assert_close(outputs, 2 * x, rtol=0.01, atol=0.01)
        assert index.tolist() == list(range(1, len(x) + 1))
        assert torch.equal(kept.find(bytes([number + 1]), "picky")[0], x)
    assert results[jobs[2]][0][0].codec == "bf16"


def test_only_who_spoils_a_batch_of_small_requests_fails():
    expert = picky_expert()
    jobs = [small_job(expert, torch.rand(1, 4)) for _ in range(5)]
    jobs.insert(2, small_job(expert, -torch.ones(1, 4)))
    results = started(jobs)
    assert [isinstance(results[job], RemoteFailure) for job in jobs] == [n == 2 for n in range(6)]


def test_memory_that_kept_inputs_share_counts_until_the_last_of_them_goes():
    kept = InputCache(1 << 20, 60.0)
    whole = torch.zeros(3, 100)
    kept.keep_all("a", [(bytes([n]), [row]) for n, row in enumerate(whole.split(1))], whole.nbytes)
    assert kept.used_bytes == 3 * _ENTRY_BYTES + whole.nbytes
    kept.drop(b"\0")
    kept.drop(b"\2")
    assert kept.used_bytes == _ENTRY_BYTES + whole.nbytes
    kept.keep(b"\1", "a", [torch.zeros(1)])
    assert (kept.used_bytes, len(kept)) == (_ENTRY_BYTES + 4, 1)


@pytest.mark.parametrize(
    "metas",
    [
        (EncodedMeta("none", TensorSpec("float32", (2, 5))),),
        (EncodedMeta("none", TensorSpec("float64", (2, 4))),),
        (EncodedMeta("none", TensorSpec("float32", (2, 4), (1, 2))),),
        (EncodedMeta("bf16", TensorSpec("float32", (2, 4))),),
        (EncodedMeta("none", TensorSpec("float32", (0, 4))),),
        (None,),
        (),
    ],
)
def test_what_is_unusual_is_left_to_those_who_look_closely(metas):
    usual = (EncodedMeta("none", TensorSpec("float32", (2, 4))),)
    for _ in range(2):  # found out, and remembered
        assert wire.fitting(FLOATS, usual, [32]).num_samples == 2
        assert wire.fitting(FLOATS, usual, [31]) is None
        assert wire.fitting(FLOATS, metas, [32]) is None
    with pytest.raises(TensorError):
        wire.from_wire(usual, [memoryview(bytearray(31))])
    assert torch.equal(wire.from_wire(usual, [bytes(32)])[0], torch.zeros(2, 4))


def test_tensors_that_numpy_cannot_read_are_sent_as_all_others():
    tensors = [
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.tensor([[True, False]]),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(2, 2, requires_grad=True),
    ]
    metas, buffers = wire.to_wire(tensors)
    for tensor, other in zip(tensors, wire.from_wire(metas, list(map(bytearray, buffers))), strict=True):
        assert torch.equal(tensor, other)


def test_many_threads_that_wait_get_their_own_answers():
    expert = linear_expert()
    with serving(expert) as served, client_of() as client, contextlib.ExitStack() as closing:
        module = client.expert("expert0", served.peer)
        threads = [closing.enter_context(LoopThread(f"client{n}")) for n in range(8)]
        go = threading.Barrier(8)

        async def work(number):
            x = torch.full((1, 8), float(number), requires_grad=True)
            go.wait(30)
            for _ in range(20):
                with torch.no_grad():
                    given = module(x)
                torch.testing.assert_close(given, expert.module(x).detach())

        for future in [thread.submit(work(n)) for n, thread in enumerate(threads)]:
            future.result(60)


def _rss_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_memory_is_flat_over_a_hundred_thousand_calls_of_changing_clients():
    """A client makes 250 calls, a tenth of them with a backward, and is gone; 400 of them."""
    seen = []
    with serving(
        linear_expert(), settings=ServerSettings(kept_bytes=8 << 20, remembered_bytes=8 << 20)
    ) as served:
        for number in range(400):
            with client_of() as client:
                module = client.expert("expert0", served.peer)
                x = torch.randn(1, 8, requires_grad=True)
                for turn in range(225):
                    if turn % 9 == 0:
                        module(x).sum().backward()
                    else:
                        with torch.no_grad():
                            module(x)
            if number % 40 == 39:
                gc.collect()
                seen.append(_rss_bytes())
    after_first = seen[1]  # 20,000 calls
    assert all(abs(size - after_first) <= 0.02 * after_first for size in seen[1:]), seen
