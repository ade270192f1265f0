from __future__ import annotations

import pytest
import torch

from experts.loopback import linear_expert
from shoal.core import Deadline, PeerRefused
from shoal.experts import expert as expert_module
from shoal.experts.server import jobs as kept_module
from shoal.experts.server.jobs import BackwardAnswers, InputCache, Job, JobKind

ENTRY = kept_module._ENTRY_BYTES


def inputs(num_bytes):
    return [torch.zeros(num_bytes, dtype=torch.uint8)]


def test_inputs_are_kept_until_dropped_and_only_for_their_expert():
    kept = InputCache(ENTRY * 2 + 100, 60.0)
    tensors = inputs(10)
    kept.keep(b"1", "a", tensors)
    assert kept.find(b"1", "a") is tensors
    assert kept.find(b"1", "b") is None
    assert kept.used_bytes == ENTRY + 10
    kept.drop(b"1")
    kept.drop(b"1")
    assert kept.find(b"1", "a") is None
    assert (kept.used_bytes, len(kept)) == (0, 0)


def test_the_oldest_inputs_go_when_there_are_too_many_bytes_or_too_much_time(monkeypatch):
    kept = InputCache(ENTRY * 2 + 100, 60.0)
    for key in (b"1", b"2", b"3"):
        kept.keep(key, "a", inputs(40))
    assert [kept.find(key, "a") is None for key in (b"1", b"2", b"3")] == [True, False, False]
    kept.keep(b"4", "a", inputs(3 * ENTRY))  # more than there is room for: nothing else has to go
    assert len(kept) == 2
    now_s = kept_module.time.monotonic()
    monkeypatch.setattr(kept_module.time, "monotonic", lambda: now_s + 61)
    kept.keep(b"5", "a", inputs(1))
    assert (len(kept), kept.used_bytes) == (1, ENTRY + 1)


def test_what_is_kept_goes_with_time_although_nothing_comes(monkeypatch):
    kept = InputCache(ENTRY * 2, 60.0)
    kept.keep(b"1", "a", inputs(1))
    kept.sweep()
    assert len(kept) == 1
    now_s = kept_module.time.monotonic()
    monkeypatch.setattr(kept_module.time, "monotonic", lambda: now_s + 61)
    kept.sweep()
    assert (len(kept), kept.used_bytes) == (0, 0)


EXPERT = linear_expert()


def job(number, expert=EXPERT):
    made = Job(JobKind.BACKWARD, expert, 1, "c", Deadline.never())
    made.request_id = bytes([number] * 16)
    return made


def apply(job):
    job.expert.backward([torch.zeros(1, 8)], [torch.zeros(1, 8)], [job.request_id])


def test_a_request_is_under_way_then_answered_and_known_when_its_answer_is_gone():
    applied, expert = BackwardAnswers(ENTRY + 100), linear_expert()
    first, second = job(1, expert), job(1, expert)
    assert applied.find(expert, first.request_id) is None
    assert applied.begin(first) is first
    assert applied.begin(second) is first
    applied.end(second, None)  # it is not the one that is under way
    assert applied.find(expert, first.request_id) is first
    apply(first)
    assert applied.find(expert, first.request_id) is first
    outcome = ((), [bytes(60)])
    applied.end(first, outcome)
    assert applied.begin(second) is outcome
    other = job(2, expert)
    applied.begin(other)
    applied.end(other, ((), [bytes(60)]))
    with pytest.raises(PeerRefused, match="applied before"):
        applied.begin(second)
    assert applied.used_bytes == ENTRY + 60
    assert applied.num_under_way == 0


def test_equal_ids_of_two_experts_are_two_requests():
    applied, others = BackwardAnswers(1 << 20), linear_expert("expert1")
    first, second = job(1), job(1, others)
    assert applied.begin(first) is first
    assert applied.begin(second) is second
    applied.end(first, ((), [b"x"]))
    assert applied.find(others, second.request_id) is second


def test_answers_are_not_many_however_small_they_are(monkeypatch):
    monkeypatch.setattr(kept_module, "_MAX_ANSWERS", 3)
    applied, expert = BackwardAnswers(1 << 30), linear_expert()
    for number in range(5):
        one = job(number, expert)
        applied.begin(one)
        apply(one)
        applied.end(one, ((), [b"x"]))
    assert applied.used_bytes == 3 * (ENTRY + 1)
    assert applied.find(expert, job(4).request_id) == ((), [b"x"])
    with pytest.raises(PeerRefused, match="applied before"):
        applied.find(expert, job(1).request_id)


def test_a_request_that_was_not_done_may_come_again_and_one_that_was_may_not():
    applied, expert = BackwardAnswers(ENTRY + 100), linear_expert()
    first = job(1, expert)
    applied.begin(first)
    applied.end(first, None)
    assert applied.find(expert, first.request_id) is None
    applied.begin(first)
    apply(first)  # but its answer could not be made
    applied.end(first, None)
    with pytest.raises(PeerRefused, match="applied before"):
        applied.find(expert, first.request_id)


def test_an_expert_remembers_the_latest_ids_and_not_all(monkeypatch):
    monkeypatch.setattr(expert_module, "MAX_APPLIED_IDS", 3)
    expert = linear_expert()
    for number in range(5):
        apply(job(number, expert))
    assert [expert.has_applied(job(number).request_id) for number in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
