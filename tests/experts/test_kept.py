from __future__ import annotations

import pytest
import torch

from experts.loopback import linear_expert
from shoal.core import Deadline, PeerRefused
from shoal.experts import kept as kept_module
from shoal.experts.jobs import Job, JobKind
from shoal.experts.kept import Applied, KeptInputs

ENTRY = kept_module._ENTRY_BYTES


def inputs(num_bytes):
    return [torch.zeros(num_bytes, dtype=torch.uint8)]


def test_inputs_are_kept_until_dropped_and_only_for_their_expert():
    kept = KeptInputs(ENTRY * 2 + 100, 60.0)
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
    kept = KeptInputs(ENTRY * 2 + 100, 60.0)
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
    kept = KeptInputs(ENTRY * 2, 60.0)
    kept.keep(b"1", "a", inputs(1))
    kept.sweep()
    assert len(kept) == 1
    now_s = kept_module.time.monotonic()
    monkeypatch.setattr(kept_module.time, "monotonic", lambda: now_s + 61)
    kept.sweep()
    assert (len(kept), kept.used_bytes) == (0, 0)


def job(request_id):
    made = Job(JobKind.BACKWARD, linear_expert(), 1, "c", Deadline.never())
    made.request_id = request_id
    return made


def test_a_request_is_under_way_then_answered_and_known_when_its_answer_is_gone():
    applied = Applied(ENTRY + 100)
    first, second = job(b"1"), job(b"1")
    assert applied.find(b"1") is None
    assert applied.begin(b"1", first) is first
    assert applied.begin(b"1", second) is first
    applied.end(second, None)  # it is not the one that is under way
    assert applied.find(b"1") is first
    outcome = ((), [bytes(60)])
    applied.end(first, outcome)
    assert applied.begin(b"1", second) is outcome
    other = job(b"2")
    applied.begin(b"2", other)
    applied.end(other, ((), [bytes(60)]))
    with pytest.raises(PeerRefused, match="applied before"):
        applied.begin(b"1", second)
    assert applied.used_bytes == ENTRY + 60
    assert applied.num_under_way == 0


def test_answers_are_not_many_however_small_they_are(monkeypatch):
    monkeypatch.setattr(kept_module, "_MAX_ANSWERS", 3)
    applied = Applied(1 << 30)
    for number in range(5):
        one = job(bytes([number]))
        applied.begin(one.request_id, one)
        applied.end(one, ((), [b"x"]))
    assert applied.used_bytes == 3 * (ENTRY + 1)
    assert applied.find(bytes([4])) == ((), [b"x"])
    with pytest.raises(PeerRefused, match="applied before"):
        applied.find(bytes([1]))


def test_a_request_that_was_not_done_may_come_again_and_one_that_was_may_not():
    applied = Applied(ENTRY + 100)
    first = job(b"1")
    applied.begin(b"1", first)
    applied.end(first, None)
    assert applied.find(b"1") is None
    applied.begin(b"1", first)
    first.is_applied = True  # but its answer could not be made
    applied.end(first, None)
    with pytest.raises(PeerRefused, match="applied before"):
        applied.find(b"1")
