"""Which calls were served, and how much of it is remembered."""

from shoal.transport.datagrams import callee
from shoal.transport.datagrams.callee import ENTRY_BYTES, FORGOTTEN, NEW, RUNNING, AnswerCache


class FakeHub:
    def __init__(self):
        self.kept_bytes, self.num_shed = 0, 0

    def shed(self):
        self.num_shed += 1


def test_an_answer_is_kept_until_its_caller_has_gone_on():
    hub = FakeHub()
    answers = AnswerCache(hub)
    assert answers.get(1) is NEW
    answers.mark(1, RUNNING)
    answers.keep(2, b"two", 3)
    answers.keep(3, [b"th", b"ree"], 5)
    assert hub.kept_bytes == 8 + 3 * ENTRY_BYTES
    assert answers.forget_before(3) == [1]  # it still runs, and nobody waits for it
    assert answers.get(2) is NEW
    assert answers.get(3) == [b"th", b"ree"]
    assert hub.kept_bytes == answers.size_bytes == 5 + ENTRY_BYTES
    answers.clear()
    assert hub.kept_bytes == answers.size_bytes == 0


def test_answers_that_come_out_of_order_leave_no_bytes_behind():
    hub = FakeHub()
    answers = AnswerCache(hub)
    answers.mark(1, RUNNING)
    for call_id in (9, 2, 3, 1):
        answers.keep(call_id, b"answer", 6)
    answers.mark(9, FORGOTTEN)
    assert hub.kept_bytes == 18 + 4 * ENTRY_BYTES
    assert answers.forget_before(9) == []
    assert hub.kept_bytes == ENTRY_BYTES
    answers.forget_before(10)
    assert hub.kept_bytes == answers.size_bytes == 0


def test_a_hostile_oldest_costs_nothing():
    answers = AnswerCache(FakeHub())
    answers.keep(5, b"five", 4)
    assert answers.forget_before(2**63) == []
    assert answers.oldest == 2**63
    assert answers.size_bytes == 0


def test_the_oldest_answers_go_first_and_their_calls_stay_known(monkeypatch):
    monkeypatch.setattr(callee, "MAX_KEPT", 10)
    answers = AnswerCache(FakeHub())
    for call_id in range(25):
        answers.keep(call_id, b"answer", 6)
    assert [answers.get(call_id) is FORGOTTEN for call_id in range(25)] == [True] * 15 + [False] * 10
    assert answers.size_bytes == 60 + 25 * ENTRY_BYTES


def test_bytes_are_bounded_for_a_session_and_for_all(monkeypatch):
    monkeypatch.setattr(callee, "ENTRY_BYTES", 0)
    monkeypatch.setattr(callee, "MAX_KEPT_BYTES", 100)
    monkeypatch.setattr(callee, "MAX_KEPT_BYTES_IN_ALL", 150)
    hub = FakeHub()
    one, other = AnswerCache(hub), AnswerCache(hub)
    for call_id in range(10):
        one.keep(call_id, bytes(30), 30)
    assert one.size_bytes == 90
    other.keep(0, bytes(50), 50)
    assert hub.num_shed == 0
    other.keep(1, bytes(50), 50)
    assert hub.num_shed == 1
    one.shed()
    assert one.size_bytes == 0
    assert hub.kept_bytes == 100
    assert one.get(9) is FORGOTTEN
