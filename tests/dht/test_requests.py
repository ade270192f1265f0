"""Requests of one operation: a few at once, and the slow ones told apart, so that others can go on."""

import asyncio

from dht.made_contacts import TOP, made_contact
from shoal.core import Deadline, PeerLost, run_virtual
from shoal.dht.search import MAX_IN_FLIGHT, Requests


class Swarm:
    """What requests need of the peers."""

    def __init__(self, usual_s):
        self.usual_s = usual_s
        self.checked = []

    def slow_s(self):
        return self.usual_s

    def check_soon(self, contact):
        self.checked.append(contact)


class Waits(Requests):
    """Parts are seconds that a peer of their own takes to answer; negative ones fail after as long."""

    def __init__(self, usual_s=0.4, then=()):
        self.swarm = Swarm(usual_s)
        super().__init__(self.swarm, "test")
        self.then = list(then)
        """Parts that are sent when another is slow."""
        self.sent, self.slow, self.ended = [], [], []

    def now_s(self):
        return asyncio.get_running_loop().time()

    def advance(self, part):
        self._waiting[made_contact(TOP * (1 + len(self._waiting) + len(self.sent)))] = [part]

    def take(self, contact, waiting):
        return waiting

    async def call(self, request):
        self.sent.append((request.parts[0], self.now_s()))
        await asyncio.sleep(abs(request.parts[0]))
        if request.parts[0] < 0:
            raise PeerLost("gone")

    def on_answer(self, request, answer):
        self.ended.append((request.parts[0], request.is_slow))
        self.end_one()

    on_failed = lambda self, request: self.on_answer(request, None)  # noqa: E731

    def on_slow(self, request):
        self.slow.append((request.parts[0], self.now_s()))
        if self.then:
            self._num_open += 1
            self.advance(self.then.pop(0))


def run_waits(parts, timeout_s=60.0, **options):
    """Run parts; what came of it, and when all were done."""

    async def main():
        waits = Waits(**options)
        await waits.run(parts, Deadline.after(timeout_s))
        ended_s = waits.now_s()
        await asyncio.sleep(30)
        return waits, ended_s

    return run_virtual(main())


def test_who_takes_long_is_told_of_once_and_its_answer_counts():
    waits, ended_s = run_waits([10.0, 0.1, 5.0])
    assert [part for part, _ in waits.slow] == [10.0, 5.0]
    assert all(0.4 <= at_s <= 0.6 for _, at_s in waits.slow)
    assert waits.ended == [(0.1, False), (5.0, True), (10.0, True)]
    assert ended_s == 10.0
    assert waits.swarm.checked == []


def test_failures_end_requests_as_answers_do():
    waits, ended_s = run_waits([-0.1, -3.0])
    assert waits.ended == [(-0.1, False), (-3.0, True)]
    assert ended_s == 3.0


def test_no_more_than_so_many_are_under_way_and_the_slow_take_no_place():
    waits, _ = run_waits([9.0] * MAX_IN_FLIGHT + [0.1])
    times = [at_s for _, at_s in waits.sent]
    assert times[:-1] == [0.0] * MAX_IN_FLIGHT
    assert 0.4 <= times[-1] <= 0.6
    waits, _ = run_waits([0.2] * MAX_IN_FLIGHT + [0.1])
    assert waits.sent[-1] == (0.1, 0.2), "as soon as there is room"


def test_waits_are_never_very_short_nor_long():
    assert 0.1 <= run_waits([20.0], usual_s=0.0)[0].slow[0][1] <= 0.2
    assert 1.0 <= run_waits([20.0], usual_s=30.0)[0].slow[0][1] <= 1.6


def test_what_is_sent_when_another_is_slow_is_watched_too():
    waits, _ = run_waits([20.0], then=[21.0, 22.0, 23.0])
    assert [part for part, _ in waits.slow] == [20.0, 21.0, 22.0, 23.0]


def test_after_the_deadline_nothing_is_sent_and_the_slow_are_checked():
    waits, ended_s = run_waits([9.0] * MAX_IN_FLIGHT + [0.1], timeout_s=0.3)
    assert ended_s == 0.3
    assert (len(waits.sent), waits.slow, waits.ended) == (MAX_IN_FLIGHT, [], [])
    waits, ended_s = run_waits([9.0, 0.1], timeout_s=2.0)
    assert ended_s == 2.0
    assert len(waits.swarm.checked) == 1
