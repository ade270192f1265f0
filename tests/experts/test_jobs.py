from __future__ import annotations

import asyncio

import pytest

from experts.loopback import linear_expert
from shoal.core import Deadline, DeadlineExceeded, PeerBusy
from shoal.experts.server.jobs import Job, JobKind, JobQueue
from shoal.experts.settings import ServerSettings
from shoal.transport import Reply

EXPERTS = {uid: linear_expert(uid, 2) for uid in ("a", "b")}


class Line:
    """A queue with the loop that its waiters live on."""

    def __init__(self, **settings):
        self.num_puts = 0
        self.queue = JobQueue(
            ServerSettings(**settings), self._count, lambda undone: self.queue.finish(undone)
        )
        self.loop = asyncio.new_event_loop()
        self.waiters = {}

    def _count(self):
        self.num_puts += 1

    def put(self, uid="a", num_samples=1, client="c", kind=JobKind.FORWARD, deadline=None):
        job = Job(kind, EXPERTS[uid], num_samples, client, deadline or Deadline.never())
        waiter = self.waiters[job] = self.loop.create_future()
        self.queue.put(job, waiter)
        return job

    def turn(self):
        self.loop.run_until_complete(asyncio.sleep(0))


@pytest.fixture
def line():
    made = []

    def make(**settings):
        made.append(Line(**settings))
        return made[-1]

    yield make
    for each in made:
        each.loop.close()


def test_a_batch_is_of_one_expert_and_kind_and_the_oldest_goes_first(line):
    lines = line()
    first = lines.put("a")
    other = lines.put("b")
    backward = lines.put("a", kind=JobKind.BACKWARD)
    second = lines.put("a")
    assert lines.num_puts == 4
    assert lines.queue.take() == ([first, second], None)
    assert lines.queue.take() == ([other], None)
    assert lines.queue.take() == ([backward], None)
    assert lines.queue.take() == ([], None)
    assert lines.queue.num_waiting == 0


def test_clients_take_turns_in_all_lines_together(line):
    lines = line(max_batch_size=4)
    greedy = [lines.put(client="greedy") for _ in range(6)]
    modest = lines.put(client="modest")
    batch, _ = lines.queue.take()
    assert batch == [greedy[0], modest, *greedy[1:3]]
    later = lines.put("b", client="modest")
    assert lines.queue.take()[0] == [later]  # one client's flood is before nobody else, in no line
    assert lines.queue.take()[0] == greedy[3:]


def test_a_large_request_waits_for_the_next_batch_and_not_longer(line):
    lines = line(max_batch_size=10)
    jobs = [lines.put(num_samples=num) for num in (6, 6, 3)]
    assert [lines.queue.take()[0] for _ in range(2)] == [[jobs[0]], jobs[1:]]


def test_few_samples_wait_for_others_but_not_forever(line):
    lines = line(min_batch_size=4, max_wait_s=60.0)
    job = lines.put(num_samples=2)
    batch, wait_s = lines.queue.take()
    assert batch == []
    assert 50 < wait_s <= 60
    other = lines.put(num_samples=2)
    assert lines.queue.take()[0] == [job, other]
    lines = line(min_batch_size=4, max_wait_s=0.0)
    job = lines.put()
    assert lines.queue.take()[0] == [job]


def test_who_has_more_than_its_share_is_told_busy_when_the_line_is_full(line):
    lines = line(max_waiting=4)
    for _ in range(3):
        lines.put(client="greedy")
    lines.put(client="modest")
    with pytest.raises(PeerBusy, match="4 requests wait"):
        lines.put(client="greedy")
    lines.put(client="modest")
    for index in range(3):
        lines.put(client=f"newcomer{index}")
    with pytest.raises(PeerBusy):  # twice the limit is the end for everybody
        lines.put(client="one more")


def test_what_nobody_waits_for_is_dropped_unless_it_runs(line):
    lines = line()
    gone, running, joined = lines.put(), lines.put("b"), lines.put()
    another = lines.loop.create_future()
    assert lines.queue.join(joined, another)
    assert not lines.queue.leave(joined, lines.waiters[joined])  # somebody else waits for it too
    assert lines.queue.leave(gone, lines.waiters[gone])
    assert lines.queue.num_waiting == 2
    assert lines.queue.take()[0] == [running]
    assert not lines.queue.leave(running, lines.waiters[running])
    assert lines.queue.take()[0] == [joined]
    reply = Reply()
    lines.queue.finish([(joined, reply)])
    assert not lines.queue.join(joined, lines.loop.create_future())
    lines.turn()
    assert another.result() is reply


def test_a_job_whose_deadline_has_passed_is_not_done(line):
    lines = line()
    late = lines.put(deadline=Deadline(0.0))
    job = lines.put()
    assert lines.queue.take()[0] == [job]
    lines.turn()
    assert isinstance(lines.waiters[late].exception(), DeadlineExceeded)


def test_jobs_of_an_expert_that_goes_are_told(line):
    lines = line()
    going, staying = lines.put("a"), lines.put("b")
    lines.queue.drop_all("a", PeerBusy("gone"))
    lines.turn()
    assert isinstance(lines.waiters[going].exception(), PeerBusy)
    assert lines.queue.take()[0] == [staying]
    assert lines.queue.num_waiting == 0


def test_an_error_that_no_future_takes_leaves_the_others_told(line):
    lines = line()
    odd, job = lines.put(), lines.put()
    assert lines.queue.take()[0] == [odd, job]
    reply = Reply()
    lines.queue.finish([(odd, StopIteration()), (job, reply)])
    lines.turn()
    assert lines.waiters[odd].cancelled()
    assert lines.waiters[job].result() is reply
