"""A worker's link to its launcher: what it answers by itself, whenever messages come."""

import socket

import pytest

from shoal.core import Deadline
from shoal.core.elastic import (
    Form,
    MeetAt,
    MessageReader,
    Prepare,
    Reached,
    UpMessage,
    WorkerPlace,
    encode_message,
)
from shoal.group.elastic import LauncherLink

FORM = Form(3, (WorkerPlace(0, 0),))
LONG_S = 20.0


@pytest.fixture
def ends():
    """The link of a worker, and the launcher's end of it."""
    mine, theirs = socket.socketpair()
    theirs.settimeout(LONG_S)
    link = LauncherLink(0, mine.detach())
    with theirs:
        yield link, theirs
        link.close()


def answers_of(launcher):
    reader: MessageReader[UpMessage] = MessageReader(UpMessage)
    while True:
        yield from reader.feed(launcher.recv(1 << 16))


def test_who_is_asked_at_once_when_it_can_stop_answers_once_it_has_begun(ends):
    """Another worker comes right after a group was told to form: both messages may be read together."""
    link, launcher = ends
    launcher.sendall(encode_message(FORM) + encode_message(Prepare(3)))
    assert link.receive(Deadline.after(LONG_S)) == FORM
    link.begin(FORM, steps=10)
    assert next(answers_of(launcher)) == Reached(3, 11)
    assert link.last_step == 11


def test_a_worker_that_has_done_no_step_yet_promises_one_alone(ends):
    """However little time has passed: what a step takes is not known."""
    link, launcher = ends
    link.begin(FORM, steps=10)
    launcher.sendall(encode_message(Prepare(3)) + encode_message(MeetAt(3, 11)))
    assert next(answers_of(launcher)) == Reached(3, 11)
    link.wait_until_due()
    assert link.due_step == 11


def test_steps_that_were_taken_over_say_nothing_of_what_a_step_takes(ends):
    link, _ = ends
    link.begin(FORM, steps=0)
    link.trains_on(100_000)
    assert link.num_steps_in(1.0) == 1
