"""Which calls were served, and how much of it is remembered."""

from shoal.transport.datagrams import callee
from shoal.transport.datagrams.callee import ENTRY_BYTES, AnswerCache


class FakeTransport:
    def __init__(self):
        self.kept_bytes, self.num_dropped = 0, 0

    def drop_answers(self):
        self.num_dropped += 1


def test_an_answer_is_kept_until_its_caller_has_gone_on():
    transport = FakeTransport()
    answers = AnswerCache(transport)
    assert answers.get(2) is None
    answers.keep(2, b"two")
    answers.keep(3, b"three")
    assert transport.kept_bytes == 8 + 2 * ENTRY_BYTES
    answers.forget_before(3)
    assert answers.get(2) is None
    assert answers.get(3) == b"three"
    assert transport.kept_bytes == answers.size_bytes == 5 + ENTRY_BYTES
    answers.clear()
    assert transport.kept_bytes == answers.size_bytes == 0


def test_answers_that_come_out_of_order_leave_no_bytes_behind():
    transport = FakeTransport()
    answers = AnswerCache(transport)
    for call_id in (9, 2, 3, 1):
        answers.keep(call_id, b"answer")
    answers.drop_answers(answers.size_bytes - 1)
    assert answers.get(9) == b""
    assert transport.kept_bytes == 18 + 4 * ENTRY_BYTES
    answers.forget_before(9)
    assert transport.kept_bytes == ENTRY_BYTES
    answers.forget_before(10)
    assert transport.kept_bytes == answers.size_bytes == 0


def test_a_hostile_oldest_costs_nothing():
    answers = AnswerCache(FakeTransport())
    answers.keep(5, b"five")
    answers.forget_before(2**63)
    assert answers.oldest == 2**63
    assert answers.size_bytes == 0


def test_the_oldest_answers_go_first_and_their_calls_stay_known(monkeypatch):
    monkeypatch.setattr(callee, "MAX_KEPT_BYTES", 20 * (600 + ENTRY_BYTES))
    answers = AnswerCache(FakeTransport())
    for call_id in range(25):
        answers.keep(call_id, bytes(600))
    num_gone = sum(answers.get(call_id) == b"" for call_id in range(25))
    assert 0 < num_gone < 15
    assert all(answers.get(call_id) == bytes(600) for call_id in range(num_gone, 25))
    assert answers.size_bytes == 600 * (25 - num_gone) + 25 * ENTRY_BYTES


def test_bytes_are_bounded_for_a_session_and_for_all(monkeypatch):
    monkeypatch.setattr(callee, "ENTRY_BYTES", 0)
    monkeypatch.setattr(callee, "MAX_KEPT_BYTES", 100)
    monkeypatch.setattr(callee, "MAX_KEPT_BYTES_IN_ALL", 150)
    transport = FakeTransport()
    one, other = AnswerCache(transport), AnswerCache(transport)
    for call_id in range(10):
        one.keep(call_id, bytes(30))
        assert one.size_bytes <= 100
    assert one.get(9) == bytes(30)
    other.keep(0, bytes(50))
    assert transport.num_dropped == 0
    other.keep(1, bytes(50))
    assert transport.num_dropped == 1
    one.drop_answers()
    assert one.size_bytes == 0
    assert transport.kept_bytes == 100
    assert one.get(9) == b""
