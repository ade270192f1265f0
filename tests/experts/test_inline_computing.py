from __future__ import annotations

import threading

import torch

from experts.loopback import client_of, linear_expert, serving
from shoal.core import Deadline
from shoal.experts.server.jobs import Job, JobKind
from shoal.experts.server.server import InlineComputing

EXPERT = linear_expert("a", 2)


def job_of(num_bytes=100, kind=JobKind.FORWARD):
    job = Job(kind, EXPERT, 1, "client", Deadline.never())
    job.is_small = num_bytes < 1 << 15
    return job


def may(work, job):
    if not work.try_begin(job):
        return False
    work.end(job, 1e-5)
    return True


def test_only_what_is_known_to_be_quick_and_small_is_done_at_once():
    work = InlineComputing()
    assert not may(work, job_of())
    work.learn(job_of(), 1e-5)
    assert may(work, job_of())
    assert not may(work, job_of(kind=JobKind.BACKWARD))
    assert not may(work, job_of(num_bytes=1 << 20))
    for _ in range(16):
        work.learn(job_of(), 1.0)
    assert not may(work, job_of())


def test_nobody_waits_for_a_device_that_is_in_use():
    work = InlineComputing()
    work.learn(job_of(), 1e-5)
    with work.device:
        assert not may(work, job_of())
    assert work.try_begin(job_of())
    assert work.device.locked()
    work.end(job_of(), 1e-5)
    assert not work.device.locked()


def test_quick_experts_answer_on_the_thread_of_the_network_and_count_as_all_do():
    expert = linear_expert()
    threads = []
    expert.module.register_forward_pre_hook(
        lambda module, args: threads.append(threading.current_thread().name)
    )
    with serving(expert) as served, client_of() as client:
        for kind in JobKind:
            served.server._inline._is_quick[expert.uid, kind] = True
        module = client.expert("expert0", served.peer)
        x = torch.randn(2, 8, requires_grad=True)
        module(x).sum().backward()
        assert x.grad is not None
        assert expert.num_updates == 1
        assert threads[-2:] == ["server", "server"]
        statistics = served.server.statistics
        assert (statistics.num_forward, statistics.num_backward) == (1, 1)
        assert served.loop.run(served.server.leave(Deadline.after(5)))
