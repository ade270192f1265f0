from __future__ import annotations

import torch

from experts.loopback import linear_expert
from shoal.core import Deadline
from shoal.experts import kept as kept_module
from shoal.experts.jobs import Job, JobKind
from shoal.experts.kept import Applied, KeptInputs


def inputs(num_bytes):
    return [torch.zeros(num_bytes, dtype=torch.uint8)]


def test_inputs_are_kept_until_dropped_and_only_for_their_expert():
    kept = KeptInputs(100, 60.0)
    tensors = inputs(10)
    kept.keep(b"1", "a", tensors)
    assert kept.find(b"1", "a") is tensors
    assert kept.find(b"1", "b") is None
    assert kept.used_bytes == 10
    kept.drop(b"1")
    kept.drop(b"1")
    assert kept.find(b"1", "a") is None
    assert (kept.used_bytes, len(kept)) == (0, 0)


def test_the_oldest_inputs_go_when_there_are_too_many_bytes_or_too_much_time(monkeypatch):
    kept = KeptInputs(100, 60.0)
    for key in (b"1", b"2", b"3"):
        kept.keep(key, "a", inputs(40))
    assert [kept.find(key, "a") is None for key in (b"1", b"2", b"3")] == [True, False, False]
    kept.keep(b"4", "a", inputs(101))  # more than there is room for: nothing else has to go
    assert len(kept) == 2
    now_s = kept_module.time.monotonic()
    monkeypatch.setattr(kept_module.time, "monotonic", lambda: now_s + 61)
    kept.keep(b"5", "a", inputs(1))
    assert (len(kept), kept.used_bytes) == (1, 1)


def job():
    return Job(JobKind.BACKWARD, linear_expert(), 1, "c", Deadline.never())


def test_a_request_is_under_way_then_answered_and_known_when_its_answer_is_gone():
    applied = Applied(100)
    first = job()
    assert applied.find(b"1") is None
    assert applied.begin(b"1", first) is first
    assert applied.begin(b"1", job()) is first
    assert applied.find(b"1") is first
    outcome = ((), [bytes(60)])
    applied.end(b"1", outcome)
    assert applied.find(b"1") is outcome
    applied.begin(b"2", job())
    applied.end(b"2", ((), [bytes(60)]))
    assert applied.find(b"1") is None
    assert applied.is_applied(b"1")
    assert applied.used_bytes == 60


def test_a_request_that_was_not_done_may_come_again():
    applied = Applied(100)
    applied.begin(b"1", job())
    applied.end(b"1", None)
    assert applied.find(b"1") is None
    assert not applied.is_applied(b"1")
